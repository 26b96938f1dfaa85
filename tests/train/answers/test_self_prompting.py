"""Questions that a target writes itself: which are kept, by seed alone, and where it goes on."""

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from polybasic.chain.base.errors import UserError
from polybasic.train.answers.answerer import WrittenTurn
from polybasic.train.answers.self_prompting import (
    QUESTIONS_NAME,
    read_questions,
    reason_against,
    write_questions,
)
from polybasic.train.data.chat import UserTurn
from tests.checkpoints import write_family

ANSWERS = [
    WrittenTurn("What is the tallest mountain of Peru?", is_cut=False),
    WrittenTurn("Why?", is_cut=False),
    WrittenTurn("Write a long poem about the sea and", is_cut=True),
    WrittenTurn("Como está o senhor, é o café já está?", is_cut=False),
    WrittenTurn("what IS the tallest mountain of peru?", is_cut=False),
    WrittenTurn("tell me " + "again and " * 20, is_cut=False),
    WrittenTurn(" How do bees find their way home?\n", is_cut=False),
    WrittenTurn("Name three rivers of Asia. [/INST] The Ganges and", is_cut=True),
]


class Fake:
    """Writes the text that belongs to a seed, after as many turns of the loop as the seed says."""

    def __init__(self, num_parallel: int) -> None:
        self.num_parallel, self.asked = num_parallel, 0
        self.by_seed: dict[int, int] = {}

    async def write(self, turn: UserTurn, seed: int) -> WrittenTurn:
        assert turn.token_ids
        self.asked += 1
        for _ in range(seed % 7):
            await asyncio.sleep(0)
        return ANSWERS[seed % len(ANSWERS)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("target")
    write_family(folder, "qwen2")
    loaded = AutoTokenizer.from_pretrained(folder)
    loaded.chat_template = (
        "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"
    )
    return loaded


def written(tmp_path: Path, tokenizer: Any, writer: Fake, num: int, seed: int = 0) -> Any:
    out = tmp_path / f"out{num}"
    out.mkdir(parents=True, exist_ok=True)
    found = write_questions(
        tokenizer,
        nullcontext(writer),
        num=num,
        identity={"target": "t"},
        seed=seed,
        journals=tmp_path / "answers",
        out=out,
    )
    return found, read_questions(out / QUESTIONS_NAME)


def test_usable_questions_are_kept_however_many_are_written_at_once(
    tmp_path: Path, tokenizer: Any
) -> None:
    found, alone = written(tmp_path / "a", tokenizer, Fake(1), 3)
    assert sorted(alone) == [
        "How do bees find their way home?",
        "Name three rivers of Asia.",
        "What is the tallest mountain of Peru?",
    ]
    assert found["num_kept"] == 3
    assert sum(found["left_out"].values()) == found["num_written"] - 3
    assert set(found["left_out"]) <= {"length", "cut", "script", "repetition", "seen"}
    assert written(tmp_path / "b", tokenizer, Fake(5), 3) == (found, alone)
    assert written(tmp_path / "c", tokenizer, Fake(1), 3, seed=1)[1] != alone


def test_a_run_goes_on_from_the_journal(tmp_path: Path, tokenizer: Any) -> None:
    class Failing(Fake):
        async def write(self, turn: UserTurn, seed: int) -> WrittenTurn:
            if self.asked == 2:
                raise UserError("the card is lost", "gpu 0", "find it")
            return await super().write(turn, seed)

    with pytest.raises(UserError, match="the card is lost"):
        written(tmp_path, tokenizer, Failing(1), 3)
    first = Fake(2)
    found, three = written(tmp_path, tokenizer, first, 3)
    (journal,) = (tmp_path / "answers").glob("*.jsonl")
    assert first.asked == len(journal.read_bytes().splitlines()) - 2
    assert found["num_written"] <= first.asked + 2
    again = Fake(2)
    assert written(tmp_path, tokenizer, again, 2)[1] == three[:2]
    assert again.asked == 0


def test_a_model_that_writes_nothing_usable_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    class Mute(Fake):
        async def write(self, turn: UserTurn, seed: int) -> WrittenTurn:
            return WrittenTurn("", is_cut=False)

    with pytest.raises(UserError, match=r"hardly any usable question: 0 of 1\d\d \(length \(1\d\d"):
        written(tmp_path, tokenizer, Mute(4), 110)


@pytest.mark.parametrize(
    ("question", "why"),
    [
        ("one two three", "length"),
        ("one two three four", None),
        (" ".join(f"word{number}" for number in range(200)), None),
        (" ".join(f"word{number}" for number in range(201)), "length"),
        ("你好，请介绍一下 the city of Paris", "script"),
        ("again and again and again and again", None),
        ("again and " * 11, "repetition"),
    ],
)
def test_questions_are_judged_by_length_script_and_repetition(
    question: str, why: str | None
) -> None:
    assert reason_against(question) == why
