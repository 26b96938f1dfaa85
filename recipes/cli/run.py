"""`polybasic run`, and single stages of it."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polybasic.chain.errors import UserError
from polybasic.recipes.cli.options import NoGraphsOption

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
DryRunOption = Annotated[
    bool,
    typer.Option("--dry-run", help="Print what would run, its memory, disk and time; then stop."),
]
HardwareOption = Annotated[
    str | None,
    typer.Option(
        help="With --dry-run: the machine that times are estimated for, one of cpu, a100-80gb, "
        "h100-80gb, h200, rtx-4090.  [default: the one here]"
    ),
]
NprocOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Processes that train a head, one a GPU: sets train.num_processes.  "
        "[default: the recipe's, or all slots of --hostfile]",
    ),
]
HostfileOption = Annotated[
    Path | None,
    typer.Option(
        help="DeepSpeed hostfile ('host slots=N' a line) of the machines that train a head "
        "together; they see this output folder."
    ),
]


def run(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    out: OutOption = None,
    dry_run: DryRunOption = False,
    hardware: HardwareOption = None,
    nproc: NprocOption = None,
    hostfile: HostfileOption = None,
    no_graphs: NoGraphsOption = False,
) -> None:
    """Run a whole recipe; continues where it was stopped."""
    given = _Given("run", recipe, overrides, out, dry_run, hardware, nproc, hostfile, no_graphs)
    workspace = _run(given, None)
    if workspace is None:
        return
    from polybasic.chain.console import Console
    from polybasic.deploy.bench.report.terminal import print_report
    from polybasic.deploy.bench.schema import read_report
    from polybasic.recipes.pipeline.members import last_chain
    from polybasic.recipes.pipeline.run import say

    chain = workspace.folder(last_chain(workspace.recipe))
    print_report(read_report(chain / "report" / "report.json"), Console())
    typer.echo(f"report: {chain / 'report' / 'report.html'}")
    say(f"chain: {chain}; next: polybasic generate {shlex.quote(str(chain))} -p 'Hello'")


def train(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    out: OutOption = None,
    dry_run: DryRunOption = False,
    hardware: HardwareOption = None,
    nproc: NprocOption = None,
    hostfile: HostfileOption = None,
) -> None:
    """Train the draft heads, and make what that needs."""
    given = _Given("train", recipe, overrides, out, dry_run, hardware, nproc, hostfile)
    _run_until(given, ("draft", "small_draft"), f"polybasic quantize {recipe}")


def quantize(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    out: OutOption = None,
    dry_run: DryRunOption = False,
    hardware: HardwareOption = None,
) -> None:
    """Quantize the recipe's models to 4 bits, and make what that needs."""
    given = _Given("quantize", recipe, overrides, out, dry_run, hardware)
    _run_until(given, ("intermediate", "small"), f"polybasic package {recipe}")


def package(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    out: OutOption = None,
    dry_run: DryRunOption = False,
    hardware: HardwareOption = None,
) -> None:
    """Pack the chain, grow it where the recipe says so, and make what that needs."""
    given = _Given("package", recipe, overrides, out, dry_run, hardware)
    _run_until(given, ("chain", "grown"), "polybasic bench")


@dataclass(frozen=True)
class _Given:
    """What was given on the command line."""

    command: str
    recipe: str
    overrides: list[str] | None
    out: Path | None
    dry_run: bool
    hardware: str | None
    nproc: int | None = None
    hostfile: Path | None = None
    no_graphs: bool = False

    @property
    def words(self) -> list[str]:
        """The command, to be given again."""
        words = ["polybasic", self.command, self.recipe, *(self.overrides or [])]
        options = {"--out": self.out, "--nproc": self.nproc, "--hostfile": self.hostfile}
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
    from polybasic.recipes.schema.loading import load_recipe
    from polybasic.train.run.hosts import read_hostfile

    overrides, nproc = list(given.overrides or []), given.nproc
    if nproc is None and given.hostfile is not None:
        nproc = sum(host.slots for host in read_hostfile(given.hostfile))
    if nproc is not None:
        overrides.append(f"train.num_processes={nproc}")
    recipe = load_recipe(given.recipe, overrides)
    if given.no_graphs:
        sections = ["plan", "bench"]
        if recipe.data.regenerate is not None:
            sections.append("data.regenerate")
        overrides += [f"{section}.graphs=false" for section in sections]
        recipe = load_recipe(given.recipe, overrides)
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
    return run_recipe(recipe, out, shlex.join(given.words), only, given.hostfile)


def _print_estimate(
    recipe: "Recipe", out: Path, hardware: str | None, only: Sequence[str] | None
) -> None:
    from polybasic.chain.console import Console
    from polybasic.recipes.estimates.dry_run import check_disk, estimate, print_estimates
    from polybasic.recipes.estimates.hardware_profiles import hardware_at_hand, hardware_named
    from polybasic.recipes.pipeline.running import Workspace
    from polybasic.recipes.pipeline.stages import stages_of

    if hardware is None:
        profile, reason = hardware_at_hand()
    else:
        profile, reason = hardware_named(hardware), "by --hardware"
    estimates = estimate(stages_of(recipe), Workspace(recipe, out), only, profile)
    print_estimates(estimates, out, profile, reason, Console())
    check_disk(estimates, out)
