"""The command line: `polybasic`. Imports no model code until a command needs it."""

import io
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from importlib.metadata import version
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from polybasic.chain.errors import UserError
from polybasic.chain.terminal import ShownStream
from polybasic.recipes.cli import (
    chain,
    chat,
    doctor,
    export,
    grow,
    measure,
    recipes,
    run,
    serve,
)
from polybasic.recipes.cli.lacking import what_is_lacking
from polybasic.train.run.interruption import Interrupted, sigterm_raises


class _Commands(TyperGroup):
    """Commands that say what a signal left behind, and exit with its code."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except Interrupted as interrupted:  # typer knows Ctrl-C alone
            print(f"interrupted by {interrupted}", file=sys.stderr)
            ctx.exit(interrupted.exit_code)


app = typer.Typer(
    name="polybasic",
    cls=_Commands,
    help="Make a language model answer faster without changing a single probability.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
app.command()(run.run)
app.command()(run.train)
app.command()(run.quantize)
app.command()(run.package)
app.command()(measure.plan)
app.command()(measure.bench)
app.command()(chain.generate)
app.command()(chat.chat)
app.command()(serve.serve)
app.command()(chain.inspect)
app.command()(chain.verify)
app.command()(export.export)
app.command()(grow.grow)
app.add_typer(recipes.app, name="recipes")
app.command()(doctor.doctor)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"polybasic {version('polybasic')}")
        raise typer.Exit


@app.callback()
def polybasic(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Make a language model answer faster without changing a single probability."""


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 done, 1 failed, 2 user error, 130 or 143 interrupted."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # of a locale that lacks a character, rather than nothing at all
            stream.reconfigure(errors="backslashreplace")
    with redirect_stdout(ShownStream(sys.stdout)), redirect_stderr(ShownStream(sys.stderr)):
        sys.exit(_exit_code(arguments))


def _exit_code(arguments: list[str] | None) -> Any:
    try:
        with sigterm_raises():
            app(arguments, prog_name="polybasic")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if (lacking := what_is_lacking(error)) is not None:
            print(f"error: {lacking}", file=sys.stderr)
            return 2
        traceback.print_exc()
        print(f"failed: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    main()
