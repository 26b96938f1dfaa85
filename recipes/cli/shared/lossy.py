"""Plans from files, and lossy ones: asked for, tuned and shown."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polybasic.chain.base.errors import UserError
from polybasic.recipes.cli.shared.options import first_given

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console

    from polybasic.chain.base.tables import Table
    from polybasic.chain.formats.plan import Plan
    from polybasic.deploy import Chain
    from polybasic.deploy.bench.lossy import Tuning
    from polybasic.deploy.planner.settings import PlanSettings

BILD, AUTOJUDGE = "bild", "autojudge"
"""Rules of plans that are lossy."""
LOSSY_RULES = (BILD, AUTOJUDGE)

PlanFileOption = Annotated[
    Path | None,
    typer.Option(
        "--plan", metavar="FILE", help="JSON file with the plan to run by.  [default: the chain's]"
    ),
]
QualityOption = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=1,
        help="With a lossy rule: least share of tokens that are the target's own (bild), or of the "
        "questions that the target answers rightly (autojudge).",
    ),
]
RunCodeOption = Annotated[
    bool,
    typer.Option(
        "--run-code",
        help="With --rule autojudge: run the programs of answers, apart and without a network.",
    ),
]


def plan_in(path: Path | None) -> "Plan | None":
    """The plan of a file, be it one that was measured.

    Raises:
        UserError: no such file, or it holds no plan; its judge is missing.
    """
    if path is None:
        return None
    from polybasic.chain.formats.files import read_json
    from polybasic.chain.formats.plan import Judge, MeasuredPlan, Plan
    from polybasic.recipes.schema.loading import validated

    content = read_json(path, "plan")
    if isinstance(content, dict) and "plan" in content:
        return validated(MeasuredPlan, content, {}, str(path)).plan
    plan = validated(Plan, content, {}, str(path))
    if not isinstance(plan.lossy, Judge):
        return plan
    file = path.resolve().parent / plan.lossy.file
    if not file.is_file():
        raise UserError("judge not found", f"{file}, lossy.file of {path}", "put it there")
    return _with_judge_at(plan, str(file))


def lossy_in(path: Path | None) -> "Plan | None":
    """The same of a lossy plan.

    Raises:
        UserError: as `plan_in`, or it is lossless.
    """
    plan = plan_in(path)
    if plan is not None and plan.is_lossless:
        do = f"name what polybasic plan --rule {BILD} wrote; lossless plans run as polybasic"
        raise UserError("plan is not lossy", str(path), do)
    return plan


def check_lossy(
    rule: str | None, quality: float | None, out: Path | None, run_code: bool, **others: Any
) -> tuple[float, Path] | None:
    """Quality and place of a lossy plan, if one is asked for.

    Args:
        others: what only lossless plans are made with, by option.

    Raises:
        UserError: what another rule asks for, no quality, no place for the plan, or one of these.
    """
    if run_code and rule != AUTOJUDGE:
        do = f"leave it out, or give --rule {AUTOJUDGE}"
        raise UserError("programs of another rule's answers", "--run-code", do)
    if rule not in LOSSY_RULES:
        if quality is None:
            return None
        what, where = "quality of a lossless plan", f"--quality {quality:g}"
        raise UserError(what, where, f"leave it out, or give --rule {BILD} or {AUTOJUDGE}")
    if given := first_given(**others):
        what, where = "of a lossless plan", f"--{given}"
        raise UserError(what, where, f"leave it out beside --rule {rule}")
    if quality is None or out is None:
        raise UserError(
            "a lossy plan is asked for each time, and no chain carries it",
            f"--rule {rule} without {'--quality' if quality is None else '--out'}",
            "give --quality SHARE and --out FILE; polybasic generate --plan FILE then runs it",
        )
    return quality, out


def tuned(
    folder: Path,
    settings: "PlanSettings",
    quality: float,
    target: str | None,
    say: "Callable[[str], None]",
) -> "Tuning":
    """Tune the thresholds of a lossy plan of a chain.

    Args:
        settings: `prompts` names a question file.
        quality: least share of tokens that are the target's own.
        target: as `load_chain`.

    Raises:
        UserError: as `polybasic.deploy.bench.lossy.tune_lossy`; a temperature; the chain cannot
            be loaded.
    """
    from polybasic.deploy.bench.lossy import tune_lossy
    from polybasic.deploy.planner.measuring.budget import Budget
    from polybasic.deploy.planner.run import first_turns

    with greedy_chain(folder, settings, target, say) as chain:
        prompts, budget = first_turns(chain, settings), Budget(settings.max_seconds)
        return tune_lossy(chain, prompts, quality, settings.max_new_tokens, budget, say)


def greedy_chain(
    folder: Path, settings: "PlanSettings", target: str | None, say: "Callable[[str], None]"
) -> "Chain":
    """A chain to tune a lossy plan of.

    Raises:
        UserError: a temperature; the chain cannot be loaded.
    """
    from polybasic.deploy import load_chain

    if settings.temperature:
        where = f"temperature={settings.temperature:g}"
        raise UserError("a lossy plan does not draw", where, "use temperature 0")
    options = settings.model_dump(include={"dtype", "graphs", "tensor_parallel"})
    return load_chain(folder, target=target, say=say, temperature=0.0, **options)


def write_lossy(path: Path, plan: "Plan") -> None:
    """Write a lossy plan; its judge lies beside it.

    Raises:
        UserError: the disk is full or not writable.
    """
    from polybasic.chain.formats.files import write_json
    from polybasic.chain.formats.plan import Judge

    if isinstance(plan.lossy, Judge):
        plan = _with_judge_at(plan, Path(plan.lossy.file).name)
    write_json(path, plan.model_dump(mode="json"))


def _with_judge_at(plan: "Plan", file: str) -> "Plan":
    from polybasic.chain.formats.plan import Judge

    assert isinstance(plan.lossy, Judge)
    judge = Judge(file=file, threshold=plan.lossy.threshold)
    return plan.model_copy(update={"lossy": judge})


def show_lossy(
    found: Any, quality: float, show: "Callable[[Any, float, Console], None]", as_json: bool
) -> None:
    """Print what was found of a lossy plan, as JSON or for people."""
    from polybasic.chain.base.console import Console

    if as_json:
        typer.echo(json.dumps(found.to_json(), ensure_ascii=False))
    else:
        show(found, quality, Console())


def print_tuning(tuning: "Tuning", quality: float, console: "Console") -> None:
    """Print what a lossy plan gains and loses, and the thresholds that were tried."""
    from polybasic.chain.base.readable import counted
    from polybasic.chain.base.tables import Table

    low, high = tuning.speedup_bounds
    least, most = tuning.quality_bounds
    tuned_on, measured_on = tuning.num_prompts
    lines = [
        f"Lossy: {tuning.speedup:.2f}x of the lossless plan ({low:.2f}-{high:.2f}), "
        f"{tuning.quality:.1%} of tokens the target's own ({least:.1%}-{most:.1%}), "
        f"{tuning.identical:.0%} of answers identical",
        f"Tuned on {counted(tuned_on, 'prompt')}, measured on {counted(measured_on, 'other')} in "
        "turns, after their prompts were read.",
    ]
    if tuning.quality < quality:
        lines.append(
            f"There it is below the {quality:.1%} that were asked for: ask for more, or tune on "
            "more prompts (--num-prompts-per-task)."
        )
    rows = [
        [
            f"{tried.fallback_threshold:g}",
            f"{tried.rollback_threshold:g}",
            f"{tried.speedup:.2f}",
            f"{tried.quality:.3f}",
            f"{tried.identical:.2f}",
        ]
        for tried in tuning.tried
    ]
    header = ["falls back under", "takes back over", "speedup", "quality", "identical"]
    table = Table("Thresholds, on the prompts that were tuned on", header, rows)
    print_thresholds(lines, tuning.left_out, table, console)


def print_thresholds(
    lines: "Sequence[str]", left_out: "Sequence[str]", table: "Table", console: "Console"
) -> None:
    """Print what was found, the most important first, and the thresholds that were tried.

    Args:
        left_out: what there was no time for, in words.
    """
    from polybasic.chain.base.tables import print_table

    first, *others = lines
    console.print(first, style="bold", highlight=False)
    for line in (*others, *(f"Left out for want of time: {what}." for what in left_out)):
        console.print(line, highlight=False)
    console.print()
    print_table(table, console)
