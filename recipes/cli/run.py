"""`polybasic run`, and single stages of it."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.processes.place import Place, place_in
from polybasic.recipes.cli.shared.options import NoGraphsOption

if TYPE_CHECKING:
    from polybasic.recipes.pipeline.running import Workspace
    from polybasic.recipes.schema.recipe import Recipe

RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a shipped recipe.")
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Values to change in the recipe."),
]
OutOption = Annotated[
    Path | None, typer.Option(help="Output folder.  [default: runs/<name of the recipe>]")
]
PresetOption = Annotated[
    str | None,
    typer.Option(
        help="quick, normal or thorough: how long is trained and measured, as shares of what the "
        "recipe says.  [default: normal, as it says]"
    ),
]
DryRunOption = Annotated[
    bool,
    typer.Option("--dry-run", help="Print what would run, its memory, disk and time; then stop."),
]
HardwareOption = Annotated[
    str | None,
    typer.Option(
        help="With --dry-run: the machine that times are estimated for, one of cpu, cpu-avx2, "
        "a100-80gb, h100-80gb, h200, rtx-4090, or several devices: 4xh100-80gb.  "
        "[default: the one here]"
    ),
]
NprocOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Processes to start, one a GPU: sets train.num_processes. Under torchrun, srun and "
        "the like those that there are count.  [default: the recipe's]",
    ),
]


def run(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    out: OutOption = None,
    preset: PresetOption = None,
    dry_run: DryRunOption = False,
    hardware: HardwareOption = None,
    nproc: NprocOption = None,
    no_graphs: NoGraphsOption = False,
) -> None:
    """Run a whole recipe; continues where it was stopped."""
    given = _Given("run", recipe, overrides, out, preset, dry_run, hardware, nproc, no_graphs)
    workspace = _run(given, None)
    if workspace is None:
        return
    from polybasic.chain.base.console import Console
    from polybasic.deploy.bench.report.terminal import print_report
    from polybasic.deploy.bench.schema import read_report
    from polybasic.recipes.pipeline.run import say

    chain = workspace.folder("chain")
    print_report(read_report(chain / "report" / "report.json"), Console())
    typer.echo(f"report: {chain / 'report' / 'report.html'}")
    say(f"chain: {chain}; next: polybasic generate {shlex.quote(str(chain))} -p 'Hello'")


def train(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    out: OutOption = None,
    preset: PresetOption = None,
    dry_run: DryRunOption = False,
    hardware: HardwareOption = None,
    nproc: NprocOption = None,
) -> None:
    """Train the draft heads, and make what that needs."""
    given = _Given("train", recipe, overrides, out, preset, dry_run, hardware, nproc)
    _run_until(given, ("draft", "small_draft"), f"polybasic quantize {recipe}")


def quantize(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    out: OutOption = None,
    preset: PresetOption = None,
    dry_run: DryRunOption = False,
    hardware: HardwareOption = None,
) -> None:
    """Quantize the recipe's models, and make what that needs."""
    given = _Given("quantize", recipe, overrides, out, preset, dry_run, hardware)
    _run_until(given, ("intermediate", "small"), f"polybasic package {recipe}")


def package(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    out: OutOption = None,
    preset: PresetOption = None,
    dry_run: DryRunOption = False,
    hardware: HardwareOption = None,
) -> None:
    """Pack the chain, and make what that needs."""
    given = _Given("package", recipe, overrides, out, preset, dry_run, hardware)
    _run_until(given, ("chain",), "polybasic bench")


@dataclass(frozen=True)
class _Given:
    """What was given on the command line."""

    command: str
    recipe: str
    overrides: list[str] | None
    out: Path | None
    preset: str | None
    dry_run: bool
    hardware: str | None
    nproc: int | None = None
    no_graphs: bool = False

    @property
    def words(self) -> list[str]:
        """The command, to be given again."""
        words = ["polybasic", self.command, self.recipe, *(self.overrides or [])]
        options = {"--out": self.out, "--preset": self.preset, "--nproc": self.nproc}
        for name, value in options.items():
            words += [name, str(value)] if value is not None else []
        return [*words, "--no-graphs"] if self.no_graphs else words


