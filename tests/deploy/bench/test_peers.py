"""How engines in other processes are asked, and what becomes of those that fail."""

import importlib.util
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from polybasic.chain.base.errors import UserError
from polybasic.chain.model.reference import load_reference_model
from polybasic.deploy import load_chain
from polybasic.deploy.bench.peers import catalogue, process, systems
from polybasic.deploy.bench.peers.process import PeerSystem
from polybasic.deploy.bench.peers.systems import Mode, peer_systems
from polybasic.deploy.bench.peers.workers import llama_library
from polybasic.deploy.bench.peers.workers.lines import PeerQuestion
from polybasic.deploy.bench.peers.workers.llama_engine import Llama, PromptLookup
from polybasic.deploy.bench.peers.workers.llama_library import ContextParams, LlamaError
from polybasic.deploy.runtime.rounds.sampling import Sampling

PYTHON, STOP = Path(sys.executable), 63
HELLO = """
import json, os, sys, time
print(json.dumps({"version": "scripted 1", "dtype": "bfloat16"}), flush=True)
"""
REPLIES = """
for line in sys.stdin:
    asked = json.loads(line)
    reply = {"token_ids": answer(**asked), "seconds": 0.5, "num_first": 2, "first_seconds": 0.25}
    print(json.dumps(reply), flush=True)
"""
ECHO = f"{HELLO}def answer(prompt, max_new_tokens, **_): return prompt[::-1]\n{REPLIES}"


@pytest.fixture
def ask() -> Iterator[Any]:
    """Makes systems of scripted workers, and ends them."""
    with ExitStack() as stack:

        def make(code: str, name: str = "scripted") -> PeerSystem:
            command = (PYTHON, "-c", code)
            system = PeerSystem(name, "Scripted", "a script", command, 1, frozenset({STOP}))
            stack.callback(system.close)
            return system

        yield make


def test_answers_end_at_the_cut_and_at_a_stop_token(ask: Any) -> None:
    system = ask(ECHO)
    assert (system.version, system.dtype) == ("scripted 1", "bfloat16")
    answer = system.answer([5, 6, 7], 2, Sampling())
    assert answer.token_ids == [7, 6]
    assert (answer.seconds, answer.num_first, answer.first_seconds) == (0.5, 2, 0.25)
    answer = system.answer([5, STOP, 7, 8], 4, Sampling())
    assert answer.token_ids == [8, 7, STOP]
    assert system.answer([5, STOP], 4, Sampling()).num_first == 1


def test_workers_answer_in_turns(ask: Any) -> None:
    counting = f"""{HELLO}
numbers = []
def answer(prompt, **_):
    numbers.append(prompt[0])
    return numbers
{REPLIES}"""
    first, second = ask(counting), ask(counting)
    for turn in (1, 2, 3):
        for system, number in ((first, turn), (second, 10 * turn)):
            assert system.answer([number], 9, Sampling()).token_ids[-1] == number
    assert first.answer([4], 9, Sampling()).token_ids == [1, 2, 3, 4]
    assert second.answer([4], 9, Sampling()).token_ids == [10, 20, 30, 4]


def test_settings_are_handed_over(ask: Any) -> None:
    system = ask(f"""{HELLO}
def answer(max_new_tokens, stop, temperature, seed, **_):
    assert sys.stdin.isatty() is False and os.environ["OMP_NUM_THREADS"] == "1"
    return [max_new_tokens, round(100 * temperature), 0 if seed is None else seed, *stop]
{REPLIES}""")
    sampled = Sampling(temperature=0.7, seed=11, top_p=1.0, top_k=0)
    assert system.answer([1], 5, sampled).token_ids == [5, 70, 11, STOP]
    assert system.answer([1], 6, Sampling(top_k=3)).token_ids == [6, 0, 0, STOP]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, top_k=3),
        Sampling(temperature=1.0, top_p=0.9),
        Sampling(temperature=1.0, min_p=0.1),
        Sampling(repetition_penalty=1.1),
        Sampling(logit_bias={3: 1.0}),
    ],
)
def test_a_setting_that_peers_are_not_given_is_refused(ask: Any, sampling: Sampling) -> None:
    with pytest.raises(UserError, match=r"setting that peers are not given: \w+="):
        ask(ECHO).answer([1], 5, sampling)


