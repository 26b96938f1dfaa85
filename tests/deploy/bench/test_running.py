"""The benchmark on a tiny chain: prompts, counting, agreement, files, refusals."""

import json
import shutil
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.manifest import read_manifest, write_manifest
from polybasic.chain.formats.verify import check_chain
from polybasic.deploy import load_chain
from polybasic.deploy.bench import running, summary
from polybasic.deploy.bench.exactness.outputs import gap_at_divergence
from polybasic.deploy.bench.exactness.rereading import ONE_ROW, ReadPattern, answer_logits
from polybasic.deploy.bench.running import bench_chain
from polybasic.deploy.bench.schema import Report, read_report
from polybasic.deploy.bench.systems import transformers_systems
from polybasic.deploy.bench.systems.chain_systems import ChainSystem
from polybasic.deploy.bench.systems.system import TimedAnswer
from polybasic.deploy.planner.settings import BenchSettings
from polybasic.deploy.runtime.rounds.sampling import GreedySampler, Sampling
from tests.conftest import ChainParts

NOTEBOOK = Path(__file__).parents[3] / "docs" / "research.ipynb"


def write_prompts(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def question(number: int, category: str, *turns: str) -> dict[str, Any]:
    return {"question_id": number, "category": category, "turns": list(turns)}


@pytest.fixture(autouse=True)
def _without_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots take a second; the report that all tests read has them."""
    monkeypatch.setattr(running, "write_page", lambda path, report: None)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(
        tmp_path_factory.mktemp("prompts") / "prompts.jsonl",
        question(1, "writing", "w5 w9", "w7"),
        question(2, "qa", "w1 w2 w3"),
        question(3, "qa", "w4"),
        question(4, "rag", " ".join(["w1"] * 200)),
    )


@pytest.fixture(scope="module")
def benched(
    _tiny_models: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Report]:
    """A chain and its report, which tests only read."""
    folder = tmp_path_factory.mktemp("benched")
    models = shutil.copytree(_tiny_models, folder / "models")
    ChainParts(*(models / name for name in ("target", "intermediate", "draft"))).package(
        folder / "chain"
    )
    settings = BenchSettings(prompts=str(prompts), max_new_tokens=20, dtype="float32")
    with pytest.MonkeyPatch.context() as patch:
        # in whatever dtype transformers is faster: answers are compared in one
        patch.setattr(transformers_systems, "candidate_dtypes", lambda own, *_: ([own], []))
        report = bench_chain(folder / "chain", settings, command="polybasic bench it")
    return folder / "chain", report


def test_report_counts_what_was_run(benched: tuple[Path, Report]) -> None:
    _, report = benched
    assert report.complete
    assert (report.answered, report.planned) == (8, 8)
    assert report.settings["num_prompts"] == 4  # two turns and two questions
    assert report.settings["num_questions_left_out_as_too_long"] == 1
    assert [(prompt.question_id, prompt.turn) for prompt in report.prompts] == [
        *(("1", 1), ("1", 2), ("2", 1), ("3", 1))
    ]
    systems = report.systems
    assert list(systems) == ["target", "hf_generate", "eagle2", "polybasic_full", "polybasic"]
    for system in systems.values():
        totals, agreement = system.totals, system.agreement
        assert totals.tokens == systems["target"].totals.tokens
        assert (agreement.answers, agreement.identical, agreement.near_ties) == (8, 8, 0)
        assert agreement.tolerance < 1e-4
        assert list(system.tasks) == ["mt_bench", "qa"]
        for total in ("tokens", "seconds", "num_answers"):
            by_task = sum(getattr(task, total) for task in system.tasks.values())
            assert getattr(totals, total) == pytest.approx(by_task)
        assert totals.tokens_per_second == totals.tokens / totals.seconds
        assert totals.tokens == sum(map(sum, system.answers.num_tokens))
        assert totals.seconds == pytest.approx(sum(map(sum, system.answers.seconds)))
        assert 0 < totals.first_token_seconds.median <= totals.first_token_seconds.p95
        decoded = totals.tokens - sum(map(sum, system.answers.num_first))
        later = totals.seconds - sum(map(sum, system.answers.first_seconds))
        assert totals.decode_tokens_per_second == pytest.approx(decoded / later)
    assert systems["target"].totals.speedup.value == pytest.approx(1)
    assert systems["target"].totals.accepted_length.mean == 1
    assert report.notes == [
        "The plan runs as packed; it was not measured on this machine: polybasic plan."
    ]


def test_each_answer_is_a_row(benched: tuple[Path, Report]) -> None:
    report = read_report(benched[0] / "report" / "report.json")
    rows = report.rows()
    assert len(rows) == 4 * 2 * len(report.systems)
    for row in rows:
        assert row["token_ids"]
        assert row["text"].split() == [f"w{token}" for token in row["token_ids"] if token < 62]
        for lengths in row["accepted_lengths"].values():
            assert sum(lengths) >= len(row["token_ids"]) - 1
    first, *_ = (row for row in rows if row["system"] == "polybasic_full")
    assert first["prompt"] == "w5 w9"
    assert list(first["accepted_lengths"]) == ["target", "intermediate"]
    assert sum(first["accepted_lengths"]["target"]) == len(first["token_ids"]) - 1
    full = report.systems["polybasic_full"]
    assert [list(map(len, row)) for row in full.answers.accepted_lengths["target"]] == (
        full.answers.passes
    )
    assert not any(row["accepted_lengths"] for row in rows if row["system"] == "hf_generate")


def test_the_notebook_runs(
    benched: tuple[Path, Report], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs" / "smollm2-135m").mkdir(parents=True)
    (tmp_path / "runs" / "smollm2-135m" / "chain").symlink_to(benched[0])
    monkeypatch.chdir(tmp_path)
    matplotlib.use("agg")
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    ran: dict[str, Any] = {}
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            assert not cell["outputs"]
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), ran)
    assert len(ran["plt"].get_fignums()) == 3
    ran["plt"].close("all")
    assert ran["identical"]
    # random models continue no two prompts alike: the toy shows what it can where it has seen it
    target, prompt = ran["target"], benched[1].prompts[-1].token_ids
    expected, _ = ran["answer"](target, ran["NoDrafter"](), prompt, 16)
    found, gained = ran["answer"](target, ran["Bigrams"]([expected]), prompt, 16)
    assert found == expected
    assert max(gained) > 1
    assert sum(map(len, ran["lengths_by_system"](ran["rows"]).values())) == sum(
        int(sum(map(sum, system.answers.passes or []))) for system in benched[1].systems.values()
    )


def test_members_are_counted_by_repeat(benched: tuple[Path, Report]) -> None:
    full = benched[1].systems["polybasic_full"]
    assert list(full.members) == ["target", "intermediate", "draft"]
    target, intermediate, draft = full.members.values()
    # each answer's first token came with the prompt
    tokens = full.totals.tokens / 2 - 4
    assert tokens == pytest.approx(target.passes * target.accepted_length.mean)
    assert target.passes == sum(full.answers.passes[0])
    # a tree of 6 rows a pass, whose root is no proposal
    gained = intermediate.accepted_length.mean
    assert 1 <= intermediate.rows_per_token * gained <= 6
    assert target.rows_per_token * target.accepted_length.mean <= 9
    assert draft.accepted_length is draft.rows_per_token is None
    assert target.acceptance == []
    for proposing in (intermediate, draft):
        assert proposing.acceptance == sorted(proposing.acceptance, reverse=True)
        assert 0 < proposing.acceptance[0] <= 1
    # the mean of a block's kept tokens, and the one that a pass draws itself
    assert target.accepted_length.mean == pytest.approx(1 + sum(intermediate.acceptance), abs=0.3)
    assert full.plan["flush"]["target"]["length"] == 5  # as packed
    assert full.predicted_seconds_per_token is None
    assert 0 < full.measured_seconds_per_token * tokens < full.totals.seconds / 2
    assert benched[1].plan["members"] == ["target", "intermediate", "draft"]
    assert benched[1].plan["explanation"] is None


def test_an_inserted_member_is_judged_by_measured_values(benched: tuple[Path, Report]) -> None:
    _, report = benched
    (found,) = report.insertions
    assert (found.member, found.without, found.within) == (
        *("intermediate", "eagle2", "polybasic_full"),
    )
    before, after = (report.systems[name] for name in (found.without, found.within))
    tokens = after.totals.tokens / 2 - 4  # first tokens came with the prompts
    assert found.accepted == tokens / before.members["target"].passes
    assert found.accepted_new == tokens / after.members["intermediate"].passes
    cost = after.members["intermediate"]
    assert found.left == pytest.approx(cost.seconds / cost.passes / found.above_seconds)
    saved = 1 / found.accepted - 1 / found.accepted_above_new
    assert found.right == pytest.approx(found.accepted_new * saved)
    rates = [system.totals.decode_tokens_per_second for system in (after, before)]
    assert found.speedup.value == pytest.approx(rates[0] / rates[1])


def test_results_reach_files_and_manifest(benched: tuple[Path, Report]) -> None:
    chain, report = benched
    assert read_report(chain / "report" / "report.json") == report
    markdown = (chain / "report" / "report.md").read_text()
    page = (chain / "report" / "report.html").read_text()
    for shown in (markdown, page):
        assert "polybasic bench it" in shown
        assert "polybasic_full" in shown
    assert sorted(path.name for path in (chain / "report").iterdir()) == [
        *("report.html", "report.json", "report.md")
    ]
    memory = report.memory
    assert memory["stated"]["context_tokens"] == 128
    assert set(memory["stated"]["members"]) == {"target", "intermediate", "draft"}
    measured = memory["measured"]
    assert 0 < measured["staying_bytes"] <= measured["peak_bytes"]
    assert memory["ratio"] == measured["staying_bytes"] / memory["stated"]["staying_bytes"]
    assert (report.adaptations, report.draft_vocabulary) == ([], [])
    results = read_manifest(chain).results
    totals = report.systems["eagle2"].totals
    assert results["systems"]["eagle2"] == {
        "tokens_per_second": totals.tokens_per_second,
        "speedup_vs_target": totals.speedup.value,
        "mean_accepted_length": totals.accepted_length.mean,
    }
    check_chain(chain)


def test_an_interrupted_benchmark_goes_on(
    tiny_chain: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = BenchSettings(
        prompts=str(prompts), max_new_tokens=8, systems=("target", "polybasic"), dtype="float32"
    )
    answered: list[tuple[int, ...]] = []
    usual = ChainSystem.answer

    def answer(self: ChainSystem, prompt: list[int], *others: Any) -> TimedAnswer:
        if len(answered) == limit:
            raise KeyboardInterrupt
        answered.append(tuple(prompt))
        return usual(self, prompt, *others)

    monkeypatch.setattr(ChainSystem, "answer", answer)
    lines: list[str] = []
    limit = 2 + 2 * 6 + 1  # both are warm, six turns of eight, and half of the next
    with pytest.raises(KeyboardInterrupt):
        bench_chain(tiny_chain, settings, lines.append)
    partial = tiny_chain / "report" / "partial"
    report = read_report(partial / "report.json")
    assert (report.complete, report.answered, report.planned) == (False, 6, 8)
    assert [len(repeat) for repeat in report.systems["polybasic"].answers.seconds] == [4, 2]
    assert str(partial / "report.md") in lines[-1]
    assert not (tiny_chain / "report" / "report.json").exists()
    assert read_manifest(tiny_chain).results is None
    before, limit = report.systems["target"].answers.seconds, None
    answered.clear()
    whole = bench_chain(tiny_chain, settings, lines.append)
    assert len(answered) == 2 + 2 * 2, "what was kept is not asked again"
    assert "bench: 6 of 8 turns are kept from before" in lines
    after = whole.systems["target"].answers.seconds
    assert (after[0], after[1][:2]) == (before[0], before[1])
    assert whole.complete
    assert not partial.exists()
    # nothing is kept of a whole one
    answered.clear()
    bench_chain(tiny_chain, settings, lines.append)
    assert len(answered) == 2 + 2 * 8


def test_a_report_may_lie_elsewhere(tiny_chain: Path, prompts: Path, tmp_path: Path) -> None:
    settings = BenchSettings(
        prompts=str(prompts), max_new_tokens=8, systems=("target",), dtype="float32", repeats=1
    )
    report = bench_chain(tiny_chain, settings, out=tmp_path / "there")
    assert read_report(tmp_path / "there" / "report.json") == report
    assert not (tiny_chain / "report").exists()
    assert read_manifest(tiny_chain).results is None


OF_CHAINS = ("target", "eagle2", "polybasic")
SAMPLED = BenchSettings(
    prompts="",
    max_new_tokens=20,
    temperature=1.0,
    repeats=1,
    systems=("target", "hf_generate", "eagle2", "polybasic"),
)


def test_samples_of_a_seed_are_the_targets(tiny_chain: Path, prompts: Path) -> None:
    changes = {"prompts": str(prompts), "repeats": 2, "max_new_tokens": 40}
    report = bench_chain(tiny_chain, SAMPLED.model_copy(update=changes))
    systems = report.systems
    for name in ("eagle2", "polybasic"):
        assert systems[name].agreement.identical == 8
    assert systems["hf_generate"].agreement is None, "drawn by its own numbers"
    assert report.rounding == {}, "nothing is there that it could explain"
    for system in systems.values():
        assert system.law.tokens == system.totals.tokens
        assert system.law.p_value > 1e-4
    first, second = systems["target"].answers.num_tokens
    assert first != second, "each answer has a seed of its own"


@pytest.mark.usefixtures("noise_of_another_seed")
def test_samples_that_part_from_the_targets_are_counted(tiny_chain: Path, prompts: Path) -> None:
    settings = SAMPLED.model_copy(update={"prompts": str(prompts), "systems": OF_CHAINS})
    systems = bench_chain(tiny_chain, settings).systems
    assert systems["target"].agreement.identical == 4
    assert systems["eagle2"].agreement.identical < 4
    assert systems["eagle2"].agreement.tokens_before_parting < 20


def test_independent_samples_are_not_compared(tiny_chain: Path, prompts: Path) -> None:
    manifest = read_manifest(tiny_chain)
    plan = manifest.plan.model_copy(update={"rule": "block"})
    write_manifest(tiny_chain, manifest.model_copy(update={"plan": plan}))
    settings = SAMPLED.model_copy(update={"prompts": str(prompts), "systems": OF_CHAINS})
    systems = bench_chain(tiny_chain, settings).systems
    assert systems["target"].plan["rule"] == "coupled"
    assert systems["polybasic"].plan["rule"] == "block"
    assert systems["polybasic"].agreement is None


@pytest.mark.parametrize("kernels", ["auto", "device"])
def test_rounding_is_measured_and_stated(
    tiny_chain: Path, prompts: Path, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYBASIC_KERNELS", kernels)
    # it is measured only where answers part
    monkeypatch.setattr(summary, "_differs", lambda *given: True)
    settings = BenchSettings(prompts=str(prompts), max_new_tokens=20, repeats=1)
    report = bench_chain(tiny_chain, settings)
    rounding = report.rounding
    assert rounding["dtype"] == "bfloat16"
    assert rounding["num_positions"] == report.systems["target"].totals.tokens
    # trees of 6 rows alone, and blocks of 6 to 9 above the intermediate
    assert list(rounding["ways"]) == [
        "1 row",
        "trees of 6 rows, 3 deep",
        *(f"blocks of {rows} rows" for rows in (6, 8, 9)),
    ]
    assert list(rounding["others"]) == ["hf_generate"]
    assert all(change["is_sound"] for change in (rounding["ways"] | rounding["others"]).values())
    systems = report.systems
    for name in ("eagle2", "polybasic_full", "polybasic"):
        assert systems[name].agreement.tolerance == rounding["tolerance"]
    library = systems["hf_generate"].agreement.tolerance
    assert library == max(rounding["tolerance"], rounding["others"]["hf_generate"]["from_one_row"])
    assert 0 < library < 5 * rounding["usual"]
    for system in systems.values():
        assert system.agreement.different == 0
        assert system.agreement.widest_near_tie <= system.agreement.tolerance


def test_native_kernels_round_alike_in_blocks_of_any_size(tiny_chain: Path) -> None:
    verifier = load_chain(tiny_chain, dtype="bfloat16").engine.verifiers["target"]
    prompt, answer = list(range(1, 10)), list(range(20, 45))
    one_by_one = answer_logits(verifier, prompt, answer, ONE_ROW)
    for pattern in (*map(ReadPattern, (4, 8, 16, 25, 40)), ReadPattern(6, 3), ReadPattern(20, 5)):
        assert torch.equal(answer_logits(verifier, prompt, answer, pattern), one_by_one)
    best, second = one_by_one[-1].topk(2).indices.tolist()
    sampler = GreedySampler(Sampling(), len(prompt))
    tokens, other = [*answer[:-1], best, 3], [*answer[:-1], second, 4]
    gap = gap_at_divergence(verifier, sampler, prompt, tokens, other)
    assert gap == float(one_by_one[-1, best] - one_by_one[-1, second])


def test_refusals_before_anything_runs(tiny_chain: Path, prompts: Path, tmp_path: Path) -> None:
    def refuse(message: str, **changed: Any) -> None:
        settings = BenchSettings(**({"prompts": str(prompts)} | changed))
        with pytest.raises(UserError) as refusal:
            bench_chain(tiny_chain, settings)
        assert str(refusal.value).startswith(message)

    refuse("prompts not found", prompts=str(tmp_path / "none.jsonl"))
    refuse("no baseline: bench.systems=eagle2", systems=("eagle2",))
    refuse("no prompt fits the context", max_new_tokens=128)
    assert not (tiny_chain / "report").exists()
