"""What tokenizers say of their tokens: whether two give the same ids, and how far texts grow."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polybasic.chain.base.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_NAME = "tokenizer.json"

_MOST_GROWTH = 64
"""Characters that replacements may make of one: real tokenizers put a mark for a blank, a few that
double each other fill any memory."""


def read_vocabulary(path: Path) -> dict[str, int]:
    """Token -> id of a tokenizer.json, added tokens included.

    Raises:
        UserError: it is no tokenizer, or one that makes texts many times as long.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except BaseException as error:
        if not is_tokenizer_failure(error):
            raise
        raise UserError(
            "malformed tokenizer", f"{path} ({error})", "package the chain again or fetch it anew"
        ) from error
    if (growth := _growth(tokenizer)) > _MOST_GROWTH:
        raise UserError(
            "tokenizer lets texts grow",
            f"{path} (its replacements make {growth:.3g} characters of one, {_MOST_GROWTH} at most "
            "are taken)",
            "take the tokenizer that belongs to the target",
        )
    return tokenizer.get_vocab(with_added_tokens=True)


def num_token_ids(path: Path) -> int:
    """Ids of a tokenizer.json, those between them counted that no token has.

    Raises:
        UserError: as `read_vocabulary`.
    """
    return max(read_vocabulary(path).values(), default=-1) + 1


def is_tokenizer_failure(error: BaseException) -> bool:
    """Whether the library tokenizers failed: it raises bare Exception, and panics are none."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _growth(tokenizer: "Tokenizer") -> float:
    """How many characters the replacements of normalizer or decoder make of one at most."""
    most = 1.0
    for part in (tokenizer.normalizer, tokenizer.decoder):
        growth = 1.0
        for each in _replacements(json.loads(part.__getstate__()) if part is not None else None):
            replaced, content = each["pattern"].get("String"), each["content"]
            # an expression may match nothing, before every character
            growth *= max(1.0, len(content) / len(replaced) if replaced else len(content) + 1)
        most = max(most, growth)
    return most


def _replacements(state: Any) -> Iterator[dict[str, Any]]:
    if isinstance(state, dict):
        if state.get("type") == "Replace":
            yield state
        state = list(state.values())
    if isinstance(state, list):
        for each in state:
            yield from _replacements(each)


def check_same_vocabulary(
    found: dict[str, int], expected: dict[str, int], name: str, path: Path, expected_path: Path
) -> None:
    """Check that a member called `name` has the target's vocabulary.

    Args:
        found: vocabulary of the member.
        expected: vocabulary of the target.
        name: of the member, for the error, as are both paths.
        path: tokenizer.json that `found` was read from.
        expected_path: tokenizer.json that `expected` was read from.

    Raises:
        UserError: a token has another id, or only one of the two has it; the first such token by
            id is named.
    """
    differing = [
        token for token in found.keys() | expected.keys() if found.get(token) != expected.get(token)
    ]
    if not differing:
        return
    first = min(differing, key=lambda token: (found.get(token, expected.get(token)), token))
    raise UserError(
        "another tokenizer than the target's",
        f"{path} of {name} gives {first!r} {_id(found, first)}, {expected_path} "
        f"{_id(expected, first)} ({len(differing)} tokens differ)",
        "use a model that was trained with the target's tokenizer",
    )


def _id(vocabulary: dict[str, int], token: str) -> str:
    return f"id {vocabulary[token]}" if token in vocabulary else "no id"
