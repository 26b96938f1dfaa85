"""`polybasic run`, and single stages of it."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polybasic.chain.errors import UserError

if TYPE_CHECKING:
    from polybasic.recipes.pipeline import Workspace
    from polybasic.recipes.schema import Recipe

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


def run(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    out: OutOption = None,
    dry_run: DryRunOption = False,
    hardware: HardwareOption = None,
) -> None:
    """Run a whole recipe; continues where it was stopped."""
    workspace = _run("run", recipe, overrides, out, dry_run, hardware, None)
    if workspace is None:
        return
    from rich.console import Console

    from polybasic.chain.files import read_json
    from polybasic.deploy.report import print_report
    from polybasic.recipes.members import last_chain
    from polybasic.recipes.run import say

    chain = workspace.folder(last_chain(workspace.recipe))
    print_report(read_json(chain / "report" / "report.json", "report"), Console())
    typer.echo(f"report: {chain / 'report' / 'report.md'}")
    say(f"chain: {chain}; next: polybasic generate {shlex.quote(str(chain))} -p 'Hello'")


def train(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    out: OutOption = None,
    dry_run: DryRunOption = False,
    hardware: HardwareOption = None,
) -> None:
    """Train the draft heads, and make what that needs."""
    stages = ("draft", "small_draft")
    given = (recipe, overrides, out, dry_run, hardware)
    _run_until("train", stages, f"polybasic quantize {recipe}", *given)


def quantize(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    out: OutOption = None,
    dry_run: DryRunOption = False,
    hardware: HardwareOption = None,
) -> None:
    """Quantize the recipe's models to 4 bits, and make what that needs."""
    stages = ("intermediate", "small")
    given = (recipe, overrides, out, dry_run, hardware)
    _run_until("quantize", stages, f"polybasic package {recipe}", *given)


def package(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    out: OutOption = None,
    dry_run: DryRunOption = False,
    hardware: HardwareOption = None,
) -> None:
    """Pack the chain, grow it where the recipe says so, and make what that needs."""
    given = (recipe, overrides, out, dry_run, hardware)
    _run_until("package", ("chain", "grown"), "polybasic bench", *given)


def _run_until(
    command: str,
    stages: Sequence[str],
    next_command: str,
    recipe: str,
    overrides: list[str] | None,
    out: Path | None,
    dry_run: bool,
    hardware: str | None,
) -> None:
    workspace = _run(command, recipe, overrides, out, dry_run, hardware, stages)
    if workspace is None:
        return
    from polybasic.recipes.run import say
    from polybasic.recipes.stages import stages_of

    names = [stage.name for stage in stages_of(workspace.recipe) if stage.name in stages]
    folders = [workspace.folder(name) for name in names]
    if "chain" in names:
        next_command += f" {shlex.quote(str(folders[-1]))}"
    for folder in folders:
        typer.echo(folder)
    say(f"wrote {', '.join(map(str, folders))}; next: {next_command}")


def _run(
    command: str,
    name_or_path: str,
    overrides: list[str] | None,
    out: Path | None,
    dry_run: bool,
    hardware: str | None,
    only: Sequence[str] | None,
) -> "Workspace | None":
    """Run those stages of `only` that the recipe has; None after a dry run."""
    from polybasic.recipes.loading import load_recipe
    from polybasic.recipes.run import run_recipe

    recipe = load_recipe(name_or_path, overrides)
    words = ["polybasic", command, name_or_path, *(overrides or [])]
    if out is None:
        out = Path("runs") / recipe.name
    else:
        words += ["--out", str(out)]
    if dry_run:
        _foretell(recipe, out, hardware, only)
        return None
    if hardware is not None:
        raise UserError(
            "hardware without --dry-run", f"--hardware {hardware}", "it is for estimates: leave it"
        )
    return run_recipe(recipe, out, shlex.join(words), only)


def _foretell(
    recipe: "Recipe", out: Path, hardware: str | None, only: Sequence[str] | None
) -> None:
    from rich.console import Console

    from polybasic.recipes.estimate import check_disk, estimate, print_estimates
    from polybasic.recipes.hardware_profiles import hardware_at_hand, hardware_named
    from polybasic.recipes.pipeline import Workspace
    from polybasic.recipes.stages import stages_of

    if hardware is None:
        profile, reason = hardware_at_hand()
    else:
        profile, reason = hardware_named(hardware), "by --hardware"
    estimates = estimate(stages_of(recipe), Workspace(recipe, out), only, profile)
    print_estimates(estimates, out, profile, reason, Console())
    check_disk(estimates, out)