def test_a_worker_that_does_not_start_is_named_with_what_it_said(ask: Any) -> None:
    code = "import sys; print('first', file=sys.stderr); sys.exit('no such model')"
    with pytest.raises(UserError, match=r"peer failed: scripted \(exit code 1: no such model\)"):
        ask(code)


def test_a_worker_that_dies_is_named_each_time_it_is_asked(ask: Any) -> None:
    dying = "sys.stdin.readline(); sys.stderr.write('out of memory'); sys.stderr.flush()"
    system = ask(f"{HELLO}{dying}; os._exit(3)")
    for _ in range(2):
        with pytest.raises(UserError, match=r"scripted \(exit code 3: out of memory\)"):
            system.answer([1], 5, Sampling())


@pytest.mark.parametrize(
    "reply",
    ["hello", "{}", '{"token_ids": [], "seconds": 1.0, "num_first": 1, "first_seconds": 1.0}'],
)
def test_a_bad_reply_is_shown(ask: Any, reply: str) -> None:
    system = ask(f"{HELLO}sys.stdin.readline(); print({reply!r}, flush=True); time.sleep(60)")
    with pytest.raises(UserError, match=r"scripted \(its reply was '"):
        system.answer([1], 5, Sampling())
    with pytest.raises(UserError, match=r"exit code -9"):
        system.answer([1], 5, Sampling())


def test_what_a_killed_worker_started_ends_with_it(ask: Any) -> None:
    system = ask(f"""{HELLO}
import subprocess
child = subprocess.Popen(["sleep", "600"])
def answer(**_): return [child.pid]
{REPLIES}""")
    [child] = system.answer([1], 5, Sampling()).token_ids
    os.kill(system._process.pid, signal.SIGKILL)
    assert Path(f"/proc/{child}").exists()
    system.close()
    assert not is_running(child)


def is_running(pid: int) -> bool:
    """No zombie, which nobody may wait for in a container."""
    status = Path(f"/proc/{pid}/stat")
    for _ in range(50):
        if not status.exists() or ") Z " in status.read_text():
            return False
        time.sleep(0.02)
    return True


def test_a_worker_that_never_replies_is_ended(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "ANSWER_SECONDS", 0.2)
    system = ask(f"{HELLO}time.sleep(600)")
    with pytest.raises(UserError, match=r"scripted \(no reply in 0.2 seconds\)"):
        system.answer([1], 5, Sampling())
    assert system._process.returncode == -9


# Which peers there are


def test_an_unknown_peer_is_one_line() -> None:
    with pytest.raises(UserError, match=r"no such peer: --peers foo; use llama.cpp, openvino, x"):
        catalogue.check_peers(["llama.cpp", "foo"], PYTHON, others=("x",))


def test_without_an_environment_the_command_that_makes_one_is_named(tmp_path: Path) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    with pytest.raises(UserError, match=r"run python3 -m venv \S+/venv && .*requirements.txt"):
        catalogue.check_peers(["openvino"], python)
    catalogue.check_peers([], python)


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = {
        "here": catalogue.Peer("Here", ("torch",)),
        "absent": catalogue.Peer("Absent", ("torch", "no-package-has-this-name")),
    }
    monkeypatch.setattr(catalogue, "PEERS", peers)
    catalogue.check_peers(["here"], PYTHON)
    with pytest.raises(UserError, match=r"peer is not installed: absent for --peers-python"):
        catalogue.check_peers(["here", "absent"], PYTHON)


# llama.cpp's drafts


