"""How byte-level tokenizers split a text before tokens are merged, by llama.cpp's names."""

from dataclasses import dataclass

BYTE_LEVEL = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""GPT-2's expression, which ByteLevel of tokenizers has by itself."""
DIGIT = r"\p{N}"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CAPITALS, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


@dataclass(frozen=True)
class Split:
    """How texts are split.

    Attributes:
        expressions: applied one after the other, each to what the ones before it left; what an
            expression matches is a piece, and what lies between two matches is another.
        ignores_merges: a piece that is a token is that token, whatever merges there are.
        adds_begin: an encoded text begins with the begin token, where the file does not say it.
        normal_form: that texts are brought to first, as the models' own tokenizers do; llama.cpp
            does not.
    """

    expressions: tuple[str, ...]
    ignores_merges: bool = False
    adds_begin: bool = False
    normal_form: str | None = None


_GPT2 = Split((BYTE_LEVEL,))
_DIGITS = Split((DIGIT, BYTE_LEVEL))
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = Split((rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_REST}",), True, True)
_QWEN2 = Split((rf"{_CONTRACTIONS}|{_WORD}|{DIGIT}|{_REST}",), normal_form="NFC")
_TEKKEN = Split(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}*{_SMALL}+|[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}+{_SMALL}*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    True,
    True,
)
_DEEPSEEK_CODER = Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", DIGIT))

SPLITS = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "smaug-bpe": Split(_LLAMA3.expressions),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "tekken": _TEKKEN,
    "deepseek-coder": _DEEPSEEK_CODER,
}
"""By `tokenizer.ggml.pre`; of several names of one, the first is written."""


def name_of(expressions: tuple[str, ...]) -> str | None:
    """llama.cpp's name of a split by these expressions; None if it has none."""
    return next((name for name, split in SPLITS.items() if split.expressions == expressions), None)
