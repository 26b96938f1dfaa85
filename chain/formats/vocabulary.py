"""Whether two tokenizers give the same ids to the same tokens."""

from pathlib import Path

from polybasic.chain.errors import UserError

TOKENIZER_NAME = "tokenizer.json"


def read_vocabulary(path: Path) -> dict[str, int]:
    """Token -> id of a tokenizer.json, added tokens included.

    Raises:
        UserError: it is no tokenizer.
    """
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    except Exception as error:  # tokenizers raises bare Exception
        raise UserError(
            "malformed tokenizer", f"{path} ({error})", "package the chain again or fetch it anew"
        ) from error


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