class CountingModel:
    """Says the sum of the last two tokens modulo 7, which repeats itself; `wrong` errs at times."""

    def __init__(self, wrong: int = 0) -> None:
        self.tokens: list[int] = []
        self.chosen: list[int] = []
        self.wrong, self.num_reads = wrong, 0

    @property
    def length(self) -> int:
        return len(self.tokens)

    def cut(self, length: int) -> None:
        del self.tokens[length:]

    def read(self, tokens: list[int], rows: int) -> None:
        assert tokens
        self.num_reads += 1
        self.chosen = []
        for token in tokens:
            self.tokens.append(token)
            is_wrong = self.wrong and len(self.tokens) % self.wrong == 0
            self.chosen.append((sum(self.tokens[-2:]) + bool(is_wrong)) % 7)
        del self.chosen[:-rows]

    def best(self, row: int) -> int:
        return self.chosen[row]


def llama(lookup: Any = None, drafter: Any = None) -> Any:
    peer: Any = object.__new__(Llama)
    peer.model, peer.lookup, peer.drafter, peer.num_drafted = CountingModel(), lookup, drafter, 4
    return peer


@pytest.mark.parametrize("stop", [[], [5]])
@pytest.mark.parametrize("num_tokens", [1, 2, 40])
def test_drafts_save_passes_and_change_no_answer(num_tokens: int, stop: list[int]) -> None:
    plain, question = llama(), PeerQuestion([1, 1], num_tokens, stop)
    expected = plain.answer(question).token_ids
    assert len(expected) == num_tokens or expected[-1] in stop
    for drafted in (llama(PromptLookup(4, 2)), llama(drafter=CountingModel(wrong=3))):
        for _ in range(2):
            assert drafted.answer(question).token_ids == expected
        if num_tokens == 40 and not stop:
            assert drafted.model.num_reads < 2 * plain.model.num_reads


@pytest.mark.parametrize(
    ("tokens", "drafted"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5]),
        ([1, 2, 9, 2, 8, 1, 2, 7, 1, 2], [9, 2, 8]),  # the first time counts
        ([3, 7, 7, 4, 7], [7, 4, 7]),  # of (4, 7) there is none, of 7 there is
        ([5, 5], [5]),
        ([1, 2, 3], []),
        ([1], []),
    ],
)
def test_prompt_lookup_drafts_what_followed_the_longest_run(
    tokens: list[int], drafted: list[int]
) -> None:
    assert PromptLookup(3, 2)(np.array(tokens)).tolist() == drafted


# llama.cpp's library


def context_params(**changes: float) -> ContextParams:
    defaults = llama_library._DEFAULTS["llama_context_default_params"]
    return ContextParams(**(defaults | changes))


def test_a_library_with_other_structs_is_refused() -> None:
    name = "llama_context_default_params"
    llama_library.check_defaults(name, context_params())
    for changed in ({"n_batch": 1}, {"n_rs_seq": 1}, {"defrag_thold": 0.0}, {"ctx_other": 8}):
        [field] = changed
        with pytest.raises(LlamaError, match=f"another version of llama.cpp: .* gives {field} "):
            llama_library.check_defaults(name, context_params(**changed))


def test_a_library_that_is_missing_or_another_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LLAMA_CPP_LIB_PATH", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(LlamaError, match="xllamacpp is not installed: pip install xllamacpp"):
        llama_library.library_path()
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    path = llama_library.library_path()
    with pytest.raises(LlamaError, match=r"libllama.so cannot be used: .*No such file"):
        llama_library.load_library(path)
    path.write_bytes(b"no library")
    with pytest.raises(LlamaError, match=r"libllama.so cannot be used: "):
        llama_library.load_library(path)


# All of them

WORKERS = {
    "good": ECHO,
    "bad": "raise SystemExit('this processor is too old')",
    "mute": f"{HELLO}sys.stdin.readline(); raise SystemExit('cannot run this checkpoint')",
}


