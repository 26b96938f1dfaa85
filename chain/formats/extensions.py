"""Tables of records, to which installed packages add theirs by entry points."""

from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import EntryPoints, entry_points
from pkgutil import resolve_name
from typing import Any, TypeVar

from polybasic.chain.base.errors import UserError

Record = TypeVar("Record")


class Registry(Mapping[str, Record]):
    """Records by name: those of this project, and those that installed packages add.

    An entry point has the name of its record. What it names is imported when that record is asked
    for, and a name that this project has is never looked up among the entry points.

    Args:
        group: of the entry points.
        key: attribute of a record that is its name.
        own: this project's records.
    """

    def __init__(self, group: str, key: str, *own: Record) -> None:
        self.group, self.own = group, own
        self._key, self._class = key, type(own[0])
        self._by_name = {getattr(record, key): record for record in own}

    def __getitem__(self, name: str) -> Record:
        """The record of this name.

        Raises:
            KeyError: there is none.
            UserError: two packages add it, or what its entry point names cannot be imported or is
                no such record.
        """
        if not isinstance(name, str):  # as a malformed file may have it
            raise KeyError(name)
        if name in self._by_name:
            return self._by_name[name]
        references = [entry.value for entry in offered(self.group) if entry.name == name]
        if not references:
            raise KeyError(name)
        where = f"entry point {name} of {self.group}"
        if len(references) > 1:
            shown = " and ".join(references)
            raise UserError("several packages add one name", f"{where} is {shown}", "uninstall one")
        record = resolve(references[0], where)
        if not isinstance(record, self._class) or getattr(record, self._key) != name:
            raise UserError(
                "entry point names something else",
                f"{where} is {references[0]}, no {self._class.__name__} with {self._key} {name!r}",
                "mend or uninstall the package that has it",
            )
        return record

    def __iter__(self) -> Iterator[str]:
        yield from self._by_name
        yield from sorted(offered(self.group).names - self._by_name.keys())

    def __len__(self) -> int:
        return sum(1 for _ in self)


@cache
def offered(group: str) -> EntryPoints:
    """The entry points of a group, looked up once in a process."""
    return entry_points(group=group)


def resolve(reference: str, where: str) -> Any:
    """What "package.module:attribute" names.

    Args:
        where: what has the reference, for errors.

    Raises:
        UserError: it cannot be imported.
    """
    try:
        return resolve_name(reference)
    except (ImportError, AttributeError, SyntaxError, ValueError) as error:
        raise UserError(
            "cannot import what an extension names",
            f"{where} is {reference} ({type(error).__name__}: {error})",
            "mend or uninstall the package that has it",
        ) from error
