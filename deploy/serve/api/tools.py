"""Tools of a chat: how requests name them, how answers hold to their calls, and how calls are read.

Two ways of writing calls are known, by what the chat template says: between <tool_call> marks, as
Hermes and Qwen write them, and as bare JSON with "parameters", as Llama 3.1 does.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal, NamedTuple
from uuid import uuid4

from pydantic import Field, StringConstraints, TypeAdapter, model_validator

from polybasic.deploy.runtime.grammar import ANY_OBJECT, Grammar, json_rule
from polybasic.deploy.serve.api.fields import Fields, JsonObject, Refused

MAX_TOOLS = 128
_Name = Annotated[str, StringConstraints(pattern=r"^[\w.-]{1,64}$")]
_ARGUMENTS = TypeAdapter(JsonObject)


class Function(Fields):
    """That may be called."""

    name: _Name
    description: str | None = None
    parameters: JsonObject | None = Field(None, description="a JSON schema of an object")
    strict: bool | None = Field(None, description="taken: calls that are required hold to it")


class Tool(Fields):
    """One of a request."""

    type: Literal["function"]
    function: Function

    @property
    def for_template(self) -> dict[str, Any]:
        """As chat templates read it."""
        return {"type": "function", "function": self.function.model_dump(exclude_none=True)}


class NamedFunction(Fields):
    """The one that is to be called."""

    name: str


class NamedTool(Fields):
    """A choice of one tool."""

    type: Literal["function"]
    function: NamedFunction


class CalledFunction(Fields):
    """Of an earlier call."""

    name: str
    arguments: str = Field(description="an object of JSON, as text")

    @model_validator(mode="after")
    def _has_an_object(self) -> "CalledFunction":
        try:
            _ARGUMENTS.validate_json(self.arguments)
        except ValueError as error:
            message = "arguments are no object of JSON, or a deep one"
            raise Refused("arguments", message, "invalid_value") from error
        return self


class ToolCall(Fields):
    """An earlier call of the assistant."""

    id: str | None = None
    index: int | None = Field(None, description="taken, and not used")
    type: Literal["function"] = "function"
    function: CalledFunction

    @property
    def for_template(self) -> dict[str, Any]:
        """As chat templates read it: with the arguments as an object."""
        function = {"name": self.function.name, "arguments": json.loads(self.function.arguments)}
        return {"id": self.id, "type": "function", "function": function}


class Call(NamedTuple):
    """A call that was read in an answer.

    Attributes:
        arguments: an object of JSON, as text.
    """

    name: str
    arguments: str

    def to_json(self) -> dict[str, Any]:
        """As OpenAI shapes it, with an id of its own."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": function}


class CallReader:
    """Parts an answer into what is said and calls, as it grows.

    What is no call of a tool of the request is said: nothing is lost. An answer that begins as
    JSON is held back to its end, since it may be calls without marks.

    Args:
        names: of the tools.
        is_single: only the first call counts.
    """

    KEY = "parameters"
    """Of a call's arguments."""

    def __init__(self, names: Iterable[str], is_single: bool = False) -> None:
        self._names, self._held, self._has_begun = {*names}, "", False
        self._is_after_call, self.is_single = False, is_single

    def add(self, text: str, is_last: bool = False) -> tuple[str, list[Call]]:
        """What a further text adds to what is said, and to the calls.

        Args:
            text: the next part of the answer; may be empty.
            is_last: nothing comes any more, so nothing is held back.
        """
        self._held += text
        begin = self._held.lstrip()
        if not self._has_begun:
            if not is_last and (not begin or begin.startswith("{")):
                return "", []
            self._has_begun = True
            calls = [self._call(value) for value in _values(begin)]
            if calls and None not in calls:
                self._held = ""
                return "", [call for call in calls if call]
        return self._parted(is_last)

    @classmethod
    def grammar(cls, tools: Sequence[Tool], is_single: bool, rule: Callable[[str], str]) -> Grammar:
        """Of an answer that is a call, or several.

        Args:
            rule: gives what stands for a text in a grammar.
        """
        more = "" if is_single else ' ("; " call)*'
        return Grammar.lark(f"start: call{more}\n{cls._rules(tools)}")

    def _parted(self, is_last: bool) -> tuple[str, list[Call]]:
        """As `add`, of what is held."""
        said, self._held = self._held, ""
        return said, []

    def _call(self, content: Any) -> Call | None:
        """The call that JSON means, if it is one of the tools'."""
        if not isinstance(content, dict) or content.get("name") not in self._names:
            return None
        given = content.get(self.KEY, {})
        if not isinstance(given, dict):
            return None
        return Call(content["name"], json.dumps(given, ensure_ascii=False))

    @classmethod
    def _rules(cls, tools: Sequence[Tool]) -> str:
        """Of a call; each tool's arguments are a schema of their own, to whose parts it refers."""
        lines = [f"call: {' | '.join(f'call{place}' for place in range(len(tools)))}"]
        for place, tool in enumerate(tools):
            begin = json.dumps(f'{{"name": "{tool.function.name}", "{cls.KEY}": ')
            schema = ANY_OBJECT | (tool.function.parameters or {})
            lines.append(f'call{place}: {begin} arguments{place} "}}"')
            lines.append(f"arguments{place}: {json_rule(schema)}")
        return "\n".join(lines)


class MarkedCalls(CallReader):
    """Of calls between marks, as Hermes and Qwen write them."""

    KEY, OPENING, CLOSING = "arguments", "<tool_call>", "</tool_call>"

    def _parted(self, is_last: bool) -> tuple[str, list[Call]]:
        said, calls = "", list[Call]()
        while True:
            if self._is_after_call:
                self._held = self._held.lstrip()
                self._is_after_call = not self._held
            before, mark, inside = self._held.partition(self.OPENING)
            if not mark:
                num = len(before)
                if not is_last:  # a mark may have begun, or white space before one
                    num = len(before[: num - _num_begun(before, self.OPENING)].rstrip())
                said, self._held = said + before[:num], before[num:]
                return said, calls
            content, end, after = inside.partition(self.CLOSING)
            if not end and not is_last:
                said, self._held = said + before.rstrip(), mark + inside
                return said, calls
            call = self._call(next(iter(_values(content.strip())), None))
            said += before.rstrip() if call else before + mark + content + end
            calls += [call] if call else []
            self._held, self._is_after_call = after, call is not None

    @classmethod
    def grammar(cls, tools: Sequence[Tool], is_single: bool, rule: Callable[[str], str]) -> Grammar:
        marked_call = rf'{rule(cls.OPENING)} "\n" call "\n" {rule(cls.CLOSING)}'
        more = "" if is_single else rf' ("\n" {marked_call})*'
        return Grammar.lark(f"start: {marked_call}{more}\n{cls._rules(tools)}")


def style_of(template: str) -> type[CallReader] | None:
    """How models of a chat template write calls; None where nobody here can read them."""
    if not re.search(r"\btools\b", template):
        return None
    if MarkedCalls.OPENING in template and MarkedCalls.KEY in template:
        return MarkedCalls
    return CallReader if re.search(rf"[\"']{CallReader.KEY}\\?[\"']", template) else None


def _num_begun(text: str, mark: str) -> int:
    """Characters at the end of a text with which a mark may have begun."""
    return max(size for size in range(len(mark)) if text.endswith(mark[:size]))


def _values(text: str) -> list[Any]:
    """JSON values that stand one after the other, divided by semicolons; None for what is none."""
    values: list[Any] = []
    while text:
        try:
            value, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            return [*values, None]
        values.append(value)
        text = text[end:].lstrip("; \n")
    return values
