"""Head training in several processes: the same numbers as in one, the same bits after a stop."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from polybasic.chain.errors import UserError
from polybasic.train.batches import Batch, row_noise
from polybasic.train.launch import _failure, train_head_in_processes
from polybasic.train.losses import step_weights, unrolled_loss
from polybasic.train.settings import DataSettings, HeadSettings
from polybasic.train.target import LmHead
from tests.checkpoints import write_family
from tests.processes import heed_ctrl_c
from tests.train.counting import write_counting

DATA = DataSettings(num_heldout=3, max_tokens=64)
SETTINGS = HeadSettings(
    num_steps=40,
    warmup_steps=1,
    batch_size=4,
    learning_rate=1e-3,
    token_loss_weight=1.0,
    dtype="float32",
    eval_every_steps=10,
    save_every_steps=4,
    eval_answer_tokens=8,
    eval_tree_depth=3,
)
TWO = HeadSettings(**(SETTINGS.model_dump() | {"num_processes": 2}))
RUN = """
import json, sys
from pathlib import Path
from polybasic.train.launch import train_head_in_processes
from polybasic.train.settings import DataSettings, HeadSettings
target, conversations, data, settings, out = sys.argv[1:]
settings = HeadSettings.model_validate_json(settings)
train_head_in_processes(
    settings.num_processes, target=Path(target), conversations=conversations,
    data=DataSettings.model_validate_json(data), settings=settings, seed=0, out=Path(out),
)
"""


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
    return out, train_head_in_processes(1, **arguments(target, conversations, SETTINGS, out))


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
    return out, train_head_in_processes(2, **arguments(target, conversations, TWO, out))


@pytest.mark.slow
def test_two_processes_train_as_one(alone, two):
    assert_same_training(*two, alone)
    assert {path.name for path in two[0].iterdir()} == {path.name for path in alone[0].iterdir()}


@pytest.mark.slow
def test_target_partitioned_over_two_processes_trains_as_whole(
    target, conversations, alone, tmp_path
):
    settings, out = changed(num_processes=2, zero_stage=3), tmp_path / "partitioned"
    summary = train_head_in_processes(2, **arguments(target, conversations, settings, out))
    assert_same_training(out, summary, alone)


@pytest.mark.slow
def test_other_noise_and_order_are_told_apart(target, conversations, alone, tmp_path):
    other = train_head_in_processes(
        1, **arguments(target, conversations, SETTINGS, tmp_path / "other", seed=1)
    )
    with pytest.raises(AssertionError):
        assert_same_training(tmp_path / "other", other, alone)


def start(target, conversations, settings, out):
    command = [target, conversations, DATA.model_dump_json(), settings.model_dump_json(), out]
    return subprocess.Popen(
        [sys.executable, "-c", RUN, *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(out.parent)},
        preexec_fn=heed_ctrl_c,
    )


def stop(process, out, num_steps, how, worker=None):
    """Send a signal to the launching process, or to one worker, alone; all must end.

    Returns:
        What the launching process said on stderr.
    """
    path, deadline = out / "metrics.jsonl", time.monotonic() + 120
    while not (path.exists() and path.read_text().count('"loss"') >= num_steps):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(workers) == 2
    os.kill(process.pid if worker is None else int(workers[worker]), how)
    _, stderr = process.communicate()
    while any(Path(f"/proc/{each}").exists() for each in workers):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not (out / "model.safetensors").exists()
    return stderr


@pytest.mark.slow
def test_stopped_run_of_two_continues_to_the_same_bits(target, conversations, two, tmp_path):
    out = tmp_path / "stopped"

    def begin():
        return start(target, conversations, TWO, out)

    assert "KeyboardInterrupt" in stop(begin(), out, 5, signal.SIGINT)
    stderr = stop(begin(), out, 12, signal.SIGKILL, worker=1)
    assert "RuntimeError: training process 1 ended with SIGKILL" in stderr
    stop(begin(), out, 20, signal.SIGKILL)
    (checkpoint,) = (out / "checkpoints").glob("step-*")
    with pytest.raises(UserError, match=r"another number of processes than 1: .*_processes 2\)"):
        train_head_in_processes(1, **arguments(target, conversations, SETTINGS, out))
    again = begin()
    stdout, stderr = again.communicate(timeout=240)
    assert again.returncode == 0, stderr
    assert stdout == ""
    assert "Warning" not in stderr
    assert stderr.count("continuing from") == 1
    assert str(checkpoint) in "".join(stderr.split("\n"))
    whole = two[0]
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert numbers(out) == numbers(whole)


@pytest.mark.slow
def test_user_error_of_a_process_arrives(target, conversations, tmp_path):
    wanted = arguments(tmp_path / "none", conversations, TWO, tmp_path / "run")
    with pytest.raises(UserError, match=r"^no weights: \S+none") as raised:
        train_head_in_processes(2, **wanted)
    assert raised.value.what == "no weights"


def failed(folder, codes):
    return str(_failure(codes, folder))


def test_first_cause_is_told(tmp_path):
    """Processes that break off because another one ended are not it."""
    (tmp_path / "log-0.txt").write_text("")
    (tmp_path / "log-1.txt").write_text("loading\nout of memory\n")
    assert failed(tmp_path, [None, 3]).endswith("1 ended with exit code 3\nloading\nout of memory")
    (tmp_path / "trace-0.txt").write_text("Traceback\nConnection closed by peer")
    os.utime(tmp_path / "trace-0.txt", ns=(2, 2))
    assert failed(tmp_path, [1, -9]).startswith("training process 1 ended with SIGKILL\n")
    assert failed(tmp_path, [1, None]).endswith(
        "0 ended with exit code 1\nTraceback\nConnection closed by peer"
    )
    (tmp_path / "trace-1.txt").write_text("ValueError: odd")
    os.utime(tmp_path / "trace-1.txt", ns=(1, 1))
    assert failed(tmp_path, [1, 1]) == "training process 1 ended with exit code 1\nValueError: odd"
    told = {"what": "no weights", "where": "here", "do": "fetch them"}
    (tmp_path / "error-1.json").write_text(json.dumps(told))
    assert isinstance(_failure([1, 2], tmp_path), UserError)
    assert failed(tmp_path, [1, 2]) == "no weights: here; fetch them"


def test_more_processes_than_gpus_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(UserError, match=r"more processes than GPUs: .*num_processes = 5, GPUs 4;"):
        train_head_in_processes(5)


@pytest.mark.parametrize("num_rows", [1, 3, 4])
@pytest.mark.parametrize("num_shares", [2, 3])
def test_loss_and_gradient_of_shares_average_to_the_batchs(num_rows, num_shares):
    """Also where a share is empty, and where assistant tokens are spread unevenly."""
    random = torch.Generator().manual_seed(0)
    lm_head = LmHead(torch.randn(11, 8, generator=random))
    features = torch.randn(num_rows, 9, 8, generator=random)
    outputs = torch.randn(2, num_rows, 9, 8, generator=random).requires_grad_()
    is_assistant = torch.arange(9) >= torch.randint(2, 8, (num_rows, 1), generator=random)
    batch = Batch(torch.zeros(num_rows, 9, dtype=torch.long), is_assistant, 9 * num_rows)

    def loss_of(rows, is_label, counts=None):
        picked = [output[list(rows)] for output in outputs]
        return unrolled_loss(
            picked, features[list(rows)], lm_head, is_label, 1.0, 1.0, token_counts=counts
        ).total

    whole = loss_of(range(num_rows), is_assistant)
    (expected,) = torch.autograd.grad(whole, outputs)
    counts = step_weights(is_assistant, 2).sum(dim=(1, 2)) / num_shares
    shares = [batch.share(index, num_shares) for index in range(num_shares)]
    parts = [loss_of(share.rows, share.is_assistant, counts) for share in shares]
    mean = torch.stack(parts).mean()
    (gradient,) = torch.autograd.grad(mean, outputs)
    assert torch.allclose(mean, whole, atol=1e-6)
    assert torch.allclose(gradient, expected, atol=1e-7)
    assert expected.abs().max() > 0.01
    own_means = torch.stack([loss_of(share.rows, share.is_assistant) for share in shares]).mean()
    assert not torch.allclose(own_means, whole, atol=1e-3), "means of means are another loss"


def test_noise_of_a_row_is_that_of_its_place_in_the_batch():
    def noise(rows, step=3):
        return row_noise(torch.Size((len(rows), 5, 4)), rows, 7, step, torch.device("cpu"))

    whole = noise(range(4))
    assert torch.equal(noise(range(1, 4, 2)), whole[1::2])
    assert not torch.equal(noise(range(4), step=4), whole)
    assert whole.unique().numel() == whole.numel()
    assert whole.min() >= -1
    assert whole.max() < 1
