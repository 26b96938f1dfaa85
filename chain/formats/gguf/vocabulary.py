"""A checkpoint's tokenizer as llama.cpp has it: tokens with their types, merges or scores."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.files import read_json
from polybasic.chain.formats.gguf.splits import BYTE_LEVEL, DIGIT, name_of
from polybasic.chain.formats.tokenizer import load_tokenizer
from polybasic.chain.formats.vocabulary import TOKENIZER_NAME

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "▁"
_NO_MERGES = [f"{_MARK} {_MARK}"]
"""Of tokens that no byte stands for: llama.cpp wants merges."""
_LAST = 10**9
"""Rank of what no merge makes."""


@dataclass(frozen=True)
class GGUFVocabulary:
    """What llama.cpp reads of a tokenizer.

    Attributes:
        model: "gpt2" of byte-level BPE, "llama" of SentencePiece.
        split: llama.cpp's name of what splits texts before tokens are merged.
        tokens: by id, as many as the model's embeddings.
        types: of the tokens.
        merges: pairs of tokens, a space between them, the first the most urgent; of byte-level BPE.
        scores: of SentencePiece: the highest is merged first.
        ids: of special tokens, by their names in `GGUFWriter` ("bos", "eos", "unk", "pad").
        adds: whether a begin ("bos"), an end ("eos") and a space ("space") is put to a text.
        chat_template: Jinja text.
    """

    model: str
    split: str
    tokens: Sequence[str]
    types: Sequence[int]
    merges: Sequence[str] = ()
    scores: Sequence[float] = ()
    ids: dict[str, int] | None = None
    adds: dict[str, bool] | None = None
    chat_template: str | None = None

    def add_to(self, writer: gguf.GGUFWriter) -> None:
        """Write it."""
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.split)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.scores:
            writer.add_token_scores(self.scores)
        writer.add_token_merges(self.merges)
        for name, token in (self.ids or {}).items():
            getattr(writer, f"add_{name}_token_id")(token)
        for name, adds in (self.adds or {}).items():
            if name == "space":
                writer.add_add_space_prefix(adds)
            else:
                getattr(writer, f"add_add_{name}_token")(adds)
        if self.chat_template is not None:
            writer.add_chat_template(self.chat_template)


def numbers(vocab_size: int, stop: Iterable[int]) -> GGUFVocabulary:
    """A vocabulary for those who hand over ids: each text ends nothing and waits for no other.

    Args:
        stop: ids that end an answer; the first is written.
    """
    tokens = [f"t{number}" for number in range(vocab_size)]
    types = [int(gguf.TokenType.NORMAL)] * vocab_size
    return GGUFVocabulary("gpt2", "gpt-2", tokens, types, _NO_MERGES, ids={"eos": min(stop)})


def read_vocabulary(folder: Path, vocab_size: int) -> GGUFVocabulary:
    """The tokenizer in a folder.

    Args:
        vocab_size: of the model; ids without a token stand for nothing.

    Raises:
        UserError: no tokenizer.json, more tokens than the model has, or a tokenizer that llama.cpp
            does not have.
    """
    path = folder / TOKENIZER_NAME
    content: Any = read_json(path, "tokenizer")
    model = content["model"]
    if model.get("type") != "BPE":
        raise _unknown(path, f"its model is {model.get('type')}")
    tokenizer = load_tokenizer(folder)
    added = {entry["id"]: entry for entry in content["added_tokens"]}
    texts = {number: token for token, number in model["vocab"].items()}
    texts |= {number: entry["content"] for number, entry in added.items()}
    if max(texts) >= vocab_size:
        raise UserError(
            "more tokens than the model has",
            f"{path} has id {max(texts)}, the model {vocab_size} tokens",
            "take the tokenizer that belongs to the model",
        )
    is_pieces = bool(model.get("byte_fallback"))
    unknown = model.get("unk_token")
    tokens, types = [], []
    for number in range(vocab_size):
        token, kind = texts.get(number), gguf.TokenType.NORMAL
        if token is None:
            token, kind = f"[PAD{number}]", gguf.TokenType.UNUSED
        elif is_pieces and token == unknown:
            kind = gguf.TokenType.UNKNOWN
        elif number in added:
            special = added[number].get("special")
            kind = gguf.TokenType.CONTROL if special else gguf.TokenType.USER_DEFINED
            if is_pieces and not special:
                token = token.replace(_MARK, " ")  # it is looked for before spaces become marks
        elif is_pieces and len(token) == 6 and token.startswith("<0x"):
            kind = gguf.TokenType.BYTE
        tokens.append(token)
        types.append(int(kind))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    shared: dict[str, Any] = {
        "ids": _special_ids(tokenizer),
        "chat_template": _chat_template(tokenizer),
    }
    begin_end = _adds(tokenizer)
    if is_pieces:
        space = tokenizer.tokenize("a")[0].startswith(_MARK)
        return GGUFVocabulary(
            "llama", "default", tokens, types,
            scores=_scores(texts, merges, vocab_size), adds=begin_end | {"space": space}, **shared,
        )  # fmt: skip
    split = _split(content.get("pre_tokenizer"), path)
    return GGUFVocabulary(
        "gpt2", split, tokens, types, merges or _NO_MERGES, adds=begin_end, **shared
    )


def _split(pre_tokenizer: Any, path: Path) -> str:
    """llama.cpp's name of what splits texts."""
    steps = (pre_tokenizer or {}).get("pretokenizers") or [pre_tokenizer]
    steps = [step for step in steps if step]
    found = [_expression(step) for step in steps]
    expressions = tuple(expression for expression in found if expression)
    if not steps or steps[-1]["type"] != "ByteLevel" or None in found:
        kinds = ", ".join(step["type"] for step in steps)
        raise _unknown(path, f"it splits texts by {kinds or 'nothing'}")
    if (name := name_of(expressions)) is None:
        raise _unknown(path, f"it splits texts by {' and '.join(map(str, expressions))}")
    return name


def _expression(step: dict[str, Any]) -> str | None:
    """The expression that a step splits by, "" for none; None if it does something else."""
    if step["type"] == "ByteLevel" and not step.get("add_prefix_space"):
        return BYTE_LEVEL if step.get("use_regex", True) else ""
    if step["type"] == "Digits" and step.get("individual_digits"):
        return DIGIT
    if step["type"] == "Split" and step["behavior"] == "Isolated" and not step.get("invert"):
        return step["pattern"].get("Regex")
    return None


def _scores(texts: dict[int, str], merges: Sequence[str], vocab_size: int) -> list[float]:
    """Scores by which SentencePiece merges in the order of the merges."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", "", 1), rank)
    return [-float(ranks.get(texts.get(token_id, ""), _LAST)) for token_id in range(vocab_size)]


def _special_ids(tokenizer: "PreTrainedTokenizerBase") -> dict[str, int]:
    ids = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "unk", "pad")}
    return {name: number for name, number in ids.items() if number is not None}


def _adds(tokenizer: "PreTrainedTokenizerBase") -> dict[str, bool]:
    """Whether an encoded text begins and ends with special tokens."""
    ids = tokenizer("a")["input_ids"]
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    return {
        "bos": begin is not None and ids[:1] == [begin],
        "eos": end is not None and ids[-1:] == [end],
    }


def _chat_template(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    template = tokenizer.chat_template
    return template.get("default") if isinstance(template, dict) else template


def _unknown(path: Path, what: str) -> UserError:
    return UserError("llama.cpp has no such tokenizer", f"{path} ({what})", "run the chain here")
