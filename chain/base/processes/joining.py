"""The group of a launcher's processes, for those that may well be alone: torch is not imported."""

from collections.abc import Iterator
from contextlib import contextmanager

from polybasic.chain.base.processes.coordinator import silent_unless_first
from polybasic.chain.base.processes.place import Place, place_in


@contextmanager
def joined() -> Iterator[Place]:
    """The group of all processes that a launcher has started; one that is alone needs none.

    Of several the first one alone writes to stdout and stderr, as far as Python writes.

    Raises:
        UserError: as `polybasic.chain.base.processes.group.process_group`.
    """
    place = place_in()
    if place.world_size == 1:
        yield place
        return
    from polybasic.chain.base.processes.group import process_group

    with process_group(), silent_unless_first(place):
        yield place


def leave() -> None:
    """Take down the group of a command that all processes have ended; NCCL would warn of it."""
    from torch import distributed

    distributed.destroy_process_group()
