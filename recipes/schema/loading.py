"""From a recipe's name or path and the command line's overrides to a checked `Recipe`.

Every mistake is reported in one line that names the key, the file and the line it stands in.
"""

import difflib
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.files import lies_anywhere
from polybasic.recipes.schema.layers import BASE, Key, Layer, merged, parse_yaml, places, read_layer
from polybasic.recipes.schema.recipe import Recipe

Places = dict[Key, str]
Model = TypeVar("Model", bound=BaseModel)


def shipped_recipes() -> dict[str, Path]:
    """Name -> path of the recipes that come with the package."""
    folder = Path(str(resources.files("polybasic.recipes")))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"), key=lambda path: path.stem)}


def find_recipe(name_or_path: str, folder: Path = Path(), where: str | None = None) -> Path:
    """The file of a recipe.

    Args:
        name_or_path: a path, or the name of a shipped recipe ("vicuna-7b").
        folder: that paths start from; the current one by default.
        where: the recipe is named, for the error; the name itself by default.

    Raises:
        UserError: neither exists.
    """
    path = folder / name_or_path
    is_there = lies_anywhere(path)
    if is_there and path.is_file():
        return path
    shipped = shipped_recipes()
    if name_or_path in shipped:
        return shipped[name_or_path]
    near = difflib.get_close_matches(path.stem, shipped, n=1)
    what = "recipe is a folder" if is_there else "recipe not found"
    do = f"did you mean {near[0]}?" if near else f"shipped recipes: {', '.join(shipped)}"
    raise UserError(what, where or name_or_path, do)


def read_layers(name_or_path: str) -> list[Layer]:
    """A recipe's file, then its base, then that one's base.

    Raises:
        UserError: a file is missing or malformed, or a recipe is its own base.
    """
    layers = [read_layer(find_recipe(name_or_path))]
    while (base := layers[-1].base) is not None:
        path = layers[-1].path
        where = f"{BASE} = {base} ({layers[-1].place((BASE,))})"
        found = find_recipe(base, path.parent, where)
        if any(found.samefile(layer.path) for layer in layers):
            raise UserError("recipe is its own base", where, "name another one there")
        layers.append(read_layer(found))
    return layers


def load_recipe(name_or_path: str, overrides: list[str] | None = None) -> Recipe:
    """Read, override and check a recipe. Paths in it are relative to the current directory.

    Args:
        name_or_path: a path, or the name of a shipped recipe.
        overrides: "section.key=value" each; the value is read as YAML.

    Raises:
        UserError: anything is wrong with the file, its base, a key or a value.
    """
    layers = read_layers(name_or_path)
    content, read_at = merged(layers), places(layers)
    for override in overrides or []:
        _apply_override(content, read_at, override)
    return validated(Recipe, content, read_at, str(layers[0].path))


def validated(model: type[Model], content: Mapping[str, Any], places: Places, source: str) -> Model:
    """Check `content` against `model`; the first mistake becomes one line.

    Args:
        model: the schema.
        content: what was read.
        places: where each key was read; errors about other keys name `source` alone.
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


def _apply_override(content: dict[str, Any], places: Places, override: str) -> None:
    name, equals, text = override.partition("=")
    key = tuple(name.split("."))
    if not equals:
        raise UserError("override without '='", override, "write section.key=value")
    if key not in set(known_keys(Recipe)):
        raise _unknown_key(key, Recipe, "on the command line")
    _, value = parse_yaml(text, "override's value", override)
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
