"""OpenAI's /v1/responses: a chat by other names, whose answer comes in items and events.

Nothing is stored: a conversation goes on by its items, as agents send them.
"""

import time
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal
from uuid import uuid4

from pydantic import BeforeValidator, Field

from polybasic.deploy.serve.api.choices import Choice, ChoicePart, Json
from polybasic.deploy.serve.api.errors import ApiError
from polybasic.deploy.serve.api.fields import Fields, JsonObject
from polybasic.deploy.serve.api.protocol import MAX_MESSAGES, MOST
from polybasic.deploy.serve.api.replies import ChatReply
from polybasic.deploy.serve.api.tools import MAX_TOOLS
from polybasic.deploy.serve.tickets import News


class InputText(Fields):
    """A part of a content."""

    type: Literal["input_text", "output_text", "text"]
    text: str

    IGNORED = frozenset({"annotations", "logprobs"})


Content = str | Annotated[list[InputText], Field(fail_fast=True)]


def _text(content: Content) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class InputMessage(Fields):
    """What somebody said."""

    type: Literal["message"]
    role: Literal["system", "developer", "user", "assistant"]
    content: Content

    IGNORED = frozenset({"id", "status", "phase"})

    @property
    def message(self) -> Json:
        """As chats have it."""
        return {"role": self.role, "content": _text(self.content)}


