"""Smaller models beside a model that has no chain, none of them trained here."""

from collections.abc import Sequence
from pathlib import Path

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.bare import bare_chain
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.checkpoints.models import resolve_model
from polybasic.chain.formats.files import lies_anywhere
from polybasic.chain.formats.kept import MODELS, folder_stamp, kept_folder
from polybasic.chain.formats.manifest import MANIFEST_NAME
from polybasic.chain.formats.package import Part

_NAMES = ("small", "smaller", "smallest")
"""Of members, from the target down."""


def chain_beside(model: str, small: Sequence[str]) -> Path:
    """The folder of the chain of models: the smaller ones in few bits, and n-grams below them.

    It is made in the cache, unless it is there. The model keeps the blocks of a GGUF file. A
    smaller one does where these take five bits a weight or less, or is taken as it is from a
    checkpoint in AutoAWQ's format; else all of its matrices are rounded to four bits.
    Encoder-decoders are taken as they are.

    Args:
        model: a model's folder, hub id or GGUF file, as `resolve_model` takes it.
        small: the same, of models with the same tokenizer, from the larger to the smaller.

    Raises:
        UserError: `model` is a chain already, too many models, another tokenizer, or as
            `resolve_model`, `round_to_blocks` and `bare_chain`.
    """
    if lies_anywhere(Path(model).expanduser() / MANIFEST_NAME):
        raise UserError(
            "a chain has its members already", f"{model} --small {small[0]}", "name the model alone"
        )
    if len(small) > len(_NAMES):
        raise UserError(
            "too many smaller models",
            f"--small {small[len(_NAMES)]}",
            f"give {len(_NAMES)} at most",
        )
    target = resolve_model(model, as_stored=True)
    below = []
    for name, source in zip(_NAMES, small, strict=False):
        folder = _in_few_bits(resolve_model(source, as_stored=True))
        below.append(Part(name, "intermediate", read_config(folder).kind, folder))
    return bare_chain(target, model, below)


def _in_few_bits(source: Path) -> Path:
    from polybasic.quantize.blocks import is_in_few_bits, round_to_blocks

    if is_in_few_bits(source) or read_config(source).decoder.encoder is not None:
        return source
    name, made_of = f"{source.resolve().name}-4-bits", folder_stamp(source)
    return kept_folder(MODELS, name, made_of, lambda out: round_to_blocks(source, out))
