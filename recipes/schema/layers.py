"""A recipe file over the files that it is based on: values, places and comments of each key."""

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.files import check_content, read_text

Key = tuple[str, ...]
BASE = "base"
"""The key by which a recipe names the one that it is based on."""
_MAX_COLUMNS = 104
_NEVER_INHERITED = ("name", "description")  # else two recipes would share one output folder


@dataclass(frozen=True)
class Layer:
    """One file of a recipe.

    Attributes:
        path: of the file.
        text: of the file.
        content: what it says, without its base.
        positions: line and column of each key, counted from 0.
        base: the recipe that it is based on, as the file names it.
    """

    path: Path
    text: str
    content: dict[str, Any]
    positions: dict[Key, tuple[int, int]]
    base: str | None = None

    def place(self, key: Key) -> str:
        """Where a key stands, for errors."""
        return f"{self.path} line {self.positions[key][0] + 1}"


@dataclass
class _Comments:
    """Comments of one key, as they are written from the `#` on."""

    above: list[str] = field(default_factory=list)
    beside: list[str] = field(default_factory=list)  # on the key's line and on those below it
    column: int = 0  # of those beside


def read_layer(path: Path) -> Layer:
    """Read one file of a recipe.

    Raises:
        UserError: as `read_keys`, or a base that is no name.
    """
    layer = read_keys(path, "recipe", "start from `polybasic recipes cp own-model`")
    if BASE not in layer.content:
        return layer
    base = layer.content.pop(BASE)
    if not isinstance(base, str):
        raise UserError(
            "base is no name",
            f"{BASE} = {base} ({layer.place((BASE,))})",
            "name a shipped recipe, or a file by its path from this one's folder",
        )
    return replace(layer, base=base)


def read_keys(path: Path, what: str, do: str) -> Layer:
    """Read a YAML file of keys.

    Args:
        what: it is, for errors.
        do: what to do about one without keys.

    Raises:
        UserError: no YAML, not a mapping, or a key twice.
    """
    text = read_text(path, what)
    root, content = parse_yaml(text, what, str(path))
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"{what} holds no keys", str(path), do)
    positions: dict[Key, tuple[int, int]] = {}
    for key, position in _keys(root):
        if key in positions:
            first, second = positions[key][0] + 1, position[0] + 1
            where = f"{'.'.join(key)} ({path} line {second}; first in {path} line {first})"
            raise UserError("key given twice", where, "remove one of the two")
        positions[key] = position
    return Layer(path, text, content, positions)


def parse_yaml(text: str, what: str, where: str) -> tuple[yaml.Node | None, Any]:
    """The nodes of a YAML document, and what it says; `what` and `where` name it in errors.

    Raises:
        UserError: no YAML (the line is named), an alias, or as `check_content`.
    """
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        content: Any = loader.construct_document(root) if root is not None else None
    except RecursionError as error:
        raise UserError(f"{what} is nested too deeply", where, "write it flat") from error
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(
            f"{what} is not YAML", f"{where}{_yaml_problem(error)}", "repair that line"
        ) from error
    check_content(content, what, where)
    return root, content


def merged(layers: Sequence[Layer]) -> dict[str, Any]:
    """The content of all layers, the file itself first and its base after it.

    Sections are merged key by key; anything else, lists and null too, replaces what the base says.
    """
    content: dict[str, Any] = {}
    for layer in reversed(layers):
        content = _merged(content, layer.content)
        for key in _NEVER_INHERITED:
            if key not in layer.content:
                content.pop(key, None)
    return content


def places(layers: Sequence[Layer]) -> dict[Key, str]:
    """Where each key of the merged content was read: "recipes/base.yaml line 12"."""
    own, *bases = layers
    inherited = {
        key: layer.place(key)
        for layer in reversed(bases)
        for key in layer.positions
        if key[0] not in _NEVER_INHERITED
    }
    return inherited | {key: own.place(key) for key in own.positions}


