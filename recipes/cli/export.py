"""The command that hands what a chain holds to other engines: export."""

from pathlib import Path
from typing import Annotated

import typer

from polybasic.chain.base.terminal import say
from polybasic.recipes.cli.chain import ChainArgument
from polybasic.recipes.cli.shared.options import TargetOption

GGUF = "gguf"


def export(
    chain: ChainArgument,
    to: Annotated[str, typer.Option(help="eagle, vllm, sglang, int8 or gguf.")],
    member: Annotated[
        str | None,
        typer.Option(
            help="Name of the draft head, or of the model for gguf.  [default: the only head; the "
            "target and its intermediates]"
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write.  [default: MEMBER-ENGINE]")
    ] = None,
    target: TargetOption = None,
) -> None:
    """Write draft heads for other engines, models for llama.cpp."""
    from polybasic.chain.base.errors import UserError
    from polybasic.chain.formats.chains import resolve_chain
    from polybasic.chain.heads.export import (
        ENGINES,
        INT8,
        export_compact,
        export_head,
        launch_command,
    )

    if to == GGUF:
        _export_models(resolve_chain(chain), member, out, target)
        return
    if to == INT8:
        folder = export_compact(resolve_chain(chain), member, out, target)
        typer.echo(str(folder))
        say(f"wrote the head in 8 bits; next: polybasic run own-model draft.model={folder}")
        return
    engine = next((known for known in ENGINES if known == to), None)
    if engine is None:
        known = ", ".join((*ENGINES, INT8, GGUF))
        raise UserError("unknown engine", f"--to {to}", f"use one of {known}")
    exported = export_head(resolve_chain(chain), engine, member, out, target)
    typer.echo(str(exported.folder))
    for warning in exported.warnings:
        say(f"warning: {warning}")
    if engine != "eagle":
        for folder in exported.four_bit_copies:
            say(f"{folder}, its 4-bit copy, is an ordinary AWQ model: it can be served instead")
    command = launch_command(engine, exported)
    say(f"wrote {exported.member} into {exported.folder}; next: {command}")


def _export_models(chain: Path, member: str | None, out: Path | None, target: str | None) -> None:
    """Write models for llama.cpp."""
    from polybasic.chain.base.readable import readable_bytes
    from polybasic.chain.formats.gguf.export import export_gguf

    exported = export_gguf(chain, member, out, target)
    typer.echo(str(exported.folder))
    for warning in exported.warnings:
        say(f"warning: {warning}")
    for file in exported.files.values():
        say(f"{file}: {readable_bytes(file.stat().st_size)}")
    say(f"next: {exported.command}")
