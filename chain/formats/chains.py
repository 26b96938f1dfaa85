"""Chains as people name them, and models alone as the chains of them."""

from pathlib import Path

from polybasic.chain.formats.bare import bare_chain
from polybasic.chain.formats.checkpoints.checkpoint import folder_with, split_hub_id
from polybasic.chain.formats.checkpoints.hub import snapshot
from polybasic.chain.formats.checkpoints.models import resolve_model
from polybasic.chain.formats.files import lies_anywhere
from polybasic.chain.formats.gguf.finding import names_gguf
from polybasic.chain.formats.manifest import MANIFEST_NAME


def resolve_chain(reference: str, revision: str | None = None) -> Path:
    """The folder of a chain, given as a folder or as a hub id `org/name[@revision]`.

    Of a run's output folder it is the chain inside; of a model, be it a folder, a hub id or a GGUF
    file, the chain of it alone.

    Raises:
        UserError: as `resolve_model`, for a missing chain.json and config.json; as `bare_chain`.
    """
    folder = Path(reference).expanduser()
    if names_gguf(reference) and not lies_anywhere(folder / MANIFEST_NAME):
        model = resolve_model(reference, revision, as_stored=True)
        return bare_chain(model, reference)
    if not lies_anywhere(folder):
        named = split_hub_id(reference, revision)
        if not (snapshot(*named, [MANIFEST_NAME]) / MANIFEST_NAME).is_file():
            return bare_chain(resolve_model(reference, revision), reference)
        folder = snapshot(*named, None)
    if not (folder / MANIFEST_NAME).is_file() and (folder / "chain" / MANIFEST_NAME).is_file():
        folder /= "chain"
    if not (folder / MANIFEST_NAME).is_file() and (folder / "config.json").is_file():
        return bare_chain(resolve_model(f"{folder}"), reference)
    return folder_with(folder, MANIFEST_NAME, "not a chain")
