"""Requests as OpenAI defines and vLLM extends them: what is taken, and what is refused by name."""

from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from polybasic.chain.base.readable import readable_value
from polybasic.deploy.runtime.rounds.logprobs import MAX_LOGPROBS
from polybasic.deploy.serve.api.errors import ApiError, bad_request
from polybasic.deploy.serve.api.fields import Fields, JsonObject, Refused
from polybasic.deploy.serve.api.structured import (
    Structured,
)
from polybasic.deploy.serve.api.tools import (
    MAX_TOOLS,
    NamedTool,
    Tool,
    ToolCall,
)

MOST = 10**9
"""Of any number that is asked for."""
MAX_ANSWERS = 128
"""Of one prompt."""

MAX_MESSAGES = 1 << 12
"""Of a conversation, and parts of one; longer lists are refused before anything is made of them."""
MAX_PROMPTS = 1 << 12
"""Of a request, likewise."""

_OF_RENDERING = frozenset(
    """messages conversation tools documents chat_template add_generation_prompt
    continue_final_message tokenize padding truncation max_length return_tensors return_dict
    return_assistant_tokens_mask tokenizer_kwargs""".split()  # noqa: SIM905
)
"""What `chat_template_kwargs` must not set."""

_END_OF_IDS = 1 << 31
Tokens = Annotated[list[Annotated[int, Field(ge=0, lt=_END_OF_IDS)]], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Logprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


def _first_of(messages: Any) -> Any:
    """Refuse what is no list of objects, before pydantic describes every alternative."""
    if not isinstance(messages, list) or not messages:
        raise ValueError("a list of at least one message is needed")
    if len(messages) > MAX_MESSAGES:
        raise ValueError(
            f"{len(messages):,} messages are more than {MAX_MESSAGES:,}, the most taken"
        )
    return messages


def _alike(prompt: Any) -> Any:
    """Refuse by its place what is no prompt: pydantic would name what each alternative misses."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list):
        raise ValueError("a prompt is a text, a list of token ids, or a list of either")
    if prompt and isinstance(prompt[0], int):
        _check_ids(prompt)
        return prompt
    if len(prompt) > MAX_PROMPTS:
        raise ValueError(f"{len(prompt):,} prompts are more than {MAX_PROMPTS:,}, the most taken")
    for place, element in enumerate(prompt):
        if type(element) is not type(prompt[0]) or not isinstance(element, str | list):
            raise ValueError(
                f"prompt {place} is of another kind: give texts, or lists of token ids"
            )
        if isinstance(element, list):
            _check_ids(element, f" of prompt {place}")
    return prompt


def _check_ids(token_ids: list[Any], of: str = "") -> None:
    for place, token in enumerate(token_ids):
        if type(token) is not int or not 0 <= token < _END_OF_IDS:
            shown = readable_value(token)
            raise ValueError(f"token {place}{of} is {shown}: token ids are whole numbers from 0 up")


def _all_numbers(biases: Any) -> Any:
    """Refuse the first value that is no number: pydantic would describe each."""
    for token, bias in biases.items() if isinstance(biases, dict) else ():
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not is_number or not -MOST < bias < MOST:
            raise ValueError(f"the bias of token {str(token)[:100]!r} is no number")
    return biases


class StreamOptions(Fields):
    """What a stream carries beside the answer."""

    include_usage: bool = Field(False, description="a last chunk with the tokens of all answers")
    continuous_usage_stats: bool = Field(False, description="the tokens so far in every chunk")


class Extras(Fields):
    """What only this server offers."""

    members: bool = Field(False, description="say of each token which member proposed it")
    run: Texts | None = Field(
        None, min_length=1, description="members that run, from the target down"
    )


class _Asked(Structured):
    """What chat and text completions have in common."""

    model: str | None = Field(None, description="as /v1/models names it")
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: int = Field(1, ge=1, le=MAX_ANSWERS, description="answers of each prompt")
    stop: str | Texts | None = Field(None, description="texts that end an answer before them")
    seed: int | None = Field(None, ge=0, lt=1 << 64, description="the same seed, the same text")
    temperature: float | None = Field(None, description="0 is greedy")
    top_p: float | None = None
    top_k: int | None = Field(None, ge=-1, le=MOST, description="0 or -1 for all tokens")
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(_all_numbers)] = Field(
        None, description="token id -> added to its logit"
    )
    stop_token_ids: Tokens | None = Field(None, description="further tokens that end an answer")
    min_tokens: int = Field(0, ge=0, description="no stop token before so many")
    ignore_eos: bool = Field(False, description="the checkpoint's stop tokens do not end an answer")
    prompt_logprobs: Logprobs | None = Field(None, description="of the prompt's tokens")
    return_token_ids: bool = Field(False, description="token ids of prompt and answer")
    return_tokens_as_token_ids: bool = Field(
        False, description="with logprobs: tokens are written as token_id:5"
    )
    polybasic: Extras = Extras()
    user: str | None = Field(None, description="taken, and not used")

    UNSUPPORTED = frozenset(
        """guided_decoding_backend guided_whitespace_pattern structural_tag
        logits_processors truncate_prompt_tokens truncation_side allowed_token_ids
        bad_words logprob_token_ids kv_transfer_params ec_transfer_params vllm_xargs
        cache_salt repetition_detection thinking_token_budget lora adapter_id
        prompt_embeds stream_interval watermarking""".split()  # noqa: SIM905
    )
    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        "use_beam_search": (False,),
        "length_penalty": (1.0, 1),
        "include_stop_str_in_output": (False,),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "priority": (0,),
    }

    @model_validator(mode="after")
    def _fits_together(self) -> "_Asked":
        if self.restriction is not None and (self.ignore_eos or self.min_tokens):
            field = "ignore_eos" if self.ignore_eos else "min_tokens"
            message = f"{field} leaves no end to an answer that {self.restriction[0]} restricts"
            raise Refused(field, message, "invalid_value")
        if "stream_options" in self.model_fields_set and not self.stream:
            raise Refused("stream_options", "stream_options needs stream to be true")
        if self.stream and self.prompt_logprobs is not None:
            raise Refused("prompt_logprobs", "prompt_logprobs is not available in a stream")
        for token in self.logit_bias or {}:
            if not (token.isascii() and token.isdigit()):
                raise Refused("logit_bias", "logit_bias names tokens by their ids, as in 42")
        return self

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling settings that are given, as `polybasic.deploy.Sampling` names them."""
        names = (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "seed",
        )
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if given.get("top_k") == -1:
            given["top_k"] = 0
        if self.logit_bias:
            given["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        return given

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class TextPart(Fields):
    """Of a message whose content comes in parts."""

    type: Literal["text"]
    text: str


def _text_parts(content: Any) -> Any:
    """Refuse parts of other kinds by their names, and too many."""
    if isinstance(content, list) and len(content) > MAX_MESSAGES:
        raise ValueError(f"{len(content):,} parts are more than {MAX_MESSAGES:,}, the most taken")
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise Refused("content", f"content of type {kind[:100]} is not supported, text is")
    return content


class ChatMessage(Fields):
    """Of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | Annotated[list[TextPart], Field(fail_fast=True)], BeforeValidator(_text_parts)
    ] = Field("", validate_default=False)
    name: str | None = None
    tool_calls: list[ToolCall] = Field([], description="of an earlier turn of the assistant")
    tool_call_id: str | None = Field(None, description="of the call that a tool answers")
    reasoning_content: str | None = Field(
        None, description="what the assistant thought, for templates that read it"
    )

    UNSUPPORTED = frozenset(
        "function_call refusal audio annotations reasoning".split()  # noqa: SIM905
    )

    @model_validator(mode="after")
    def _says_something(self) -> "ChatMessage":
        if self.tool_calls and self.role != "assistant":
            raise Refused("tool_calls", "tool_calls are the assistant's", "invalid_value")
        if "content" not in self.model_fields_set and not self.tool_calls:
            raise Refused("content", "content is missing", "invalid_value")
        return self

    @property
    def for_template(self) -> dict[str, Any]:
        """As chat templates read it; parts are lines."""
        content = self.content
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        given: dict[str, Any] = {
            "name": self.name,
            "reasoning_content": self.reasoning_content,
            "tool_call_id": self.tool_call_id,
            "tool_calls": [call.for_template for call in self.tool_calls] or None,
        }
        present = {name: value for name, value in given.items() if value is not None}
        return {"role": self.role, "content": content, **present}


class _Rendered(Fields):
    """How messages become a text."""

    chat_template_kwargs: JsonObject = Field(
        {}, description="what the chat template reads beside the messages"
    )
    enable_thinking: bool | None = Field(None, description="the same as in chat_template_kwargs")
    continue_final_message: bool = Field(
        False, description="the answer goes on with the last message, which is the assistant's"
    )
    add_generation_prompt: bool | None = Field(
        None, description="false only where the last message is continued"
    )

    @model_validator(mode="after")
    def _opens_one_turn(self) -> "_Rendered":
        opens = self.add_generation_prompt
        if opens is not None and opens == self.continue_final_message:
            raise Refused(
                "add_generation_prompt",
                "an answer begins a turn, or continues the final message: "
                "add_generation_prompt is the contrary of continue_final_message",
            )
        for name in self.chat_template_kwargs:
            if name in _OF_RENDERING:
                message = f"chat_template_kwargs cannot set {name[:100]}"
                raise Refused("chat_template_kwargs", message, "invalid_value")
        return self

    @property
    def tools_told(self) -> list[Tool]:
        """The tools that the model is told of."""
        return []

    @property
    def template_options(self) -> dict[str, Any]:
        """What the template reads beside the messages."""
        thinking = self.enable_thinking
        named: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
        if self.tools_told:
            named["tools"] = [tool.for_template for tool in self.tools_told]
        return self.chat_template_kwargs | named


class ChatRequest(_Rendered, _Asked):
    """Of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True), BeforeValidator(_first_of)]
    max_tokens: int | None = Field(None, ge=1, le=MOST)
    max_completion_tokens: int | None = Field(
        None, ge=1, le=MOST, description="of an answer at most; default: what the context leaves"
    )
    logprobs: bool = False
    top_logprobs: Logprobs | None = None
    metadata: dict[str, str] | None = Field(None, description="taken, and not used")
    include_reasoning: bool = Field(
        True, description="answers of models that think have reasoning_content"
    )
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = Field(
        [], description="that the model may call, as its chat template tells it"
    )
    tool_choice: Literal["none", "auto", "required"] | NamedTool = Field(
        "auto", description="required and a named tool hold the answer to calls"
    )
    parallel_tool_calls: bool = Field(True, description="false: one call at most")

    UNSUPPORTED = _Asked.UNSUPPORTED | frozenset(
        """functions function_call audio prediction web_search_options
        reasoning_effort reasoning verbosity documents chat_template
        mm_processor_kwargs media_io_kwargs""".split()  # noqa: SIM905
    )
    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        **_Asked.NEUTRAL,
        "modalities": (["text"],),
        "store": (False,),
        "service_tier": ("auto", "default"),
        "echo": (False,),
        "add_special_tokens": (False,),
    }

    @model_validator(mode="after")
    def _asks_one_thing(self) -> "ChatRequest":
        if self.must_call is not None and self.restriction is not None:
            message = f"tool_choice and {self.restriction[0]} both restrict the answer"
            raise Refused("tool_choice", message, "invalid_value")
        if self.must_call == []:
            message = "tool_choice names no tool of the request"
            raise Refused("tool_choice", message, "invalid_value")
        if self.top_logprobs is not None and not self.logprobs:
            raise Refused("top_logprobs", "top_logprobs needs logprobs to be true")
        both = self.max_tokens, self.max_completion_tokens
        if None not in both and both[0] != both[1]:
            raise Refused("max_tokens", "max_tokens and max_completion_tokens differ; give one")
        return self

    @property
    def tools_told(self) -> list[Tool]:
        return [] if self.tool_choice == "none" else self.tools

    @property
    def must_call(self) -> list[Tool] | None:
        """The tools of which the answer is a call; None where it need not be one."""
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            return [tool for tool in self.tools if tool.function.name == name]
        return self.tools if self.tool_choice == "required" else None

    @property
    def most_tokens(self) -> int | None:
        """Of an answer; None for what the context leaves."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def top(self) -> int | None:
        """How many log-probabilities a token has; None for none, not even its own."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(_Asked):
    """Of /v1/completions."""

    prompt: Annotated[
        str | Texts | Tokens | Annotated[list[Tokens], Field(fail_fast=True)],
        Field(description="a text, token ids, or a list of either", union_mode="left_to_right"),
        BeforeValidator(_alike),
    ]
    suffix: str = Field("", description="what stands behind the answer, which fills the middle")
    max_tokens: int = Field(16, ge=0, le=MOST, description="of an answer at most")
    logprobs: Logprobs | None = None
    echo: bool = Field(False, description="the prompt stands before the answer")
    best_of: int | None = Field(None, description="taken if it equals n")
    add_special_tokens: bool = Field(True, description="those that begin a text")

    @model_validator(mode="after")
    def _asks_for_an_answer(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of != self.n:
            raise Refused("best_of", "best_of is supported only where it equals n")
        if isinstance(self.prompt, list) and not self.prompt:
            raise Refused("prompt", "prompt is empty")
        if self.suffix and (self.echo or not all(isinstance(given, str) for given in self.prompts)):
            field = "echo" if self.echo else "token ids as prompt"
            raise Refused("suffix", f"suffix and {field} do not go together", "invalid_value")
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise Refused("max_tokens", "max_tokens of 0 needs echo or prompt_logprobs")
        return self

    @property
    def most_tokens(self) -> int:
        """Of an answer."""
        return self.max_tokens

    @property
    def prompts(self) -> list[str | list[int]]:
        """One by one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class TokenizeRequest(_Rendered):
    """Of /tokenize: a text, or messages as the chat template makes one of them."""

    model: str | None = None
    prompt: str | None = None
    messages: (
        Annotated[list[ChatMessage], Field(fail_fast=True), BeforeValidator(_first_of)] | None
    ) = None
    add_special_tokens: bool = Field(True, description="of a text: those that begin it")
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _has_one(self) -> "TokenizeRequest":
        if (self.prompt is None) == (not self.messages):
            raise Refused("prompt", "give a prompt or messages, and not both")
        return self


class DetokenizeRequest(Fields):
    """Of /detokenize."""

    model: str | None = None
    tokens: Tokens


class MarkdownRequest(Fields):
    """Of /markdown."""

    text: str


@cache
def _names() -> frozenset[str]:
    """Of all fields that clients know, by which unions' alternatives are told from them."""
    models: list[type[Fields]] = [Fields]
    for model in models:
        models += model.__subclasses__()
    return frozenset(name for model in models for name in (*model.model_fields, *model.ALIASES))


def refusal_of(fault: Any) -> ApiError:
    """What a client is told of a request that does not hold to its model.

    Args:
        fault: the first that pydantic found.
    """
    cause = fault.get("ctx", {}).get("error")
    # of a union, pydantic names the alternative too
    place = [str(part) for part in fault["loc"] if isinstance(part, int) or part in _names()]
    if isinstance(cause, Refused):
        place = place if place[-1:] == [cause.name] else [*place, cause.name]
        return bad_request(str(cause), ".".join(place), cause.code)
    if fault["type"] == "extra_forbidden":
        name = ".".join([*place, str(fault["loc"][-1])[:100]])
        return bad_request(f"unknown field {name}", name, "unknown_parameter")
    if not place and fault["type"] == "missing":
        return bad_request("the body is empty: send a JSON object", code="invalid_json")
    if not place and fault["type"] in ("model_attributes_type", "model_type"):
        return bad_request(
            "the body is no JSON object: send one, with Content-Type: application/json",
            code="invalid_json",
        )
    if fault["type"] == "json_invalid":
        return bad_request("the body is not JSON", code="invalid_json")
    param = ".".join(place) or None
    message = str(cause or fault["msg"])
    return bad_request(f"{param}: {message}" if param else message, param, "invalid_value")
