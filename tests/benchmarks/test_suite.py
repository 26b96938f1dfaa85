"""The suite on a tiny chain: each script's record, and two checkouts in turns."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from polybasic.chain.errors import UserError
from polybasic.deploy import load_chain
from polybasic.deploy.hardware import describe_hardware
from polybasic.deploy.rounds import stages
from tests.benchmarks.scripts import load_script

timing, passes, rounds = (load_script(name) for name in ("timing", "passes", "rounds"))
end_to_end, bench, kernels = (load_script(name) for name in ("end_to_end", "bench", "kernels"))
systems, record, comparison = map(load_script, ("systems", "record", "comparison"))

HEAD = {"schema", "command", "commit", "hardware", "kernels", "versions"}
SPREAD = {"min", "median", "max", "turns"}
SHORT = "--max-new-tokens 6 --turns 2"
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little memory is read, and eager operations need no compiler."""
    monkeypatch.setattr(timing, "buffer_bytes", lambda device: 1 << 20)
    monkeypatch.setattr(kernels, "last_cache_bytes", lambda: 1 << 16)
    monkeypatch.setenv("POLYBASIC_KERNELS", "eager")


def run(script: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "argv", ["x", *words.split()])
    return script.main()


def written(script: Any, words: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The record of a script, whose head is that of all."""
    run(script, f"{words} --json {path}", monkeypatch)
    content: dict[str, Any] = json.loads(path.read_text())
    assert content.keys() >= HEAD
    assert content["schema"] == f"polybasic.benchmark.{script.__name__}/1"
    assert str(path.parent) not in path.read_text(), "no place on this machine stays in a record"
    assert content["command"].startswith(f"python benchmarks/{script.__name__}.py")
    assert content["hardware"] == describe_hardware(torch.device("cpu"))
    return content


def test_passes_have_bounds(
    tiny_chain: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = f"{tiny_chain} --context 16 --rows 1 3 --shapes 2x2 --repeats 2 --turns 2"
    content = written(passes, words, tmp_path / "record.json", monkeypatch)
    assert list(content["passes"]) == ["target", "intermediate"]
    assert list(content["drafts"]["draft"]) == ["2x2"]
    for cost in (content["passes"]["intermediate"]["3"], content["drafts"]["draft"]["2x2"]):
        assert cost["milliseconds"].keys() == SPREAD
        bound = 1e3 * cost["bytes"]["total"] / content["bandwidth"]["bound"]
        assert cost["bound_milliseconds"] == pytest.approx(bound)
        assert cost["times_bound"] == pytest.approx(cost["milliseconds"]["median"] / bound)
    assert "milliseconds a pass" in capsys.readouterr().out


def test_passes_of_chosen_members(tiny_chain: Path) -> None:
    chain = load_chain(tiny_chain)
    bandwidth = timing.measure_bandwidth(torch.device("cpu"))
    settings = passes.PassSettings(16, (2,), ("1x2",), 1, 1, only=("draft",))
    found = passes.measure_passes(chain, settings, bandwidth)
    assert (list(found.passes), list(found.drafts)) == ([], ["draft"])
    for changes, match in (({"only": ("drift",)}, "no such member"), ({"context": 4000}, "contex")):
        wrong = passes.PassSettings(**{**vars(settings), **changes})
        with pytest.raises(UserError, match=match):
            passes.measure_passes(chain, wrong, bandwidth)


def test_rounds_break_down_whole_answers(
    tiny_chain: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    walk = stages.walk
    profile = tmp_path / "profile.txt"
    words = (
        f"{tiny_chain} --dtype float32 {SHORT} --systems target polybasic_full --profile {profile}"
    )
    content = written(rounds, words, tmp_path / "record.json", monkeypatch)
    assert stages.walk is walk, "timers are taken off"
    assert list(content["systems"]) == ["target", "polybasic_full"]
    assert content["timer_seconds"] > 0
    three = content["systems"]["polybasic_full"]
    assert set(three["operations"]) == {
        *(f"{name}: {part}" for name in ("target", "intermediate") for part in rounds_parts()),
        "target: verification of blocks",
        *("draft", "walk", "blocks", "observe", "cache moves", rounds.REST),
    }
    total = three["milliseconds_per_token_with_timers"]
    for operation in three["operations"].values():
        spent = operation["milliseconds_per_token"]
        assert operation["milliseconds_per_token_without"] == pytest.approx(total - spent)
        assert operation["milliseconds_per_round"].keys() == SPREAD
    assert sum(one["share"] for one in three["operations"].values()) == pytest.approx(1)
    assert set(three["passes"]) == {"target", "intermediate", "draft"}
    one = three["passes"]["intermediate"]
    assert one["per_round"] == pytest.approx(1)
    saved = one["milliseconds"] - one["bound_milliseconds"]
    assert one["milliseconds_per_token_at_bound"] == pytest.approx(
        total - saved / three["tokens_per_round"]
    )
    assert content["systems"]["target"]["tokens_per_round"] == 1
    shown = capsys.readouterr().out
    assert "if it cost nothing" in shown
    assert "polybasic_full: target → intermediate → draft" in profile.read_text()


def rounds_parts() -> tuple[str, ...]:
    return "states", "logits", "choice of tokens"


def test_timed_answers_are_the_answers(tiny_chain: Path) -> None:
    chain = load_chain(tiny_chain, dtype="float32")
    plan = systems.chosen_plans(chain, ["polybasic_full"])["polybasic_full"]
    (prompt, *_) = systems.read_prompts(chain, None, 1, 12)
    bandwidth = timing.measure_bandwidth(torch.device("cpu"))
    settings = rounds.RoundSettings(max_new_tokens=12, turns=1)
    found = rounds.measure_rounds(chain, {"full": plan}, [prompt], settings, bandwidth)
    ids = [t for new in chain.stream_ids(prompt, 12, chain.sampling(), plan) for t in new]
    assert chain.last_statistics is not None
    (turn,) = found.systems["full"].turns
    assert turn.tokens == len(ids)
    assert dict(turn.passes) == {
        name: chain.last_statistics.forward_passes[name] for name in ("target", "intermediate")
    }
    verifier = chain.engine.verifiers["target"]
    assert not {"read", "logits"} & vars(verifier).keys()


def test_systems_are_those_that_the_chain_has_members_for(tiny_chain: Path) -> None:
    chain = load_chain(tiny_chain)
    plans = systems.system_plans(chain)
    assert {name: plan.members for name, plan in plans.items()} == {
        "target": ("target",),
        "eagle2": ("target", "draft"),
        "polybasic_full": ("target", "intermediate", "draft"),
    }
    further = systems.chosen_plans(chain, [], ["target,intermediate"])
    assert list(further) == ["target,intermediate"]
    for names, members in ((["ngram"], []), ([], ["target,drift"])):
        with pytest.raises(UserError):
            systems.chosen_plans(chain, names, members)


def test_end_to_end_compares_systems(
    tiny_chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = f"{tiny_chain} --dtype float32 {SHORT} --systems target eagle2 --hf-generate"
    content = written(end_to_end, words, tmp_path / "record.json", monkeypatch)
    here = content["checkouts"]["here"]
    assert list(here) == ["target", "eagle2", "hf_generate"]
    assert len({one["answers_sha256"] for one in here.values()}) == 1, "greedy, in float32"
    eagle2 = here["eagle2"]
    ratio = here["target"]["milliseconds_per_token"]["median"]
    ratio /= eagle2["milliseconds_per_token"]["median"]
    assert eagle2["speedup_vs_target"]["median"] == pytest.approx(ratio)
    assert eagle2["tokens_per_target_pass"] > 0
    assert content["plans"]["eagle2"]["members"] == ["target", "draft"]


def test_two_checkouts_in_turns(
    tiny_chain: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    clone = tmp_path / "clone"
    for folder in ("chain", "train", "quantize", "deploy", "recipes"):
        shutil.copytree(ROOT / folder, clone / folder)
    provenance = clone / "recipes" / "provenance.py"
    provenance.write_text(provenance.read_text() + '\n\ndef git_commit():\n    return "clone"\n')
    monkeypatch.setattr(end_to_end, "PAUSE_SECONDS", 0.0)
    words = f"{tiny_chain} --dtype float32 {SHORT} --systems target eagle2 --against {clone}"
    content = written(end_to_end, words, tmp_path / "record.json", monkeypatch)
    assert content["commits"]["against"] == "clone", "each process runs its own checkout's code"
    assert content["commits"]["here"] != "clone"
    here, against = content["checkouts"]["here"], content["checkouts"]["against"]
    assert here["eagle2"]["answers_sha256"] == against["eagle2"]["answers_sha256"]
    gained = content["here_over_against"]["eagle2"]
    assert gained["identical_answers"] == content["settings"]["num_prompts"]
    ratio = against["eagle2"]["milliseconds_per_token"]["median"]
    ratio /= here["eagle2"]["milliseconds_per_token"]["median"]
    assert gained["speedup"]["median"] == pytest.approx(ratio)
    assert "eagle2: here" in capsys.readouterr().out
    with pytest.raises(UserError, match="no checkout"):
        run(end_to_end, f"{tiny_chain} --against {tmp_path}", monkeypatch)


def test_bench_writes_a_record_and_compares_with_it(
    tiny_chain: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    records = tmp_path / "records"
    words = f"{tiny_chain} --records {records} --context 16 --rows 2 --shapes 2x2 --repeats 2"
    words += f" --num-prompts-per-task 1 {SHORT}"
    assert run(bench, words, monkeypatch) == 0
    (path,) = records.iterdir()
    cores = describe_hardware(torch.device("cpu"))["cores"]
    assert path.name == f"cpu-{cores}-cores-bench.json"
    assert "no record of this hardware was there" in capsys.readouterr().out
    content = json.loads(path.read_text())
    assert content.keys() >= HEAD | {"bandwidth", "chain", "passes", "rounds", "end_to_end"}
    assert str(tmp_path) not in path.read_text()
    # a million times as fast as this machine
    for cost in content["passes"]["target"].values():
        fast = cost["milliseconds"]
        fast["median"] /= 1e6
        fast["turns"] = [one / 1e6 for one in fast["turns"]]
    path.write_text(json.dumps(content))
    before = path.read_bytes()
    monkeypatch.setattr(comparison, "LEAST_MILLISECONDS", 0.0)
    assert run(bench, f"{words} --strict", monkeypatch) == 1
    shown = capsys.readouterr().out
    assert "slower" in next(line for line in shown.splitlines() if "pass target, 2 rows" in line)
    assert path.read_bytes() == before, "a record changes by --update alone"
    with pytest.raises(UserError, match="record of other settings"):
        run(bench, words.replace("--context 16", "--context 20"), monkeypatch)


def test_record_is_found_by_its_hardware(tmp_path: Path) -> None:
    hardware = {"device": "cpu", "processor": "A 1", "cores": 2, "threads": 2}
    assert bench.record_of(tmp_path, hardware) == (tmp_path / "cpu-2-cores-bench.json", None)
    content = {"schema": "polybasic.benchmark.bench/1", "hardware": hardware}
    (tmp_path / "cpu-2-cores-bench.json").write_text(json.dumps(content))
    (tmp_path / "another.json").write_text(json.dumps({"hardware": hardware}))
    assert bench.record_of(tmp_path, hardware | {"memory_bytes": 3})[1] == content
    other = tmp_path / "cpu-2-cores-b-2-bench.json"
    assert bench.record_of(tmp_path, hardware | {"processor": "B (2)"}) == (other, None)
    assert bench.record_of(tmp_path, hardware | {"threads": 1})[1] is None


def test_kernels_are_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "--shapes 128x256 --rows 1 3 --turns 1"
    content = written(kernels, words, tmp_path / "record.json", monkeypatch)
    assert list(content["products"]) == ["128x256 1 rows", "128x256 3 rows"]
    assert set(content["products"]["128x256 3 rows"]) == set(kernels.KERNELS)
    by_kernel = content["products"]["128x256 1 rows"]
    assert by_kernel["bfloat16"]["bytes"] == 128 * 256 * 2
    assert by_kernel["int4"]["bytes"] == 128 * 256 // 2 + 128 * 2 * 4


def test_command_line_names_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "/home/me/chain", "--json=/tmp/r.json", "--turns", "2"])
    places = {Path("/home/me/chain"): "CHAIN", Path("/tmp/r.json"): "FILE", None: "NOTHING"}
    shown = record.command_line("passes", places)
    assert shown == "python benchmarks/passes.py CHAIN --json=FILE --turns 2"
