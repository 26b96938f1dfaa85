"""From a recipe's name or path and the command line's overrides to a checked `Recipe`.

Every mistake is told in one line that names the key, the file and the line it stands in.
"""

import difflib
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from polybasic.chain.errors import UserError
from polybasic.recipes.schema.recipe import Recipe

Key = tuple[str, ...]
Places = dict[Key, str]
Model = TypeVar("Model", bound=BaseModel)


def shipped_recipes() -> dict[str, Path]:
    """Name -> path of the recipes that come with the package."""
    folder = Path(str(resources.files("polybasic.recipes")))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"), key=lambda path: path.stem)}


def find_recipe(name_or_path: str) -> Path:
    """The file of a recipe.

    Args:
        name_or_path: a path, or the name of a shipped recipe ("tiny").

    Raises:
        UserError: neither exists.
    """
    path = Path(name_or_path)
    if path.is_file():
        return path
    shipped = shipped_recipes()
    if name_or_path in shipped:
        return shipped[name_or_path]
    near = difflib.get_close_matches(path.stem, shipped, n=1)
    what = "recipe is a folder" if path.is_dir() else "recipe not found"
    do = f"did you mean {near[0]}?" if near else f"shipped recipes: {', '.join(shipped)}"
    raise UserError(what, name_or_path, do)


def load_recipe(name_or_path: str, overrides: list[str] | None = None) -> Recipe:
    """Read, override and check a recipe. Paths in it are relative to the current directory.

    Args:
        name_or_path: a path, or the name of a shipped recipe.
        overrides: "section.key=value" each; the value is read as YAML.

    Raises:
        UserError: anything is wrong with the file, a key or a value.
    """
    path = find_recipe(name_or_path)
    content, places = read_yaml(path)
    for override in overrides or []:
        _apply_override(content, places, override)
    return validated(Recipe, content, places, str(path))


def read_yaml(path: Path) -> tuple[dict[str, Any], Places]:
    """Read a mapping from YAML and note where each key stands.

    Returns:
        The content, and for every key its place ("recipes/tiny.yaml line 12").

    Raises:
        UserError: no YAML, not a mapping, or a key twice.
    """
    try:
        text = path.read_text("utf-8")
        root, content = yaml.compose(text, Loader=yaml.SafeLoader), yaml.safe_load(text)
    except UnicodeDecodeError as error:
        raise UserError("recipe is not UTF-8 text", str(path), "save it as UTF-8") from error
    except yaml.YAMLError as error:
        raise UserError(
            "recipe is not YAML", f"{path}{_yaml_problem(error)}", "repair that line"
        ) from error
    if not isinstance(root, yaml.MappingNode):
        raise UserError("recipe holds no keys", str(path), "start from `polybasic recipes cp tiny`")
    places: Places = {}
    for key, line in _keys(root, ()):
        if key in places:
            raise UserError(
                "key given twice",
                f"{'.'.join(key)} ({path} line {line}; first in {places[key]})",
                "remove one of the two",
            )
        places[key] = f"{path} line {line}"
    return content, places


def validated(model: type[Model], content: Mapping[str, Any], places: Places, source: str) -> Model:
    """Check `content` against `model`; the first mistake becomes one line.

    Args:
        model: the schema.
        content: what was read.
        places: where each key was read; keys without one are told by `source` alone.
        source: where `content` as a whole comes from.

    Raises:
        UserError: an unknown key, a missing one, or a value that its field refuses.
    """
    try:
        return model.model_validate(content)
    except ValidationError as error:
        mistakes = error.errors(include_url=False)
        unknown = [mistake for mistake in mistakes if mistake["type"] == "extra_forbidden"]
        raise _explained((unknown or mistakes)[0], model, places, source) from error


def known_keys(model: type[BaseModel], prefix: Key = ()) -> Iterator[Key]:
    """Every key that `model` and its sections know, sections before what they hold."""
    for name, field in model.model_fields.items():
        yield (*prefix, name)
        # a section that may be left out is annotated `Section | None`
        for part in (field.annotation, *get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from known_keys(part, (*prefix, name))


def _keys(mapping: yaml.MappingNode, prefix: Key) -> Iterator[tuple[Key, int]]:
    for key_node, value_node in mapping.value:
        key = (*prefix, str(key_node.value))
        yield key, key_node.start_mark.line + 1
        if isinstance(value_node, yaml.MappingNode) and len(key) < 8:
            yield from _keys(value_node, key)


def _yaml_problem(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f" line {error.problem_mark.line + 1} ({error.problem})"
    return f" ({error})"


def _apply_override(content: dict[str, Any], places: Places, override: str) -> None:
    name, equals, text = override.partition("=")
    key = tuple(name.split("."))
    if not equals:
        raise UserError("override without '='", override, "write section.key=value")
    if key not in set(known_keys(Recipe)):
        raise _unknown_key(key, Recipe, "on the command line")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(
            "override's value is not YAML", override, "quote it: key='\"value\"'"
        ) from error
    section = content
    for part in key[:-1]:
        if not isinstance(section.get(part), dict):
            section[part] = {}
        section = section[part]
    section[key[-1]] = value
    places[key] = "on the command line"


def _explained(
    mistake: ErrorDetails, model: type[BaseModel], places: Places, source: str
) -> UserError:
    key = tuple(str(part) for part in mistake["loc"])
    place = next((places[key[:n]] for n in range(len(key), 0, -1) if key[:n] in places), source)
    if mistake["type"] == "extra_forbidden":
        return _unknown_key(key, model, place)
    name = ".".join(key)
    if mistake["type"] == "missing":
        return UserError("key is missing", f"{name} ({place})", f"add {key[-1]}")
    if mistake["type"] == "value_error":
        where = f"{name or 'the recipe'} ({place})"
        return UserError("settings contradict", where, mistake["msg"].removeprefix("Value error, "))
    rule = mistake["msg"].replace("Input should", "it must", 1)
    if mistake["type"] == "model_type":
        rule = f"it must be a section of keys: {', '.join(_names_in(model, key))}"
    value = mistake["input"]
    shown = "empty" if value is None else repr(value) if isinstance(value, str) else value
    return UserError("value not allowed", f"{name} = {shown} ({place})", rule)


def _unknown_key(key: Key, model: type[BaseModel], place: str) -> UserError:
    known = list(known_keys(model))
    siblings = {candidate[-1]: candidate for candidate in known if candidate[:-1] == key[:-1]}
    near = [siblings[name] for name in difflib.get_close_matches(key[-1], siblings, n=1)]
    near += [candidate for candidate in known if candidate[-1] == key[-1]]
    if not near:
        dotted = {".".join(candidate): candidate for candidate in known}
        close = difflib.get_close_matches(".".join(key), dotted, n=1)
        near = [dotted[name] for name in close]
    if near:
        do = f"did you mean {'.'.join(near[0])}?"
    else:
        do = f"known keys: {', '.join(siblings or _names_in(model, ()))}"
    return UserError("unknown key", f"{'.'.join(key)} ({place})", do)


def _names_in(model: type[BaseModel], key: Key) -> list[str]:
    return [known[-1] for known in known_keys(model) if known[:-1] == key]
