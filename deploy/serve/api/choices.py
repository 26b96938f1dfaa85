"""One answer of a reply, as it grows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from polybasic.deploy.runtime.request import Statistics
from polybasic.deploy.runtime.rounds.logprobs import TokenLogprobs
from polybasic.deploy.serve.api.reasoning import Reasoning
from polybasic.deploy.serve.api.tools import CallReader
from polybasic.deploy.serve.texts import SharedText
from polybasic.deploy.serve.tickets import News

Json = dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """One that is answered.

    Attributes:
        text: that was asked, or that the ids mean; only for `echo`.
        thinking: whether it has begun a thought; None where the model has none.
    """

    token_ids: list[int]
    text: str = ""
    thinking: bool | None = None


class Choice:
    """One answer, as it grows."""

    def __init__(
        self,
        index: int,
        prompt: Prompt,
        shares: SharedText | None,
        reader: CallReader | None = None,
    ) -> None:
        self.index, self.prompt, self.shares = index, prompt, shares
        self.text, self.is_opened = "", False
        self.reasoning, self.content = "", ""
        self._parted = None if prompt.thinking is None else Reasoning(prompt.thinking)
        self._reader, self.calls = reader, list[Json]()
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.shown: list[Json] = []
        self.statistics: Statistics | None = None
        self.length = 0
        """Characters of the tokens that were named with their log-probabilities."""

    def read(self, news: News) -> "ChoicePart":
        """Take in what has come."""
        part, self.is_opened = ChoicePart(is_first=not self.is_opened), True
        for piece in news.pieces:
            part.text += piece.text
            part.token_ids += piece.token_ids
            part.logprobs += piece.logprobs
            if self.shares is not None:
                part.shown += _shown(self.shares.add(piece.text, piece.token_ids, piece.members))
        if news.statistics is not None:
            self.statistics = news.statistics
            if self.shares is not None:
                part.shown += _shown(self.shares.finish())
        self.prompt_logprobs = news.prompt_logprobs
        part.content = part.text
        is_last = news.statistics is not None
        if self._parted is not None:
            part.reasoning, part.content = self._parted.add(part.text, is_last)
        if self._reader is not None:
            part.content, calls = self._reader.add(part.content, is_last)
            most = max(1 - len(self.calls), 0) if self._reader.is_single else len(calls)
            part.calls = [call.to_json() for call in calls[:most]]
        self.text += part.text
        self.reasoning += part.reasoning
        self.content += part.content
        self.calls += part.calls
        self.token_ids += part.token_ids
        self.logprobs += part.logprobs
        self.shown += part.shown
        return part


class ChoicePart:
    """What a chunk carries of an answer.

    Attributes:
        text: of the answer, thoughts and their marks included.
        reasoning: that was thought, of this text and of what was held back before.
        content: that was said, likewise.
        calls: of tools that have ended.
    """

    def __init__(self, is_first: bool) -> None:
        self.is_first = is_first
        self.text = self.reasoning = self.content = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.shown: list[Json] = []
        self.calls: list[Json] = []


def _shown(told: Sequence[Any]) -> list[Json]:
    return [{"text": share.text, "id": share.token, "member": share.member} for share in told]
