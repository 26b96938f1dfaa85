"""A checkpoint's tokenizer as the chain carries it: fast, and with a chat template."""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.chat_templates import RejectedMessages, rendered_messages
from polybasic.chain.formats.checkpoints.config import refuse_remote_code
from polybasic.chain.formats.files import read_json, whole_folder, write_json
from polybasic.chain.formats.vocabulary import TOKENIZER_NAME

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SENTENCEPIECE_NAME = "tokenizer.model"
_CONFIG_NAME = "tokenizer_config.json"
_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
_PROBE = [{"role": "user", "content": "Hello"}]


def needs_preparation(checkpoint: Path, chat_template: str | None) -> bool:
    """Whether the chain cannot carry the tokenizer in `checkpoint` as it is.

    Args:
        checkpoint: a folder with a tokenizer.
        chat_template: Jinja text that is to replace the tokenizer's own.
    """
    return chat_template is not None or not (checkpoint / TOKENIZER_NAME).is_file()


def prepare_tokenizer(checkpoint: Path, chat_template: str | None, out: Path) -> None:
    """Write a fast tokenizer that gives the ids of the one that transformers finds in `checkpoint`.

    Args:
        checkpoint: holds tokenizer.json, or tokenizer.model of SentencePiece (Llama 2, Vicuna).
        chat_template: Jinja text that replaces the tokenizer's own; None keeps that.
        out: the folder to write, whole: tokenizer.json, tokenizer_config.json and, where there is
            a template, chat_template.jinja.

    Raises:
        UserError: no tokenizer that transformers reads without running code of the folder, a
            template that does not render, SentencePiece not installed; the disk is full or not
            writable.
    """
    _refuse_code_of(checkpoint)
    if not (checkpoint / TOKENIZER_NAME).is_file():
        _check_sentencepiece(checkpoint / _SENTENCEPIECE_NAME)
    tokenizer = load_tokenizer(checkpoint)
    if not tokenizer.is_fast:
        raise UserError(
            "tokenizer without a fast form",
            f"{type(tokenizer).__name__} in {checkpoint}",
            f"add a {TOKENIZER_NAME} that was made for this model",
        )
    if chat_template is not None:
        tokenizer.chat_template = chat_template
        _check_template(tokenizer)
    with whole_folder(out) as partial:
        tokenizer.save_pretrained(partial)
        path = partial / _CONFIG_NAME
        # Llama's own class would build the tokenizer anew from the vocabulary, by settings that are
        # not saved with it; this one takes tokenizer.json as it is, whatever model is beside it.
        config = read_json(path, "config") | {"tokenizer_class": "PreTrainedTokenizerFast"}
        write_json(path, config)


def load_tokenizer(folder: Path, what: str = "tokenizer") -> "PreTrainedTokenizerBase":
    """The tokenizer in `folder`, by transformers; code of the folder is never run.

    Args:
        folder: as transformers saves tokenizers.
        what: names it in the error.

    Raises:
        UserError: transformers loads none from there.
    """
    try:
        if _takes_the_file_as_it_is(folder):
            # the class that AutoTokenizer takes too, whose own import takes seconds more
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(folder)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare Exception, transformers many kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"cannot load the {what}",
            f"{folder} ({reason})",
            "name a folder that transformers' AutoTokenizer loads",
        ) from error


def _takes_the_file_as_it_is(folder: Path) -> bool:
    """Whether its class reads tokenizer.json without rules of a model's own."""
    path = folder / _CONFIG_NAME
    if not (path.is_file() and (folder / TOKENIZER_NAME).is_file()):
        return False
    config = read_json(path, "config")
    return isinstance(config, dict) and config.get("tokenizer_class") in _PLAIN_CLASSES


def _refuse_code_of(checkpoint: Path) -> None:
    path = checkpoint / _CONFIG_NAME
    if path.is_file() and isinstance(config := read_json(path, "config"), dict):
        refuse_remote_code(path, config)


def _check_sentencepiece(path: Path) -> None:
    if not path.is_file():
        raise UserError(
            "no tokenizer",
            f"{path.parent} holds neither {TOKENIZER_NAME} nor {_SENTENCEPIECE_NAME}",
            "download the checkpoint again, or copy the tokenizer of the model that it was made of",
        )
    if importlib.util.find_spec("sentencepiece") is None:
        raise UserError(
            "sentencepiece is not installed",
            f"{path} cannot be read without it",
            "pip install 'polybasic[train]'",
        )
    from sentencepiece import SentencePieceProcessor

    try:
        # transformers would take a file that it cannot read for one of another kind
        SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError) as error:
        raise UserError(
            "malformed tokenizer", f"{path} is no SentencePiece model", "fetch it anew"
        ) from error


def _check_template(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Render one user turn, as every template must."""
    try:
        rendered_messages(tokenizer, _PROBE, add_generation_prompt=True)
    except RejectedMessages as error:
        cause = error.__cause__
        if isinstance(cause, jinja2.TemplateSyntaxError):
            raise UserError(
                "chat template is not valid Jinja",
                f"line {cause.lineno} ({cause.message})",
                "mend it",
            ) from error
        raise UserError(
            "chat template does not render", f"one user turn ({error})", "mend it"
        ) from error
