"""From a request to what the chain is asked: prompts as token ids, settings, limits."""

import json
import re
import secrets
import time
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.chat_templates import token_ids_of
from polybasic.deploy.runtime.chain import Chain, check_draws, checked_plan
from polybasic.deploy.runtime.drafters.history import History
from polybasic.deploy.runtime.grammar import Grammar
from polybasic.deploy.runtime.rounds.stopping import AnswerText
from polybasic.deploy.serve.api.choices import Prompt
from polybasic.deploy.serve.api.errors import ApiError, bad_request
from polybasic.deploy.serve.api.infill import Infilling, InfillRequest
from polybasic.deploy.serve.api.protocol import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
)
from polybasic.deploy.serve.api.reasoning import CLOSING, OPENING
from polybasic.deploy.serve.api.replies import ChatReply, CompletionReply, Reply
from polybasic.deploy.serve.api.tools import Tool, style_of
from polybasic.deploy.serve.learning import Learner
from polybasic.deploy.serve.markdown import MAX_CHARACTERS, Node, elements
from polybasic.deploy.serve.metrics import Metrics
from polybasic.deploy.serve.reading import Reading
from polybasic.deploy.serve.scheduler import Limits, Scheduler, readable
from polybasic.deploy.serve.settings import ServeSettings
from polybasic.deploy.serve.texts import TokenTexts
from polybasic.deploy.serve.tickets import RequestHandle

_SEED_BITS = 53
"""Of a seed that is drawn: numbers that every reader of JSON keeps."""

_MESSAGE_CHARACTERS = 64
"""For which a chat template takes as long as for a message."""

_END_TOKENS = 16
"""Of a prompt, in which a template opens a thought."""

_MARKDOWN_CHARACTERS = 16
"""Of a text that waits for its turn as one of Markdown does: that takes longer to read."""

_HISTORY_TOKENS = 1 << 17
"""Of a client's earlier sequences."""

_NUM_HISTORIES = 64
"""Of the clients that asked last."""


