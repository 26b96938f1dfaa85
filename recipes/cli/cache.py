"""`polybasic cache`: what was compiled, chosen and timed for this machine."""

import json
import time
from typing import TYPE_CHECKING, Annotated

import typer

from polybasic.chain.base.readable import counted, readable_bytes
from polybasic.chain.base.terminal import say
from polybasic.recipes.cli.shared.asking import check_wanted

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from polybasic.chain.kernels.cached import Cached

app = typer.Typer(
    help="List and clear what was compiled, chosen and timed here.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command("ls")
def list_cached(
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")] = False,
) -> None:
    """List compiled kernels, choices of kernels and timed products, with sizes and last use."""
    from polybasic.chain.base.console import Console
    from polybasic.chain.base.tables import Table, print_table

    folder, found = _found()
    if as_json:
        content = [
            {
                "what": kind.what,
                "folder": str(kind.folder),
                "num_files": kind.num_files,
                "num_bytes": kind.num_bytes,
                "used": kind.used,
            }
            for kind in found
        ]
        typer.echo(json.dumps(content))
        return
    typer.echo(f"cache folder: {folder}")
    rows = [
        [
            kind.what,
            f"{kind.num_files:,}",
            readable_bytes(kind.num_bytes),
            _day(kind.used),
            f"{where}/",
        ]
        for kind in found
        for where in [kind.folder.name]
    ]
    if rows:
        header = ["what", "files", "size", "last used", "where"]
        print_table(Table("", header, rows, text_columns=("where",)), Console())
    else:
        typer.echo("nothing in it")
    say(
        "not ours, and not listed: models from the hub (`hf cache ls`), kernels that Triton "
        "compiled (TRITON_CACHE_DIR, else ~/.triton)"
    )


@app.command()
def clear(
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove all that `ls` lists; it is made again when it is needed."""
    from polybasic.chain.formats.files import disk_errors
    from polybasic.chain.kernels.cached import clear as clear_found

    folder, found = _found()
    if not found:
        say(f"nothing to remove in {folder}")
        return
    num_files = counted(sum(kind.num_files for kind in found), "file")
    size = readable_bytes(sum(kind.num_bytes for kind in found))
    names = ", ".join(f"{kind.folder.name}/" for kind in found)
    check_wanted(f"Remove {num_files} ({size}) of {names} in {folder}?", yes)
    with disk_errors(folder):
        clear_found(found)
    say(f"removed {num_files} ({size}); next: polybasic warmup CHAIN")


def _found() -> "tuple[Path, Sequence[Cached]]":
    from polybasic.chain.base.caching import CACHE_VARIABLE, cache_folder
    from polybasic.chain.base.errors import UserError
    from polybasic.chain.kernels.cached import cached

    try:
        return cache_folder(), cached()
    except RuntimeError as error:
        do = f"set {CACHE_VARIABLE} or HOME to a folder"
        raise UserError("no cache folder", str(error), do) from error


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(seconds))
