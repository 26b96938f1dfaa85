"""A file of small conversations to run recipes on."""

import json
from collections.abc import Sequence
from pathlib import Path


def write_conversations(path: Path, tasks: Sequence[str] = ()) -> None:
    """Write 60 rows as ShareGPT has them, a few of no use among them.

    Args:
        path: a .json file.
        tasks: of the rows, in turns; none names any.
    """
    text = "the rain in the north is as old as the sea and the stone on the shore"
    words = text.split()
    rows = []
    for index in range(60):
        turns = [
            {"from": role, "value": " ".join(words[(index + turn) % 9 :]) + f" {index} {turn}"}
            for turn, role in enumerate(("human", "gpt") * (1 + index % 3))
        ]
        if index % 10 == 0:
            turns.insert(0, {"from": "gpt", "value": "before any question"})
        if index % 15 == 0:
            turns[-1]["value"] = ""
        task = {"task": tasks[index % len(tasks)]} if tasks else {}
        rows.append({"id": str(index), **task, "conversations": turns})
    path.write_text(json.dumps(rows), "utf-8")