class Service:
    """A chain that answers requests.

    Attributes:
        context_tokens: prompt and answer together.
    """

    def __init__(
        self, chain: Chain, settings: ServeSettings, learner: Learner | None = None
    ) -> None:
        self.chain, self.settings = chain, settings
        self.metrics = Metrics(settings.model_names[0])
        limits = Limits(
            settings.sequences, settings.queue, settings.queued_tokens, settings.request_seconds
        )
        self.scheduler = Scheduler(chain, self.metrics, limits, learner)
        self.tokenizer = chain.tokenizer.backend_tokenizer
        self.texts = TokenTexts(self.tokenizer)
        self.context_tokens: int = chain.engine.context_tokens
        self.reading = Reading(self.tokenizer, self.context_tokens)
        self._calls = style_of(f"{chain.tokenizer.chat_template}")
        self._infilling = Infilling.of(self.tokenizer)
        self._history_of = lru_cache(_NUM_HISTORIES)(lambda client: History(_HISTORY_TOKENS))
        self._began = int(time.time())

    async def ask(
        self,
        asked: ChatRequest | CompletionRequest,
        request_id: str,
        client: str,
        made: Callable[..., Reply] | None = None,
    ) -> tuple[RequestHandle, Reply]:
        """Check a request and give it to the scheduler.

        Args:
            made: makes the reply; default: the usual one of its kind.

        Raises:
            ApiError: it asks for what there is not, does not fit, or cannot be taken now.
        """
        self.check_model(asked.model)
        if isinstance(asked, ChatRequest) and self._calls is None:
            _refuse_tools(asked)
        num_characters = self._bounded(asked)
        prompts, grammar = await self.reading.read(
            client, num_characters, lambda: (self._prompts(asked), self._grammar(asked))
        )
        history = self._history_of(client) if self.settings.history else None
        options = self._options(asked) | {"grammar": grammar, "history": history}
        jobs = []
        for prompt in prompts:
            self._check_prompt(prompt)
            num = self._most_tokens(asked, len(prompt.token_ids))
            for choice in range(asked.n):
                each = options | {"max_new_tokens": num, "choice": choice}
                jobs.append((prompt.token_ids, each))
        ticket = RequestHandle(request_id, client, jobs)
        made = made or (ChatReply if isinstance(asked, ChatRequest) else CompletionReply)
        name = self.settings.model_names[0]
        reply = made(asked, prompts, name, self.texts, self.chain.stop_tokens, self._calls)
        self.scheduler.submit(ticket)
        return ticket, reply

    def _bounded(self, asked: ChatRequest | CompletionRequest) -> int:
        """Characters that are to be read.

        Raises:
            ApiError: more answers or longer prompts than can be taken.
        """
        if isinstance(asked, ChatRequest):
            self.scheduler.check_number(asked.n)
            return self._characters_of(asked.messages, asked)
        self.scheduler.check_number(len(asked.prompts) * asked.n)
        num_characters = 0
        for prompt in asked.prompts:
            num_characters += len(prompt) + len(asked.suffix)
            if isinstance(prompt, str):
                self.reading.check(len(prompt) + len(asked.suffix), "prompt")
            else:
                self._most_tokens(asked, len(prompt))
        return num_characters

    def _characters_of(
        self, messages: list[ChatMessage], asked: ChatRequest | TokenizeRequest
    ) -> int:
        num_characters = len(json.dumps(asked.template_options)) if asked.template_options else 0
        for message in messages:
            for value in message.for_template.values():
                num_characters += len(value if isinstance(value, str) else json.dumps(value))
        # whoever speaks is at least a token
        self.reading.check(num_characters, "messages", num_tokens=len(messages))
        return num_characters + _MESSAGE_CHARACTERS * len(messages)

    def check_model(self, name: str | None) -> None:
        """Check that a model is served.

        Raises:
            ApiError: it is not (404).
        """
        names = self.settings.model_names
        if name is not None and name not in names:
            message = f"there is no model {name[:100]!r} here; there is {', '.join(names)}"
            raise ApiError(404, message, "model", "model_not_found")

    def models(self) -> list[dict[str, Any]]:
        """What /v1/models lists."""
        members = [member.name for member in self.chain.manifest.members]
        plan = self.chain.plan
        return [
            {
                "id": name,
                "object": "model",
                "created": self._began,
                "owned_by": "polybasic",
                "root": self.settings.model_names[0],
                "parent": None,
                "max_model_len": self.context_tokens,
                "polybasic": {
                    "members": members,
                    "plan": list(plan.members),
                    "lossless": plan.is_lossless,
                },
            }
            for name in self.settings.model_names
        ]

    async def tokenize(self, asked: TokenizeRequest, client: str) -> dict[str, Any]:
        """Of a text, or of messages in their template, what /tokenize answers.

        Raises:
            ApiError: it is longer than any prompt.
        """
        text, messages = asked.prompt, asked.messages or []
        if text is not None:
            self.reading.check(len(text), "prompt")
        num_characters = len(text) if text is not None else self._characters_of(messages, asked)

        def read() -> dict[str, Any]:
            if text is None:
                token_ids = self._of_messages(messages, asked)
            else:
                token_ids = self._of_text(text, asked.add_special_tokens)
            named = token_ids if asked.return_token_strs else []
            names = [self.texts.text_of(token) for token in named]
            return {
                "count": len(token_ids),
                "max_model_len": self.context_tokens,
                "tokens": token_ids,
                "token_strs": names if asked.return_token_strs else None,
            }

        return await self.reading.read(client, num_characters, read)

    async def detokenize(self, token_ids: list[int], client: str) -> str:
        """That token ids mean, special tokens included.

        Raises:
            ApiError: one is outside of the vocabulary, or they are more than any prompt has.
        """
        self.reading.check(0, "tokens", num_tokens=len(token_ids))
        return await self.reading.read(client, len(token_ids), lambda: self._text(token_ids))

    async def markdown(self, text: str, client: str) -> list[Node]:
        """The elements that an answer's Markdown means.

        Raises:
            ApiError: it has more than `MAX_CHARACTERS`.
        """
        if len(text) > MAX_CHARACTERS:
            raise bad_request(
                f"text has {len(text):,} characters; at most {MAX_CHARACTERS:,} are formatted: "
                "show it as it is",
                "text",
                "text_too_long",
            )
        num_characters = _MARKDOWN_CHARACTERS * len(text)
        return await self.reading.read(client, num_characters, lambda: elements(text))

    def _text(self, token_ids: list[int]) -> str:
        self._check_tokens(token_ids, "tokens")
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=False))

    def _prompts(self, asked: ChatRequest | CompletionRequest) -> list[Prompt]:
        if isinstance(asked, ChatRequest):
            token_ids = self._of_messages(asked.messages, asked)
            is_free = asked.restriction is None and asked.must_call is None
            thinking = self._thinking(asked, token_ids) if is_free else None
            return [Prompt(token_ids, thinking=thinking)]
        prompts = []
        for given in asked.prompts:
            if isinstance(given, str) and asked.suffix:
                before, behind = (self._of_text(text, False) for text in (given, asked.suffix))
                prompts.append(Prompt(self._fills("suffix").prompt(before, behind)))
            elif isinstance(given, str):
                prompts.append(Prompt(self._prompt_of(given, asked.add_special_tokens), given))
            else:
                prompts.append(Prompt(given, self._text(given) if asked.echo else ""))
        return prompts

    def _thinking(self, asked: ChatRequest, token_ids: list[int]) -> bool | None:
        """Whether the prompt has begun a thought; None where the template knows of none."""
        if CLOSING not in f"{self.chain.tokenizer.chat_template}":
            return None
        if asked.continue_final_message:
            begun = asked.messages[-1].for_template["content"]
            return OPENING in begun.rpartition(CLOSING)[2]
        end = self.tokenizer.decode(token_ids[-_END_TOKENS:], skip_special_tokens=False)
        return end.rstrip().endswith(OPENING)

    def _fills(self, param: str) -> Infilling:
        """How middles are asked for.

        Raises:
            ApiError: the tokenizer has no marks for it.
        """
        if self._infilling is None:
            message = f"{param} is not supported: the chain's tokenizer has no marks by which "
            message += "models fill in a middle"
            raise bad_request(message, param, "unsupported_parameter")
        return self._infilling

    async def infill(self, asked: InfillRequest, client: str) -> CompletionRequest:
        """The completion that /infill asks for.

        Raises:
            ApiError: the tokenizer has no marks, or the texts do not fit the context.
        """
        fills, files = self._fills("input_prefix"), asked.input_extra
        texts = [asked.input_prefix + asked.prompt, asked.input_suffix]
        texts += [f"{file.filename}\n{file.text}\n" for file in files]
        num_characters = sum(map(len, texts))
        self.reading.check(num_characters, "input_prefix")

        def read() -> list[int]:
            before, behind, *extras = (self._of_text(text, False) for text in texts)
            mark = [] if fills.file_mark is None else [fills.file_mark]
            return [
                *(token for tokens in extras for token in (*mark, *tokens)),
                *fills.prompt(before, behind),
            ]

        prompt = await self.reading.read(client, num_characters, read)
        self.reading.check(0, "input_prefix", num_tokens=len(prompt) + 1)
        return asked.completion(prompt, fills.stops, max(self.context_tokens - len(prompt), 1))

    def _of_messages(
        self, messages: list[ChatMessage], asked: ChatRequest | TokenizeRequest
    ) -> list[int]:
        try:
            given: Any = [message.for_template for message in messages]
            token_ids: list[int] = self.chain.encode(
                given,
                self.settings.special_tokens,
                asked.continue_final_message,
                asked.template_options,
            )
        except UserError as error:
            raise bad_request(readable(error, self.chain), "messages") from error
        return token_ids

    def _of_text(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            return token_ids_of(self.chain.tokenizer, text, add_special_tokens)
        except UserError as error:
            raise bad_request(readable(error, self.chain), "prompt") from error

    def _prompt_of(self, text: str, add_special_tokens: bool) -> list[int]:
        token_ids = self._of_text(text, add_special_tokens)
        try:
            return self.chain.prompt_of(token_ids)
        except UserError as error:
            raise bad_request(readable(error, self.chain), "prompt") from error

    def _grammar(self, asked: ChatRequest | CompletionRequest) -> Grammar | None:
        """That the answers have to match, as far as it can be used."""
        restriction = asked.restriction
        if isinstance(asked, ChatRequest) and asked.must_call is not None:
            restriction = "tools", partial(self._grammar_of_calls, asked, asked.must_call)
        if restriction is None:
            return None
        param, make = restriction
        try:
            grammar = make()
            self.chain.vocabulary.constraint(grammar).check()
        except UserError as error:
            raise bad_request(readable(error, self.chain), param, "invalid_value") from error
        return grammar

    def _grammar_of_calls(self, asked: ChatRequest, tools: list[Tool]) -> Grammar:
        assert self._calls is not None, "tools are refused without"
        is_single, rule = not asked.parallel_tool_calls, self.chain.vocabulary.rule
        return self._calls.grammar(tools, is_single, rule)

    def _options(self, asked: ChatRequest | CompletionRequest) -> dict[str, Any]:
        """Of `Chain.begin`, for all answers of a request."""
        run = tuple(asked.polybasic.run) if asked.polybasic.run is not None else None
        stop_token_ids = asked.stop_token_ids or []
        if isinstance(asked, CompletionRequest) and asked.suffix:
            stop_token_ids = [*stop_token_ids, *self._fills("suffix").stops]
        self._check_tokens(stop_token_ids, "stop_token_ids")
        try:
            sampling = self.chain.sampling(**asked.sampling)
            sampling.check_vocabulary(self._vocab_size)
            AnswerText(self.tokenizer, asked.stops)
            plan = self.chain.plan
            if run is not None and run != plan.members:
                plan = checked_plan(self.chain.plan_of(run), self.chain.manifest)
            check_draws(plan, sampling)
        except UserError as error:
            named = re.match(r"\w+", error.where)
            param = "polybasic.run" if error.what == "plan cannot run" else named and named[0]
            raise bad_request(readable(error, self.chain), param, "invalid_value") from error
        wants_prompt = asked.prompt_logprobs
        if isinstance(asked, CompletionRequest):
            top = asked.logprobs
            if asked.echo and wants_prompt is None:
                wants_prompt = top if top is not None or asked.max_tokens else 0
        else:
            top = asked.top
        seed = asked.seed
        if seed is None and plan.is_lossless:
            seed = secrets.randbits(_SEED_BITS)
        return asked.sampling | {
            "seed": seed,
            "rule": "coupled",
            "stop": asked.stops,
            "stop_token_ids": stop_token_ids,
            "min_tokens": asked.min_tokens,
            "ignore_eos": asked.ignore_eos,
            "logprobs": top,
            "prompt_logprobs": wants_prompt,
            "members": run,
        }

    @property
    def _vocab_size(self) -> int:
        return self.chain.engine.models.vocab_size

    def _check_tokens(self, token_ids: list[int], param: str) -> None:
        outside = [token for token in token_ids if token >= self._vocab_size]
        if outside:
            message = f"{param}: token {outside[0]} is outside of the {self._vocab_size} there are"
            raise bad_request(message, param, "invalid_value")

    def _check_prompt(self, prompt: Prompt) -> None:
        if not prompt.token_ids:
            raise bad_request("the prompt is empty", "prompt", "invalid_value")
        self._check_tokens(prompt.token_ids, "prompt")

    def _most_tokens(self, asked: ChatRequest | CompletionRequest, num_prompt: int) -> int:
        """New tokens of an answer at most.

        Raises:
            ApiError: prompt and answer do not fit the context.
        """
        left = self.context_tokens - num_prompt
        most = asked.most_tokens
        if left < (1 if most is None else most) or left < 0:
            new = "at least 1 new one" if most is None else f"{most} new ones"
            raise bad_request(
                f"the prompt's {num_prompt} tokens and {new} do not fit the context of "
                f"{self.context_tokens}; shorten the prompt or ask for fewer tokens",
                "messages" if isinstance(asked, ChatRequest) else "prompt",
                "context_length_exceeded",
            )
        num = left if most is None else most
        if asked.min_tokens > num:
            raise bad_request(f"min_tokens is more than {num}, the most tokens", "min_tokens")
        return num


def _refuse_tools(asked: ChatRequest) -> None:
    """Of a chain whose chat template has no tools.

    Raises:
        ApiError: the request has some.
    """
    of_calls = [
        n for n, turn in enumerate(asked.messages) if turn.role == "tool" or turn.tool_calls
    ]
    place = "tools" if asked.tools_told else f"messages.{of_calls[0]}" if of_calls else None
    if place is not None:
        message = f"{place} is not supported: the chain's chat template tells models of no tools, "
        message += "or of calls in a way that cannot be read here"
        raise bad_request(message, place, "unsupported_parameter")
