"""Commands that measure a chain on the machine at hand: plan, bench."""

import json
import sys
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.processes.interruption import Interrupted
from polybasic.chain.base.terminal import say
from polybasic.chain.formats.places import command_without_places
from polybasic.recipes.cli.chain import ChainArgument, JsonOption
from polybasic.recipes.cli.shared.devices import NO_LINK, DevicesOption, fleet_in
from polybasic.recipes.cli.shared.lossy import (
    AUTOJUDGE,
    QualityOption,
    RunCodeOption,
    check_lossy,
    lossy_in,
)
from polybasic.recipes.cli.shared.options import (
    KeyFileOption,
    NoGraphsOption,
    RemoteOption,
    SmallOption,
    TargetOption,
    TensorParallelOption,
    TlsCertificateOption,
    WaitOption,
    as_named,
    recipe_defaults,
    remote_options,
    with_small,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from polybasic.deploy.planner.association import Fleet
    from polybasic.deploy.planner.run import Planning
    from polybasic.deploy.planner.settings import BenchSettings, PlanSettings
    from polybasic.recipes.pipeline.prompts import PromptSource
    from polybasic.recipes.schema.loading import Model

PromptsOption = Annotated[
    str | None,
    typer.Option(
        help="A file of prompts or its URL, or shipped ones.  [default: held-out turns of "
        "the run's own conversations, if it had such, else shipped]"
    ),
]
NumPromptsOption = Annotated[int | None, typer.Option(help="Prompts of each task.")]
NewTokensOption = Annotated[
    int | None,
    typer.Option(help="Tokens of one answer.  [default: that of the chain's recipe, else 96]"),
]
TemperatureOption = Annotated[
    float | None,
    typer.Option(help="0 is greedy.  [default: that of the chain's recipe, else 0]"),
]
RuleOption = Annotated[
    str | None,
    typer.Option(
        help="How tokens are drawn: coupled, block, token or auto.  "
        "[default: that of the chain's recipe, else auto]"
    ),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        help="auto, bfloat16, float16 or float32.  [default: that of the chain's recipe, else auto]"
    ),
]


JUDGE_DEFAULTS: dict[str, Any] = {
    "max_seconds": 1800.0,
    "max_new_tokens": 256,
    "num_prompts_per_task": 96,
}
"""A judge's answers are to come to their end, and are many."""


