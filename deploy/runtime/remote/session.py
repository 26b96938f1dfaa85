"""Sequences of a target that runs elsewhere: what is under way, and links that break."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from polybasic.chain.base.errors import UserError
from polybasic.deploy.runtime.remote.messages import (
    Answer,
    Begin,
    BrokenLinkError,
    Channel,
    End,
    Failure,
    Received,
    Verify,
    Working,
    malformed,
)
from polybasic.deploy.runtime.remote.target import SILENT_SECONDS, RemoteTarget
from polybasic.deploy.runtime.rounds.logprobs import TokenLogprobs
from polybasic.deploy.runtime.rounds.sampling import Sampling
from polybasic.deploy.runtime.rounds.verifier import PassClock

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
"""Seconds between tries to connect."""


@dataclass(frozen=True)
class Sent:
    """A block under way.

    Attributes:
        number: of the message.
        ids: the last token before the block, and the block.
    """

    number: int
    ids: list[int]


@dataclass(frozen=True)
class Verdict:
    """What the target says of a block.

    Attributes:
        num_kept: how many of the block's tokens.
        next_token: after them.
        logprobs: of the tokens kept and the next one, if they were asked for.
    """

    num_kept: int
    next_token: int
    logprobs: list[TokenLogprobs]


class Session:
    """One sequence of a target that runs elsewhere.

    A link that breaks is made again, and the far side is told the tokens so far and the blocks
    that were under way: what a sequence answers does not depend on it.

    Attributes:
        name: of the target.
        clock: its passes, and the seconds of waiting for them.
        tokens: the sequence so far, with the last one; whoever has begun it appends to it.
        sent: blocks under way, in order.
    """

    def __init__(self, target: RemoteTarget) -> None:
        self.target, self.name = target, target.name
        self.clock = PassClock(torch.device("cpu"))
        self.tokens: list[int] = []
        self.sent: deque[Sent] = deque()
        self._channel: Channel | None = None
        self._begin: Begin | None = None
        self._verdict: Verdict | None = None
        self._broken_since: float | None = None
        self._pause = 0.0

    def begin(
        self, tokens: list[int], num_prompt_tokens: int, sampling: Sampling, logprobs: int | None
    ) -> None:
        """Begin a sequence, or go on with one; the far side reads what it does not know.

        Args:
            tokens: at least one.
            num_prompt_tokens: leading ones that are not output.
            sampling: greedy or with a seed.
            logprobs: so many most probable tokens are named beside each one.
        """
        self.drop()
        self.tokens = tokens
        self._begin = Begin(
            num_prompt_tokens=num_prompt_tokens, sampling=sampling, logprobs=logprobs
        )
        try:
            self._channel = self._channel or self.target.take()
            self._send_begin(self._channel)
        except BrokenLinkError as error:
            self._connect_again(error)

    def send(self, ids: list[int]) -> None:
        """Have a block verified after those that are under way.

        Args:
            ids: the last token before the block, and the block.
        """
        sent = Sent(next(self.target.numbers), ids)
        position = len(self.tokens) - 1 + sum(len(block.ids) for block in self.sent)
        self.sent.append(sent)
        try:
            if self._channel is not None:
                self._send_block(self._channel, sent, position)
        except BrokenLinkError:
            self._break()  # `verdict` makes it again

    @property
    def has_verdict(self) -> bool:
        """Whether `verdict` returns without waiting, or has a broken link to make again."""
        try:
            while self._verdict is None and self._channel is not None:
                if not self._channel.has_arrived:
                    return False
                self._verdict = self._read(self._channel.receive(SILENT_SECONDS))
        except BrokenLinkError:
            self._break()
        return True

    def verdict(self) -> Verdict:
        """What the target says of the first block under way, which is under way no longer.

        Raises:
            UserError: the far side refuses, or the link stays broken.
        """
        with self.clock.running(num_passes=1):
            while self._verdict is None:
                try:
                    if self._channel is None:
                        raise BrokenLinkError("it broke")
                    self._verdict = self._read(self._channel.receive(SILENT_SECONDS))
                except BrokenLinkError as error:
                    self._connect_again(error)
        verdict, self._verdict = self._verdict, None
        self._broken_since, self._pause = None, 0.0
        self.sent.popleft()
        return verdict

    def drop(self) -> None:
        """Forget the blocks under way."""
        self.sent.clear()
        self._verdict = None

    def end(self) -> None:
        """End the sequence; the connection is kept for others."""
        self.drop()
        if self._channel is None:
            return
        channel, self._channel = self._channel, None
        try:
            channel.send(End(), SILENT_SECONDS)
            self.target.give_back(channel)
        except BrokenLinkError:
            channel.close()

    def _read(self, message: Received) -> Verdict | None:
        """What a message says of the first block under way; None where it says nothing of it."""
        content = message.content
        if isinstance(content, Failure):
            self._break()
            if content.is_busy and self._broken_since is not None:
                # it may not know yet that the link broke, and still hold the place
                raise BrokenLinkError(f"{content.what}: {content.where}")
            what = f"the target at {self.target.address} refuses: {content.what}"
            raise UserError(what, content.where, content.do)
        if isinstance(content, Working):
            return None
        if not isinstance(content, Answer):
            raise malformed(f"{type(content).__name__} in the place of an answer")
        first = self.sent[0]
        if content.number < first.number:
            return None  # to a block that was dropped
        is_possible = content.number == first.number and 0 <= content.num_kept < len(first.ids)
        if not is_possible or content.next_token >= self.target.vocab_size:
            raise malformed(f"an answer that cannot be: {content}")
        tokens = [*first.ids[1 : content.num_kept + 1], content.next_token]
        return Verdict(
            content.num_kept, content.next_token, _logprobs_in(message.arrays, tokens, self._begin)
        )

    def _send_begin(self, channel: Channel) -> None:
        assert self._begin is not None, "a sequence that was begun"
        channel.send(self._begin, SILENT_SECONDS, ids=np.array(self.tokens, np.int32))

    def _send_block(self, channel: Channel, sent: Sent, position: int) -> None:
        content = Verify(number=sent.number, position=position)
        channel.send(content, SILENT_SECONDS, ids=np.array(sent.ids, np.int32))

    def _break(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _connect_again(self, error: BrokenLinkError) -> None:
        """Make a link again, with all that the far side has to know."""
        self._break()
        self.target.close()  # connections of the same link
        self._broken_since = self._broken_since or time.monotonic()
        while self._channel is None:
            if time.monotonic() > self._broken_since + self.target.reconnect_seconds:
                raise self._lost(error)
            time.sleep(self._pause)
            self._pause = min(2 * self._pause, _LONGEST_PAUSE) or _FIRST_PAUSE
            try:
                channel = self.target.connected()
                self._send_begin(channel)
                position = len(self.tokens) - 1
                for sent in self.sent:
                    self._send_block(channel, sent, position)
                    position += len(sent.ids)
                self._channel = channel
            except BrokenLinkError as again:
                error = again

    def _lost(self, error: BrokenLinkError) -> UserError:
        assert self._begin is not None, "a sequence that was begun"
        num_given = len(self.tokens) - self._begin.num_prompt_tokens
        return UserError(
            "link to the target is broken",
            f"{self.target.address} ({error}), after {num_given} tokens of the answer",
            "ask again once it is whole; what was given is right",
        )


def _logprobs_in(arrays: Any, tokens: Sequence[int], begin: Begin | None) -> list[TokenLogprobs]:
    """The log-probabilities of an answer's tokens.

    Raises:
        UserError: they were asked for, and are not there.
    """
    if begin is None or begin.logprobs is None:
        return []
    own, ids, values = (arrays.get(name) for name in ("logprobs", "top_ids", "top_logprobs"))
    shape = (len(tokens), begin.logprobs)
    if (
        own is None
        or ids is None
        or values is None
        or not (own.shape == shape[:1] and ids.shape == values.shape == shape)
    ):
        raise malformed("an answer without its log-probabilities")
    return [
        TokenLogprobs(
            token, float(logprob), list(zip(best.tolist(), probable.tolist(), strict=True))
        )
        for token, logprob, best, probable in zip(tokens, own, ids, values, strict=True)
    ]
