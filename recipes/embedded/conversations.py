"""The embedded conversations and held-out prompts: six task groups, written by a grammar.

The space of first user turns is split by SHA-256: one bucket in sixteen belongs to the prompts,
the others to the conversations, so that no prompt is ever trained on, whatever the seeds.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from polybasic.chain.formats.files import whole_file
from polybasic.recipes.embedded.arithmetic import compose_problem
from polybasic.recipes.embedded.chat import compose_chat
from polybasic.recipes.embedded.german import compose_translation
from polybasic.recipes.embedded.questions import compose_question
from polybasic.recipes.embedded.reports import compose_passages, compose_report

Dialogue = list[tuple[str, str]]
"""Turns of (user, assistant)."""

COMPOSERS: dict[str, Callable[[Random], Dialogue]] = {
    "mt_bench": compose_chat,
    "translation": compose_translation,
    "summarization": compose_report,
    "qa": compose_question,
    "math_reasoning": compose_problem,
    "rag": compose_passages,
}

_NUM_BUCKETS = 16
_HELDOUT_BUCKET = 0
_SYSTEM_TURN = "You are a helpful assistant."
_SYSTEM_SHARE = 1 / 20


def is_heldout(first_user_turn: str) -> bool:
    """Whether this first turn belongs to the benchmark prompts."""
    digest = hashlib.sha256(first_user_turn.encode("utf-8")).digest()
    return digest[0] % _NUM_BUCKETS == _HELDOUT_BUCKET


def write_conversations(path: Path, num: int, seed: int) -> None:
    """Write `num` ShareGPT conversations as JSONL, the task groups taking turns.

    Equal arguments give equal bytes, in every process.

    Raises:
        UserError: the disk is full or not writable.
    """
    _write_rows(path, _conversations(num, seed))


def write_prompts(path: Path, num_per_task: int, seed: int) -> None:
    """Write `num_per_task` held-out prompts of each task group in Spec-Bench's question format.

    The prompts of one file differ from each other; `reference` holds the grammar's own answers.

    Raises:
        UserError: the disk is full or not writable.
    """
    _write_rows(path, _prompts(num_per_task, seed))


def _conversations(num: int, seed: int) -> Iterator[dict[str, Any]]:
    rng = Random(f"conversations {seed}")
    tasks = tuple(COMPOSERS)
    for index in range(num):
        task = tasks[index % len(tasks)]
        turns = [
            {"from": role, "value": text}
            for pair in _compose(task, rng, heldout=False)
            for role, text in zip(("human", "gpt"), pair, strict=True)
        ]
        if rng.random() < _SYSTEM_SHARE:
            turns.insert(0, {"from": "system", "value": _SYSTEM_TURN})
        yield {"id": f"embedded-{seed}-{index:06d}", "task": task, "conversations": turns}


def _prompts(num_per_task: int, seed: int) -> Iterator[dict[str, Any]]:
    rng = Random(f"prompts {seed}")
    question_id = 0
    for task in COMPOSERS:
        seen: set[str] = set()
        while len(seen) < num_per_task:
            dialogue = _compose(task, rng, heldout=True)
            first_turn = dialogue[0][0]
            if first_turn in seen:
                continue
            seen.add(first_turn)
            question_id += 1
            yield {
                "question_id": question_id,
                "category": task,
                "turns": [user for user, _ in dialogue],
                "reference": [assistant for _, assistant in dialogue],
            }


def _compose(task: str, rng: Random, heldout: bool) -> Dialogue:
    while True:
        dialogue = COMPOSERS[task](rng)
        if is_heldout(dialogue[0][0]) == heldout:
            return dialogue


def _write_rows(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    with whole_file(path) as partial, partial.open("w", encoding="utf-8") as lines:
        for row in rows:
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")
