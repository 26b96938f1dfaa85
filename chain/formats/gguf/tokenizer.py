"""The tokenizer of a GGUF file, as the files that transformers reads."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.chat_templates import (
    RejectedMessages,
    rendered_messages,
    token_ids_of,
)
from polybasic.chain.formats.files import write_json
from polybasic.chain.formats.gguf.header import Header
from polybasic.chain.formats.gguf.splits import SPLITS, Split
from polybasic.chain.formats.tokenizer import load_tokenizer
from polybasic.chain.formats.vocabulary import TOKENIZER_NAME, read_vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_KEY = "tokenizer.ggml."
_MARK = "▁"
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""transformers' names of special tokens and llama.cpp's."""
_ENDS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
)
"""Control tokens that end an answer in llama.cpp, whatever the file says of them."""
_ADDED = (gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED)
_UNUSED = (gguf.TokenType.UNUSED,)
_ANSWER = "polybasic"
_PROBE = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": _ANSWER}]
_BEFORE_SPACES = ("<unk>", "<s>", "<|endoftext|>")
"""Special tokens of Phi-3 that leave the spaces behind them alone; all others take them in."""

_log = logging.getLogger(__name__)


def write_tokenizer(header: Header, vocab_size: int, folder: Path) -> list[int]:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja.

    A chat template that does not render is left out, and said to be in the log.

    Args:
        vocab_size: of the model's embeddings.
        folder: that there is.

    Returns:
        The ids that end an answer: those of the file, those that llama.cpp knows by their text,
        and the one that the chat template puts behind an answer.

    Raises:
        UserError: another number of tokens than embeddings, a tokenizer or a pre-tokenizer that is
            not read, or one that is malformed.
    """
    model = header.text(f"{_KEY}model")
    tokens = header.texts(f"{_KEY}tokens")
    if len(tokens) != vocab_size:
        raise UserError(
            "tokenizer of another size than the model",
            f"{header.path} has {len(tokens):,} tokens and {vocab_size:,} embeddings",
            "fetch or convert the file again",
        )
    types = [gguf.TokenType.NORMAL] * len(tokens)
    if f"{_KEY}token_type" in header.metadata:
        types = header.numbers(f"{_KEY}token_type", len(tokens)).tolist()
    vocabulary = {
        token: number for number, token in enumerate(tokens) if types[number] not in _UNUSED
    }
    num_used = len(tokens) - sum(kind in _UNUSED for kind in types)
    if len(vocabulary) < num_used:
        raise UserError(
            "malformed GGUF file",
            f"{header.path} has {num_used - len(vocabulary)} tokens twice",
            "fetch or convert it again",
        )
    if model == "gpt2":
        split = _split_of(header)
        content = _byte_level(header, vocabulary, split)
        adds_begin = split.adds_begin
    elif model == "llama":
        content = _sentence_pieces(header, vocabulary, types)
        adds_begin = True
    else:
        raise UserError(
            "unsupported tokenizer",
            f"{header.path} {_KEY}model {model!r:.80}",
            "supported: gpt2 (byte-level BPE), llama (SentencePiece)",
        )
    content["added_tokens"] = [
        _added(header, number, token, types[number])
        for number, token in enumerate(tokens)
        if types[number] in _ADDED
    ]
    ids = {name: _special(header, f"{key}_token_id") for name, key in _SPECIAL.items()}
    content["post_processor"] = _post_processor(header, tokens, ids, adds_begin)
    write_json(folder / TOKENIZER_NAME, content, indent=None)
    special = {
        f"{name}_token": tokens[token_id]
        for name, token_id in ids.items()
        if token_id is not None and types[token_id] not in _UNUSED
    }
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **special,
        },
    )
    read_vocabulary(folder / TOKENIZER_NAME)
    named = (_special(header, f"{key}_token_id") for key in ("eos", "eot", "eom"))
    controls = {tokens[token_id]: token_id for token_id, kind in enumerate(types) if kind in _ADDED}
    ends = {token_id for token_id in named if token_id is not None}
    ends |= {controls[text] for text in _ENDS if text in controls}
    return sorted(ends | _template_ends(header, folder))


def _split_of(header: Header) -> Split:
    named = header.text(f"{_KEY}pre", "")
    if named not in SPLITS:
        said = repr(named)[:80] if named else "is missing, as in files of the first half of 2024"
        raise UserError(
            "unsupported pre-tokenizer",
            f"{header.path} {_KEY}pre {said}",
            f"supported: {', '.join(SPLITS)}; convert the model again, or name its checkpoint",
        )
    return SPLITS[named]


def _byte_level(header: Header, vocabulary: dict[str, int], split: Split) -> dict[str, Any]:
    merges = []
    for merge in header.texts(f"{_KEY}merges"):
        rest, _, second = merge[1:].partition(" ")
        first = merge[:1] + rest
        are_tokens = [part in vocabulary for part in (first, second, first + second)]
        if all(are_tokens):
            merges.append([first, second])
        elif any(are_tokens):
            raise UserError(
                "malformed GGUF file",
                f"{header.path} merges {merge!r:.80}, of which not all are tokens",
                "fetch or convert it again",
            )
    form = split.normal_form
    return _tokenizer(
        model={"ignore_merges": split.ignores_merges, "vocab": vocabulary, "merges": merges},
        normalizer=None if form is None else {"type": form},
        pre_tokenizer={
            "type": "Sequence",
            "pretokenizers": [
                *(
                    {
                        "type": "Split",
                        "pattern": {"Regex": expression},
                        "behavior": "Isolated",
                        "invert": False,
                    }
                    for expression in split.expressions
                ),
                _byte_level_step(),
            ],
        },
        decoder=_byte_level_step(),
    )


def _sentence_pieces(
    header: Header, vocabulary: dict[str, int], types: Sequence[int]
) -> dict[str, Any]:
    """As byte-pair encoding that merges in the order of scores."""
    scores = header.numbers(f"{_KEY}scores", len(types))
    merged = []
    for token, number in vocabulary.items():
        if types[number] != gguf.TokenType.NORMAL:
            continue
        for cut in range(1, len(token)):
            first, second = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if first is not None and second is not None:
                rank = (-scores[number], number, first, second)
                merged.append((rank, [token[:cut], token[cut:]]))
    merged.sort(key=lambda entry: entry[0])
    unknown = [
        token for token, token_id in vocabulary.items() if types[token_id] == gguf.TokenType.UNKNOWN
    ]
    has_prefix = header.flag(f"{_KEY}add_space_prefix", True)
    spaces = [{"type": "Replace", "pattern": {"String": " "}, "content": _MARK}]
    if has_prefix:
        spaces = [{"type": "Prepend", "prepend": _MARK}, *spaces]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _MARK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return _tokenizer(
        model={
            "unk_token": unknown[0] if unknown else None,
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocabulary,
            "merges": [merge for _, merge in merged],
        },
        normalizer={"type": "Sequence", "normalizers": spaces},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": decoders},
    )


def _tokenizer(model: dict[str, Any], **parts: Any) -> dict[str, Any]:
    defaults = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        **parts,
        "model": defaults | model,
    }


def _byte_level_step() -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }


def _added(header: Header, number: int, token: str, kind: int) -> dict[str, Any]:
    is_special = kind == gguf.TokenType.CONTROL
    takes_spaces = (
        is_special
        and header.metadata["general.architecture"] == "phi3"
        and token not in _BEFORE_SPACES
    )
    return {
        "id": number,
        "content": token,
        "single_word": False,
        "lstrip": False,
        "rstrip": takes_spaces,
        "normalized": False,
        "special": is_special,
    }


def _special(header: Header, name: str) -> int | None:
    """The id of a special token, if the file names one that there is."""
    key = f"{_KEY}{name}"
    number = header.integer(key) if key in header.metadata else -1
    return number if 0 <= number < len(header.texts(f"{_KEY}tokens")) else None


def _post_processor(
    header: Header, tokens: Sequence[str], ids: dict[str, int | None], adds_begin: bool
) -> dict[str, Any] | None:
    """What puts begin and end tokens to a text."""
    wanted = {
        "bos": header.flag(f"{_KEY}add_bos_token", adds_begin),
        "eos": header.flag(f"{_KEY}add_eos_token", False),
    }
    pieces: dict[str, dict[str, Any]] = {}
    for name, is_added in wanted.items():
        if not is_added:
            continue
        number = ids[name]
        if number is None:
            header.refuse(f"{_KEY}{name}_token_id", "the id of the token that is to be added")
        pieces[name] = {"id": tokens[number], "ids": [number], "tokens": [tokens[number]]}
    if not pieces:
        return None

    def sequence(name: str, kind: int) -> list[dict[str, Any]]:
        around = {
            role: [{"SpecialToken": {"id": piece["id"], "type_id": kind}}]
            for role, piece in pieces.items()
        }
        text = {"Sequence": {"id": name, "type_id": kind}}
        return [*around.get("bos", []), text, *around.get("eos", [])]

    return {
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": [*sequence("A", 0), *sequence("B", 1)],
        "special_tokens": {piece["id"]: piece for piece in pieces.values()},
    }


def _template_ends(header: Header, folder: Path) -> set[int]:
    """Write the chat template, if it works, and find the control token behind an answer."""
    template = header.metadata.get("tokenizer.chat_template")
    if template is None:
        return set()
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = header.text("tokenizer.chat_template")
    try:
        rendered_messages(tokenizer, _PROBE[:1], add_generation_prompt=True)
        text = rendered_messages(tokenizer, _PROBE)
    except RejectedMessages as error:
        _log.warning(
            "the chat template of %s does not render (%s); prompts go in as they are",
            header.path,
            error,
        )
        return set()
    (folder / "chat_template.jinja").write_text(tokenizer.chat_template, "utf-8")
    return _first_special(tokenizer, text.rpartition(_ANSWER)[2])


def _first_special(tokenizer: "PreTrainedTokenizerBase", text: str) -> set[int]:
    """The special token that a text begins with, if it does."""
    ids = token_ids_of(tokenizer, text.lstrip(), add_special_tokens=False)[:1]
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    return {token_id for token_id in ids if token_id in added and added[token_id].special}