def plan(
    chain: ChainArgument,
    small: SmallOption = None,
    prompts: PromptsOption = None,
    num_prompts_per_task: NumPromptsOption = None,
    max_new_tokens: NewTokensOption = None,
    max_seconds: Annotated[
        float | None,
        typer.Option(
            help="Of measuring; what does not fit is left out.  [default: 120; of autojudge 1800]"
        ),
    ] = None,
    temperature: TemperatureOption = None,
    rule: Annotated[
        str | None,
        typer.Option(
            help="How tokens are drawn: coupled, block, token or auto; bild and autojudge are "
            "lossy, see --quality.  [default: that of the chain's recipe, else auto]"
        ),
    ] = None,
    quality: QualityOption = None,
    run_code: RunCodeOption = False,
    link: Annotated[
        str | None,
        typer.Option(
            help="Plan for a target on another host, by its round trip and bits a second, as in "
            "20ms,100Mbit; --remote measures them."
        ),
    ] = None,
    remote: RemoteOption = None,
    key_file: KeyFileOption = None,
    tls_certificate: TlsCertificateOption = None,
    no_optimism: WaitOption = False,
    devices: DevicesOption = None,
    dtype: DtypeOption = None,
    target: TargetOption = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the plan there, as JSON, and leave the chain as it is."),
    ] = None,
    no_write: Annotated[bool, typer.Option("--no-write", help="Leave the chain as it is.")] = False,
    measurements: Annotated[
        Path | None, typer.Option(help="Also write what was measured there, as JSON.")
    ] = None,
    no_graphs: NoGraphsOption = False,
    tensor_parallel: TensorParallelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure, and choose what runs fastest here.

    Costs and acceptance decide on members, tree and block lengths, which is explained.
    """
    from polybasic.chain.base.console import Console
    from polybasic.chain.formats.chains import resolve_chain
    from polybasic.chain.formats.files import write_json
    from polybasic.deploy.planner.settings import PlanSettings
    from polybasic.recipes.schema.loading import validated

    lossy = check_lossy(
        rule,
        quality,
        out,
        run_code,
        link=link,
        remote=remote,
        no_write=no_write,
        measurements=measurements,
        devices=devices,
    )
    fleet = fleet_in(devices, link=link, remote=remote, measurements=measurements)
    if options := remote_options(remote, key_file, tls_certificate, no_optimism):
        if link is not None:
            raise UserError("two links", f"--link {link} --remote {remote}", "name one of them")
        from polybasic.deploy.runtime.load import measured_link

        link = str(measured_link(chain, target=target, **options))
        say(f"the link to {remote}: {link}")
    given = {
        "prompts": prompts,
        "num_prompts_per_task": num_prompts_per_task,
        "max_new_tokens": max_new_tokens,
        "max_seconds": max_seconds,
        "temperature": temperature,
        "rule": rule if lossy is None else None,
        "link": link if fleet is None else NO_LINK,
        "optimistic": False if no_optimism else None,
        "dtype": dtype,
        "graphs": False if no_graphs else None,
        "tensor_parallel": tensor_parallel,
    }
    given = {key: value for key, value in given.items() if value is not None}
    if rule == AUTOJUDGE:
        given = JUDGE_DEFAULTS | given
    validated(PlanSettings, given, {}, "on the command line")
    folder = resolve_chain(with_small(chain, small))
    settings = _settings(PlanSettings, folder, given)
    if lossy is not None and rule == AUTOJUDGE:
        from polybasic.recipes.cli.shared.judged import plan_judge

        return plan_judge(folder, settings, prompts, run_code, target, *lossy, as_json)
    if lossy is not None:
        return _plan_lossy(folder, settings, target, *lossy, as_json)
    if fleet is not None:
        return _associate(folder, settings, target, fleet, out, as_json)
    records = out is None and not no_write
    planning = _plan(folder, settings, target, records=records)
    if out is not None:
        write_json(out, planning.measured.model_dump(mode="json"))
    if measurements is not None:
        content = [group.to_json() for group in planning.measurements]
        write_json(measurements, content, indent=None)
        say(f"wrote {measurements}")
    if as_json:
        typer.echo(json.dumps(planning.measured.model_dump(mode="json"), ensure_ascii=False))
    else:
        from polybasic.deploy.planner.tables import print_explanation

        print_explanation(planning.measured.explanation, Console())
    if not planning.is_recorded:
        say(f"{'no plan written' if out is None else f'wrote {out}'}; the chain is as it was")
        return
    named = as_named(chain, small)
    following = f"generate {named} --remote HOST:PORT" if link else f"bench {named}"
    say(f"wrote the plan into {folder / 'chain.json'}; next: polybasic {following}")


def bench(
    chain: Annotated[
        str | None,
        typer.Argument(
            metavar="CHAIN",
            help="A chain, or a model alone: a folder, a hub id org/name[@revision], a GGUF file.",
        ),
    ] = None,
    small: SmallOption = None,
    prompts: PromptsOption = None,
    num_prompts_per_task: NumPromptsOption = None,
    max_new_tokens: NewTokensOption = None,
    temperature: TemperatureOption = None,
    rule: RuleOption = None,
    repeats: Annotated[int | None, typer.Option(help="Turns that each system takes.")] = None,
    dtype: DtypeOption = None,
    target: TargetOption = None,
    systems: Annotated[
        str | None, typer.Option(help="Names, separated by commas; auto, all.  [default: auto]")
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(help="Other engines, separated by commas: llama.cpp, openvino, transformers."),
    ] = None,
    peers_python: Annotated[
        str | None,
        typer.Option(help="Of their environment.  [default: .venv-peers/bin/python]"),
    ] = None,
    plan_here: Annotated[
        bool,
        typer.Option("--plan-here", help="Plan on a third of the prompts, measure on the others."),
    ] = False,
    lossy: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Run this plan, too, as of polybasic plan --rule bild --out FILE."
        ),
    ] = None,
    no_plan: Annotated[
        bool,
        typer.Option(
            "--no-plan",
            help="Make no plan where none holds for these settings: run what is there.",
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the report.  [default: the chain's own]")
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="A.json B.json", help="Say what changed between two reports."),
    ] = None,
    no_graphs: NoGraphsOption = False,
    tensor_parallel: TensorParallelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure systems side by side. Writes a report, or compares two."""
    if compare is not None:
        return _compare(*compare, as_json)
    if chain is None:
        raise UserError("no chain", "polybasic bench", "name one, or two reports with --compare")
    from polybasic.chain.base.console import Console
    from polybasic.chain.formats.chains import resolve_chain
    from polybasic.deploy.planner.settings import BenchSettings
    from polybasic.recipes.schema.loading import validated

    given: dict[str, Any] = {
        "prompts": prompts,
        "num_prompts_per_task": num_prompts_per_task,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "rule": rule,
        "repeats": repeats,
        "dtype": dtype,
        "systems": systems and systems.split(","),
        "peers": peers and peers.split(","),
        "peers_python": peers_python,
        "graphs": False if no_graphs else None,
        "tensor_parallel": tensor_parallel,
    }
    given = {key: value for key, value in given.items() if value is not None}
    validated(BenchSettings, given, {}, "on the command line")
    folder, run_beside = resolve_chain(with_small(chain, small)), lossy_in(lossy)
    settings = _settings(BenchSettings, folder, given)
    from polybasic.deploy.runtime.load import serving_conditions

    where = settings.model_dump(include={"dtype", "tensor_parallel"})
    hardware, dtype = serving_conditions(folder, target=target, **where)
    settings = settings.model_copy(update={"dtype": dtype})
    if plan_here and no_plan:
        raise UserError("to plan and not to plan", "--plan-here --no-plan", "give one of them")
    settings, source = _planned(folder, settings, hardware, plan_here, no_plan, target)
    from polybasic.deploy.bench.places import report_place
    from polybasic.deploy.bench.report.terminal import print_report
    from polybasic.deploy.bench.running import bench_chain

    place = out or report_place(folder, settings, source.shown, hardware)
    command = command_without_places(["polybasic", *sys.argv[1:]])
    beside = None if place == folder / "report" else place
    shown = source.shown
    report = bench_chain(folder, settings, say, beside, command, shown, target, run_beside)
    if as_json:
        typer.echo(json.dumps(report.to_json(), ensure_ascii=False))
    else:
        print_report(report, Console())
    say(f"wrote {place / 'report.html'}; next: polybasic inspect {folder if small else chain}")


