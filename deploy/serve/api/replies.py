"""Answers as OpenAI shapes them, whole and in chunks, with what vLLM and llama.cpp say beside."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import uuid4

from polybasic.deploy.runtime.rounds.logprobs import TokenLogprobs
from polybasic.deploy.serve.api.choices import Choice, ChoicePart, Json, Prompt
from polybasic.deploy.serve.api.costs import costs
from polybasic.deploy.serve.api.errors import ApiError
from polybasic.deploy.serve.api.protocol import ChatRequest, CompletionRequest
from polybasic.deploy.serve.api.tools import CallReader
from polybasic.deploy.serve.texts import SharedText, TokenTexts
from polybasic.deploy.serve.tickets import News

_LEAST_LOGPROB = -9999.0
"""JSON has no infinity."""


class Reply(ABC):
    """The answers to one request, of either kind.

    Args:
        asked: the request.
        prompts: `asked.n` answers to each.
        model: its name.
        texts: of single tokens.
        own_stops: the checkpoint's stop tokens.
        calls: how tools are called; None where they cannot be.
    """

    kind: str
    """Of a whole reply."""
    chunk_kind: str
    ending = b"data: [DONE]\n\n"
    """Of a stream."""

    def __init__(
        self,
        asked: ChatRequest | CompletionRequest,
        prompts: Sequence[Prompt],
        model: str,
        texts: TokenTexts,
        own_stops: frozenset[int],
        calls: type[CallReader] | None = None,
    ) -> None:
        self._asked, self._texts, self._own_stops = asked, texts, own_stops
        self._prompts, self._calls = prompts, calls
        self.choices = [
            Choice(index, prompts[index // asked.n], self._shares(), self._reader())
            for index in range(asked.n * len(prompts))
        ]
        self._head = {"created": int(time.time()), "model": model}
        self._id = self._prefix + uuid4().hex

    _prefix = ""

    def whole(self) -> Json:
        """The reply, once all answers have ended."""
        choices = [self._choice(choice) for choice in self.choices]
        statistics = [each.statistics for each in self.choices if each.statistics is not None]
        return {
            "id": self._id,
            "object": self.kind,
            **self._head,
            "choices": choices,
            "usage": self.usage(),
            **self._beside_whole(),
            **costs(statistics),
        }

    def chunks(self, news: News) -> Iterator[Json]:
        """What a stream says of the news."""
        choice = self.choices[news.index]
        part = choice.read(news)
        if part.is_first:
            yield from self._opening(choice)
        said = part.text or part.reasoning or part.content or part.calls
        if said or part.token_ids or part.shown:
            told = {"tokens": part.shown, "passes": news.passes}
            extras = {"polybasic": told} if choice.shares is not None else {}
            yield self._chunk([self._delta(choice, part)], extras)
        if choice.statistics is not None:
            yield self._chunk([self._last(choice)], costs([choice.statistics]))

    def usage_chunk(self) -> Json:
        """The last one of a stream, where it was asked for."""
        return self._chunk([]) | {"usage": self.usage()}

    def failure(self, error: ApiError) -> Json:
        """What a stream says of an error."""
        return error.body

    # Of either kind

    @abstractmethod
    def _opening(self, choice: Choice) -> Iterator[Json]:
        """Chunks before the first tokens."""

    @abstractmethod
    def _delta(self, choice: Choice, part: ChoicePart) -> Json:
        """A part of an answer, in a chunk."""

    @abstractmethod
    def _last(self, choice: Choice) -> Json:
        """The end of an answer, in a chunk."""

    @abstractmethod
    def _choice(self, choice: Choice) -> Json:
        """A whole answer."""

    def _beside_whole(self) -> Json:
        return {}

    # Of both

    def _reader(self) -> CallReader | None:
        """Of an answer's calls, where it may have some."""
        return None

    def _shares(self) -> SharedText | None:
        return SharedText(self._texts.tokenizer) if self._asked.polybasic.members else None

    def _chunk(self, choices: list[Json], extras: Json | None = None) -> Json:
        made = {"id": self._id, "object": self.chunk_kind, **self._head, "choices": choices}
        if self._asked.stream_options.continuous_usage_stats:
            made["usage"] = self.usage()
        return made | (extras or {})

    def usage(self) -> Json:
        """Tokens of prompts and of the answers so far."""
        prompt_tokens = sum(len(prompt.token_ids) for prompt in self._prompts)
        completion_tokens = sum(len(choice.token_ids) for choice in self.choices)
        cached = sum(
            choice.statistics.num_cached_tokens
            for choice in self.choices[:: self._asked.n]
            if choice.statistics is not None
        )
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _ending(self, choice: Choice) -> Json:
        assert choice.statistics is not None
        stopped_by = choice.statistics.stopped_by
        reason: int | str | None = None
        if stopped_by == "stop" and choice.token_ids[-1] not in self._own_stops:
            reason = choice.token_ids[-1]
        elif stopped_by == "stop_string":
            behind = self._texts.tokenizer.decode(choice.token_ids)[len(choice.text) :]
            reason = next((stop for stop in self._asked.stops if behind.startswith(stop)), None)
        ended = "tool_calls" if choice.calls else "stop"
        ended = "length" if stopped_by == "length" else ended
        return {"finish_reason": ended, "stop_reason": reason}

    def _ids(self, token_ids: list[int]) -> Json:
        return {"token_ids": token_ids} if self._asked.return_token_ids else {}

    def _name(self, token: int) -> str:
        if self._asked.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return self._texts.text_of(token)

    def _of_prompt(self, choice: Choice) -> list[Json | None]:
        """Log-probabilities of a prompt, as vLLM shapes them."""
        entries: list[Json | None] = [None]
        for row in choice.prompt_logprobs:
            ranks = {token: rank for rank, (token, _) in enumerate(row.top, 1)}
            of_tokens = dict(row.top) | {row.token: row.logprob}
            entries.append(
                {
                    str(token): {
                        "logprob": _finite(logprob),
                        "rank": ranks.get(token),
                        "decoded_token": self._texts.text_of(token),
                    }
                    for token, logprob in of_tokens.items()
                }
            )
        return entries


