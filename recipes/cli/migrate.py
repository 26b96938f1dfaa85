"""The command that brings a chain of an older version to the present one: migrate."""

import shlex
from typing import Annotated

import typer

from polybasic.chain.base.terminal import say


def migrate(
    chain: Annotated[str, typer.Argument(metavar="CHAIN", help="A chain's folder.")],
) -> None:
    """Bring an older chain's manifest to the present version."""
    from polybasic.chain.formats.chains import resolve_chain
    from polybasic.chain.formats.manifest import SCHEMA
    from polybasic.chain.formats.migration import migrate_chain

    folder = resolve_chain(chain)
    done = migrate_chain(folder)
    written = shlex.quote(str(folder))
    if done is None:
        say(f"{folder} is of {SCHEMA} already; nothing was changed")
        return
    say(f"migrated {folder} from {done.schema} to {SCHEMA}; {done.kept.name} is as it was")
    if done.left_out:
        say(
            f"left out: {' and '.join(done.left_out)}, which were measured by older kernels; "
            f"next: polybasic plan {written}"
        )
    else:
        say(f"next: polybasic verify {written}")
