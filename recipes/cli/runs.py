"""`polybasic runs`: folders that runs have written."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from polybasic.chain.base.readable import counted, readable_bytes
from polybasic.chain.base.terminal import say
from polybasic.recipes.cli.shared.asking import check_wanted

app = typer.Typer(
    help="List and remove folders that runs have written.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
_FOLDER = Path("runs")


@app.command("ls")
def list_runs(
    folder: Annotated[Path, typer.Argument(help="Where they lie.")] = _FOLDER,
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")] = False,
) -> None:
    """List runs: recipe, size, when they changed last, and which stages are whole."""
    from polybasic.chain.base.console import Console
    from polybasic.chain.base.tables import Table, print_table
    from polybasic.recipes.pipeline.kept_runs import runs_in

    found = runs_in(folder)
    if as_json:
        typer.echo(json.dumps([asdict(run) | {"folder": str(run.folder)} for run in found]))
        return
    if not found:
        say(f"no runs in {folder}; next: polybasic recipes ls")
        return
    rows = []
    for run in found:
        changed = time.strftime("%Y-%m-%d", time.localtime(run.changed))
        stages = f"whole: {', '.join(run.whole) or 'none'}"
        stages += f"\nleft: {', '.join(run.left)}" if run.left else ""
        recipe = run.recipe or "of another version"
        rows.append([run.folder.name, recipe, readable_bytes(run.num_bytes), changed, stages])
    header = ["run", "recipe", "size", "changed", "stages"]
    print_table(Table("", header, rows, num_text_columns=2, wraps=True), Console())


@app.command("rm")
def remove_runs(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Folders of runs, or their names in runs/."),
    ],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove runs with their chains and reports; a folder that is no run is refused."""
    from polybasic.recipes.pipeline.kept_runs import kept_run, remove_run

    named = [Path(name) if Path(name).exists() else _FOLDER / name for name in runs]
    found = [kept_run(folder) for folder in named]
    size = readable_bytes(sum(run.num_bytes for run in found))
    names = ", ".join(str(run.folder) for run in found)
    check_wanted(f"Remove {counted(len(found), 'run')} ({size}): {names}?", yes)
    for run in found:
        remove_run(run.folder)
        say(f"removed {run.folder}")
