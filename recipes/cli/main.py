"""The command line: `polybasic`. Imports no model code until a command needs it."""

import io
import os
import sys
import traceback
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from importlib.metadata import version
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from polybasic.chain.base.errors import LostProcessError, UserError
from polybasic.chain.base.logs import logging_as
from polybasic.chain.base.processes.coordinator import end_all, is_of_a_lost_process, show, watch
from polybasic.chain.base.processes.interruption import Interrupted, signals_raise
from polybasic.chain.base.processes.joining import joined, leave
from polybasic.chain.base.processes.place import place_in
from polybasic.chain.base.terminal import ShownStream
from polybasic.recipes.cli import (
    cache,
    chain,
    chat,
    doctor,
    export,
    forget,
    measure,
    migrate,
    recipes,
    run,
    runs,
    serve,
    serve_target,
    trace,
    warmup,
)
from polybasic.recipes.cli.shared.lacking import what_is_lacking
from polybasic.recipes.cli.shared.logs import (
    LogJsonOption,
    LogLevelOption,
    VerboseOption,
    without_log_options,
)

_OF_ALL = ("run", "train", "quantize", "package")
"""Commands that all processes of a launcher run. Those with `--tensor-parallel` keep the others as
followers; any other one is the first process's."""


class _Stopped(Exception):
    """`Interrupted`, which typer would take for Ctrl-C."""

    def __init__(self, interrupted: Interrupted) -> None:
        self.interrupted = interrupted


class _Commands(TyperGroup):
    """Commands of one process or of several, that say what a signal left behind."""

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:  # type: ignore[override]
        found = super().resolve_command(ctx, args)
        options = [option.name for option in found[1].params] if found[1] else []
        if not (found[0] in _OF_ALL or "tensor_parallel" in options or place_in().is_first):
            ctx.exit()
        return found

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except Interrupted as interrupted:
            raise _Stopped(interrupted) from interrupted


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
app.command()(serve_target.serve_target)
app.command()(forget.forget)
app.command()(trace.trace)
app.command()(chain.inspect)
app.command()(chain.verify)
app.command()(migrate.migrate)
app.command()(export.export)
app.command()(warmup.warmup)
app.add_typer(runs.app, name="runs")
app.add_typer(cache.app, name="cache")
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
    verbose: VerboseOption = False,
    log_level: LogLevelOption = None,
    log_json: LogJsonOption = False,
) -> None:
    """Make a language model answer faster without changing a single probability."""


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 done, 1 failed, 2 user error, 130 or 143 interrupted."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # of a locale that lacks a character, rather than nothing at all
            stream.reconfigure(errors="backslashreplace")
    with (
        redirect_stdout(ShownStream(sys.stdout)),
        redirect_stderr(ShownStream(sys.stderr)),
        ExitStack() as opened,
    ):
        try:
            words, logs = without_log_options(sys.argv[1:] if arguments is None else arguments)
        except UserError as error:
            code, text = _ending(error)
            show(text)
        else:
            opened.enter_context(logging_as(logs))
            code = _exit_code(words)
        try:
            sys.stdout.flush()
        except OSError as error:
            # what cannot be written is not tried again when the interpreter ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if code == 0 and not isinstance(error, BrokenPipeError):
                code, text = _ending(error)
                show(text)
        sys.exit(code)


def _exit_code(arguments: list[str]) -> int:
    """Of this process, and of all that a launcher has started with it."""
    try:
        with signals_raise(), ExitStack() as opened:
            place = place_in()
            if place.world_size > 1:
                opened.enter_context(joined())
                watch()
            try:
                app(arguments, prog_name="polybasic")
            except BaseException as error:
                code = end_all(*_ending(error))
                if code == 0 and place.world_size > 1:
                    leave()
                return code
    except BaseException as error:
        code, text = _ending(error)
        show(text)
        return code
    return 0


def _ending(error: BaseException) -> tuple[int, str]:
    """Exit code, and what to say."""
    if isinstance(error, SystemExit):
        return (error.code if isinstance(error.code, int) else 1 if error.code else 0), ""
    if isinstance(error, _Stopped):
        interrupted = error.interrupted
        return interrupted.exit_code, f"interrupted by {interrupted}"
    if isinstance(error, UserError):
        return 2, f"error: {error}"
    if isinstance(error, LostProcessError):
        return 1, f"failed: {error}"
    if isinstance(error, KeyboardInterrupt):
        return 130, ""
    if (lacking := what_is_lacking(error)) is not None:
        return 2, f"error: {lacking}"
    if is_of_a_lost_process(error):
        return 1, "failed: another process has ended without a word; see what ended it"
    trace = "".join(traceback.format_exception(error))
    return 1, f"{trace}failed: {type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
