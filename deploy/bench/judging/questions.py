"""Questions whose answers can be checked: numbers, and code that has tests."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.files import parse_json, read_text
from polybasic.deploy.bench.judging.sandbox import check_sandbox, passes

NUMBERS, CODE = "numbers", "code"
"""Tasks."""
STEP_BY_STEP = " Think step by step, and end with the line 'Answer: ' and the number."
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_FENCED = re.compile(r"```(?:python)?\n(.*?)(?:```|$)", re.DOTALL)
_DO = (
    'write {"turns": ["..."], "answer": 42}, or {"prompt": ..., "entry_point": ..., "test": ...} '
    "as HumanEval does, on each line"
)
NAMES = ("Amina", "Bruno", "Chen", "Dora", "Emil", "Fatma", "Goran", "Hana", "Ivo", "Jun")

Numbers = tuple[int, int, int, int]
TEMPLATES: tuple[tuple[str, Callable[..., int]], ...] = (
    (
        "{name} has {a} boxes with {b} pencils in each, and gives {c} pencils away. How many "
        "pencils are left?",
        lambda a, b, c, d: a * b - c,
    ),
    (
        "{name} buys {a} notebooks at {c} dollars each and {b} pens at {d} dollars each. How many "
        "dollars does {name} pay?",
        lambda a, b, c, d: a * c + b * d,
    ),
    (
        "A train goes {c} km an hour for {a} hours, and then {d} km an hour for {b} hours. How "
        "many km does it go?",
        lambda a, b, c, d: c * a + d * b,
    ),
    (
        "A garden has {a} rows of {b} plants, and in each row {d} of them are roses. Then {c} "
        "tulips are planted. How many plants of the garden are not roses?",
        lambda a, b, c, d: a * (b - d) + c,
    ),
    (
        "{name} is {b} years old, and a brother is {d} years older. How old will the two be "
        "together in {a} years?",
        lambda a, b, c, d: 2 * (b + a) + d,
    ),
    (
        "{name} saves {c} dollars a week for {a} weeks, and then spends half of it. {name} gets "
        "{d} dollars as a present. How many dollars does {name} have?",
        lambda a, b, c, d: c * a // 2 + d,
    ),
    (
        "A baker makes {a} trays of {b} rolls in the morning and twice as many rolls in the "
        "afternoon. {c} rolls are sold. How many rolls are left?",
        lambda a, b, c, d: 3 * a * b - c,
    ),
    (
        "There are {c} liters of water in a tank. {a} buckets of {d} liters are poured in, and "
        "then {b} liters leak out. How many liters are in the tank now?",
        lambda a, b, c, d: c + a * d - b,
    ),
)
"""With what their answer is, of a from 3 to 9, b from 11 to 19, c even from 20 to 48, d from 2 to
8."""


@dataclass(frozen=True)
class CheckedQuestion:
    """What is asked, and what answers come to.

    Attributes:
        task: `numbers` or `code`.
        turn: what the user says.
        result: of the text of an answer: its number, or True if its code passes the tests; None
            where it has none.
        right: the result of a right answer.
    """

    task: str
    turn: str
    result: Callable[[str], float | None]
    right: float

    @property
    def messages(self) -> list[dict[str, str]]:
        """As a chain encodes them."""
        return [{"role": "user", "content": self.turn}]

    def is_right(self, text: str) -> bool:
        """Whether the text of an answer is right."""
        return self.result(text) == self.right


Asked = tuple[CheckedQuestion, list[int]]
"""A question, and the token ids of its prompt."""


def made_questions(num: int, seed: int = 0) -> list[CheckedQuestion]:
    """Word problems of two or three steps."""
    numbers, found = random.Random(seed), []
    for _ in range(num):
        text, answer = numbers.choice(TEMPLATES)
        given: Numbers = (
            numbers.randint(3, 9),
            numbers.randint(11, 19),
            2 * numbers.randint(10, 24),
            numbers.randint(2, 8),
        )
        name = numbers.choice(NAMES)
        turn = text.format(name=name, **dict(zip("abcd", given, strict=True))) + STEP_BY_STEP
        found.append(CheckedQuestion(NUMBERS, turn, _number, answer(*given)))
    return found


def read_checked(path: Path, runs_code: bool) -> list[CheckedQuestion]:
    """Questions of a file, a JSON object a line, with a number as the answer or tests of code.

    Args:
        runs_code: whether programs of answers may be run, see `sandbox`.

    Raises:
        UserError: a missing or empty file; a malformed line, which is named; code that may not or
            cannot be run.
    """
    lines = enumerate(read_text(path, "questions").split("\n"), 1)
    found = [_question(line, path, number) for number, line in lines if line.strip()]
    if not found:
        raise UserError("questions are empty", str(path), _DO)
    if any(question.task == CODE for question in found):
        if not runs_code:
            raise UserError(
                "answers are code, which runs to be checked",
                str(path),
                "allow it by --run-code, or ask questions of numbers",
            )
        check_sandbox()
    return found


def _question(line: str, path: Path, number: int) -> CheckedQuestion:
    row = parse_json(line, "question", str(path), number)
    where = f"{path} line {number}"
    if not isinstance(row, dict):
        raise UserError("question is not an object", where, _DO)
    if "test" in row:
        prompt, entry_point, test = (_text(row, key, where) for key in _CODE_KEYS)
        turn, result = _CODE_TURN.format(prompt), _tested(prompt, entry_point, test)
        return CheckedQuestion(CODE, turn, result, True)
    turns = row.get("turns", [row.get("prompt")])
    if not (isinstance(turns, list) and turns and isinstance(turns[0], str) and turns[0]):
        raise UserError("question has no text", f"{where} (turns, prompt)", _DO)
    answer = _number(str(row.get("answer", "")))
    if answer is None:
        raise UserError("question has no number as its answer", f"{where} (answer)", _DO)
    return CheckedQuestion(NUMBERS, turns[0], _number, answer)


_CODE_KEYS = ("prompt", "entry_point", "test")
_CODE_TURN = (
    "Complete this function. Answer with the whole function in one Python code block, without "
    "explanation.\n\n```python\n{}```"
)


def _text(row: dict[str, Any], key: str, where: str) -> str:
    if not isinstance(value := row.get(key), str) or not value:
        raise UserError("question lacks a text", f"{where} ({key})", _DO)
    return value


def _number(text: str) -> float | None:
    """The last number of a text."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def _tested(prompt: str, entry_point: str, test: str) -> Callable[[str], float | None]:
    known: dict[str, bool] = {}
    imports = prompt.split("def ")[0]

    def result(text: str) -> float | None:
        fenced = _FENCED.search(text)
        program = f"{imports}\n{fenced[1] if fenced else text}\n{test}\ncheck({entry_point})"
        if program not in known:
            known[program] = passes(program)
        return known[program] or None

    return result