def _run_until(given: _Given, stages: Sequence[str], next_command: str) -> None:
    workspace = _run(given, stages)
    if workspace is None:
        return
    from polybasic.recipes.pipeline.run import say
    from polybasic.recipes.pipeline.stages import stages_of

    names = [stage.name for stage in stages_of(workspace.recipe) if stage.name in stages]
    folders = [workspace.folder(name) for name in names]
    if "chain" in names:
        next_command += f" {shlex.quote(str(folders[-1]))}"
    for folder in folders:
        typer.echo(folder)
    say(f"wrote {', '.join(map(str, folders))}; next: {next_command}")


def _run(given: _Given, only: Sequence[str] | None) -> "Workspace | None":
    """Run those stages of `only` that the recipe has; None after a dry run."""
    from polybasic.recipes.pipeline.run import run_recipe
    from polybasic.recipes.pipeline.stages import stages_of
    from polybasic.recipes.schema.loading import load_recipe
    from polybasic.recipes.schema.presets import preset_overrides

    overrides, nproc = list(given.overrides or []), _num_processes(given.nproc, place_in())
    if nproc is not None:
        overrides.append(f"train.num_processes={nproc}")
    if given.preset is not None:
        overrides = [*preset_overrides(given.recipe, given.preset), *overrides]
    if given.dry_run and given.hardware is not None:
        overrides = [*on_devices(given.hardware), *overrides]
    recipe = load_recipe(given.recipe, overrides)
    if given.no_graphs:
        sections = ["plan", "bench"]
        if recipe.data.regenerate is not None:
            sections.append("data.regenerate")
        overrides += [f"{section}.graphs=false" for section in sections]
        recipe = load_recipe(given.recipe, overrides)
    if only is not None and not {stage.name for stage in stages_of(recipe)} & {*only}:
        raise UserError(
            "nothing to make",
            f"recipe {recipe.name} has no stage {' or '.join(only)}",
            "set train.kind, quantize or small in it, or `polybasic run` it as it is",
        )
    out = given.out or Path("runs") / recipe.name
    if given.dry_run:
        _print_estimate(recipe, out, given.hardware, only)
        return None
    if given.hardware is not None:
        raise UserError(
            "hardware without --dry-run",
            f"--hardware {given.hardware}",
            "it is for estimates: leave it",
        )
    return run_recipe(recipe, out, shlex.join(given.words), only)


def _num_processes(asked: int | None, place: Place) -> int | None:
    """A launcher's processes, or those that are asked for; None leaves it to the recipe.

    Raises:
        UserError: both, and they differ.
    """
    launched = place.world_size
    if launched == 1 or asked == launched:
        return asked
    if asked is not None:
        raise UserError(
            "another number of processes than the launcher has started",
            f"--nproc {asked}, WORLD_SIZE {launched}",
            "leave --nproc, or start polybasic without a launcher",
        )
    return launched


def on_devices(hardware: str) -> list[str]:
    """Overrides by which a recipe is trained and run over all of several devices."""
    from polybasic.recipes.estimates.hardware_profiles import hardware_named

    num_devices = hardware_named(hardware).num_devices
    if num_devices == 1:
        return []
    keys = ("train.num_processes", "plan.tensor_parallel", "bench.tensor_parallel")
    return [f"{key}={num_devices}" for key in keys]


def _print_estimate(
    recipe: "Recipe", out: Path, hardware: str | None, only: Sequence[str] | None
) -> None:
    from polybasic.chain.base.console import Console
    from polybasic.recipes.estimates.dry_run import check_disk, estimate, print_estimates
    from polybasic.recipes.estimates.hardware_profiles import hardware_at_hand, hardware_named
    from polybasic.recipes.estimates.known import known_lines, machine_line
    from polybasic.recipes.pipeline.running import Workspace, closure
    from polybasic.recipes.pipeline.stages import stages_of

    if hardware is None:
        profile, reason = hardware_at_hand()
    else:
        profile, reason = hardware_named(hardware), "by --hardware"
    stages, console = stages_of(recipe), Console()
    estimates = estimate(stages, Workspace(recipe, out), only, profile)
    for line in known_lines(recipe, closure(stages, only)):
        console.print(line, highlight=False)
    if hardware is None:
        console.print(machine_line(), highlight=False)
    print_estimates(estimates, out, profile, reason, console)
    check_disk(estimates, out)