def _compare(before: Path, after: Path, as_json: bool) -> None:
    from polybasic.chain.base.console import Console
    from polybasic.deploy.bench.comparing import compare
    from polybasic.deploy.bench.report.comparison import print_comparison
    from polybasic.deploy.bench.schema import read_report

    comparison = compare(read_report(before), read_report(after))
    if as_json:
        typer.echo(json.dumps(comparison.model_dump(mode="json"), ensure_ascii=False))
    else:
        print_comparison(comparison, Console())


def _planned(
    folder: Path,
    settings: "BenchSettings",
    hardware: str,
    is_planned_here: bool,
    is_taken_as_it_is: bool,
    target: str | None,
) -> "tuple[BenchSettings, PromptSource]":
    """The settings with a file of prompts, and their source; the chain has been planned then,
    unless it is to be taken as it is."""
    from polybasic.chain.formats.manifest import read_manifest
    from polybasic.deploy.planner.prompts import split_questions
    from polybasic.deploy.planner.settings import PlanSettings
    from polybasic.recipes.pipeline.prompts import PROMPTS_NAME, bench_prompts, with_prompts

    source, path = _written(bench_prompts, settings, folder, PROMPTS_NAME)
    shared = settings.model_dump(include={"temperature", "dtype", "graphs", "tensor_parallel"})
    if settings.rule != "auto":
        shared["rule"] = settings.rule
    if is_planned_here:
        planning, path = split_questions(path, folder / "report")
        say(f"bench: plans on a third of {source.shown}, which is then left out")
        here = _settings(PlanSettings, folder, shared | {"prompts": str(planning)})
        _announce(here)
        _plan(folder, here, target, source.shown)
    elif why := read_manifest(folder).lacks(hardware, settings.dtype, settings.temperature):
        if is_taken_as_it_is:
            say(f"bench: {why}; by --no-plan it runs as it is")
        else:
            say(f"bench: {why}: plans first; --no-plan leaves that out")
            here = _settings(PlanSettings, folder, shared)
            _announce(here)
            _plan(folder, here, target)
    return with_prompts(settings, source, path), source


