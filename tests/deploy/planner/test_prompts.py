"""Questions: of files of several formats, chosen from them, and made of held-out conversations."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from polybasic.chain.base.errors import UserError
from polybasic.deploy.planner.prompts import (
    Question,
    choose_questions,
    read_questions,
    write_first_turns,
)

SYSTEM = {"role": "system", "content": "Be kind."}


def conversation(*turns: str) -> list[dict[str, str]]:
    return [
        {"role": ("user", "assistant")[index % 2], "content": text}
        for index, text in enumerate(turns)
    ]


def write_rows(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


@pytest.mark.parametrize(
    ("row", "question"),
    [
        (
            {"question_id": 81, "category": "writing", "turns": ["one", "two"], "reference": ["x"]},
            Question("81", "mt_bench", ("one", "two")),
        ),
        (
            {"question_id": "q-3", "category": "rag", "turns": ["one"], "group": "new topics"},
            Question("q-3", "rag", ("one",), "new topics"),
        ),
        ({"prompt": "one", "completion": "x"}, Question("2", "prompts", ("one",))),
        (
            {"id": "a", "task": "qa", "messages": [SYSTEM, *conversation("one", "x", "two")]},
            Question("a", "qa", ("one", "two")),
        ),
        (
            {
                "conversations": [
                    {"from": "system", "value": "x"},
                    {"from": "Human", "value": "one"},
                    {"from": "gpt", "value": "x"},
                ]
            },
            Question("2", "prompts", ("one",)),
        ),
        # the keys that come first count
        ({"turns": ["one"], "prompt": "x"}, Question("2", "prompts", ("one",))),
        ({"prompt": "one", "messages": []}, Question("2", "prompts", ("one",))),
    ],
)
def test_rows_of_several_formats_are_questions(
    tmp_path: Path, row: dict[str, Any], question: Question
) -> None:
    path = write_rows(tmp_path / "q.jsonl", {"prompt": "first"}, row)
    assert read_questions(path) == [Question("1", "prompts", ("first",)), question]


def test_spec_bench_categories_become_its_task_groups(tmp_path: Path) -> None:
    categories = ("writing", "stem", "math_reasoning")
    rows = [{"question_id": 1, "category": each, "turns": ["x"]} for each in categories]
    questions = read_questions(write_rows(tmp_path / "q.jsonl", *rows))
    assert [question.task for question in questions] == ["mt_bench", "mt_bench", "math_reasoning"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "prompt is not JSON: {path} line 2 column 2"),
        ("[]", "prompt is not an object: {path} line 2; write "),
        ('{"question_id": 1}', "row without a prompt: {path} line 2; write "),
        ('{"turns": "x"}', "turns is no list: {path} line 2 turns='x'; write "),
        ('{"turns": []}', "turns without a turn of the user: {path} line 2; write "),
        ('{"turns": ["x", 1]}', "turns without text: {path} line 2 1; write "),
        ('{"prompt": " "}', "prompt without text: {path} line 2 ' '; write "),
        ('{"prompt": ["x"]}', "prompt without text: {path} line 2 ['x']; write "),
        (
            '{"messages": [{"role": "assistant", "content": "x"}]}',
            "messages without a turn of the user: {path} line 2; write ",
        ),
        (
            '{"messages": [{"role": "user", "content": [1]}]}',
            "messages without text: {path} line 2 [1]; write ",
        ),
        ('{"messages": ["x"]}', "message without a role: {path} line 2 'x'; write "),
        (
            '{"conversations": [{"value": "x"}]}',
            "message without a role: {path} line 2 {{'value': 'x'}}; write ",
        ),
        ('{"prompt": "x", "task": 5}', "prompt's category is no text: {path} line 2 category=5"),
        ('{"prompt": "x", "group": {}}', "prompt's group is no text: {path} line 2 group={{}}"),
        ('{"prompt": "x", "id": []}', "prompt's question_id is no text: {path} line 2 question_"),
    ],
)
def test_malformed_rows_are_refused_with_file_and_line(
    tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "good"}}\n{content}\n')
    with pytest.raises(UserError) as refusal:
        read_questions(path)
    assert str(refusal.value).startswith(message.format(path=path))
    assert "\n" not in str(refusal.value)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n")
    with pytest.raises(UserError) as refusal:
        read_questions(path)
    assert str(refusal.value) == f"prompts are empty: {path}; give at least one question"


def test_questions_are_spread_over_the_file() -> None:
    questions = [Question(str(i), "qa" if i % 2 else "rag", ("x",)) for i in range(20)]
    chosen = choose_questions(questions, 3)
    assert [question.task for question in chosen] == ["qa"] * 3 + ["rag"] * 3
    assert [question.question_id for question in chosen] == ["1", "7", "13", "0", "6", "12"]
    assert len(choose_questions(questions, 99)) == 20


def test_questions_are_spread_over_the_groups_in_whatever_order_they_stand() -> None:
    questions = [Question(str(i), "qa", ("x",), "new" if i % 2 else "old") for i in range(20)]
    for ordered in (questions, sorted(questions, key=lambda question: question.group)):
        chosen = choose_questions(ordered, 4)
        assert sorted(question.group for question in chosen) == ["new", "new", "old", "old"]
        assert {question.question_id for question in chosen} == {"0", "10", "1", "11"}


def test_first_user_turns_become_questions_each_once(tmp_path: Path) -> None:
    path = tmp_path / "calibration.jsonl"
    messages = [
        conversation("one\ntwo", "a", "three", "b"),
        [SYSTEM, *conversation("vier ü", "c")],
        conversation("one\ntwo", "d"),
    ]
    conversations = [{"messages": each, "task": None} for each in messages]
    write_first_turns(conversations, [path])
    questions = read_questions(path)
    assert [question.turns for question in questions] == [("one\ntwo",), ("vier ü",)]
    assert {question.task for question in questions} == {"heldout"}
    assert len({question.question_id for question in questions}) == 2
    assert choose_questions(questions, 12) == questions
    paths = [tmp_path / "plan.jsonl", tmp_path / "bench.jsonl", tmp_path / "none.jsonl"]
    write_first_turns(conversations, paths[:2])
    assert [read_questions(each) for each in paths[:2]] == [questions[:1], questions[1:]]
    with pytest.raises(UserError, match=r"^too few held-out conversations to ask: 2 different"):
        write_first_turns(conversations, paths)


def test_first_user_turns_keep_a_few_tasks_which_files_share(tmp_path: Path) -> None:
    def written(tasks: list[str]) -> list[Counter[str]]:
        rows = [
            {"messages": conversation(f"question {number}", "answer"), "task": task}
            for number, task in enumerate(tasks)
        ]
        paths = [tmp_path / "plan.jsonl", tmp_path / "bench.jsonl"]
        write_first_turns(rows, paths)
        return [Counter(question.task for question in read_questions(path)) for path in paths]

    assert written(["qa", "code"] * 6) == [{"qa": 3, "code": 3}] * 2
    assert written(["qa", "code", "code", "qa", ""]) == [
        {"code": 1, "heldout": 1, "qa": 1},
        {"code": 1, "qa": 1},
    ]
    assert written([f"task {number}" for number in range(40)]) == [{"heldout": 20}] * 2