def resolved_text(layers: Sequence[Layer]) -> str:
    """The recipe in one file, which is based on no other.

    It opens as the recipe's own file does. A key keeps the comments of its base where the recipe
    adds none of its own.
    """
    if len(layers) == 1:
        return layers[0].text
    comments: dict[Key, _Comments] = {}
    for layer in reversed(layers):
        opening, own = _comments(layer)
        comments |= own
    content = merged(layers)
    dumped = yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1 << 20)
    root = yaml.compose(dumped, Loader=yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode), "a recipe is a mapping"
    at_line = {line: key for key, (line, _) in _keys(root)}
    lines, before = opening, dict[str, Any]()
    for number, line in enumerate(dumped.splitlines()):
        key = at_line.get(number)
        if key is None:  # of a text over several lines
            lines.append(line)
            continue
        if len(key) == 1:
            value = content[key[0]]
            lines += [""] if isinstance(value, dict) or isinstance(before, dict) else []
            before = value
        lines += _commented(line, comments.get(key, _Comments()))
    return "\n".join(lines).lstrip() + "\n"


class _Loader(yaml.SafeLoader):
    """Without aliases, by which a few lines say any number of things."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem="an alias; write it out", problem_mark=mark)
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """Writes as recipes are written: a key a line, lists in brackets, longer texts as blocks."""

    def represent_mapping(self, tag: str, mapping: Any, flow_style: Any = None) -> Any:
        return super().represent_mapping(tag, mapping, flow_style=False)

    def represent_sequence(self, tag: str, sequence: Any, flow_style: Any = None) -> Any:
        return super().represent_sequence(tag, sequence, flow_style=True)

    def represent_str(self, data: str) -> Any:
        style = "|" if "\n" in data else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)


def _merged(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    content = dict(base)
    for key, value in own.items():
        below = content.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            value = _merged(below, value)
        content[key] = value
    return content


def _keys(mapping: yaml.MappingNode, prefix: Key = ()) -> Iterator[tuple[Key, tuple[int, int]]]:
    for key_node, value_node in mapping.value:
        key = (*prefix, str(key_node.value))
        yield key, (key_node.start_mark.line, key_node.start_mark.column)
        if isinstance(value_node, yaml.MappingNode) and len(key) < 8:
            yield from _keys(value_node, key)


def _comments(layer: Layer) -> tuple[list[str], dict[Key, _Comments]]:
    """The file's opening comment, and those of each key.

    A comment on lines of its own is of the key below it, unless it is indented more than that key:
    then it goes on with what stands beside the key above it.
    """
    found: dict[Key, _Comments] = {}
    keys = sorted((position, key) for key, position in layer.positions.items())
    starts = [position for position, _ in keys]
    opening: list[str] = []
    for line, column, text, is_alone in _written_comments(layer.text):
        index = bisect_right(starts, (line, column))
        if index == 0:
            opening.append(text)
        elif is_alone and index < len(keys) and column <= starts[index][1]:
            found.setdefault(keys[index][1], _Comments()).above.append(text)
        else:
            beside = found.setdefault(keys[index - 1][1], _Comments())
            beside.beside.append(text)
            beside.column = beside.column or column
    return opening, found


def _written_comments(text: str) -> Iterator[tuple[int, int, str, bool]]:
    """Line, column and text of each comment, and whether it has its line for itself."""
    # between two tokens there is nothing but white space and comments
    for before, after in itertools.pairwise(yaml.scan(text, Loader=yaml.SafeLoader)):
        number, column = before.end_mark.line, before.end_mark.column
        gap = text[before.end_mark.index : after.start_mark.index]
        for offset, line in enumerate(gap.split("\n")):
            if "#" in line:
                start = line.index("#") + (0 if offset else column)
                yield number + offset, start, line.strip(), offset > 0 or column == 0


def _commented(line: str, comments: _Comments) -> list[str]:
    indent = line[: len(line) - len(line.lstrip())]
    above, beside = comments.above, comments.beside
    width = max(comments.column, len(line) + 2)
    is_block = line.rstrip("+-0123456789").endswith("|")  # of text, in which # is text
    if is_block or any(width + len(comment) > _MAX_COLUMNS for comment in beside):
        above, beside = [*above, *beside], []
    first = [f"{line:<{width}}{comment}" for comment in beside[:1]] or [line]
    rest = [" " * width + comment for comment in beside[1:]]
    return [indent + comment for comment in above] + first + rest


def _yaml_problem(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f" line {error.problem_mark.line + 1} ({error.problem})"
    return f" ({str(error).partition(';')[0]})"