class FunctionCall(Fields):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str

    IGNORED = frozenset({"id", "status"})

    @property
    def message(self) -> Json:
        """As chats have it."""
        function = {"name": self.name, "arguments": self.arguments}
        call = {"id": self.call_id, "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [call]}


class FunctionCallOutput(Fields):
    """What a called function gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content

    IGNORED = frozenset({"id", "status"})

    @property
    def message(self) -> Json:
        """As chats have it."""
        return {"role": "tool", "tool_call_id": self.call_id, "content": _text(self.output)}


class Thought(Fields):
    """Of an earlier answer, which no template reads again."""

    type: Literal["reasoning"]

    IGNORED = frozenset({"id", "summary", "content", "encrypted_content", "status"})


def _typed(item: Any) -> Any:
    return {"type": "message", **item} if isinstance(item, dict) else item


Item = Annotated[
    Annotated[
        InputMessage | FunctionCall | FunctionCallOutput | Thought, Field(discriminator="type")
    ],
    BeforeValidator(_typed),
]


class FlatTool(Fields):
    """A function that may be called."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class FlatChoice(Fields):
    """The function that is to be called."""

    type: Literal["function"]
    name: str


class TextFormat(Fields):
    """What the answer's text has to match."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Any = Field(None, alias="schema")
    strict: bool | None = None

    ALIASES = frozenset({"schema"})


class TextSettings(Fields):
    """Of the answer's text."""

    format: TextFormat = TextFormat(type="text")

    IGNORED = frozenset({"verbosity"})


class ResponsesRequest(Fields):
    """Of /v1/responses."""

    input: str | Annotated[list[Item], Field(max_length=MAX_MESSAGES, fail_fast=True)]
    model: str | None = None
    instructions: str | None = Field(None, description="a system message before all others")
    max_output_tokens: int | None = Field(None, ge=1, le=MOST)
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False
    text: TextSettings = TextSettings()
    tools: list[FlatTool] = Field([], max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | FlatChoice = "auto"
    parallel_tool_calls: bool = True
    metadata: dict[str, str] | None = Field(None, description="sent back")

    IGNORED = frozenset(
        """store user safety_identifier prompt_cache_key prompt_cache_retention include
        reasoning service_tier stream_options""".split()  # noqa: SIM905
    )
    """Nothing is stored, and models think as their templates say."""
    UNSUPPORTED = frozenset(
        """previous_response_id conversation prompt max_tool_calls top_logprobs
        context_management""".split()  # noqa: SIM905
    )
    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        "background": (False,),
        "truncation": ("disabled",),
    }

    @property
    def chat(self) -> Json:
        """The same as the body of a chat."""
        messages: list[Json] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            for item in self.input:
                if not isinstance(item, Thought):
                    _append(messages, item.message)
        asked = {
            "model": self.model,
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self._response_format,
            "tool_choice": self.tool_choice,
        }
        if isinstance(self.tool_choice, FlatChoice):
            asked["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        if self.tools:
            asked["tools"] = [
                {"type": "function", "function": tool.model_dump(exclude={"type"})}
                for tool in self.tools
            ]
        return asked

    @property
    def _response_format(self) -> Json:
        asked = self.text.format
        found: Json = {"type": asked.type}
        if asked.type == "json_schema":
            found["json_schema"] = {"name": asked.name, "schema": asked.schema_}
        return found


def _append(messages: list[Json], message: Json) -> None:
    """Add a message; calls of one answer stand in one."""
    calls = message.get("tool_calls")
    if calls and messages and messages[-1]["role"] == "assistant":
        messages[-1].setdefault("tool_calls", []).extend(calls)
    else:
        messages.append(message)


class ResponsesReply(ChatReply):
    """Of /v1/responses.

    Args:
        of: the request.
    """

    _prefix = "resp_"
    ending = b""

    def __init__(self, *given: Any, of: ResponsesRequest) -> None:
        super().__init__(*given)
        self._of, self._num_events = of, 0
        self._items: list[Json] = []
        self._open: Json | None = None

    def whole(self) -> Json:
        """The response, once the answer has ended."""
        [choice] = self.choices
        if not self._items:
            if choice.reasoning:
                self._items.append(_thought(choice.reasoning))
            if choice.content or not choice.calls:
                self._items.append(_message(choice.content))
            self._items += map(_call, choice.calls)
        return self._response(choice, self._items)

    def chunks(self, news: News) -> Iterator[Json]:
        """The events of the news."""
        [choice] = self.choices
        part = choice.read(news)
        if part.is_first:
            begun = self._response(choice, [])
            yield self._event("response.created", response=begun)
            yield self._event("response.in_progress", response=begun)
        yield from self._told(part)
        if choice.statistics is None:
            return
        if not self._items and self._open is None:
            yield from self._add_text("message", "")
        yield from self._closed()
        ended = self._response(choice, self._items)
        yield self._event(f"response.{ended['status']}", response=ended)

    def failure(self, error: ApiError) -> Json:
        """What a stream says of an error."""
        told = error.body["error"]
        return self._event("error", **{name: told[name] for name in ("code", "message", "param")})

    def _told(self, part: ChoicePart) -> Iterator[Json]:
        if part.reasoning:
            yield from self._add_text("reasoning", part.reasoning)
        if part.content:
            yield from self._add_text("message", part.content)
        for call in part.calls:
            yield from self._closed()
            item, place = _call(call), {"output_index": len(self._items)}
            yield self._event("response.output_item.added", item=item | {"arguments": ""}, **place)
            place["item_id"] = item["id"]
            given = item["arguments"]
            yield self._event("response.function_call_arguments.delta", delta=given, **place)
            yield self._event(
                "response.function_call_arguments.done",
                arguments=given,
                name=item["name"],
                **place,
            )
            del place["item_id"]
            self._items.append(item)
            yield self._event("response.output_item.done", item=item, **place)

    def _add_text(self, kind: str, text: str) -> Iterator[Json]:
        """Further text of a message or of a thought, which is begun where another item is open."""
        if self._open is None or self._open["type"] != kind:
            yield from self._closed()
            self._open = _message("") if kind == "message" else _thought("")
            begun = self._open | {"status": "in_progress", "content": []}
            place = len(self._items)
            yield self._event("response.output_item.added", item=begun, output_index=place)
            yield self._of_part("response.content_part.added", part=self._open["content"][0])
        self._open["content"][0]["text"] += text
        if text:
            yield self._of_part(f"response.{_NAMES[kind]}.delta", delta=text)

    def _closed(self) -> Iterator[Json]:
        """End the open item."""
        if self._open is None:
            return
        [content], kind = self._open["content"], self._open["type"]
        yield self._of_part(f"response.{_NAMES[kind]}.done", text=content["text"])
        yield self._of_part("response.content_part.done", part=content)
        item, self._open = self._open, None
        self._items.append(item)
        yield self._event("response.output_item.done", item=item, output_index=len(self._items) - 1)

    def _of_part(self, name: str, **told: Any) -> Json:
        assert self._open is not None, "an open item"
        place = {"item_id": self._open["id"], "output_index": len(self._items), "content_index": 0}
        logprobs: Json = {"logprobs": []} if "output_text" in name else {}
        return self._event(name, **place, **told, **logprobs)

    def _event(self, kind: str, /, **told: Any) -> Json:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **told}

    def _response(self, choice: Choice, items: list[Json]) -> Json:
        status, why = "in_progress", None
        if choice.statistics is not None:
            is_cut = choice.statistics.stopped_by == "length"
            status = "incomplete" if is_cut else "completed"
            why = {"reason": "max_output_tokens"} if is_cut else None
        asked = self._of.model_dump(by_alias=True, exclude={"input", "stream", "model"})
        return {
            **asked,
            "id": self._id,
            "object": "response",
            "created_at": self._head["created"],
            "completed_at": int(time.time()) if choice.statistics is not None else None,
            "model": self._head["model"],
            "status": status,
            "error": None,
            "incomplete_details": why,
            "output": [*items],
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": self._usage(choice) if choice.statistics is not None else None,
        }

    def _usage(self, choice: Choice) -> Json:
        counts = self.usage()
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"],
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts["total_tokens"],
        }


_NAMES = {"message": "output_text", "reasoning": "reasoning_text"}


def _message(text: str) -> Json:
    content = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    said = {"role": "assistant", "status": "completed", "content": [content]}
    return {"type": "message", "id": f"msg_{uuid4().hex}", **said}


def _thought(text: str) -> Json:
    content = {"type": "reasoning_text", "text": text}
    return {"type": "reasoning", "id": f"rs_{uuid4().hex}", "summary": [], "content": [content]}


def _call(call: Json) -> Json:
    return {
        "type": "function_call",
        "id": f"fc_{uuid4().hex}",
        "call_id": call["id"],
        **call["function"],
        "status": "completed",
    }
