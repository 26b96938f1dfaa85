"""Questions whose answers can be checked."""

import json
import re
from pathlib import Path

import pytest

from polybasic.chain.base.errors import UserError
from polybasic.deploy.bench.judging import questions as module
from polybasic.deploy.bench.judging.questions import CODE, NUMBERS, made_questions, read_checked

CODED = {
    "task_id": "A/0",
    "prompt": "import math\n\ndef root(x):\n    '''Square root.'''\n",
    "entry_point": "root",
    "test": "def check(f):\n    assert f(4) == 2",
}
ANSWER = "Here:\n```python\ndef root(x):\n    return math.sqrt(x)\n```\nDone."


def test_word_problems_have_the_answer_that_a_reader_finds() -> None:
    questions = made_questions(100, seed=1)
    assert questions[0].turn != made_questions(1, seed=2)[0].turn
    pencils = next(question for question in questions if "pencils" in question.turn)
    boxes, each, away = (int(number) for number in re.findall(r"\d+", pencils.turn))
    assert pencils.is_right(f"So {boxes * each - away} are left.\nAnswer: {boxes * each - away}")
    assert not pencils.is_right(f"Answer: {boxes * each + away}")
    tank = next(question for question in questions if "tank" in question.turn)
    liters, buckets, more, leaks = (int(number) for number in re.findall(r"\d+", tank.turn))
    assert tank.is_right(f"{liters + buckets * more - leaks}")
    assert not tank.is_right("no number")
    assert all(question.task == NUMBERS for question in questions)
    assert all("{" not in question.turn for question in questions)


def test_a_file_has_numbers_or_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "questions.jsonl"
    rows = [{"turns": ["How many?"], "answer": "1,250"}, {"prompt": "And?", "answer": 2.5}, CODED]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    with pytest.raises(UserError, match=r"answers are code, .*; allow it by --run-code"):
        read_checked(path, runs_code=False)
    ran: list[str] = []

    def passes(program: str) -> bool:
        ran.append(program)
        return "sqrt" in program or not program

    monkeypatch.setattr(module, "passes", passes)
    monkeypatch.setattr(module, "check_sandbox", lambda: None)
    first, second, third = read_checked(path, runs_code=True)
    assert first.is_right("It is 1250.")
    assert not first.is_right("It is 250.")
    assert second.is_right("Answer: **2.50**")
    assert third.task == CODE
    assert third.turn.endswith(f"```python\n{CODED['prompt']}```")
    assert third.is_right(ANSWER)
    assert third.is_right(ANSWER)
    assert not third.is_right("def root(x): return x")
    assert third.result("def root(x): return x") is None
    assert len(ran) == 2
    # the program imports what the prompt does, and ends with the tests
    assert ran[0].index("import math") < ran[0].index("sqrt") < ran[0].index("check(root)")
    assert "Done" not in ran[0]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("", "questions are empty"),
        ("[1]", "question is not an object: .* line 1"),
        ('{"turns": [], "answer": 1}', r"no text: .* line 1 \(turns, prompt\)"),
        ('{"turns": ["a"]}', r"no number as its answer: .* line 1 \(answer\)"),
        ('{"turns": ["a"], "answer": "x"}', "no number as its answer"),
        ('{"prompt": "a", "test": "b"}', r"lacks a text: .* line 1 \(entry_point\)"),
    ],
)
def test_what_cannot_be_asked_is_named(tmp_path: Path, line: str, told: str) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(line)
    with pytest.raises(UserError, match=told):
        read_checked(path, runs_code=True)
