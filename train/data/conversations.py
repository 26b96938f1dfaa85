"""Conversations as ShareGPT or OpenAI write them: files and hub datasets become rows of one shape.

A row is {"id", "task", "group", "messages": [{"role", "content"}, ...]}: an optional
system message, then user and assistant in turns, the assistant last.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from datasets import Dataset, Features, Value, load_dataset
from datasets.exceptions import DatasetNotFoundError
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from transformers import PreTrainedTokenizerBase

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.chat_templates import RejectedMessages, rendered_messages
from polybasic.chain.formats.files import sha256_of_file, sha256_of_object
from polybasic.train.data.chat import chat_template
from polybasic.train.data.conversation_files import check_file, read_file
from polybasic.train.data.conversation_sources import HubData, fetch_file, hub_error, parse_source
from polybasic.train.data.splitting import heldout_indices

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "system": "system",
    "developer": "system",
}
_TURNS = ("conversations", "messages")
"""Keys of a row's turns: as ShareGPT has them, and as OpenAI does."""
FEATURES = Features(
    {
        "id": Value("string"),
        "task": Value("string"),
        "group": Value("string"),
        "messages": [{"role": Value("string"), "content": Value("string")}],
    }
)
_SPLIT_BY = ["task", "group", "messages"]
_SYSTEM_PROBE = [{"role": role, "content": "text"} for role in ("system", "user", "assistant")]
_COMMIT = re.compile(r"[0-9a-f]{40}")


class SkippedRow(NamedTuple):
    """A row that cannot be used: its id, and why."""

    id: str
    reason: str


def load_conversations(source: str, limit: int | None = None) -> Dataset:
    """Read conversations into a dataset with the columns id, task, group and messages.

    Leading assistant turns and trailing user turns are dropped. Rows that cannot be used are
    counted on stderr, so that a few bad ones among tens of thousands stop nobody; rows that are no
    conversations at all are an error.

    Args:
        source: a file of them (`.json`, `.jsonl`, each also `.gz` or `.zst`), a hub id with
            `@revision` where wanted, such a file of a hub data set (`org/name:path/file.json`), or
            `SHIPPED`.
        limit: stop after so many usable conversations.

    Raises:
        UserError: missing, empty, corrupt or malformed input (with file and line), or nothing
            usable in it.
    """
    rows, skipped = [], Counter[str]()
    for row in read_rows(source, limit):
        if isinstance(row, SkippedRow):
            skipped[row.reason] += 1
        else:
            rows.append(row)
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


def read_rows(source: str, limit: int | None = None) -> Iterator[dict[str, Any] | SkippedRow]:
    """Yield every row of `source` in order, in our columns or with why it cannot be used.

    Args:
        source: as `load_conversations` takes it.
        limit: stop after so many usable rows.

    Raises:
        UserError: as `load_conversations`, but for a source without a usable row.
    """
    num_usable = 0
    for number, (raw, where) in enumerate(_raw_rows(parse_source(source))):
        row = _normalise(raw, where, number)
        if isinstance(row, str):
            yield SkippedRow(_identity(raw, number), row)
        else:
            yield row
            num_usable += 1
        if num_usable == limit:
            return


def split_conversations(dataset: Dataset, num_heldout: int) -> tuple[Dataset, Dataset]:
    """Split into (training, held-out), as `heldout_indices` chooses.

    The held-out part has at least `num_heldout` rows, and may have a few more of its last group.

    Raises:
        UserError: there would be nothing left to train on.
    """
    heldout, num_groups = heldout_indices(dataset.select_columns(_SPLIT_BY), num_heldout)
    kept = sorted(set(range(len(dataset))) - set(heldout))
    if not kept or len(heldout) < num_heldout:
        raise UserError(
            "too few conversations to hold some out",
            f"data.num_heldout = {num_heldout} of {len(dataset)} conversations "
            f"of {num_groups} groups or different first turns",
            "lower data.num_heldout or give more conversations",
        )
    return dataset.select(kept), dataset.select(heldout)


