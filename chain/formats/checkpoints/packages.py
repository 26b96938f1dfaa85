"""Files and folders inside installed packages, none of whose code is run."""

import importlib.util
from pathlib import Path, PurePosixPath

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.files import lies_anywhere

PACKAGE = "package:"


def path_in_package(reference: str, what: str) -> Path:
    """Where lies what `package:name/PATH` names.

    Args:
        reference: of this form; PATH is of a file or a folder.
        what: names it in errors.

    Raises:
        UserError: the package is not installed, nothing lies there, or the path leaves the package.
    """
    name, _, inside = reference.removeprefix(PACKAGE).partition("/")
    parts = PurePosixPath(inside).parts
    if not name.isidentifier() or not parts or ".." in parts or "\0" in inside:
        raise UserError("no file in a package", reference, f"write {PACKAGE}name/PATH")
    spec = importlib.util.find_spec(name)
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    if not folders:
        raise UserError(
            "package not found", f"{name} in {reference}", f"pip install {name.replace('_', '-')}"
        )
    for folder in map(Path, folders):
        path = folder.joinpath(*parts)
        if not lies_anywhere(path):
            continue
        if not path.resolve().is_relative_to(folder.resolve()):
            raise UserError("link leaves the package", f"{path}", f"name the {what} itself")
        return path
    raise UserError(f"{what} not found", f"{inside} in {folders[0]}", "check the name")
