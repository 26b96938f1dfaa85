"""What a model's weights are: one digest over its weight files."""

from pathlib import Path

from polybasic.chain.errors import UserError
from polybasic.chain.files import sha256_of_file, sha256_of_object

WEIGHT_SUFFIXES = (".safetensors", ".bin")


def weights_digest(folder: Path) -> str:
    """Hex SHA-256 that names the weights in `folder`, whatever the folder is called.

    It is taken over {file name: digest of its bytes}, for the `*.safetensors` and `*.bin` files
    directly inside. A draft head records its target by this.

    Raises:
        UserError: the folder is missing or holds no weight file.
    """
    if not folder.is_dir():
        raise UserError("model folder not found", str(folder), "check the path")
    files = sorted(path for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES)
    if not files:
        raise UserError(
            "no weights", f"{folder} has no *.safetensors or *.bin file", "name a checkpoint folder"
        )
    return sha256_of_object({path.name: sha256_of_file(path) for path in files})
