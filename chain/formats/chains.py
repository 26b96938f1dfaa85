"""Chains as people name them, and models alone as the chains of them."""

from pathlib import Path

from polybasic.chain.formats.bare import bare_chain
from polybasic.chain.formats.checkpoint import folder_with, split_hub_id
from polybasic.chain.formats.files import lies_anywhere
from polybasic.chain.formats.gguf.finding import names_gguf
from polybasic.chain.formats.hub import snapshot
from polybasic.chain.formats.manifest import MANIFEST_NAME
from polybasic.chain.formats.models import resolve_model

_OF_RUN = ("grown", "chain")
"""In the output folder of a run, the one that counts first."""


def resolve_chain(reference: str, revision: str | None = None) -> Path:
    """The folder of a chain, given as a folder or as a hub id `org/name[@revision]`.

    Of a run's output folder it is the chain inside: the grown one if there is one. Of a model, be
    it a folder, a hub id or a GGUF file, it is the chain of it alone.

    Raises:
        UserError: as `resolve_model`, for a missing chain.json and config.json; as `bare_chain`.
    """
    folder = Path(reference).expanduser()
    if names_gguf(reference) and not lies_anywhere(folder / MANIFEST_NAME):
        return bare_chain(resolve_model(reference, revision), reference)
    if not lies_anywhere(folder):
        named = split_hub_id(reference, revision)
        if not (snapshot(*named, [MANIFEST_NAME]) / MANIFEST_NAME).is_file():
            return bare_chain(resolve_model(reference, revision), reference)
        folder = snapshot(*named, None)
    if not (folder / MANIFEST_NAME).is_file():
        inside = (folder / name for name in _OF_RUN)
        folder = next((one for one in inside if (one / MANIFEST_NAME).is_file()), folder)
    if not (folder / MANIFEST_NAME).is_file() and (folder / "config.json").is_file():
        return bare_chain(folder, reference)
    return folder_with(folder, MANIFEST_NAME, "not a chain")