def _announce(settings: "PlanSettings") -> None:
    say(
        f"bench: planning takes at most about {settings.max_seconds:.0f} seconds beside loading, "
        "and writes the plan into the chain; stopped before its end, it keeps nothing"
    )


def _settings(kind: "type[Model]", folder: Path, given: dict[str, Any]) -> "Model":
    """The given settings, over those of the recipe that the chain was made by."""
    from polybasic.deploy.planner.settings import PlanSettings
    from polybasic.recipes.schema.loading import validated

    section = "plan" if kind is PlanSettings else "bench"
    settings = recipe_defaults(folder, section) | given
    return validated(kind, settings, {}, "on the command line, over the chain's recipe")


def _plan(
    folder: Path,
    settings: "PlanSettings",
    target: str | None,
    named: str = "",
    records: bool = True,
) -> "Planning":
    from polybasic.deploy.planner.run import plan_chain

    with _planned_on(folder, settings, records) as (given, shown):
        return plan_chain(folder, given, say, named or shown, target, records)


def _plan_lossy(
    folder: Path,
    settings: "PlanSettings",
    target: str | None,
    quality: float,
    out: Path,
    as_json: bool,
) -> None:
    from polybasic.recipes.cli.shared.lossy import print_tuning, show_lossy, tuned, write_lossy

    with _planned_on(folder, settings, records=False) as (given, shown):
        say(f"plan: prompts are {shown}")
        tuning = tuned(folder, given, quality, target, say)
    write_lossy(out, tuning.plan)
    show_lossy(tuning, quality, print_tuning, as_json)
    say(f"wrote {out}; next: polybasic generate {folder} --plan {out}")


def _associate(
    folder: Path,
    settings: "PlanSettings",
    target: str | None,
    fleet: "Fleet",
    out: Path | None,
    as_json: bool,
) -> None:
    from polybasic.chain.base.console import Console
    from polybasic.chain.formats.files import write_json
    from polybasic.deploy.planner.association import associate
    from polybasic.recipes.cli.shared.devices import print_association

    (measured,) = _plan(folder, settings, target, records=False).measurements
    association = associate(measured, fleet, settings.grid)
    if out is not None:
        write_json(out, association.to_json())
    if as_json:
        typer.echo(json.dumps(association.to_json(), ensure_ascii=False))
    else:
        print_association(association, Console())
    if out is not None:
        say(f"wrote {out}")


@contextmanager
def _planned_on(
    folder: Path, settings: "PlanSettings", records: bool
) -> "Iterator[tuple[PlanSettings, str]]":
    """Settings with a file of prompts, and what people call these."""
    from polybasic.recipes.pipeline.prompts import PLAN_PROMPTS_NAME, plan_prompts, with_prompts

    with TemporaryDirectory() as elsewhere:
        into = None if records else Path(elsewhere)
        source, path = _written(plan_prompts, settings, folder, PLAN_PROMPTS_NAME, into)
        try:
            yield with_prompts(settings, source, path), source.shown
        except Interrupted as interrupted:
            lost = "the plan was not finished, and nothing of it is kept; run the command again"
            raise Interrupted(interrupted.signal_number, lost) from None


def _written(
    make: "Callable[..., PromptSource]",
    settings: Any,
    folder: Path,
    name: str,
    into: Path | None = None,
) -> "tuple[PromptSource, Path]":
    """Prompts and their file, which is written where it is not there yet.

    Args:
        into: instead of the chain's report.

    The recipe that the chain was made by says which prompts were held out.
    """
    from polybasic.chain.formats.manifest import read_manifest
    from polybasic.recipes.pipeline.prompts import prompts_of_run

    made = read_manifest(folder).provenance
    conversations = made.recipe.get("data", {}).get("conversations", "")
    source, path = make(settings, conversations, "--prompts"), None
    if source.is_heldout:
        source, path = prompts_of_run(source, folder, made, name)
        if path is None:
            say(
                "the held-out conversations of its run are not beside this chain: shipped "
                "prompts stand in for them; --prompts FILE names others"
            )
    return source, path or source.write((into or folder / "report") / name)
