"""Questions before something is removed."""

import sys

import typer

from polybasic.chain.base.errors import UserError


def check_wanted(question: str, is_yes: bool) -> None:
    """Ask on the terminal, unless --yes has answered.

    Raises:
        UserError: there is nobody to ask.
        typer.Exit: the answer is no.
    """
    if is_yes:
        return
    if not sys.stdin.isatty():
        raise UserError("no terminal to ask on", question, "give --yes")
    if not typer.confirm(question, err=True):
        raise typer.Exit(1)
