"""A target trained from scratch: learns, loads, resumes to the same bytes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from polybasic.chain.errors import UserError
from polybasic.chain.formats.checkpoint import tokenizer_files
from polybasic.train import scratch
from polybasic.train.data.documents import Document, document_tensors
from polybasic.train.data.tokenizer import train_tokenizer
from polybasic.train.scratch import (
    build_model,
    train_scratch_small,
    train_scratch_target,
)
from polybasic.train.settings import ScratchModelSettings, ScratchSettings

COLOURS = ("red", "blue", "green", "brown")
CONVERSATIONS = [
    {
        "messages": [
            {"role": "user", "content": f"Item {number} is {colour}. Which colour?"},
            {"role": "assistant", "content": f"The colour of item {number} is {colour}."},
        ]
    }
    for number in range(10)
    for colour in COLOURS
]
SETTINGS = ScratchSettings(
    vocab_size=512,
    num_layers=2,
    hidden_size=128,
    intermediate_size=128,
    num_heads=4,
    num_kv_heads=2,
    context_tokens=128,
    num_steps=8,
    batch_tokens=256,
    row_tokens=64,
    learning_rate=4e-3,
    warmup_steps=2,
)


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the program handles it."""


def _files(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes() for path in folder.iterdir() if path.name != "training.json"
    }


def _stop_at(monkeypatch: pytest.MonkeyPatch, stopped_step: int) -> list[int]:
    """Kill the run when it takes `stopped_step`; the list fills with the steps taken."""
    taken: list[int] = []
    take_step = scratch._Run._take_step

    def step_or_die(run: Any, step: int, rows: Any) -> tuple[float, int]:
        if step == stopped_step:
            raise Killed
        taken.append(step)
        return take_step(run, step, rows)

    monkeypatch.setattr(scratch._Run, "_take_step", step_or_die)
    return taken


def test_checkpoint_is_ordinary_and_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = SETTINGS.model_copy(update={"num_steps": 150, "warmup_steps": 10})
    heldout = CONVERSATIONS[::4]
    summary = train_scratch_target(CONVERSATIONS, settings, 0, tmp_path / "target", heldout)
    assert summary["steps"] == 150
    assert summary["num_answers"] == len(heldout)
    assert summary["heldout_answer_loss"] < summary["heldout_loss"] < 1.0
    assert summary["loss"] < 1.0
    line = r"target model: 150 of 150  loss \d\.\d{3}  [\d,]+ tokens/s  0:00:00 left"
    assert re.search(line, capsys.readouterr().err)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "target")
    assert model.dtype == torch.bfloat16
    assert summary["parameters"] == model.num_parameters()
    assert not model.config.tie_word_embeddings
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    prompt = [{"role": "user", "content": "Item 3 is green. Which colour?"}]
    inputs = tokenizer.apply_chat_template(
        prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0]
    answer = output[inputs["input_ids"].shape[1] :]
    assert answer[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(answer, skip_special_tokens=True).startswith("The colour of item")
    assert sorted(path.name for path in (tmp_path / "target").iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "training.json",
    ]


@pytest.mark.parametrize("deepen_step", [None, 2, 4], ids=str)
def test_killed_run_continues_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deepen_step: int | None
) -> None:
    settings = SETTINGS
    if deepen_step is not None:
        changes = {"first_layers": 1, "first_share": deepen_step / SETTINGS.num_steps}
        settings = SETTINGS.model_copy(update=changes)
    assert settings.deepen_step == deepen_step
    monkeypatch.setattr(scratch, "_SAVE_EVERY_STEPS", 3)
    whole = train_scratch_target(CONVERSATIONS, settings, seed=1, out=tmp_path / "whole")
    with monkeypatch.context() as patch:
        _stop_at(patch, 5)
        with pytest.raises(Killed):
            train_scratch_target(CONVERSATIONS, settings, seed=1, out=tmp_path / "killed")
    assert not (tmp_path / "killed" / "model.safetensors").exists()
    taken = _stop_at(monkeypatch, -1)
    continued = train_scratch_target(CONVERSATIONS, settings, seed=1, out=tmp_path / "killed")
    assert taken == [3, 4, 5, 6, 7]
    assert _files(tmp_path / "whole") == _files(tmp_path / "killed")
    assert {**whole, "seconds": 0} == {**continued, "seconds": 0}


def test_another_seed_gives_other_weights(tmp_path: Path) -> None:
    weights = []
    for seed in (1, 2):
        train_scratch_target(CONVERSATIONS, SETTINGS, seed=seed, out=tmp_path / str(seed))
        weights.append(load_file(tmp_path / str(seed) / "model.safetensors")["lm_head.weight"])
    assert not torch.equal(*weights)


def test_finished_run_is_not_repeated_and_a_changed_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = train_scratch_target(CONVERSATIONS, SETTINGS, seed=1, out=tmp_path)
    assert set(first) == {"loss", "steps", "tokens", "seconds", "parameters"}  # nothing held out
    taken = _stop_at(monkeypatch, -1)
    assert train_scratch_target(CONVERSATIONS, SETTINGS, seed=1, out=tmp_path) == first
    assert taken == []
    train_scratch_target(CONVERSATIONS[1:], SETTINGS, seed=1, out=tmp_path)
    assert taken == list(range(SETTINGS.num_steps))


