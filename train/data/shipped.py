"""The conversations that come with polybasic, read without the packages that training needs."""

import gzip
import json
from pathlib import Path
from typing import Any

from polybasic.train.data.splitting import heldout_indices

SHIPPED_PATH = Path(__file__).with_name("shipped.jsonl.gz")
NUM_HELDOUT = 120
_ROLES = {"human": "user", "gpt": "assistant"}


def shipped_rows() -> list[dict[str, Any]]:
    """All of them, as ShareGPT writes conversations, with task and group."""
    with gzip.open(SHIPPED_PATH, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def heldout_shipped(num: int = NUM_HELDOUT) -> list[dict[str, Any]]:
    """Rows with task, group and messages: those that are held out where `num` are."""
    rows = shipped_rows()
    for row in rows:
        turns = row.pop("conversations")
        row["messages"] = [{"role": _ROLES[t["from"]], "content": t["value"]} for t in turns]
    return [rows[index] for index in heldout_indices(rows, num)[0]]
