"""Head training in several processes: the same numbers as in one, the same bits after a stop."""

import json
import os
import select
import signal
import sys
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file

from polybasic.chain.errors import UserError
from polybasic.chain.formats.files import write_json
from polybasic.train.data.batches import row_noise
from polybasic.train.run import launch
from polybasic.train.run.hosts import Host, read_hostfile
from polybasic.train.run.interruption import Interrupted
from polybasic.train.run.launch import train_head_in_processes
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
WORKER = """
import os, runpy, time
from polybasic.train.run.loop import HeadRun

step_of = HeadRun._step

def step_with_signal(run, log, progress, received):
    if os.environ["RANK"] == "{index}" and run._state.step == {step}:
        os.kill({pid} or os.getpid(), {number})
        while not received.number:
            time.sleep(0.01)
    return step_of(run, log, progress, received)

HeadRun._step = step_with_signal
runpy.run_module("polybasic.train.run.launch", run_name="__main__", alter_sys=True)
"""
"""A worker that sends a signal before a step, and goes on when the signal has come to it."""


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


def test_two_processes_train_as_one(alone, two):
    assert_same_training(*two, alone)
    assert {path.name for path in two[0].iterdir()} == {path.name for path in alone[0].iterdir()}


def test_other_noise_and_order_are_told_apart(target, conversations, alone, tmp_path):
    other = train_head_in_processes(
        1, **arguments(target, conversations, SETTINGS, tmp_path / "other", seed=1)
    )
    with pytest.raises(AssertionError):
        assert_same_training(tmp_path / "other", other, alone)


def send_a_signal(patch, worker, index, step, number, pid=0):
    """Let process `index` signal a process (0: itself) when it has taken so many steps."""
    worker.write_text(WORKER.format(index=index, step=step, number=int(number), pid=pid))
    command, ssh_command = launch._command, launch.ssh_command

    def local(place, places, folder):
        found, environment = command(place, places, folder)
        if place.host is None:
            found = [sys.executable, str(worker), str(folder)]
        return found, environment

    def remote(host, arguments, environment):
        return ssh_command(host, [str(worker), arguments[-1]], environment)

    patch.setattr(launch, "_command", local)
    patch.setattr(launch, "ssh_command", remote)


def train_until_the_launcher_is_killed(worker, given, step):
    workers = launch._workers

    @contextmanager
    def with_their_ids(*arguments):
        with workers(*arguments) as started:
            ids = " ".join(str(each.pid) for each in started)
            worker.with_name("ids.txt").write_text(ids)
            yield started

    launch._workers = with_their_ids
    send_a_signal(pytest.MonkeyPatch(), worker, 0, step, signal.SIGKILL, os.getpid())
    train_head_in_processes(2, **given)


def wait_for_the_end_of(process_id):
    try:
        opened = os.pidfd_open(process_id)
    except ProcessLookupError:
        return
    select.select([opened], [], [])
    os.close(opened)


@pytest.mark.proof
def test_stopped_run_of_two_continues_to_the_same_bits(
    target, conversations, two, tmp_path, monkeypatch, capfd
):
    out, worker, log = tmp_path / "stopped", tmp_path / "worker.py", tmp_path / "log.txt"
    given = arguments(target, conversations, TWO, out)
    with monkeypatch.context() as patch:
        send_a_signal(patch, worker, 1, 1, signal.SIGTERM)
        with pytest.raises(
            Interrupted, match=r"^SIGTERM: step 2 of 12 is saved in \S+2; "
        ) as caught:
            train_head_in_processes(2, **given)
        assert caught.value.exit_code == 143
    with monkeypatch.context() as patch:
        send_a_signal(patch, worker, 1, 4, signal.SIGKILL)
        with pytest.raises(RuntimeError, match=r"^training process 1 ended with SIGKILL"):
            train_head_in_processes(2, **given)
    with pytest.raises(UserError, match=r"another number of processes than 1: .*_processes 2\)"):
        train_head_in_processes(1, **arguments(target, conversations, SETTINGS, out))
    exit_code = forked.run(train_until_the_launcher_is_killed, worker, given, 10, log=log)
    assert exit_code == -signal.SIGKILL, log.read_text()
    for process_id in map(int, (tmp_path / "ids.txt").read_text().split()):
        wait_for_the_end_of(process_id)
    assert not (out / "model.safetensors").exists()
    (checkpoint,) = (out / "checkpoints").glob("step-*")
    assert checkpoint.name == "step-00000009"
    capfd.readouterr()
    train_head_in_processes(2, **given)
    stdout, stderr = capfd.readouterr()
    assert stdout == ""
    assert "Warning" not in stderr
    assert stderr.count("continuing from") == 1
    assert str(checkpoint) in "".join(stderr.split("\n"))
    whole = two[0]
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert numbers(out) == numbers(whole)


SSH = """#!/bin/sh
# like ssh: its own folder, none of the caller's variables, a command for the shell
while [ "$1" = -o ]; do shift 2; done
host=$1; shift
command="$*"
echo "$host" >> "{log}"
case $host in
  gone) echo "ssh: connect to host gone port 22: Connection refused" >&2; exit 255 ;;
  apart) command=$(printf %s "$command" | sed "s#cd [^ ]*#cd /nowhere#") ;;
  bare) command=$(printf %s "$command" | sed "s#[^ ]*/bin/python[^ ]*#/nowhere/python#") ;;
esac
cd /
exec env -i HOME="$HOME" PATH=/usr/bin:/bin sh -c "$command"
"""


