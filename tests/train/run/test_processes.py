"""Head training in several processes: the same numbers as in one, the same bits after a stop."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from polybasic.chain.base.processes.group import process_index
from polybasic.chain.base.processes.interruption import Interrupted
from polybasic.chain.base.processes.launching import in_processes
from polybasic.train.data.batches import row_noise
from polybasic.train.run.loop import HeadRun
from polybasic.train.run.training import train_head
from polybasic.train.settings import DataSettings, HeadSettings
from tests import forked
from tests.checkpoints import write_family
from tests.train.counting import write_counting

DATA = DataSettings(num_heldout=3, max_tokens=64)
SETTINGS = HeadSettings(
    num_steps=12,
    warmup_steps=1,
    batch_size=4,
    learning_rate=1e-3,
    token_loss_weight=1.0,
    dtype="float32",
    eval_every_steps=6,
    save_every_steps=3,
    eval_answer_tokens=8,
    eval_tree_depth=3,
)
TWO = HeadSettings(**(SETTINGS.model_dump() | {"num_processes": 2}))


@pytest.fixture(scope="module")
def conversations(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "counting.jsonl"
    return write_counting(path, "On from {}", 2, 7)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "target"
    write_family(folder, "llama2", dtype=torch.float32)
    return folder


def changed(**changes):
    return HeadSettings(**(SETTINGS.model_dump() | changes))


def arguments(target, conversations, settings, out, seed=0):
    return {
        "target": target,
        "conversations": conversations,
        "data": DATA,
        "settings": settings,
        "seed": seed,
        "out": out,
    }


@pytest.fixture(scope="module")
def alone(target, conversations, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "alone"
    return out, train_head(**arguments(target, conversations, SETTINGS, out))


def numbers(out):
    """All that was measured, but for the time."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if name != "tokens_per_second"}
        for line in lines
    ]


def losses(out):
    return torch.tensor([line["loss"] for line in numbers(out) if "loss" in line])


def assert_close(numbers, others):
    """Of the same names; a number may differ in the fifth digit."""
    assert numbers.keys() == others.keys()
    for name, value in numbers.items():
        assert value == pytest.approx(others[name], rel=1e-5, abs=1e-6), name


def assert_same_training(out, summary, alone):
    expected_out, expected = alone
    assert torch.allclose(losses(out), losses(expected_out), rtol=1e-5, atol=0)
    for line, other in zip(numbers(out), numbers(expected_out), strict=True):
        assert_close(line, other)
    assert_close({**summary, "seconds": 0}, {**expected, "seconds": 0})
    weights, others = (
        load_file(out / "model.safetensors"),
        load_file(expected_out / "model.safetensors"),
    )
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        assert torch.allclose(weight, others[name], rtol=1e-3, atol=1e-4), name


