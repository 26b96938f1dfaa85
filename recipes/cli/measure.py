"""Commands that measure a chain on the machine at hand: plan, bench."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polybasic.recipes.cli.chain import ChainArgument, JsonOption, note
from polybasic.recipes.cli.options import NoGraphsOption

if TYPE_CHECKING:
    from polybasic.deploy.planner.run import Planning
    from polybasic.deploy.settings import PlanSettings

PromptsOption = Annotated[
    str | None,
    typer.Option(
        help="A Spec-Bench question file or its URL.  [default: embedded, held-out prompts]"
    ),
]
NumPromptsOption = Annotated[int | None, typer.Option(help="Prompts of each task.")]
NewTokensOption = Annotated[int | None, typer.Option(help="Tokens of one answer.")]
TemperatureOption = Annotated[float | None, typer.Option(help="0 is greedy.")]
DtypeOption = Annotated[str | None, typer.Option(help="auto, bfloat16, float16 or float32.")]


def plan(
    chain: ChainArgument,
    prompts: PromptsOption = None,
    num_prompts_per_task: NumPromptsOption = None,
    max_new_tokens: NewTokensOption = None,
    max_seconds: Annotated[
        float | None,
        typer.Option(help="Of measuring; what does not fit is left out.  [default: 120]"),
    ] = None,
    temperature: TemperatureOption = None,
    reproducible: Annotated[
        bool, typer.Option("--reproducible", help="Among plans under which a seed means a text.")
    ] = False,
    dtype: DtypeOption = None,
    measurements: Annotated[
        Path | None, typer.Option(help="Also write what was measured there, as JSON.")
    ] = None,
    no_graphs: NoGraphsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure costs and acceptance, choose members, tree and flush lengths, and explain."""
    from polybasic.chain.console import Console
    from polybasic.chain.formats.checkpoint import resolve_chain
    from polybasic.chain.formats.files import write_json
    from polybasic.deploy.settings import PlanSettings
    from polybasic.recipes.schema.loading import validated

    given = {
        "prompts": prompts,
        "num_prompts_per_task": num_prompts_per_task,
        "max_new_tokens": max_new_tokens,
        "max_seconds": max_seconds,
        "temperature": temperature,
        "reproducible": reproducible or None,
        "dtype": dtype,
        "graphs": False if no_graphs else None,
    }
    given = {key: value for key, value in given.items() if value is not None}
    settings = validated(PlanSettings, given, {}, "on the command line")
    folder = resolve_chain(chain)
    planning = _plan(folder, settings)
    if measurements is not None:
        content = [one.to_json() for one in planning.measurements]
        write_json(measurements, content, indent=None)
        note(f"wrote {measurements}")
    if as_json:
        typer.echo(json.dumps(planning.measured.model_dump(mode="json"), ensure_ascii=False))
    else:
        from polybasic.deploy.planner.tables import print_explanation

        print_explanation(planning.measured.explanation, Console())
    note(f"wrote the plan into {folder / 'chain.json'}; next: polybasic bench {chain}")


def bench(
    chain: ChainArgument,
    prompts: PromptsOption = None,
    num_prompts_per_task: NumPromptsOption = None,
    max_new_tokens: NewTokensOption = None,
    temperature: TemperatureOption = None,
    repeats: Annotated[int | None, typer.Option(help="Turns that each system takes.")] = None,
    dtype: DtypeOption = None,
    systems: Annotated[str | None, typer.Option(help="Names, separated by commas.")] = None,
    no_graphs: NoGraphsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure the chain's systems side by side; writes its report."""
    from polybasic.chain.console import Console
    from polybasic.chain.formats.checkpoint import resolve_chain
    from polybasic.deploy.settings import BenchSettings, PlanSettings
    from polybasic.recipes.pipeline.prompts import bench_prompts
    from polybasic.recipes.schema.loading import validated

    given: dict[str, Any] = {
        "prompts": prompts,
        "num_prompts_per_task": num_prompts_per_task,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "repeats": repeats,
        "dtype": dtype,
        "systems": systems.split(",") if systems else None,
        "graphs": False if no_graphs else None,
    }
    given = {key: value for key, value in given.items() if value is not None}
    settings = validated(BenchSettings, given, {}, "on the command line")
    folder = resolve_chain(chain)
    if not _has_plan(folder):
        note(f"{chain} has no plan that was measured on this machine: measuring it first")
        shared = settings.model_dump(include={"temperature", "dtype", "graphs"})
        _plan(folder, PlanSettings(**shared))
    source = bench_prompts(settings, _seed(folder), "--prompts")
    path = source.write(folder / "report" / "prompts.jsonl")
    settings = settings.model_copy(update={"prompts": str(path)})
    from polybasic.deploy.bench.report import print_report
    from polybasic.deploy.bench.running import bench_chain

    report = bench_chain(folder, settings, note)
    if as_json:
        typer.echo(json.dumps(report, ensure_ascii=False))
    else:
        print_report(report, Console())
    note(f"wrote {folder / 'report' / 'report.md'}; next: polybasic inspect {chain}")


def _plan(folder: Path, settings: "PlanSettings") -> "Planning":
    from polybasic.deploy.planner.run import plan_chain
    from polybasic.recipes.pipeline.prompts import plan_prompts

    source = plan_prompts(settings, _seed(folder), "--prompts")
    path = source.write(folder / "report" / "calibration.jsonl")
    return plan_chain(folder, settings.model_copy(update={"prompts": str(path)}), note)


def _has_plan(folder: Path) -> bool:
    import torch

    from polybasic.chain.formats.manifest import read_manifest
    from polybasic.deploy.hardware import hardware_name

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return read_manifest(folder).plan_for(hardware_name(device)) is not None


def _seed(folder: Path) -> int:
    """Of the recipe that the chain was made by: its prompts were held out."""
    from polybasic.chain.formats.manifest import read_manifest

    seed: int = read_manifest(folder).provenance.recipe.get("seed", 0)
    return seed
