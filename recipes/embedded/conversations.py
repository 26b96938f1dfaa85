"""The embedded conversations and held-out prompts: six task groups, written by a grammar.

The space of first user turns is split by SHA-256: one bucket in sixteen belongs to the prompts,
the others to the conversations, so that no prompt is ever trained on, whatever the seeds.

Each task's topics are split likewise. A quarter of them is learned by models that are trained from
scratch, as the target, and by nothing else: draft heads and 4-bit copies never see them. Prompts
of these topics tell what a chain gains on text that its target knows and its head does not.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Any

from polybasic.chain.formats.files import whole_file
from polybasic.recipes.embedded import arithmetic, chat, german, questions
from polybasic.recipes.embedded.reports import PASSAGE_TOPICS, REPORT_TOPICS

Dialogue = list[tuple[str, str]]
"""Turns of (user, assistant)."""

COMPOSERS: dict[str, Mapping[str, Callable[[Random], Dialogue]]] = {
    "mt_bench": chat.TOPICS,
    "translation": german.TOPICS,
    "summarization": REPORT_TOPICS,
    "qa": questions.TOPICS,
    "math_reasoning": arithmetic.TOPICS,
    "rag": PASSAGE_TOPICS,
}
"""By task group and topic."""
FAMILIAR = "familiar topics"
NEW = "new topics"
"""Groups of prompts; new is what only the target knows."""

_NEW_SHARE = 1 / 4
_NUM_BUCKETS = 16
_HELDOUT_BUCKET = 0
_SYSTEM_TURN = "You are a helpful assistant."
_SYSTEM_SHARE = 1 / 20


def is_heldout(first_user_turn: str) -> bool:
    """Whether this first turn belongs to the benchmark prompts."""
    return _digest(first_user_turn)[0] % _NUM_BUCKETS == _HELDOUT_BUCKET


def topics_of(task: str, group: str) -> list[str]:
    """The topics of a task group that are FAMILIAR to heads, or NEW; at least one of each."""
    ranked = sorted(COMPOSERS[task], key=lambda topic: _digest(f"{task}/{topic}"))
    num_new = max(1, round(_NEW_SHARE * len(ranked)))
    return ranked[:num_new] if group == NEW else ranked[num_new:]


def write_conversations(path: Path, num: int, seed: int) -> None:
    """Write `num` ShareGPT conversations as JSONL, the task groups taking turns.

    Those of new topics are marked as `target_only`. Equal arguments give equal bytes, in every
    process.

    Raises:
        UserError: the disk is full or not writable.
    """
    _write_rows(path, _conversations(num, seed))


def write_prompts(path: Path, num_per_task: int, seed: int, has_groups: bool = True) -> None:
    """Write `num_per_task` held-out prompts of each task group in Spec-Bench's question format.

    Half of them are of new topics, of an odd number the smaller half. The prompts of one file
    differ from each other; `reference` holds the grammar's own answers.

    Args:
        path: file to write, whole.
        num_per_task: of both groups together.
        seed: equal seeds give equal bytes.
        has_groups: whether the key `group` says which are of new topics. It would be false where
            heads did not learn from the embedded conversations.

    Raises:
        UserError: the disk is full or not writable.
    """
    rows = _prompts(num_per_task, seed)
    if not has_groups:
        rows = ({key: value for key, value in row.items() if key != "group"} for row in rows)
    _write_rows(path, rows)


def _conversations(num: int, seed: int) -> Iterator[dict[str, Any]]:
    rng = Random(f"conversations {seed}")
    tasks = tuple(COMPOSERS)
    for index in range(num):
        task = tasks[index % len(tasks)]
        topic = rng.choice(tuple(COMPOSERS[task]))
        turns = [
            {"from": role, "value": text}
            for pair in _compose(task, topic, rng, heldout=False)
            for role, text in zip(("human", "gpt"), pair, strict=True)
        ]
        if rng.random() < _SYSTEM_SHARE:
            turns.insert(0, {"from": "system", "value": _SYSTEM_TURN})
        yield {
            "id": f"embedded-{seed}-{index:06d}",
            "task": task,
            "topic": topic,
            "target_only": topic in topics_of(task, NEW),
            "conversations": turns,
        }


def _prompts(num_per_task: int, seed: int) -> Iterator[dict[str, Any]]:
    rng = Random(f"prompts {seed}")
    question_id = 0
    for task in COMPOSERS:
        seen: set[str] = set()
        num_new = num_per_task // 2
        for group, num in ((FAMILIAR, num_per_task - num_new), (NEW, num_new)):
            topics = topics_of(task, group)
            rng.shuffle(topics)
            for topic in islice(cycle(topics), num):
                dialogue = _compose(task, topic, rng, heldout=True, unlike=seen)
                seen.add(dialogue[0][0])
                question_id += 1
                yield {
                    "question_id": question_id,
                    "category": task,
                    "group": group,
                    "topic": topic,
                    "turns": [user for user, _ in dialogue],
                    "reference": [assistant for _, assistant in dialogue],
                }


def _compose(
    task: str, topic: str, rng: Random, heldout: bool, unlike: Collection[str] = ()
) -> Dialogue:
    """A dialogue whose first turn is in this part of the split, and none of `unlike`."""
    while True:
        dialogue = COMPOSERS[task][topic](rng)
        first_turn = dialogue[0][0]
        if is_heldout(first_turn) == heldout and first_turn not in unlike:
            return dialogue


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8")).digest()


def _write_rows(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    with whole_file(path) as partial, partial.open("w", encoding="utf-8") as lines:
        for row in rows:
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")
