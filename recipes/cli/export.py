"""The command that hands a chain's draft head to other engines: export."""

from pathlib import Path
from typing import Annotated

import typer

from polybasic.recipes.cli.chain import ChainArgument, note


def export(
    chain: ChainArgument,
    to: Annotated[str, typer.Option(help="eagle, vllm or sglang.")],
    member: Annotated[
        str | None, typer.Option(help="The draft head's name.  [default: the only one]")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write.  [default: MEMBER-ENGINE]")
    ] = None,
) -> None:
    """Write a draft head as EAGLE's own code, vLLM or SGLang reads it."""
    from polybasic.chain.errors import UserError
    from polybasic.chain.formats.checkpoint import resolve_chain
    from polybasic.chain.heads.export import ENGINES, export_head, launch_command

    engine = next((known for known in ENGINES if known == to), None)
    if engine is None:
        raise UserError("unknown engine", f"--to {to}", f"use one of {', '.join(ENGINES)}")
    exported = export_head(resolve_chain(chain), engine, member, out)
    typer.echo(str(exported.folder))
    for warning in exported.warnings:
        note(f"warning: {warning}")
    if engine != "eagle":
        for folder in exported.four_bit_copies:
            note(f"{folder}, its 4-bit copy, is an ordinary AWQ model: it can be served instead")
    command = launch_command(engine, exported)
    note(f"wrote {exported.member} into {exported.folder}; next: {command}")