def fit_to_template(dataset: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Drop system turns, and say so, where the tokenizer's chat template refuses them.

    Raises:
        UserError: no chat template.
    """
    if _takes_system_turns(tokenizer):
        return dataset
    has_system = [messages[0]["role"] == "system" for messages in dataset["messages"]]
    if not any(has_system):
        return dataset
    print(
        f"the chat template takes no system turns: dropped those of {sum(has_system):,} of "
        f"{len(dataset):,} conversations",
        file=sys.stderr,
    )
    return dataset.map(_without_system_turn, features=FEATURES, load_from_cache_file=False)


def data_digest(source: str) -> str:
    """Hex SHA-256 that names the data: of a file's bytes, or of the hub id with its commit.

    Raises:
        UserError: the file or the hub dataset does not exist.
    """
    data = parse_source(source)
    if isinstance(data, HubData) and data.path is None:
        return sha256_of_object(f"{data.repository}@{_commit(data)}")
    path = _file_of(data)
    check_file(path)
    return sha256_of_file(path)


def _commit(data: HubData) -> str | None:
    if data.revision is not None and _COMMIT.fullmatch(data.revision):
        return data.revision
    try:
        return HfApi().dataset_info(data.repository, revision=data.revision).sha
    except (HfHubHTTPError, OSError) as error:
        raise hub_error(data, error) from error


def _file_of(data: Path | HubData) -> Path:
    return fetch_file(data) if isinstance(data, HubData) else data


def _raw_rows(data: Path | HubData) -> Iterator[tuple[Any, str]]:
    if isinstance(data, HubData) and data.path is None:
        return _read_split(data)
    return read_file(_file_of(data))


def _read_split(data: HubData) -> Iterator[tuple[Any, str]]:
    try:
        dataset = load_dataset(data.repository, revision=data.revision, split="train")
    except (DatasetNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        raise hub_error(data, error) from error
    for number, row in enumerate(dataset):
        yield row, f"{data} row {number}"


def _normalise(raw: Any, where: str, number: int) -> dict[str, Any] | str:
    """Return the row in our columns, or the reason for which it is skipped.

    Raises:
        UserError: the row is of another format.
    """
    found = [raw.get(key) for key in _TURNS] if isinstance(raw, dict) else []
    turns = next((value for value in found if isinstance(value, list)), None)
    if turns is None:
        raise UserError(
            f"row without a list {' or '.join(map(repr, _TURNS))}",
            where,
            "give rows as ShareGPT or OpenAI have them, or remove this one",
        )
    messages = []
    for turn in turns:
        turn = turn if isinstance(turn, dict) else {}
        sender = turn.get("from", turn.get("role"))
        content = turn.get("value", turn.get("content"))
        if not isinstance(sender, str) or not isinstance(content, str):
            return "turn without 'from' and 'value' text, or 'role' and 'content'"
        if sender.lower() not in ROLES:
            return f"unknown role {sender!r}"
        messages.append({"role": ROLES[sender.lower()], "content": content})
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
    return {
        "id": _identity(raw, number),
        **{name: _text(raw.get(name)) for name in ("task", "group")},
        "messages": messages,
    }


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _identity(raw: dict[str, Any], number: int) -> str:
    identity = raw.get("id")
    return str(number if identity is None else identity)


def _trimmed(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """Drop assistant turns before the first user turn, and a user turn that nobody answers."""
    system = messages[:1] if messages and messages[0]["role"] == "system" else []
    turns = messages[len(system) :]
    while turns and turns[0]["role"] == "assistant":
        turns = turns[1:]
    if turns and turns[-1]["role"] == "user":
        turns = turns[:-1]
    return system + turns


def _takes_system_turns(tokenizer: PreTrainedTokenizerBase) -> bool:
    chat_template(tokenizer)
    try:
        rendered_messages(tokenizer, _SYSTEM_PROBE)
    except RejectedMessages:
        return False
    return True


def _without_system_turn(row: dict[str, Any]) -> dict[str, Any]:
    messages = row["messages"]
    return {"messages": messages[1:] if messages[0]["role"] == "system" else messages}


def _listing(skipped: Counter[str]) -> str:
    return ", ".join(f"{reason} ({count:,})" for reason, count in skipped.most_common())
