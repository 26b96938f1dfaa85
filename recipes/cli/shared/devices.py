"""Devices and servers that a file names: who drafts for whom, and how that is shown."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polybasic.chain.base.errors import UserError
from polybasic.recipes.cli.shared.options import first_given

if TYPE_CHECKING:
    from rich.console import Console

    from polybasic.deploy.planner.association import Association, Fleet

DevicesOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="YAML file of devices, servers and the links between them: plan which device drafts "
        "for which server.",
    ),
]
NO_LINK = "0ms"
"""What costs are measured over before each pair's own link is put in."""


def fleet_in(path: Path | None, **others: object) -> "Fleet | None":
    """The devices and servers of a file.

    Args:
        others: what is of one link alone, by option.

    Raises:
        UserError: one of these, no such file, or a mistake in it, by its line.
    """
    if path is None:
        return None
    if given := first_given(**others):
        where = f"--devices --{given}"
        raise UserError("one link beside those of the devices", where, "give one of them")
    from polybasic.deploy.planner.association import Fleet
    from polybasic.recipes.schema.layers import places, read_keys
    from polybasic.recipes.schema.loading import validated

    read = read_keys(path, "file of devices", "name `servers` and `devices` in it")
    return validated(Fleet, read.content, places([read]), str(path))


def print_association(association: "Association", console: "Console") -> None:
    """Print who drafts for whom, what that gains, and what other servers would give."""
    from polybasic.chain.base.readable import counted
    from polybasic.chain.base.tables import Table, print_table
    from polybasic.chain.formats.card import shown_members
    from polybasic.deploy.planner.association import total

    pairs = association.pairs
    seconds = total(pairs)
    headline = f"{counted(len(pairs), 'device')}: {1e3 * seconds / len(pairs):.3g} ms a token"
    if association.nearest is not None:
        times = total(association.nearest) / seconds
        headline += f", {times:.2f} times as fast as by the nearest servers"
    console.print(headline, style="bold", highlight=False)
    header = ["device", "server", "round trip", "block", "ms/token", "gain", "members"]
    rows = [
        [
            device,
            pair.server,
            f"{1e3 * pair.link.round_trip_seconds:g} ms",
            f"{pair.tokens_per_block:.1f}",
            f"{1e3 * pair.seconds:.1f}",
            f"{pair.gain:.2f}x",
            shown_members(pair.best.plan, pair.best.measurements.verifying),
        ]
        for device, pair in pairs.items()
    ]
    notes = [
        "Block: tokens that the server verifies at a time. Gain: over the tokens that its target "
        "would send by itself, with as many answers under way."
    ]
    if any(pair.gain < 1 for pair in pairs.values()):
        notes.append("Where that is below 1x, a device had better let the server answer alone.")
    print_table(Table("", header, rows, tuple(notes), num_text_columns=2, wraps=True), console)
    others = [
        [device, server, f"{1e3 * pair.seconds:.1f}", f"{pair.gain:.2f}x"]
        for device, by_server in association.others.items()
        for server, pair in by_server.items()
    ]
    if others:
        console.print()
        title = "Elsewhere, as one device more"
        print_table(
            Table(title, ["device", "server", "ms/token", "gain"], others, num_text_columns=2),
            console,
        )