@pytest.fixture
def ssh_log(tmp_path, monkeypatch):
    """Hosts that a stand-in for ssh was called for; all of them are this machine."""
    folder, log = tmp_path / "bin", tmp_path / "hosts.txt"
    folder.mkdir()
    (folder / "ssh").write_text(SSH.format(log=log))
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return log


def hostfile(tmp_path, *lines):
    path = tmp_path / "hostfile"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_two_hosts_with_a_partitioned_target_train_packed_rows_on_offline_features(
    target, conversations, ssh_log, tmp_path, monkeypatch
):
    """Ctrl-C to the launcher arrives on the hosts, and the same command continues."""
    changes = {"pack": True, "features": "offline", "batch_size": 2}
    settings = changed(**changes)
    alone = tmp_path / "alone"
    expected = train_head_in_processes(1, **arguments(target, conversations, settings, alone))
    out, file = (
        tmp_path / "two",
        hostfile(tmp_path, "# two", "localhost slots=1", "127.0.0.1 slots=1"),
    )
    settings = changed(num_processes=2, zero_stage=3, **changes)
    given = arguments(target, conversations, settings, out)
    with monkeypatch.context() as patch:
        send_a_signal(patch, tmp_path / "worker.py", 1, 3, signal.SIGINT, os.getpid())
        with pytest.raises(Interrupted, match=r"^SIGINT: step 4 of 12 is saved in \S+4; "):
            train_head_in_processes(2, file, **given)
    summary = train_head_in_processes(2, file, **given)
    assert sorted(ssh_log.read_text().split()) == ["127.0.0.1"] * 2 + ["localhost"] * 2
    assert_same_training(out, summary, (alone, expected))
    assert not list(out.glob(".*")), "what the hosts met in is removed"


@pytest.mark.parametrize(
    ("host", "reported"),
    [
        (
            "gone",
            r"ssh to a host failed: gone \(ssh: connect to .*: Connection refused\); see that ",
        ),
        ("apart", "host does not see the folders of this one: apart: /.*run/.processes; start in"),
        ("bare", f"no Python for the training processes: bare: {sys.executable}; install "),
    ],
)
def test_host_that_cannot_train_is_named(host, reported, ssh_log, tmp_path):
    file = hostfile(tmp_path, "127.0.0.1 slots=1", f"{host} slots=1")
    with pytest.raises(UserError, match=f"^{reported}"):
        train_head_in_processes(2, file, out=tmp_path / "run")
    assert not list((tmp_path / "run").iterdir())


def test_hostfile_is_deepspeeds(tmp_path):
    file = hostfile(tmp_path, "# a comment", "worker-1 slots=4", "", "me@10.0.0.2  slots=2 # more")
    assert read_hostfile(file) == [Host("worker-1", 4), Host("me@10.0.0.2", 2)]
    for lines, reported in (
        (["worker-1 slots=0"], r"malformed: \S+hostfile line 1 \(worker-1 slots=0\)"),
        (["a slots=1", "-oProxyCommand=x slots=1"], "malformed: .* line 2"),
        (["a slots=1", "a slots=2"], r"named twice: .* line 2 \(a slots=2\)"),
        (["# nobody"], "names no host"),
    ):
        with pytest.raises(UserError, match=reported):
            read_hostfile(hostfile(tmp_path, *lines))
    with pytest.raises(UserError, match="hostfile cannot be read"):
        read_hostfile(tmp_path / "none")
    with pytest.raises(UserError, match=r"slots 4, train.num_processes = 2; .*num_processes=4"):
        train_head_in_processes(2, hostfile(tmp_path, "a slots=4"), out=tmp_path)


def work(folder):
    os.environ.update({"RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    os.dup2(os.pipe()[0], 0)  # as of a launcher that lives
    sys.exit(launch._run_worker(folder))


def test_user_error_of_a_process_arrives(target, conversations, tmp_path):
    wanted = arguments(tmp_path / "none", conversations, TWO, tmp_path / "run")
    write_json(tmp_path / "arguments.json", launch._as_json(wanted))
    assert forked.run(work, tmp_path, log=tmp_path / "log.txt") == 2
    failure = launch._failure([None, 2], tmp_path)
    assert isinstance(failure, UserError)
    assert str(failure).startswith(f"no weights: {tmp_path / 'none'}")


def failed(folder, codes):
    return str(launch._failure(codes, folder))


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
    reported = {"what": "no weights", "where": "here", "do": "fetch them"}
    (tmp_path / "error-1.json").write_text(json.dumps(reported))
    assert isinstance(launch._failure([1, 2], tmp_path), UserError)
    assert failed(tmp_path, [1, 2]) == "no weights: here; fetch them"


def test_more_processes_than_gpus_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(UserError, match=r"more processes than GPUs: .*num_processes = 5, GPUs 4;"):
        train_head_in_processes(5)


def test_noise_of_a_row_is_that_of_its_place_in_the_batch():
    def noise(rows, step=3):
        return row_noise(torch.Size((len(rows), 5, 4)), rows, 7, step, torch.device("cpu"))

    whole = noise(range(4))
    assert torch.equal(noise(range(1, 4, 2)), whole[1::2])
    assert not torch.equal(noise(range(4), step=4), whole)
    assert whole.unique().numel() == whole.numel()
    assert whole.min() >= -1
    assert whole.max() < 1
