"""A smaller model beside a model that has no chain: three models, none of them trained here."""

from pathlib import Path

from polybasic.chain.errors import UserError
from polybasic.chain.formats.bare import bare_chain
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.checkpoints.models import resolve_model
from polybasic.chain.formats.files import lies_anywhere
from polybasic.chain.formats.kept import MODELS, folder_stamp, kept_folder
from polybasic.chain.formats.manifest import MANIFEST_NAME
from polybasic.chain.formats.package import Part

_NAME = "small"


def chain_beside(model: str, small: str) -> Path:
    """The folder of the chain of two models: the smaller one in few bits, and n-grams below it.

    It is made in the cache, unless it is there. The model keeps the blocks of a GGUF file. The
    smaller one does where these take five bits a weight or less, or is taken as it is from a
    checkpoint in AutoAWQ's format; else all of its matrices are rounded to four bits.

    Args:
        model: a model's folder, hub id or GGUF file, as `resolve_model` takes it.
        small: the same, of a model with the same tokenizer.

    Raises:
        UserError: `model` is a chain already, another tokenizer, or as `resolve_model`,
            `round_to_blocks` and `bare_chain`.
    """
    if lies_anywhere(Path(model).expanduser() / MANIFEST_NAME):
        raise UserError(
            "a chain has its members already", f"{model} --small {small}", "name the model alone"
        )
    target, folder = (resolve_model(source, as_stored=True) for source in (model, small))
    folder = _in_few_bits(folder)
    part = Part(_NAME, "intermediate", read_config(folder).kind, folder)
    return bare_chain(target, model, [part])


def _in_few_bits(source: Path) -> Path:
    from polybasic.quantize.blocks import is_in_few_bits, round_to_blocks

    if is_in_few_bits(source):
        return source
    name, made_of = f"{source.resolve().name}-4-bits", folder_stamp(source)
    return kept_folder(MODELS, name, made_of, lambda out: round_to_blocks(source, out))