@pytest.fixture
def chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What peers see of a chain, with scripted workers for two peers."""
    (tmp_path / "workers").mkdir()
    for name, code in WORKERS.items():
        (tmp_path / "workers" / f"{name}.py").write_text(code)

    def unreadable(*_: Any) -> list[Mode]:
        raise UserError("peer cannot read the target", "it has experts", "leave it out")

    def modes(*_: Any) -> list[Mode]:
        names = [*WORKERS, "good"]
        weights = ["", "", "", "int4"]
        found = zip(names, weights, strict=True)
        return [Mode(f"S {name}{dtype}", "...", (name,), (), dtype) for name, dtype in found]

    monkeypatch.setattr(process, "FOLDER", tmp_path)
    monkeypatch.setattr(systems, "_MODES", {"llama.cpp": modes, "openvino": unreadable})
    target = SimpleNamespace(device=torch.device("cpu"), dtype=torch.bfloat16)
    engine = SimpleNamespace(models=SimpleNamespace(target=target), context_tokens=64)
    return SimpleNamespace(engine=engine, stop_tokens=frozenset({STOP}))


def test_what_fails_is_said_and_the_others_go_on(chain: Any) -> None:
    said: list[str] = []
    with peer_systems(["openvino", "llama.cpp"], chain, PYTHON, said.append) as found:
        assert [system.name for system in found.systems] == ["S good", "S goodint4"]
        plain, packed = found.systems
        assert (plain.dtype, plain.notes) == ("bfloat16", ())
        assert packed.dtype == "int4"
        assert "4 bits" in packed.notes[0]
        assert plain.answer([4, 5], 8, Sampling()).token_ids == [5, 4]
        processes = [system._process for system in (plain, packed)]  # type: ignore[attr-defined]
    assert [worker.returncode for worker in processes] == [0, 0]
    unread, bad, mute = found.missing
    assert unread.startswith("OpenVINO GenAI does not run: peer cannot read the target")
    assert bad.startswith("S bad does not run")
    assert "this processor is too old" in bad
    assert "cannot run this checkpoint" in mute
    assert set(found.missing) <= set(said)


def test_the_smaller_model_drafts_for_openvino(
    tiny_four_chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its checkpoint, whose weights are no longer in 4 bits, and not the target in 4 bits."""
    runs: list[tuple[Any, ...]] = []
    monkeypatch.setattr(systems, "run_worker", lambda words, _: runs.append(words))
    chain = load_chain(tiny_four_chain, dtype="float32")
    modes = {mode.name: mode for mode in systems._openvino_modes(chain, PYTHON, tmp_path)}
    checkpoint = tmp_path / "checkpoint"
    assert [words[3:] for words in runs] == [
        (chain.target_folder.absolute(), tmp_path),
        (checkpoint, tmp_path / "smaller", "--group-size", 32),
    ]
    assert modes["OpenVINO assisted"].words[-1] == tmp_path / "smaller" / "int4"
    written = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()
    dense = load_reference_model(chain.member_folders["small"], torch.float32).state_dict()
    assert "model.layers.0.mlp.up_proj.weight" in written
    assert all(torch.equal(written[name], weight) for name, weight in dense.items())
    assert (checkpoint / "tokenizer.json").is_file()


def test_what_samples_from_another_distribution_is_left_out(
    chain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = [Mode("S lawful", "...", ("good",), ()), Mode("S", "...", ("good",), (), samples=False)]
    monkeypatch.setattr(systems, "_MODES", {"llama.cpp": lambda *_: modes})
    with peer_systems(["llama.cpp"], chain, PYTHON, print, is_greedy=False) as found:
        assert [system.name for system in found.systems] == ["S lawful"]
    assert "another distribution" in found.missing[0]
    with peer_systems(["llama.cpp"], chain, PYTHON, print) as found:
        assert len(found.systems) == 2


def test_a_peer_without_room_in_memory_is_left_out(
    chain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(systems, "available_bytes", lambda _: -1)
    with peer_systems(["llama.cpp"], chain, PYTHON, print) as found:
        assert not found.systems
    assert all("bytes of memory" in reason for reason in found.missing)


def test_a_chain_on_a_gpu_has_no_peers(chain: Any) -> None:
    chain.engine.models.target.device = torch.device("cuda")
    with peer_systems(["llama.cpp"], chain, PYTHON, print) as found:
        assert not found.systems
    assert "on cuda" in found.missing[0]
