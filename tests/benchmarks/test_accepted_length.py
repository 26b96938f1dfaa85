"""Simulated and served rounds are the same where nothing is rounded."""

import dataclasses
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from polybasic.chain.formats.plan import Tree
from polybasic.deploy import Chain, load_chain
from polybasic.train.features.states import Features
from polybasic.train.features.target import Target
from polybasic.train.head.acceptance import HeldoutBatch, TreeShape, simulate
from polybasic.train.head.eagle2 import DraftHead
from tests.benchmarks.scripts import load_script
from tests.trimmed_heads import replace_by_eagle3, trim

accepted_length = load_script("accepted_length")
ANSWER_TOKENS = 20
TREE = Tree(depth=3, top_k=8, rows=140)
"""Holds all candidates, so that a tree cut at the end of an answer has all of its depth."""


@pytest.fixture
def conversations(tmp_path: Path) -> str:
    rows = [
        {
            "id": str(number),
            "task": "even" if number % 2 == 0 else "odd",
            "conversations": [
                {"from": "human", "value": " ".join(f"w{number + each}" for each in range(6))},
                {"from": "gpt", "value": "w1"},
            ],
        }
        for number in range(20)
    ]
    path = tmp_path / "conversations.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@dataclasses.dataclass
class Loaded:
    chain: Chain
    target: Target
    drafts: DraftHead
    batches: list[HeldoutBatch]

    def simulate(self, tree: Tree) -> Any:
        shape = TreeShape(tree.depth, tree.top_k, tree.rows)
        return simulate(self.drafts, self.target.lm_head, self.batches, shape)

    def serve(self, tree: Tree) -> list[Any]:
        head = accepted_length.trained_head(self.chain, None)
        plan = accepted_length.plans(self.chain, head, tree, None)["target, draft"]
        return accepted_length.serve(self.chain, plan, self.batches, ANSWER_TOKENS)


def load(chain_folder: Path, conversations: str, num_heldout: int = 4) -> Loaded:
    chain = load_chain(chain_folder, dtype="float32")
    head = accepted_length.trained_head(chain, "draft")
    target = accepted_length.load_for_training(chain)
    drafts = accepted_length.head_for_training(chain, head, target)
    data = accepted_length.data_settings(chain, conversations, num_heldout)
    batches = accepted_length.heldout_answers(target, drafts, data, ANSWER_TOKENS)
    return Loaded(chain, target, drafts, batches)


@pytest.fixture(params=["eagle2", "trimmed eagle2", "trimmed eagle3"])
def loaded(
    request: pytest.FixtureRequest, tiny_chain_parts: Any, conversations: str, tmp_path: Path
) -> Loaded:
    kind = request.param.split()[-1]
    if kind == "eagle3":
        replace_by_eagle3(tiny_chain_parts.draft, tiny_chain_parts.target)
    elif request.param.startswith("trimmed"):
        trim(tiny_chain_parts.draft)
    intermediate, draft = tiny_chain_parts.parts
    parts = [intermediate, dataclasses.replace(draft, kind=kind)]
    tiny_chain_parts.package(tmp_path / "chain", parts=parts)
    return load(tmp_path / "chain", conversations)


def test_simulated_rounds_are_those_that_are_served(loaded: Loaded) -> None:
    answers = loaded.serve(TREE)
    assert len(answers) == 4
    assert all(answer.is_as_simulated for answer in answers)
    found = loaded.simulate(TREE)
    assert accepted_length.pooled(answers) == {
        "accepted_length": pytest.approx(found.accepted_length),
        "num_rounds": found.num_rounds,
    }
    assert found.num_rounds < 4 * (ANSWER_TOKENS - 1), "some drafts are accepted"
    compared = accepted_length.compared(found, answers)
    assert set(compared["by_task"]) == {"even", "odd"}
    for part in (compared, *compared["by_task"].values()):
        assert part["difference_percent"] == pytest.approx(0)
    narrow = accepted_length.compared(found, loaded.serve(Tree(depth=1, top_k=1, rows=2)))
    assert narrow["difference_percent"] < 0


def test_an_answer_that_parts_is_told(tiny_chain: Path, conversations: str) -> None:
    loaded = load(tiny_chain, conversations)
    (batch,) = loaded.batches
    token_ids = batch.token_ids.clone()
    token_ids[0, batch.lengths[0] - 1] = (token_ids[0, batch.lengths[0] - 1] + 1) % 60
    loaded.batches = [dataclasses.replace(batch, token_ids=token_ids)]
    is_equal = [answer.is_as_simulated for answer in loaded.serve(TREE)]
    assert Counter(is_equal) == {False: 1, True: 3}
    assert not is_equal[0]


def test_kept_rows_take_all_of_theirs_with_them() -> None:
    def batch(first: int, num: int) -> HeldoutBatch:
        numbers = torch.arange(first, first + num)
        states = numbers[:, None, None].float()
        return HeldoutBatch(
            numbers[:, None], Features(states, states + 100), numbers, numbers + 1, list("abcdef")
        )

    def short(first: int, num: int) -> HeldoutBatch:
        whole = batch(first, num)
        return dataclasses.replace(whole, tasks=whole.tasks[:num])

    batches = [short(0, 3), short(3, 2), short(5, 2)]
    first, last = accepted_length.rows_of(batches, [True, False, True, False, False, False, True])
    assert first.token_ids.flatten().tolist() == first.prompt_lengths.tolist() == [0, 2]
    assert first.features.states.flatten().tolist() == [0, 2]
    assert first.features.layers is not None
    assert first.features.layers.flatten().tolist() == [100, 102]
    assert first.lengths.tolist() == [1, 3]
    assert first.tasks == ["a", "c"]
    assert last.token_ids.flatten().tolist() == [6]
    assert last.tasks == ["b"]


def test_record_compares_two_and_three_members(
    tiny_chain: Path,
    conversations: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = tmp_path / "record.json"
    words = f"x {tiny_chain} --conversations {conversations} --num-heldout 4 --answer-tokens 12"
    words += f" --dtype float32 --depth 2 --top-k 2 --rows 6 --flush-length 3 --json {record}"
    monkeypatch.setattr(sys, "argv", words.split())
    accepted_length.main()
    written = json.loads(record.read_text())
    assert str(tmp_path) not in record.read_text()
    assert written["command"].startswith("python benchmarks/accepted_length.py CHAIN")
    shown = capsys.readouterr().out
    assert list(written["served"]) == ["target, draft", "target, intermediate, draft"]
    two, three = written["served"].values()
    assert two["num_equal_answers"] == two["num_prompts"] == 4
    assert two["equal_answers"] == two["all_answers"]
    assert three["plan"]["flush"]["target"]["length"] == 3
    assert "tokens a round of intermediate" in shown
    for one in (two, three):
        found = one["all_answers"]
        assert found["difference_percent"] == pytest.approx(
            100 * (found["accepted_length"] / found["simulated"] - 1)
        )
    assert "4 of 4 served answers are the simulated ones" in shown
    assert f"{two['all_answers']['accepted_length']:.2f}" in shown
