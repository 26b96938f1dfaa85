"""`polybasic forget`: what a chain's head has learned from answers."""

from typing import Annotated

import typer

from polybasic.chain.base.terminal import say
from polybasic.recipes.cli.chain import ChainArgument
from polybasic.recipes.cli.shared.asking import check_wanted


def forget(
    chain: ChainArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove what a chain's head has learned while it served."""
    from polybasic.chain.formats.chains import resolve_chain
    from polybasic.chain.formats.learned import forget_learned, learned_folder

    folder = learned_folder(resolve_chain(chain))
    if not folder.exists():
        say(f"nothing to remove: no {folder}")
        return
    check_wanted(f"Remove {folder}?", yes)
    forget_learned(resolve_chain(chain))
    say(f"removed {folder}; {chain} drafts as it was packaged")
