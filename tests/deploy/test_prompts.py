"""Questions that are made of held-out conversations."""

from pathlib import Path

from polybasic.deploy.prompts import choose_questions, read_questions, write_first_turns

SYSTEM = {"role": "system", "content": "Be kind."}


def conversation(*turns: str) -> list[dict[str, str]]:
    return [
        {"role": ("user", "assistant")[index % 2], "content": text}
        for index, text in enumerate(turns)
    ]


def test_first_user_turns_become_questions_each_once(tmp_path: Path) -> None:
    path = tmp_path / "calibration.jsonl"
    conversations = [
        conversation("one\ntwo", "a", "three", "b"),
        [SYSTEM, *conversation("vier ü", "c")],
        conversation("one\ntwo", "d"),
    ]
    write_first_turns(path, conversations)
    questions = read_questions(path)
    assert [question.turns for question in questions] == [("one\ntwo",), ("vier ü",)]
    assert {question.task for question in questions} == {"heldout"}
    assert len({question.question_id for question in questions}) == 2
    assert choose_questions(questions, 12) == questions
