"""Models as people name them: a folder, a hub id or a GGUF file."""

from pathlib import Path

from polybasic.chain.formats.checkpoints.checkpoint import resolve_checkpoint
from polybasic.chain.formats.checkpoints.gptq import as_awq, is_gptq
from polybasic.chain.formats.gguf.finding import find_gguf, names_gguf


def resolve_model(
    reference: str, revision: str | None = None, weights: bool = True, as_stored: bool = False
) -> Path:
    """The folder of a model's checkpoint.

    Args:
        reference: as `resolve_checkpoint` takes it, or a GGUF file as `find_gguf` does; of that,
            and of a checkpoint in GPTQ's format, it is the folder in the cache with what was made
            of it.
        revision: commit, tag or branch of a hub id.
        weights: False fetches only what is beside them; a GGUF file is read whole.
        as_stored: of a GGUF file, as `imported` takes it.

    Raises:
        UserError: as `resolve_checkpoint` and `as_awq`; of a GGUF file as `find_gguf` and
            `imported`.
    """
    if not names_gguf(reference):
        folder = resolve_checkpoint(reference, revision, weights)
        return as_awq(folder) if weights and is_gptq(folder) else folder
    from polybasic.chain.formats.gguf.importing import imported

    return imported(find_gguf(reference, revision), as_stored)