class ChatReply(Reply):
    """Of /v1/chat/completions."""

    kind, chunk_kind, _prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"
    _asked: ChatRequest

    def _opening(self, choice: Choice) -> Iterator[Json]:
        extras = {}
        if self._asked.return_token_ids:
            extras["prompt_token_ids"] = choice.prompt.token_ids
        delta = {"role": "assistant", "content": ""}
        yield self._chunk([_streamed(choice.index, {"delta": delta})], extras)

    def _delta(self, choice: Choice, part: ChoicePart) -> Json:
        delta = self._reasoning(part.reasoning)
        if part.calls:
            first = len(choice.calls) - len(part.calls)
            delta["tool_calls"] = [
                {"index": place, **call} for place, call in enumerate(part.calls, first)
            ]
        if part.content or not delta:
            delta["content"] = part.content
        said = {"delta": delta, **self._logprobs(part.logprobs)}
        return _streamed(choice.index, said | self._ids(part.token_ids))

    def _last(self, choice: Choice) -> Json:
        return _streamed(choice.index, {"delta": {}}) | self._ending(choice)

    def _choice(self, choice: Choice) -> Json:
        message: Json = {"role": "assistant", "content": choice.content, "refusal": None}
        message |= self._reasoning(choice.reasoning)
        if choice.calls:
            message |= {"content": choice.content or None, "tool_calls": choice.calls}
        logprobs = self._logprobs(choice.logprobs) or {"logprobs": None}
        shown = {"polybasic": {"tokens": choice.shown}} if choice.shares is not None else {}
        return {
            "index": choice.index,
            "message": message,
            **logprobs,
            **self._ending(choice),
            **self._ids(choice.token_ids),
            **shown,
        }

    def _reader(self) -> CallReader | None:
        names = [tool.function.name for tool in self._asked.tools_told]
        if self._calls is None or not names:
            return None
        return self._calls(names, not self._asked.parallel_tool_calls)

    def _reasoning(self, thought: str) -> Json:
        return {"reasoning_content": thought} if thought and self._asked.include_reasoning else {}

    def _beside_whole(self) -> Json:
        first = self.choices[0]
        fields: Json = {}
        if self._asked.return_token_ids:
            fields["prompt_token_ids"] = first.prompt.token_ids
        if self._asked.prompt_logprobs is not None:
            fields["prompt_logprobs"] = self._of_prompt(first)
        return fields

    def _logprobs(self, rows: list[TokenLogprobs]) -> Json:
        if not self._asked.logprobs:
            return {}
        content = [
            {
                **self._named(row.token, row.logprob),
                "top_logprobs": [self._named(token, logprob) for token, logprob in row.top],
            }
            for row in rows
        ]
        return {"logprobs": {"content": content, "refusal": None}}

    def _named(self, token: int, logprob: float) -> Json:
        spelled = list(self._texts.bytes_of(token))
        return {"token": self._name(token), "logprob": _finite(logprob), "bytes": spelled}


