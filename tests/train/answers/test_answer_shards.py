"""Answers shared out over processes: the same files as of one, and shards that add up."""

import json
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.processes.place import Place
from polybasic.train.answers.answer_shards import MANIFEST_NAME
from polybasic.train.answers.answerer import AskedPrompt, FailedAnswer, WrittenTurn
from polybasic.train.answers.regeneration import regenerate
from polybasic.train.settings import DataSettings
from tests.checkpoints import byte_level_tokenizer

NUM = 24
TOKENIZER = byte_level_tokenizer()


class Scripted:
    """Answers with the seed that it is given; some questions fail, and it can be stopped."""

    context_tokens, num_parallel = 4096, 1

    def __init__(self, num_answers: int = 10**6, failing: tuple[str, ...] = ()) -> None:
        self.identity = {"through": "script"}
        self.num_left, self.failing, self.asked = num_answers, failing, list[str]()

    async def answer(self, prompt: AskedPrompt) -> WrittenTurn:
        question = prompt.messages[-1]["content"]
        if question in self.failing:
            raise FailedAnswer("hush")
        if not self.num_left:
            raise KeyboardInterrupt
        self.num_left -= 1
        self.asked.append(question)
        return WrittenTurn(f"{question} {prompt.seed}", is_cut=prompt.seed % 2 == 0)


def source_of(folder: Path) -> str:
    lines = []
    for index in range(NUM):
        turns = []
        # the same first question is asked twice, and turns are few or many
        for turn in range(1 + index % 3):
            turns.append({"from": "human", "value": f"question {index // 2} turn {turn}"})
            turns.append({"from": "gpt", "value": "ready-made"})
        lines.append(json.dumps({"id": f"id{index}", "conversations": turns}))
    lines[7] = json.dumps({"id": "strange", "conversations": [{"from": "martian", "value": "x"}]})
    path = folder / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def answered(folder: Path, place: Place, answerer: Scripted, seed: int = 0) -> dict[str, Any]:
    """Regenerate one process's share into folder/out."""
    data = DataSettings.model_validate({"regenerate": {"temperature": 0.5}})
    return regenerate(
        source_of(folder),
        data,
        TOKENIZER,
        nullcontext(answerer),
        identity={},
        seed=seed,
        journals=folder / "answers",
        out=folder / "out",
        place=place,
    )


def all_answered(folder: Path, count: int, **given: Any) -> tuple[bytes, bytes]:
    """What all processes write; the first one ends last, as it waits for the others."""
    folder.mkdir(exist_ok=True)
    for index in reversed(range(count)):
        answered(folder, Place(index, count), Scripted(failing=("question 4 turn 0",)), **given)
    names = ("conversations.jsonl", "accounting.json")
    conversations, accounting = ((folder / "out" / name).read_bytes() for name in names)
    return conversations, accounting


def test_any_number_of_processes_writes_the_same(tmp_path: Path) -> None:
    single, two, three, many = (all_answered(tmp_path / f"{n}", n) for n in (1, 2, 3, NUM + 5))
    assert single == two == three == many
    assert single[0] != all_answered(tmp_path / "other", 1, seed=1)[0], (
        "answers follow from the seed"
    )
    for count in (1, 2, 3):
        found = json.loads((tmp_path / f"{count}" / "out" / MANIFEST_NAME).read_text())
        shards = found.pop("shards")
        assert len(shards) == count
        assert found == {name: sum(shard[name] for shard in shards) for name in found}
        assert (found["num_inputs"], found["num_failed"]) == (NUM - 1, 2)
        names = {path.name for path in (tmp_path / f"{count}" / "out").iterdir()}
        assert names == {"conversations.jsonl", "accounting.json", MANIFEST_NAME}


def test_an_interrupted_shard_asks_for_the_rest_alone(tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    answered(tmp_path / "alone", Place(), whole := Scripted())
    first, stopped = Scripted(), Scripted(num_answers=5)
    assert answered(tmp_path, Place(1, 3), first)["num_inputs"] == 8
    with pytest.raises(KeyboardInterrupt):
        answered(tmp_path, Place(2, 3), stopped)
    rest = [Scripted(), Scripted()]  # in another number of processes
    for index in (1, 0):
        answered(tmp_path, Place(index, 2), rest[index])
    parts = [each.asked for each in (first, stopped, *rest)]
    assert all(parts)
    assert sorted(chain(*parts)) == sorted(whole.asked), "each is asked for once"
    paths = [folder / "out" / "conversations.jsonl" for folder in (tmp_path, tmp_path / "alone")]
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_shard_that_is_not_whole_is_named(tmp_path: Path) -> None:
    def merge() -> None:
        answered(tmp_path, Place(0, 2), Scripted())

    path = tmp_path / "out" / "shards" / "00001.jsonl"
    with pytest.raises(UserError, match=rf"shard of answers is missing: {path}; let all hosts"):
        merge()
    answered(tmp_path, Place(1, 2), Scripted())
    content = path.read_bytes()
    path.write_bytes(content[: content.rindex(b"\n", 0, -1) + 1])
    with pytest.raises(UserError, match=rf"short shard of answers: {path} \(10 of 11 conv"):
        merge()
    path.write_bytes(content[:-5])
    with pytest.raises(UserError, match=rf"shard of answers .*{path}"):
        merge()
    assert not (tmp_path / "out" / "conversations.jsonl").exists()
    path.write_bytes(content)
    merge()


def test_failures_are_counted_over_all_shards(tmp_path: Path) -> None:
    failing = "question 0 turn 0", "question 1 turn 0"  # four of 23 conversations, two a shard
    answered(tmp_path, Place(1, 2), Scripted(failing=failing))
    with pytest.raises(UserError, match=r"more than a tenth .*: 4 of 23, the first: hush"):
        answered(tmp_path, Place(0, 2), Scripted(failing=failing))
