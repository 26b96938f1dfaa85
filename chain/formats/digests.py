"""What a model's weights are: one digest over its weight files."""

from pathlib import Path

from polybasic.chain.formats.checkpoint import weight_files
from polybasic.chain.formats.files import sha256_of_file, sha256_of_object


def weights_digest(folder: Path) -> str:
    """Hex SHA-256 that names the weights in `folder`, whatever the folder is called.

    It is taken over {file name: digest of its bytes} of the files that loading reads. A draft
    head records its target by this.

    Raises:
        UserError: the folder is missing or holds no weight file.
    """
    return sha256_of_object({path.name: sha256_of_file(path) for path in weight_files(folder)})