@pytest.fixture(scope="module")
def two(target, conversations, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "two"
    return out, in_processes(train_head, arguments(target, conversations, TWO, out), 2)


def test_two_processes_train_as_one(alone, two):
    assert_same_training(*two, alone)
    assert {path.name for path in two[0].iterdir()} == {path.name for path in alone[0].iterdir()}


def test_other_noise_and_order_are_told_apart(target, conversations, alone, tmp_path):
    other = train_head(**arguments(target, conversations, SETTINGS, tmp_path / "other", seed=1))
    with pytest.raises(AssertionError):
        assert_same_training(tmp_path / "other", other, alone)


def train_with_a_signal(rank, step, number, arguments):
    """Train as one of several, and send process `rank` a signal before it takes a step."""
    step_of = HeadRun._step

    def step_with_signal(run, log, progress, received):
        if process_index() == rank and run._state.step == step:
            os.kill(os.getpid(), number)
        return step_of(run, log, progress, received)

    HeadRun._step = step_with_signal
    try:
        return train_head(**arguments)
    finally:
        HeadRun._step = step_of


def stopped(num, number, step, arguments):
    """Train until the last of so many processes is sent a signal; what is said then."""
    given = {"rank": num - 1, "step": step, "number": number, "arguments": arguments}
    with pytest.raises(Interrupted) as caught:
        in_processes(train_with_a_signal, given, num)
    return str(caught.value)


@pytest.mark.parametrize(
    "changes", [{"zero_stage": 0}, {"optimizer": "muon", "dtype": "bfloat16"}], ids=str
)
def test_a_stopped_run_without_partitions_continues_to_the_same_bits(
    changes, target, conversations, tmp_path
):
    settings = changed(eval_every_steps=12, **changes)
    whole, out = tmp_path / "whole", tmp_path / "stopped"
    train_head(**arguments(target, conversations, settings, whole))
    given = arguments(target, conversations, settings, out)
    assert "step 5 of 12 is saved" in stopped(1, signal.SIGUSR1, 4, given)
    train_head(**given)
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert numbers(out) == numbers(whole)


@pytest.mark.proof
def test_a_stopped_run_of_two_continues_to_the_same_bits(target, conversations, two, tmp_path):
    out = tmp_path / "stopped"
    given = arguments(target, conversations, TWO, out)
    said = stopped(2, signal.SIGTERM, 4, given)
    assert said.startswith(f"SIGTERM: step 5 of 12 is saved in {out}/checkpoints/step-00000005; ")
    in_processes(train_head, given, 2)
    whole = two[0]
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert numbers(out) == numbers(whole)


@pytest.mark.parametrize(
    "changes",
    [
        {"zero_stage": 2},
        {"optimizer": "muon"},
        {"zero_stage": 3, "num_processes": 2, "pack": True, "features": "offline"},
    ],
)
@pytest.mark.proof
def test_any_number_of_processes_continues(changes, target, conversations, tmp_path):
    """Two, then one, then three; a partitioned target needs two."""
    settings = changed(batch_size=6, **changes)
    whole = settings.model_copy(update={"zero_stage": min(2, settings.zero_stage)})
    alone = tmp_path / "alone"
    expected = train_head(**arguments(target, conversations, whole, alone))
    out = tmp_path / "changing"
    given = arguments(target, conversations, settings, out)
    assert "step 4 of 12 is saved" in stopped(2, signal.SIGUSR1, 3, given)
    if settings.zero_stage < 3:
        assert "step 7 of 12 is saved" in stopped(1, signal.SIGINT, 6, given)
    summary = in_processes(train_head, given, 3)
    assert_same_training(out, summary, (alone, expected))


def work_for_long(arguments, ids):
    (ids / str(os.getpid())).touch()
    train_head(**arguments)


def launch(arguments, ids):
    in_processes(work_for_long, {"arguments": arguments, "ids": ids}, 2)


@pytest.mark.proof
def test_processes_save_and_end_when_who_started_them_is_killed(target, conversations, tmp_path):
    ids, out, log = tmp_path / "ids", tmp_path / "run", tmp_path / "log.txt"
    ids.mkdir()
    long = changed(num_steps=100_000, save_every_steps=100_000)
    given = arguments(target, conversations, long, out)
    launcher = forked.start(launch, given, ids, log=log)
    while not (out / "metrics.jsonl").exists() or not len(losses(out)):
        assert launcher.exitcode is None, log.read_text()
        time.sleep(0.05)
    launcher.kill()
    started = [int(path.name) for path in ids.iterdir()]
    assert len(started) == 2
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{each}").exists() for each in started):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (checkpoint,) = (out / "checkpoints").glob("step-*")
    state = json.loads((checkpoint / "state.json").read_text())
    assert state["step"] == len(losses(out)), "the last step is saved"


def test_noise_of_a_row_is_that_of_its_place_in_the_batch():
    def noise(rows, step=3):
        return row_noise(torch.Size((len(rows), 5, 4)), rows, 7, step, torch.device("cpu"))

    whole = noise(range(4))
    assert torch.equal(noise(range(1, 4, 2)), whole[1::2])
    assert not torch.equal(noise(range(4), step=4), whole)
    assert whole.unique().numel() == whole.numel()
    assert whole.min() >= -1
    assert whole.max() < 1