def test_state_of_other_settings_is_neither_continued_nor_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "_SAVE_EVERY_STEPS", 3)
    with monkeypatch.context() as patch:
        _stop_at(patch, 5)
        with pytest.raises(Killed):
            train_scratch_target(CONVERSATIONS, SETTINGS, seed=1, out=tmp_path)
    taken = _stop_at(monkeypatch, -1)
    with pytest.raises(UserError, match=r"other settings.*training_state\.pt.*remove it"):
        train_scratch_target(CONVERSATIONS, SETTINGS, seed=2, out=tmp_path)
    train_scratch_target(CONVERSATIONS, SETTINGS, seed=1, out=tmp_path)
    assert taken[0] == 3


@pytest.mark.parametrize(
    ("dtype", "rounding"), [(torch.bfloat16, 5e-3), (torch.float32, 1e-5)], ids=str
)
def test_documents_of_a_row_do_not_see_each_other(dtype: torch.dtype, rounding: float) -> None:
    tokenizer = train_tokenizer([row["messages"] for row in CONVERSATIONS], 512, 128)
    model = build_model(SETTINGS, tokenizer, SETTINGS.vocab_size, seed=0)
    first, second, other = [7, 8, 9, 10], [11, 12, 13], [14, 15, 16, 17]

    def loss_of(row: list[list[int]]) -> tuple[float, int]:
        documents = [Document(ids, [True] * len(ids)) for ids in row]
        loss, num_tokens = scratch._loss(model, document_tensors([documents], 64), 1.0, dtype)
        return loss.item(), num_tokens

    alone = loss_of([second])
    behind = [loss_of([before, second]) for before in (first, other)]
    before = [loss_of([one]) for one in (first, other)]
    for (joint, num_joint), (single, num_single) in zip(behind, before, strict=True):
        assert (num_joint, num_single, alone[1]) == (5, 3, 2)
        assert 5 * joint == pytest.approx(3 * single + 2 * alone[0], rel=rounding)
    # The control: as one document, the tail's loss depends on what stands before it.
    joined, num_joined = loss_of([first + second])
    assert num_joined == 6
    whole = loss_of([[*first, second[0]]])  # its last target is the one that joins them
    assert whole[1] == 4
    assert abs(6 * joined - 4 * whole[0] - 2 * alone[0]) > 1e-3


def test_prompts_weigh_what_the_settings_say() -> None:
    tokenizer = train_tokenizer([row["messages"] for row in CONVERSATIONS], 512, 128)
    model = build_model(SETTINGS, tokenizer, SETTINGS.vocab_size, seed=0)
    document = Document([7, 8, 9, 10, 11], [False, False, False, True, True])

    def loss_at(prompt_weight: float) -> float:
        batch = document_tensors([[document]], 64)
        loss, num_tokens = scratch._loss(model, batch, prompt_weight, torch.float32)
        assert num_tokens == 4
        return loss.item()

    both, answer = loss_at(1.0), loss_at(1e-9)
    prompt = 2 * both - answer  # two tokens each
    assert loss_at(0.5) == pytest.approx((0.5 * prompt + answer) / 1.5)
    assert prompt != pytest.approx(answer)


def test_long_conversations_are_cut_at_the_context_and_split_into_rows() -> None:
    messages = [[{"role": "user", "content": "word " * 500}]]
    tokenizer = train_tokenizer(messages, 512, 128)
    pieces = scratch._encode(tokenizer, messages, SETTINGS)
    assert [len(piece.input_ids) for piece in pieces] == [64, 64]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"row_tokens": 512}, "row is longer than batch or context"),
        ({"warmup_steps": 8}, "warm-up takes all steps"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    tmp_path: Path, changes: dict[str, int], message: str
) -> None:
    settings = SETTINGS.model_copy(update=changes)
    with pytest.raises(UserError, match=message):
        train_scratch_target(CONVERSATIONS, settings, seed=0, out=tmp_path)


def test_no_conversations_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no conversations"):
        train_scratch_target([], SETTINGS, seed=0, out=tmp_path)


def test_loss_that_is_not_finite_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "_loss", lambda model, *tensors: (torch.tensor(float("nan")), 1))
    with pytest.raises(UserError, match="loss is not finite: step 0"):
        train_scratch_target(CONVERSATIONS, SETTINGS, seed=0, out=tmp_path)
    assert not (tmp_path / "training.json").exists()


def test_a_smaller_model_has_the_targets_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, out = tmp_path / "target", tmp_path / "small"
    train_scratch_target(CONVERSATIONS, SETTINGS, seed=0, out=target)
    settings = ScratchModelSettings(
        **SETTINGS.model_dump(exclude={"vocab_size", "num_embedded_conversations"})
        | {"num_layers": 1, "hidden_size": 256}
    )
    with monkeypatch.context() as forbidden:
        forbidden.delattr(scratch, "train_tokenizer")
        train_scratch_small(CONVERSATIONS, settings, target, seed=0, out=out)
    config = json.loads((out / "config.json").read_text())
    assert (config["vocab_size"], config["hidden_size"]) == (512, 256)
    for name in tokenizer_files(target):
        assert (out / name).read_bytes() == (target / name).read_bytes()
    assert "tokenizer.json" in tokenizer_files(target)
    taken = _stop_at(monkeypatch, stopped_step=-1)
    train_scratch_small(CONVERSATIONS, settings, target, seed=0, out=out)
    assert taken == []
    (target / "tokenizer_config.json").write_text(
        (target / "tokenizer_config.json").read_text() + "\n"
    )
    train_scratch_small(CONVERSATIONS, settings, target, seed=0, out=out)
    assert len(taken) == SETTINGS.num_steps
