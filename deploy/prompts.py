"""Benchmark prompts in Spec-Bench's question format."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from polybasic.chain.errors import UserError
from polybasic.chain.formats.files import parse_json, read_text, whole_file
from polybasic.deploy.settings import TASKS, BenchSettings, PlanSettings

MT_BENCH_CATEGORIES = (
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "stem",
    "humanities",
)
"""What Spec-Bench calls the questions that it took from MT-bench."""
HELDOUT_TASK = "heldout"
"""Of questions that are held-out conversations' first turns."""


@dataclass(frozen=True)
class Question:
    """One row of the file: user turns of a conversation, and the task group that it counts to."""

    question_id: str
    task: str
    turns: tuple[str, ...]


def read_questions(path: Path) -> list[Question]:
    """Read a question file: a JSON object a line, with question_id, category and turns.

    Raises:
        UserError: a missing or empty file, or a malformed line, which is named.
    """
    questions = [
        _question(line, path, number)
        for number, line in enumerate(read_text(path, "prompts").split("\n"), 1)
        if line.strip()
    ]
    if not questions:
        raise UserError("prompts are empty", str(path), "give at least one question")
    return questions


def write_first_turns(path: Path, conversations: Iterable[Sequence[dict[str, str]]]) -> None:
    """Write the first user turn of each conversation as a question of task `heldout`, each once.

    Args:
        path: file to write, whole.
        conversations: messages with role and content.

    Raises:
        UserError: the disk is full or not writable.
    """
    firsts = dict.fromkeys(
        next(message["content"] for message in messages if message["role"] == "user")
        for messages in conversations
    )
    with whole_file(path) as partial, partial.open("w", encoding="utf-8") as written:
        for number, turn in enumerate(firsts):
            row = {"question_id": number, "category": HELDOUT_TASK, "turns": [turn]}
            written.write(json.dumps(row, ensure_ascii=False) + "\n")


def choose_questions(questions: list[Question], num_per_task: int) -> list[Question]:
    """At most `num_per_task` of each task, spread evenly over the file, in the tasks' order."""
    chosen: list[Question] = []
    for task in sorted({one.task for one in questions}, key=_task_order):
        of_task = [one for one in questions if one.task == task]
        num = min(num_per_task, len(of_task))
        chosen += [of_task[index * len(of_task) // num] for index in range(num)]
    return chosen


def choose_fitting(
    questions: list[Question],
    num_tokens: Callable[[Question], int],
    room: int,
    settings: PlanSettings | BenchSettings,
    section: str,
) -> tuple[list[Question], int]:
    """Questions chosen from those that fit the context, and how many do not.

    Args:
        questions: of the file `settings.prompts`.
        num_tokens: of a question, as it is asked.
        room: tokens of the context, those of an answer included.
        section: of a recipe that the settings are, for the error.

    Raises:
        UserError: none fits.
    """
    room -= settings.max_new_tokens
    fitting = [question for question in questions if num_tokens(question) <= room]
    if not fitting:
        raise UserError(
            "no prompt fits the context",
            f"{settings.prompts} ({len(questions)} questions, room for {room} tokens)",
            f"use shorter prompts or a smaller {section}.max_new_tokens",
        )
    chosen = choose_questions(fitting, settings.num_prompts_per_task)
    return chosen, len(questions) - len(fitting)


def _question(line: str, path: Path, number: int) -> Question:
    where = f"{path} line {number}"
    do = 'write {"question_id": ..., "category": ..., "turns": [...]} on each line'
    row = parse_json(line, "prompt", str(path), number)
    if not isinstance(row, dict):
        raise UserError("prompt is not an object", where, do)
    for key in ("question_id", "category", "turns"):
        if key not in row:
            raise UserError(f"prompt without {key}", where, do)
    turns, category = row["turns"], row["category"]
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
        raise UserError("prompt without turns", f"{where} turns={turns!r}"[:200], do)
    task = "mt_bench" if category in MT_BENCH_CATEGORIES else str(category)
    return Question(str(row["question_id"]), task, tuple(turns))


def _task_order(task: str) -> tuple[int, str]:
    return (TASKS.index(task) if task in TASKS else len(TASKS), task)
