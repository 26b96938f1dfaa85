"""Conversations that a model has with itself: what it writes in a batch, and what is kept."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from polybasic.train.data.shipped import heldout_shipped
from tests.benchmarks.scripts import load_script
from tests.checkpoints import write_family

script = load_script("write_conversations")
PROMPTS = [[5, 9, 2, 40], [7], list(range(3, 40)), [11, 12]]
NUM_TOKENS = 24
NUM_SHIPPED = 955
CONVERSATION = ["is the rain in the north old", "it is", "and is the hat on the train", "no"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_family(tmp_path / "model", "llama3")
    return tmp_path / "model"


@pytest.mark.parametrize("steps", [1, 8])
def test_a_batch_writes_what_each_prompt_gets_alone(
    folder: Path, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "STEPS", steps)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    alone = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        ends = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None}
        alone.append(model.generate(ids, pad_token_id=0, **ends)[0, len(prompt) :].tolist())
    # so that sequences end one after the other, and the last one never does
    stops = {alone[0][3], alone[1][8]} - set(alone[2])
    assert stops
    expected = []
    for answer in alone:
        ends = [place for place, token in enumerate(answer) if token in stops]
        expected.append((answer[: min(ends, default=NUM_TOKENS)], bool(ends)))
    batch = script.AnswerBatch(model, stops, seed=0)
    assert batch.continued(PROMPTS, NUM_TOKENS, sampled=False) == expected


def test_drawn_tokens_are_of_the_nucleus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    batch = script.AnswerBatch(model, {1}, seed=0)
    logits = torch.tensor([[0.55, 0.30, 0.11, 0.03, 0.01]]).log() * script.TEMPERATURE
    monkeypatch.setattr(batch, "_head", lambda states: logits.expand(4000, -1))
    shares = batch._drawn(torch.zeros(4000, 1), sampled=True).bincount(minlength=5) / 4000
    expected = torch.tensor([0.55, 0.30, 0.11, 0, 0]) / 0.96
    torch.testing.assert_close(shares, expected, atol=0.03, rtol=0)
    assert shares[3:].sum() == 0


def test_an_interrupted_run_keeps_what_it_wrote_behind_what_is_shipped(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a question, its answer, another question and its answer; then a question that is too short
    texts = iter([*CONVERSATION, "a"])

    def continued(batch: Any, prompts: list[list[int]], num: int, sampled: bool) -> list[Any]:
        text = next(texts, None)
        if text is None:
            raise KeyboardInterrupt
        encode = AutoTokenizer.from_pretrained(folder).encode
        return [script.Text(encode(text, add_special_tokens=False), has_ended=True)]

    monkeypatch.setattr(script.AnswerBatch, "continued", continued)
    monkeypatch.setattr(script, "OPENED_BY_WORDS", 0)
    monkeypatch.setattr(script, "SECOND_QUESTIONS", 1)
    words = f"x {folder} --out {tmp_path / 'found.jsonl'} --num 2 --at-once 1"
    monkeypatch.setattr(sys, "argv", words.split())
    script.main()
    rows = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert {row["id"] for row in heldout_shipped()} < {row["id"] for row in rows}
    assert [turn["value"] for turn in rows[-1]["conversations"]] == CONVERSATION
    assert rows[-1]["task"] == "self-prompted"
    assert len(rows) == NUM_SHIPPED + 1
