"""Which systems a benchmark runs, and one of another engine that fails."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from polybasic.chain.base.errors import UserError
from polybasic.deploy import load_chain
from polybasic.deploy.bench import running, summary
from polybasic.deploy.bench.peers.systems import PeerSystems
from polybasic.deploy.bench.running import bench_chain
from polybasic.deploy.bench.schema import read_report
from polybasic.deploy.bench.systems import catalogue
from polybasic.deploy.bench.systems.chain_systems import all_systems, chain_system, usual_systems
from polybasic.deploy.bench.systems.system import System, TimedAnswer
from polybasic.deploy.planner.settings import USUAL_SYSTEMS, BenchSettings


class Scripted(System):
    """Answers with one token and what follows it, and fails where it is told to."""

    name, runtime, description, dtype = "scripted", "another engine", "a script", "float32"
    num_answers, fails_at = 0, -1
    failure: BaseException = UserError("peer failed", "scripted (exit code 1)", "leave it out")

    def answer(self, prompt: list[int], max_new_tokens: int, sampling: Any) -> TimedAnswer:
        self.num_answers += 1
        if self.num_answers == self.fails_at:
            raise self.failure
        return TimedAnswer([5] * (max_new_tokens + 3), 0.5, 2, 0.1)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BenchSettings:
    monkeypatch.setattr(running, "write_page", lambda path, report: None)
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"w{n} w1"}) + "\n" for n in range(3)))
    return BenchSettings(
        prompts=str(path), max_new_tokens=6, repeats=1, dtype="float32", systems=("target",)
    )


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    peer = Scripted()

    @contextmanager
    def peers(names: list[str], *others: Any) -> Iterator[PeerSystems]:
        yield PeerSystems([peer], ["another mode does not run: it is not there."])

    monkeypatch.setattr(catalogue, "peer_systems", peers)
    return peer


def test_systems_are_named_by_what_the_chain_has(tiny_chain: Path) -> None:
    chain = load_chain(tiny_chain, dtype="float32")
    assert tuple(usual_systems(chain)) == USUAL_SYSTEMS
    assert all_systems(chain) == ["target", "ngram", "eagle2", "polybasic_full", "polybasic"]
    plans = {name: chain_system(name, chain).plan for name in all_systems(chain)}
    assert plans["target"].members == ("target",)
    assert plans["ngram"].members == ("target",)
    assert plans["ngram"].ngram is not None
    assert plans["eagle2"].members == ("target", "draft")
    assert plans["polybasic_full"].members == ("target", "intermediate", "draft")
    assert plans["polybasic"] == chain.plan
    settings = BenchSettings(systems=("auto", "ngram", "target"))
    named = settings.named_systems(usual_systems(chain), all_systems(chain))
    assert named == (*USUAL_SYSTEMS, "ngram")


def test_what_another_engine_answers_is_cut_and_compared(
    tiny_chain: Path, settings: BenchSettings, scripted: Scripted
) -> None:
    report = bench_chain(tiny_chain, settings)
    found = report.systems["scripted"]
    assert list(report.systems) == ["target", "scripted"]
    assert found.answers.num_tokens == [[6, 6, 6]], "nothing after the cut counts"
    assert found.totals.tokens_per_second == 6 / 0.5
    assert found.totals.decode_tokens_per_second == pytest.approx(4 / 0.4)
    assert found.totals.first_token_seconds.median == 0.1
    assert (found.totals.accepted_length, found.plan) == (None, None)
    assert found.agreement.identical == 0
    assert found.agreement.tolerance == max(report.rounding["tolerance"], report.rounding["usual"])
    assert "another mode does not run: it is not there." in report.notes


def test_an_engine_that_fails_loses_no_answers(
    tiny_chain: Path, settings: BenchSettings, scripted: Scripted
) -> None:
    scripted.fails_at = 3  # the first one is not counted
    with pytest.raises(UserError, match="peer failed"):
        bench_chain(tiny_chain, settings)
    scripted.fails_at, lines = -1, []
    assert bench_chain(tiny_chain, settings, lines.append).complete
    assert "bench: 1 of 3 turns are kept from before" in lines


def test_an_interrupted_benchmark_leaves_out_how_answers_differ(
    tiny_chain: Path,
    settings: BenchSettings,
    scripted: Scripted,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scripted.fails_at, scripted.failure = 4, KeyboardInterrupt()
    measured: list[int] = []
    monkeypatch.setattr(summary, "measure_rounding", lambda *given: measured.append(1))
    with pytest.raises(KeyboardInterrupt):
        bench_chain(tiny_chain, settings)
    report = read_report(tiny_chain / "report" / "partial" / "report.json")
    assert (report.answered, report.rounding, measured) == (2, {}, [])
    assert report.systems["target"].agreement.identical == 2
    assert report.systems["scripted"].agreement is None
    assert report.notes[-1].startswith("Not all answers of scripted are the target's")
    assert "| scripted " in (tiny_chain / "report" / "partial" / "report.md").read_text()


@pytest.mark.parametrize("peer", ["llama.cpp", "openvino"])
def test_a_peer_that_is_not_installed_is_refused_before_anything_runs(
    tiny_chain: Path, settings: BenchSettings, tmp_path: Path, peer: str
) -> None:
    changes = {"peers": (peer,), "peers_python": str(tmp_path / "bin" / "python")}
    with pytest.raises(UserError, match="no environment of peers: --peers-python"):
        bench_chain(tmp_path / "no chain", settings.model_copy(update=changes))
