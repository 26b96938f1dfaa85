"""Benchmark prompts: Spec-Bench's questions, or any JSON lines of prompts or conversations."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.files import parse_json, read_text, whole_file
from polybasic.deploy.planner.settings import TASKS, BenchSettings, PlanSettings

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
"""Of questions that are first turns of held-out conversations without tasks."""
_MOST_TASKS = 16
"""That a report lists."""
UNNAMED_TASK = "prompts"
"""Of questions whose rows name none."""

_USERS = ("user", "human")
_DO = (
    'write {"prompt": "..."}, {"messages": [...]}, {"conversations": [...]} or '
    '{"question_id": ..., "category": ..., "turns": ["...", ...]} on each line'
)


@dataclass(frozen=True)
class Question:
    """One row of the file: user turns of a conversation.

    Attributes:
        question_id: as the file says, else the line's number.
        task: the task group that it counts to.
        turns: what the user says, one after the other.
        group: what else questions are told apart by, as "new topics"; "" for none.
    """

    question_id: str
    task: str
    turns: tuple[str, ...]
    group: str = ""


def read_questions(path: Path) -> list[Question]:
    """Read a question file: a JSON object a line.

    What the user says is the first of these keys that a row has: `turns`, texts, as Spec-Bench
    writes them; `prompt`, one text; `messages` (`role`, `content`) or `conversations` (`from`,
    `value`), of which the turns of `user` or `human` are taken and all others left out. Optional
    are `question_id` or `id` (else the line's number), `category` or `task` (else "prompts"; those
    of MT-bench count as one task) and `group`.

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


def write_first_turns(conversations: Iterable[Mapping[str, Any]], paths: Sequence[Path]) -> None:
    """Write the first user turn of each conversation as a question, each once.

    A question is of the task that its conversation names, where they name a few at most, else of
    task `heldout`.

    Args:
        conversations: rows with `messages` (role, content) and `task`.
        paths: files to write, whole, which share the questions of each task out in turns.

    Raises:
        UserError: fewer questions than files; the disk is full or not writable.
    """
    firsts: dict[str, str] = {}
    for row in conversations:
        turns = (message["content"] for message in row["messages"] if message["role"] == "user")
        firsts.setdefault(next(turns), row["task"] or HELDOUT_TASK)
    if len(set(firsts.values())) > _MOST_TASKS:
        firsts = dict.fromkeys(firsts, HELDOUT_TASK)
    if len(firsts) < len(paths):
        raise UserError(
            "too few held-out conversations to ask",
            f"{len(firsts)} different first turns for {' and '.join(path.name for path in paths)}",
            "raise data.num_heldout, or name other prompts: bench.prompts, plan.prompts",
        )
    by_task = sorted(firsts.items(), key=lambda item: item[1])
    questions = [
        Question(str(number), task, (turn,)) for number, (turn, task) in enumerate(by_task)
    ]
    for place, path in enumerate(paths):
        _write(path, questions[place :: len(paths)])


def split_questions(path: Path, folder: Path) -> tuple[Path, Path]:
    """Split a question file: every third question of a task to plan on, the others to measure on.

    Args:
        folder: where both files are written.

    Raises:
        UserError: as `read_questions`; too few questions; the disk is full or not writable.
    """
    questions = read_questions(path)
    by_task: dict[str, list[Question]] = {}
    for question in questions:
        by_task.setdefault(question.task, []).append(question)
    parts: tuple[list[Question], list[Question]] = [], []
    for of_task in by_task.values():
        for place, question in enumerate(of_task):
            parts[place % 3 > 0].append(question)
    if not parts[1]:
        raise UserError(
            "too few prompts to plan on a part of them",
            f"{path} ({len(questions)} questions)",
            "give two of a task at least",
        )
    files = folder / "planning.jsonl", folder / "measuring.jsonl"
    for file, part in zip(files, parts, strict=True):
        _write(file, part)
    return files


def choose_questions(questions: list[Question], num_per_task: int) -> list[Question]:
    """At most `num_per_task` of each task, spread evenly over its groups and over the file.

    They come in the tasks' order, those of a task by group.
    """
    chosen: list[Question] = []
    groups = list(dict.fromkeys(question.group for question in questions))
    for task in sorted({question.task for question in questions}, key=_task_order):
        of_task = [question for question in questions if question.task == task]
        of_task.sort(key=lambda question: groups.index(question.group))
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


def _write(path: Path, questions: Iterable[Question]) -> None:
    with whole_file(path) as partial, partial.open("w", encoding="utf-8") as written:
        for question in questions:
            row = {
                "question_id": question.question_id,
                "category": question.task,
                "turns": question.turns,
            }
            written.write(json.dumps(row | {"group": question.group}, ensure_ascii=False) + "\n")


def _question(line: str, path: Path, number: int) -> Question:
    where = f"{path} line {number}"
    row = parse_json(line, "prompt", str(path), number)
    if not isinstance(row, dict):
        raise UserError("prompt is not an object", where, _DO)
    names = {
        "question_id": row.get("question_id", row.get("id", number)),
        "category": row.get("category", row.get("task", UNNAMED_TASK)),
        "group": row.get("group", ""),
    }
    for key, name in names.items():
        if not isinstance(name, (str, int) if key == "question_id" else str):
            raise UserError(f"prompt's {key} is no text", f"{where} {key}={name!r}"[:200], _DO)
    question_id, category, group = names.values()
    task = "mt_bench" if category in MT_BENCH_CATEGORIES else category
    return Question(str(question_id), task, _user_turns(row, where), group)


def _user_turns(row: dict[str, Any], where: str) -> tuple[str, ...]:
    forms = ("turns", "prompt", "messages", "conversations")
    key = next((key for key in forms if key in row), None)
    if key is None:
        raise UserError("row without a prompt", where, _DO)
    given = [row[key]] if key == "prompt" else row[key]
    if not isinstance(given, list):
        raise UserError(f"{key} is no list", f"{where} {key}={given!r}"[:200], _DO)
    if key in ("messages", "conversations"):
        given = list(_asked(given, where))
    if not given:
        raise UserError(f"{key} without a turn of the user", where, _DO)
    for text in given:
        if not isinstance(text, str) or not text.strip():
            raise UserError(f"{key} without text", f"{where} {text!r}"[:200], _DO)
    return tuple(given)


def _asked(messages: list[Any], where: str) -> Iterator[Any]:
    """What the user's messages say."""
    for message in messages:
        role = message.get("role", message.get("from")) if isinstance(message, dict) else None
        if not isinstance(role, str):
            raise UserError("message without a role", f"{where} {message!r}"[:200], _DO)
        if role.lower() in _USERS:
            yield message.get("content", message.get("value"))


def _task_order(task: str) -> tuple[int, str]:
    return (TASKS.index(task) if task in TASKS else len(TASKS), task)
