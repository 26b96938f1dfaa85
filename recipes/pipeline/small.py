"""Whether a ready-made checkpoint can be the smaller model of a chain."""

from pathlib import Path

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.checkpoint import weight_files
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.checkpoints.models import resolve_model
from polybasic.chain.formats.vocabulary import (
    TOKENIZER_NAME,
    check_same_vocabulary,
    read_vocabulary,
)
from polybasic.recipes.schema.recipe import SmallSettings

_TOKENIZER_NAMES = (TOKENIZER_NAME, "tokenizer.model")


def check_small(small: SmallSettings, target: Path, tokenizer: Path, prepared: Path) -> None:
    """Check the checkpoint that `small.model` names, before anything is made of it.

    Args:
        small: the recipe's section; its model is a folder or a hub id.
        target: folder of the target.
        tokenizer: folder of the chain's tokenizer, which holds tokenizer.json.
        prepared: folder to write the smaller model's tokenizer to where it has no tokenizer.json.

    Raises:
        UserError: another vocabulary than the target's, no weights, or 4-bit weights where
            unquantized ones are needed.
    """
    folder = resolve_model(small.model)
    weight_files(folder)
    config = read_config(folder)
    vocab_size, expected = (
        each.content.get("vocab_size") for each in (config, read_config(target))
    )
    if vocab_size != expected:
        raise UserError(
            "small.model has another vocabulary",
            f"vocab_size {vocab_size} in {config.path}, the target has {expected}",
            "use a model of the target's family",
        )
    if config.content.get("quantization_config"):
        for key, is_on in (("quantize", small.quantize), ("train_head", small.has_head)):
            if is_on:
                raise UserError(
                    "small.model is quantized already",
                    f"quantization_config in {config.path}, small.{key} = true",
                    f"set small.{key}=false, or name the unquantized checkpoint",
                )
    if any((folder / name).is_file() for name in _TOKENIZER_NAMES):
        found = _tokenizer_file(folder, prepared)
        own = tokenizer / TOKENIZER_NAME
        check_same_vocabulary(read_vocabulary(found), read_vocabulary(own), "small", found, own)


def _tokenizer_file(folder: Path, prepared: Path) -> Path:
    from polybasic.chain.formats.tokenizer import needs_preparation, prepare_tokenizer

    if not needs_preparation(folder, None):
        return folder / TOKENIZER_NAME
    prepare_tokenizer(folder, None, prepared)
    return prepared / TOKENIZER_NAME
