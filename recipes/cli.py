"""The command line: `polybasic`. Imports no model code until a command needs it."""

import sys
import traceback
from importlib.metadata import version
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from polybasic.chain.errors import UserError
from polybasic.recipes import (
    commands_chain,
    commands_doctor,
    commands_export,
    commands_grow,
    commands_measure,
    commands_recipes,
    commands_run,
)
from polybasic.train.interruption import Interrupted, sigterm_raises


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
app.command()(commands_run.run)
app.command()(commands_run.train)
app.command()(commands_run.quantize)
app.command()(commands_run.package)
app.command()(commands_measure.plan)
app.command()(commands_measure.bench)
app.command()(commands_chain.generate)
app.command()(commands_chain.inspect)
app.command()(commands_chain.verify)
app.command()(commands_export.export)
app.command()(commands_grow.grow)
app.add_typer(commands_recipes.app, name="recipes")
app.command()(commands_doctor.doctor)


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
    try:
        with sigterm_raises():
            app(arguments, prog_name="polybasic")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        traceback.print_exc()
        print(f"failed: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)
    sys.exit(0)


if __name__ == "__main__":
    main()