class CompletionReply(Reply):
    """Of /v1/completions."""

    kind, chunk_kind, _prefix = "text_completion", "text_completion", "cmpl-"
    _asked: CompletionRequest

    def _opening(self, choice: Choice) -> Iterator[Json]:
        if not (self._asked.echo or self._asked.return_token_ids):
            return
        said: Json = {"text": choice.prompt.text if self._asked.echo else ""}
        if self._asked.echo:
            said |= self._logprobs(choice, self._echoed(choice))
        if self._asked.return_token_ids:
            said["prompt_token_ids"] = choice.prompt.token_ids
        yield self._chunk([_streamed(choice.index, said)])

    def _delta(self, choice: Choice, part: ChoicePart) -> Json:
        said = {"text": part.text, **self._logprobs(choice, part.logprobs)}
        return _streamed(choice.index, said | self._ids(part.token_ids))

    def _last(self, choice: Choice) -> Json:
        return _streamed(choice.index, {"text": ""}) | self._ending(choice)

    def _choice(self, choice: Choice) -> Json:
        rows: list[TokenLogprobs | int] = [*self._echoed(choice)] if self._asked.echo else []
        rows += choice.logprobs
        made = {
            "index": choice.index,
            "text": (choice.prompt.text if self._asked.echo else "") + choice.text,
            **(self._logprobs(choice, rows) or {"logprobs": None}),
            **self._ending(choice),
            **self._ids(choice.token_ids),
        }
        if self._asked.return_token_ids:
            made["prompt_token_ids"] = choice.prompt.token_ids
        if self._asked.prompt_logprobs is not None:
            made["prompt_logprobs"] = self._of_prompt(choice)
        if choice.shares is not None:
            made["polybasic"] = {"tokens": choice.shown}
        return made

    def _echoed(self, choice: Choice) -> list[TokenLogprobs | int]:
        """The prompt's tokens; the first one has no log-probability."""
        return [choice.prompt.token_ids[0], *choice.prompt_logprobs]

    def _logprobs(self, choice: Choice, rows: Sequence[TokenLogprobs | int]) -> Json:
        if self._asked.logprobs is None:
            return {}
        made: dict[str, list[Any]] = {
            "text_offset": [],
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }
        for row in rows:
            token = row if isinstance(row, int) else row.token
            made["text_offset"].append(choice.length)
            made["tokens"].append(self._name(token))
            choice.length += len(self._texts.text_of(token))
            if isinstance(row, int):
                made["token_logprobs"].append(None)
                made["top_logprobs"].append(None)
                continue
            made["token_logprobs"].append(_finite(row.logprob))
            of_tokens = dict(row.top) | {row.token: row.logprob}
            top: Json = {}
            for each, logprob in of_tokens.items():
                # of two tokens with one text, the likelier counts
                top.setdefault(self._name(each), _finite(logprob))
            made["top_logprobs"].append(top)
        return {"logprobs": made}


def _streamed(index: int, said: Json) -> Json:
    return {"index": index, "logprobs": None, "finish_reason": None} | said


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST_LOGPROB
