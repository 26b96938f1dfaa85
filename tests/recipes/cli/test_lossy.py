"""Plans that are lossy, on the command line: asked for by name, tuned, written and run."""

import json
from pathlib import Path
from typing import Any

import pytest

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.manifest import read_manifest
from polybasic.chain.formats.plan import BigLittle, Flush, Plan
from polybasic.deploy.bench import lossy, running
from polybasic.deploy.bench.lossy import Tried, Tuning
from tests.recipes.command_line import call, refusal

SHORT = ["--max-new-tokens", "12", "--dtype", "float32"]
RULE = ["--rule", "bild", "--quality", "0.9"]


def lossy_plan(chain: Path) -> Plan:
    plan = read_manifest(chain).plan
    rule = BigLittle(fallback_threshold=0.01, rollback_threshold=8.0)
    update = {"lossy": rule, "flush": {"target": Flush(length=6)}, "ngram": None}
    return plan.model_copy(update=update)


def test_a_tuned_plan_is_shown_written_and_run(
    tiny_chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, plan, asked = tmp_path / "lossy.json", lossy_plan(tiny_chain), []

    def tune(chain: Any, prompts: Any, quality: float, *given: Any) -> Tuning:
        asked.append((len(prompts), quality))
        tried, left_out = (Tried(0.5, 2.0, 1.2, 0.95, 0.25),), ("5 of 11 prompts to tune on",)
        found = (1.3, (1.1, 1.5), 0.88, (0.86, 0.9), 0.5, (6, 6), tried, left_out)
        return Tuning(plan, chain.plan, *found)

    monkeypatch.setattr(lossy, "tune_lossy", tune)
    before = (tiny_chain / "chain.json").read_bytes()
    arguments = ["plan", tiny_chain, *RULE, "--out", out, "--dtype", "float32"]
    code, shown, told = call(*arguments, "--num-prompts-per-task", "2")
    assert code == 0, told
    assert (tiny_chain / "chain.json").read_bytes() == before
    assert asked[0][1] == 0.9
    assert asked[0][0] >= 2
    assert "1.30x of the lossless plan (1.10-1.50), 88.0% of tokens the target's" in shown
    assert "(86.0%-90.0%), 50% of answers identical" in " ".join(shown.split())
    assert "below the 90.0% that were asked for" in shown
    assert "Left out for want of time: 5 of 11 prompts" in shown
    assert f"next: polybasic generate {tiny_chain} --plan {out}" in told
    assert json.loads(call(*arguments, "--json")[1])["speedup"] == 1.3
    code, text, told = call("generate", tiny_chain, "-p", "w5", *SHORT, "--plan", out)
    assert code == 0, told
    assert "not the target's own" in told.splitlines()[-1]
    assert "lossy: " in told.splitlines()[-1]
    lossless = call("generate", tiny_chain, "-p", "w5", *SHORT)
    assert "lossy" not in lossless[2]
    assert lossless[1] != text


def test_a_plan_comes_from_a_file(tiny_chain: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    generate = ["generate", tiny_chain, "-p", "w5", *SHORT, "--plan", path]
    assert f"plan not found: {path}" in refusal(*generate)
    path.write_text("[]")
    assert str(path) in refusal(*generate)
    own = read_manifest(tiny_chain).plan.model_dump(mode="json")
    path.write_text(json.dumps(own | {"members": ["target", "nobody"]}))
    assert "plan cannot run: plan.members target, nobody" in refusal(*generate)
    # as `polybasic plan --out` writes it
    measured = {"plan": own, "seconds_per_token": 1, "hardware": "here", "dtype": "float32"}
    path.write_text(json.dumps({**measured, "temperature": 0}))
    code, text, _ = call(*generate)
    assert (code, text) == call("generate", tiny_chain, "-p", "w5", *SHORT)[:2]
    lossy_own = own | {"lossy": {"fallback_threshold": 0.5, "rollback_threshold": 1.0}}
    path.write_text(json.dumps({**measured, "plan": lossy_own, "temperature": 0}))
    assert "a chain carries lossless plans" in refusal(*generate)


def test_what_a_lossy_plan_promises_not_is_refused(tiny_chain: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(lossy_plan(tiny_chain).model_dump_json())
    generate = ["generate", tiny_chain, "-p", "w5", *SHORT, "--plan", path]
    assert "a seed promises the target's text" in refusal(*generate, "--seed", "3")
    assert "temperature=0.5; use temperature 0" in refusal(*generate, "--temperature", "0.5")


def test_a_benchmark_runs_it_beside_the_others(
    tiny_chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asked = tmp_path / "plan.json", []

    def bench_chain(*given: Any) -> None:
        asked.append(given[-1])
        raise UserError("seen", "", "")

    monkeypatch.setattr(running, "bench_chain", bench_chain)
    bench = ["bench", tiny_chain, "--no-plan", "--lossy", path]
    path.write_text(read_manifest(tiny_chain).plan.model_dump_json())
    assert f"plan is not lossy: {path}" in refusal(*bench)
    path.write_text(lossy_plan(tiny_chain).model_dump_json())
    assert "seen" in refusal(*bench)
    assert asked == [lossy_plan(tiny_chain)]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--rule", "bild"], "--rule bild without --quality"),
        (RULE, "--rule bild without --out"),
        (["--quality", "0.9"], "quality of a lossless plan: --quality 0.9"),
        ([*RULE, "--out", "a", "--link", "20ms"], "of a lossless plan: --link"),
        ([*RULE, "--out", "a", "--no-write"], "of a lossless plan: --no-write"),
        ([*RULE, "--out", "a", "--measurements", "b"], "of a lossless plan: --measurements"),
        ([*RULE, "--out", "a", "--temperature", "1"], "a lossy plan does not draw: temperature=1"),
        (["--rule", "bold"], "rule"),
    ],
)
def test_wrong_options_are_told(tiny_chain: Path, arguments: list[str], told: str) -> None:
    assert told in refusal("plan", tiny_chain, *arguments)
