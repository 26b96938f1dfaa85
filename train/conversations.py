"""Conversations in ShareGPT format: files and hub datasets become rows of one shape.

A row is {"id", "task", "messages": [{"role", "content"}, ...]}: an optional system message, then
user and assistant in turns, the assistant last.
"""

import hashlib
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, Value, load_dataset
from datasets.exceptions import DatasetNotFoundError
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from polybasic.chain.errors import UserError
from polybasic.chain.files import sha256_of_file, sha256_of_object
from polybasic.train.conversation_files import FILE_NAME, check_file, read_file

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "system": "system",
}
FEATURES = Features(
    {
        "id": Value("string"),
        "task": Value("string"),
        "messages": [{"role": Value("string"), "content": Value("string")}],
    }
)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def load_conversations(source: str, limit: int | None = None) -> Dataset:
    """Read conversations into a dataset with the columns id, task and messages.

    Leading assistant turns and trailing user turns are dropped. Rows that cannot be used are
    counted on stderr; rows that are no conversations at all are an error.

    Args:
        source: a ShareGPT file (`.json`, `.jsonl`, each also `.gz` or `.zst`) or a hub id, with
            `@revision` where wanted.
        limit: stop after so many usable conversations.

    Raises:
        UserError: missing, empty, corrupt or malformed input (with file and line), or nothing
            usable in it.
    """
    rows, skipped = [], Counter[str]()
    raw_rows = read_file(Path(source)) if _is_file(source) else _read_hub(source)
    for number, (raw, where) in enumerate(raw_rows):
        row = _normalise(raw, where, number)
        if isinstance(row, str):
            skipped[row] += 1
        else:
            rows.append(row)
        if limit is not None and len(rows) == limit:
            break
    num_read = len(rows) + skipped.total()
    if not rows:
        reasons = f": {_listing(skipped)}" if skipped else ""
        raise UserError(
            "no usable conversation",
            f"{source} ({num_read} rows{reasons})",
            "give a file with at least one user turn that an assistant answers",
        )
    if skipped:
        print(
            f"kept {len(rows):,} of {num_read:,} conversations; "
            f"skipped {skipped.total():,}: {_listing(skipped)}",
            file=sys.stderr,
        )
    return Dataset.from_list(rows, features=FEATURES)


def split_conversations(dataset: Dataset, num_heldout: int) -> tuple[Dataset, Dataset]:
    """Split into (training, held-out) by SHA-256 of the first user turn.

    Conversations with the same first user turn stay together, so the held-out part has at least
    `num_heldout` rows and may have a few more. The order of the rows in the file plays no part.

    Raises:
        UserError: there would be nothing left to train on.
    """
    groups: dict[str, list[int]] = {}
    for index, messages in enumerate(dataset["messages"]):
        first = next(message["content"] for message in messages if message["role"] == "user")
        groups.setdefault(hashlib.sha256(first.encode("utf-8")).hexdigest(), []).append(index)
    heldout: list[int] = []
    for digest in sorted(groups):
        if len(heldout) >= num_heldout:
            break
        heldout += groups[digest]
    kept = sorted(set(range(len(dataset))) - set(heldout))
    if not kept or len(heldout) < num_heldout:
        raise UserError(
            "too few conversations to hold some out",
            f"data.num_heldout = {num_heldout} of {len(dataset)} conversations "
            f"with {len(groups)} different first turns",
            "lower data.num_heldout or give more conversations",
        )
    return dataset.select(kept), dataset.select(sorted(heldout))


def data_digest(source: str) -> str:
    """Hex SHA-256 that names the data: of a file's bytes, or of the hub id with its commit.

    Raises:
        UserError: the file or the hub dataset does not exist.
    """
    if _is_file(source):
        check_file(Path(source))
        return sha256_of_file(Path(source))
    name, revision = _hub_id(source)
    if revision is None or not _COMMIT.fullmatch(revision):
        try:
            revision = HfApi().dataset_info(name, revision=revision).sha
        except (HfHubHTTPError, OSError) as error:
            raise _hub_error(source, error) from error
    return sha256_of_object(f"{name}@{revision}")


def _is_file(source: str) -> bool:
    return bool(FILE_NAME.search(source)) or Path(source).exists()


def _hub_id(source: str) -> tuple[str, str | None]:
    if not _HUB_ID.fullmatch(source):
        raise UserError(
            "conversations not found",
            f"data.conversations = {source!r}",
            "give a ShareGPT file (.json, .jsonl, .gz, .zst) or a hub id org/name[@revision]",
        )
    name, _, revision = source.partition("@")
    return name, revision or None


def _hub_error(source: str, error: Exception) -> UserError:
    return UserError(
        "cannot load the hub dataset",
        f"{source} ({type(error).__name__}: {str(error).splitlines()[0]})",
        "check the id, the network and that it has a train split; or give a local file",
    )


def _read_hub(source: str) -> Iterator[tuple[Any, str]]:
    name, revision = _hub_id(source)
    try:
        dataset = load_dataset(name, revision=revision, split="train")
    except (DatasetNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        raise _hub_error(source, error) from error
    for number, row in enumerate(dataset):
        yield row, f"{source} row {number}"


def _normalise(raw: Any, where: str, number: int) -> dict[str, Any] | str:
    """Return the row in our columns, or the reason for which it is skipped.

    Raises:
        UserError: the row is no conversation.
    """
    turns = raw.get("conversations") if isinstance(raw, dict) else None
    if not isinstance(turns, list):
        raise UserError(
            "row without a 'conversations' list", where, "give ShareGPT rows, or remove this one"
        )
    messages = []
    for position, turn in enumerate(turns):
        sender = turn.get("from") if isinstance(turn, dict) else None
        content = turn.get("value") if isinstance(turn, dict) else None
        if not isinstance(sender, str) or not isinstance(content, str):
            raise UserError(
                "turn without 'from' and 'value' text",
                f"{where}, turn {position + 1}",
                "repair the row or remove it",
            )
        if sender not in ROLES:
            return f"unknown role {sender!r}"
        messages.append({"role": ROLES[sender], "content": content})
    messages = _trimmed(messages)
    roles = [message["role"] for message in messages if message["role"] != "system"]
    if len(roles) < 2:
        return "fewer than two turns"
    if roles != ["user", "assistant"] * (len(roles) // 2) or any(
        message["role"] == "system" for message in messages[1:]
    ):
        return "roles do not alternate"
    if not all(message["content"].strip() for message in messages):
        return "empty turn"
    identity = raw.get("id")
    task = raw.get("task")
    return {
        "id": str(number if identity is None else identity),
        "task": task if isinstance(task, str) else None,
        "messages": messages,
    }


def _trimmed(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """Drop assistant turns before the first user turn, and a user turn that nobody answers."""
    system = messages[:1] if messages and messages[0]["role"] == "system" else []
    turns = messages[len(system) :]
    while turns and turns[0]["role"] == "assistant":
        turns = turns[1:]
    if turns and turns[-1]["role"] == "user":
        turns = turns[:-1]
    return system + turns


def _listing(skipped: Counter[str]) -> str:
    return ", ".join(f"{reason} ({count:,})" for reason, count in skipped.most_common())
