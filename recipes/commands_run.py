"""`polybasic run`, and single stages of it."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from polybasic.recipes.pipeline import Workspace

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


def run(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    out: OutOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Run a whole recipe; continues where it was stopped."""
    workspace = _run("run", recipe, overrides, out, dry_run, None)
    if workspace is None:
        return
    from rich.console import Console

    from polybasic.chain.files import read_json
    from polybasic.deploy.report import print_report
    from polybasic.recipes.run import say

    chain = workspace.folder("chain")
    print_report(read_json(chain / "report" / "report.json", "report"), Console())
    typer.echo(f"report: {chain / 'report' / 'report.md'}")
    say(f"chain: {chain}; next: polybasic generate {shlex.quote(str(chain))} -p 'Hello'")


def train(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    out: OutOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Train the draft heads, and make what that needs."""
    stages = ("draft", "small_draft")
    _run_until("train", stages, f"polybasic quantize {recipe}", recipe, overrides, out, dry_run)


def quantize(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    out: OutOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Quantize the recipe's models to 4 bits, and make what that needs."""
    stages = ("intermediate", "small")
    _run_until("quantize", stages, f"polybasic package {recipe}", recipe, overrides, out, dry_run)


def package(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    out: OutOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Pack the chain, and make what that needs."""
    _run_until("package", ("chain",), "polybasic bench", recipe, overrides, out, dry_run)


def _run_until(
    command: str,
    stages: Sequence[str],
    next_command: str,
    recipe: str,
    overrides: list[str] | None,
    out: Path | None,
    dry_run: bool,
) -> None:
    workspace = _run(command, recipe, overrides, out, dry_run, stages)
    if workspace is None:
        return
    from polybasic.recipes.run import say
    from polybasic.recipes.stages import stages_of

    names = [stage.name for stage in stages_of(workspace.recipe) if stage.name in stages]
    folders = [workspace.folder(name) for name in names]
    if names == ["chain"]:
        next_command += f" {shlex.quote(str(folders[0]))}"
    for folder in folders:
        typer.echo(folder)
    say(f"wrote {', '.join(map(str, folders))}; next: {next_command}")


def _run(
    command: str,
    name_or_path: str,
    overrides: list[str] | None,
    out: Path | None,
    dry_run: bool,
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
        from rich.console import Console

        from polybasic.recipes.estimate import check_disk, estimate, print_estimates
        from polybasic.recipes.pipeline import Workspace
        from polybasic.recipes.stages import stages_of

        estimates = estimate(stages_of(recipe), Workspace(recipe, out), only)
        print_estimates(estimates, out, Console())
        check_disk(estimates, out)
        return None
    return run_recipe(recipe, out, shlex.join(words), only)
