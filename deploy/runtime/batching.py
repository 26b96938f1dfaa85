"""Many sequences at a time: requests that run, and which of their passes come next.

A sequence's work yields the passes that it needs. Of all passes that are waited for, those of the
model lowest in the chain run first, so that the models above, which cost more, have as many
sequences in each pass as there are.
"""

import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from polybasic.chain.formats.plan import Plan, Situation
from polybasic.deploy.runtime.drafters.interface import Drafter
from polybasic.deploy.runtime.remote.stage import RemotePass
from polybasic.deploy.runtime.request import Piece, Request, Statistics, unfinished
from polybasic.deploy.runtime.rounds.finite import not_finite
from polybasic.deploy.runtime.rounds.logprobs import TokenLogprobs
from polybasic.deploy.runtime.rounds.noise import Noise
from polybasic.deploy.runtime.rounds.passes import Pass, Passes, VerifierPass
from polybasic.deploy.runtime.rounds.proposals import Proposals
from polybasic.deploy.runtime.rounds.sampling import NotFiniteError
from polybasic.deploy.runtime.rounds.stages import Block, Stage
from polybasic.deploy.runtime.rounds.stopping import StoppedBy, cut_at_end
from polybasic.deploy.runtime.rounds.verifier import PassClock, Verifier
from polybasic.deploy.runtime.slots import MIN_COPIED_TOKENS, Slot, Slots, num_common

_MUCH_LONGER = 4
"""Times as long as a prompt is what others have to read of theirs where it is read beside them: it
makes them a quarter slower at most."""

_ROOM_TO_GO_ON = 256
"""Rows for tokens to come, at most, without which no sequence starts or goes on after a pause."""


def usual_stage(kind: type[Stage], *given: Any) -> Stage:
    """A stage of this class as it is."""
    return kind(*given)


class Host(Protocol):
    """What a running request asks of the engine, see `polybasic.deploy.runtime.engine.Engine`."""

    slots: Slots

    def stages(
        self, request: Request, *, make: Callable[..., Stage], slot: Slot, noise: Noise | None
    ) -> tuple[list[Stage], Drafter]:
        """Its stages over a slot's caches."""

    def noise(self, request: Request) -> Noise | None:
        """That its members draw with."""

    @property
    def num_running(self) -> int:
        """Sequences that have not ended."""

    def plan_now(self, request: Request, situation: Situation) -> Plan:
        """The plan of a situation."""

    def reap(self) -> None:
        """Free the sequences of requests that are over."""


class ActiveSequence:
    """A request that has a sequence.

    Made by `Engine.begin`; `Engine.step` runs it.

    Attributes:
        request: with the plan that it runs by now.
        pieces: that were not taken yet.
        waiting: the pass that it waits for; None before it has started and after its end.
        error: that ended it.
        prompt_logprobs: of the prompt's tokens but the first, if they were asked for.
        num_pauses: times that it gave its caches up.
    """

    def __init__(
        self,
        request: Request,
        slot: Slot,
        engine: Host,
        runs_ahead: bool,
        make: Callable[..., Stage],
    ) -> None:
        self.request, self.slot, self._engine = request, slot, engine
        self._runs_ahead, self._make = runs_ahead, make
        self.pieces: deque[Piece] = deque()
        self.waiting: Pass | None = None
        self.error: BaseException | None = None
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.num_cached_tokens = self.num_pauses = 0
        self.has_started = self.is_over = False
        self._begin = time.perf_counter()
        self._work = self._answer()
        self._noise = engine.noise(request)
        self._stages: list[Stage] = []
        self._drafter: Drafter | None = None
        self._costs = _Costs()
        self._answered: list[int] = []
        self._num_first = 0
        self._prefill_seconds = 0.0
        self._statistics: Statistics | None = None

    @property
    def wants_to_run(self) -> bool:
        """Whether a pass would bring it forward."""
        return not self.is_over and (self._runs_ahead or not self.pieces)

    @property
    def statistics(self) -> Statistics:
        """What the whole answer cost.

        Raises:
            UserError: it has not ended, or what made it fail.
        """
        if self.error is not None:
            raise self.error
        if self._statistics is None:
            raise unfinished()
        return self._statistics

    @property
    def spent(self) -> Statistics:
        """What it has cost so far, or by its end: of an answer that has not ended without the
        seconds of members, which a GPU would be waited for."""
        return self._statistics or self._cost(None)

    @property
    def passes(self) -> dict[str, int]:
        """Of each member so far, by name, without the prefill."""
        costs = _Costs(dict(self._costs.passes))
        costs.add_passes(self._clocks)
        return costs.passes

    def take(self) -> list[Piece]:
        """What was made since the last call."""
        return [self.pieces.popleft() for _ in range(len(self.pieces))]

    def close(self) -> None:
        """Give the rest up; the sequence is free after the pass that is under way."""
        self.is_over = True
        self._engine.reap()

    @property
    def tokens(self) -> list[int]:
        """Of prompt and answer so far."""
        return [*self.request.token_ids, *self._answered]

    @property
    def has_room(self) -> bool:
        """Whether the caches have room for its tokens and the next ones."""
        num_rows = self._num_tokens + min(self._num_left, _ROOM_TO_GO_ON)
        shared = self.tokens[:-1] if self._may_reuse else []
        members = self.request.plan.members
        return self._engine.slots.has_room(self.slot, num_rows, shared, members)

    @property
    def _may_reuse(self) -> bool:
        """Whether what caches know of its tokens is not read again."""
        return self.request.reuses and self.request.prompt_logprobs is None

    def start(self) -> None:
        """Find what need not be read again, and the first pass to wait for."""
        self.has_started = True
        self._engine.slots.fill(self.slot, self.tokens, self._may_reuse)
        self._engine.slots.make_room()
        self.resume(None)

    def pause(self) -> None:
        """Give its caches up, between two passes; `start` reads its tokens again.

        What was drafted or drawn in a round that has not ended is forgotten.
        """
        self.num_pauses += 1
        self._costs = self._costs_now()
        self._work.close()
        self._work = self._answer()
        self._stages, self._drafter, self.waiting = [], None, None
        self.has_started = False
        self.slot.drop()
        self.slot.num_reserved = 0

    def resume(self, result: Any) -> None:
        """Go on with the result of the pass that was waited for."""
        if self.is_over:
            return
        try:
            self.waiting = self._work.send(result)
        except StopIteration:
            self.is_over = True
        except NotFiniteError:
            near = [stage.verifier for stage in reversed(self._stages)]
            verifiers = [verifier for verifier in near if isinstance(verifier, Verifier)]
            self.fail(not_finite(verifiers, self._stages[-1].tokens))
        except BaseException as error:
            self.fail(error)
            if not isinstance(error, Exception):
                raise

    def fail(self, error: BaseException) -> None:
        """End with an error."""
        self.error, self.is_over = error, True

    def leave(self) -> None:
        """Free the sequence, whose caches keep what is known of its tokens."""
        self._work.close()
        self.waiting = None
        if self.error is not None:
            self.slot.clear()
        elif self._stages:
            root = self._stages[0]
            root.settle()
            self.slot.tokens = root.tokens
            if (history := self.request.history) is not None:
                history.add(root.tokens[self.num_cached_tokens :])
        self.slot.leave()

    def _answer(self) -> Passes[None]:
        request = self.request
        if request.follows_plans:
            self.request = replace(request, plan=self._plan_now())
        self._make_stages()
        stopped_by: StoppedBy | None = None
        if self._answered:
            yield from self._stages[0].prefill(self.tokens)
        else:
            stopped_by = yield from self._prefill()
        for stage in self._stages:
            stage.verifier.clock.reset()
        self._prefill_seconds = self._prefill_seconds or time.perf_counter() - self._begin
        while stopped_by is None:
            if request.follows_plans and (plan := self._plan_now()) != self.request.plan:
                yield from self._change(plan)
            stopped_by = self._take((yield from self._stages[0].propose(1, self._num_left)))
        if request.text is not None and (rest := request.text.finish()):
            self.pieces.append(Piece(rest, [], [], []))
        self._statistics = self._cost(stopped_by)

    def _plan_now(self) -> Plan:
        situation = Situation(
            active=self._engine.num_running,
            num_tokens=self._num_tokens,
            num_answered=len(self._answered),
            num_left=self._num_left,
            temperature=self.request.sampling.temperature,
            num_unread=lambda members: self.slot.num_unread(self._num_tokens, members),
        )
        return self._engine.plan_now(self.request, situation)

    @property
    def _num_tokens(self) -> int:
        return len(self.request.token_ids) + len(self._answered)

    @property
    def _num_left(self) -> int:
        return self.request.max_new_tokens - len(self._answered)

    def _take(self, block: Block) -> StoppedBy | None:
        """Add a block to the answer; what ends it there."""
        request = self.request
        tokens, stopped_by = cut_at_end(
            block.tokens, self._num_left, request.stop_tokens, request.text
        )
        self._answered += tokens
        num = len(tokens)
        text = "" if request.text is None else request.text.take()
        self.pieces.append(Piece(text, tokens, block.proposers[:num], block.logprobs[:num]))
        return stopped_by

    def _cost(self, stopped_by: StoppedBy | None) -> Statistics:
        costs, request = self._costs_now(is_timed=stopped_by is not None), self.request
        # a stop string may end the answer amid what a round has kept
        num_tolerated = min(costs.num_tolerated, len(self._answered))
        seconds = time.perf_counter() - self._begin
        return Statistics(
            num_prompt_tokens=len(request.token_ids),
            num_tokens=len(self._answered),
            seconds=seconds,
            prefill_seconds=self._prefill_seconds or seconds,
            forward_passes=costs.passes,
            seconds_by_member=costs.seconds,
            accepted_lengths=costs.accepted_lengths,
            stopped_by=stopped_by,
            seed=None if request.sampling.is_greedy else request.sampling.seed,
            num_cached_tokens=self.num_cached_tokens,
            num_first=self._num_first,
            num_pauses=self.num_pauses,
            num_tolerated=None if request.plan.is_lossless else num_tolerated,
            proposals=costs.proposals,
        )

    def _prefill(self) -> Passes[StoppedBy | None]:
        """Read the prompt; the token after it is out before anything below the root reads it."""
        root, prompt = self._stages[0], self.request.token_ids
        self.num_cached_tokens = min(root.num_held, len(prompt) - 1)
        stopped_by: StoppedBy | None = "length"
        if self._num_left:
            block = yield from root.start(prompt)
            self._num_first, stopped_by = len(block.tokens), None
            if block.tokens:
                stopped_by = self._take(block)
        else:
            yield from root.prefill(prompt)
        self.prompt_logprobs = root.prompt_logprobs
        if stopped_by is None:
            yield from root.catch_up()
        return stopped_by

    def _change(self, plan: Plan) -> Passes[None]:
        """Go on by another plan, between two rounds of the target."""
        self._costs = self._costs_now()
        tokens = self._stages[0].tokens
        self.request = replace(self.request, plan=plan, prompt_logprobs=None)
        self._make_stages()
        yield from self._stages[0].prefill(tokens)

    def _make_stages(self) -> None:
        request = self.request
        if self._answered:
            request = replace(request, prompt_logprobs=None)
        if self.num_pauses:
            # noise is of each place in the text; other draws must not be those of its beginning
            seed = random.Random(f"{request.sampling.seed} {self.num_pauses}").getrandbits(63)
            request = replace(request, sampling=replace(request.sampling, seed=seed))
        self._stages, self._drafter = self._engine.stages(
            request, make=self._make, slot=self.slot, noise=self._noise
        )

    def _costs_now(self, is_timed: bool = True) -> "_Costs":
        """With those of the present stages."""
        costs, clocks = deepcopy(self._costs), self._clocks
        costs.add_passes(clocks)
        costs.add(self._stages if clocks else [], clocks if is_timed else {})
        return costs

    @property
    def _clocks(self) -> dict[str, PassClock]:
        """Of the members in the present stages, by name; none before the prompt was read."""
        if not self._prefill_seconds:
            return {}
        clocks = {stage.verifier.name: stage.verifier.clock for stage in self._stages}
        if self._drafter is not None and self._drafter.clock is not None:
            clocks[self.request.plan.members[-1]] = self._drafter.clock
        return clocks


@dataclass
class _Costs:
    """What the stages of an answer cost, by member."""

    passes: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    accepted_lengths: dict[str, list[int]] = field(default_factory=dict)
    proposals: dict[str, Proposals] = field(default_factory=dict)
    num_tolerated: int = 0

    def add_passes(self, clocks: dict[str, PassClock]) -> None:
        for name, clock in clocks.items():
            self.passes[name] = self.passes.get(name, 0) + clock.num_passes

    def add(self, stages: Sequence[Stage], timed: dict[str, PassClock]) -> None:
        for name, clock in timed.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + clock.seconds
        for stage in stages:
            self.num_tolerated += stage.num_tolerated
            self.accepted_lengths.setdefault(stage.verifier.name, []).extend(stage.accepted_lengths)
            for name, counts in stage.proposals.items():
                self.proposals.setdefault(name, Proposals()).add(counts)


def choose(running: Sequence[ActiveSequence]) -> list[ActiveSequence]:
    """The sequences whose passes run next, together.

    Those that have not started are started here, in their order, as far as prompts of the rows of
    one pass are waited for: the next ones may share what these read. Where the caches have no room
    for one, those behind it wait, too.
    """
    for sequence in running:
        if sequence.has_started:
            continue
        if not sequence.has_room:
            break
        if _may_start(sequence, running):
            sequence.start()
    waiting = [
        sequence for sequence in running if sequence.waiting is not None and not sequence.is_over
    ]
    if not waiting:
        return []
    lowest = max(waiting, key=lambda sequence: _depth(sequence))
    assert lowest.waiting is not None
    kind = lowest.waiting.kind
    return [
        sequence
        for sequence in waiting
        if sequence.waiting is not None and sequence.waiting.kind == kind
    ]


def _depth(sequence: ActiveSequence) -> int:
    """How far below the target the model lies whose pass is waited for."""
    if isinstance(sequence.waiting, RemotePass):
        return len(sequence.slot.verifiers) + 1 if sequence.waiting.is_ready else -1
    if isinstance(sequence.waiting, VerifierPass):
        return list(sequence.slot.verifiers).index(sequence.waiting.verifier.name)
    return len(sequence.slot.verifiers)


def rows_of_prompts(waiting: Iterable[Pass | None]) -> list[int]:
    """Of each pass that reads a prompt."""
    read = (
        reading for reading in waiting if isinstance(reading, VerifierPass) and reading.is_prompt
    )
    return [len(reading.rows) for reading in read]


def _may_start(sequence: ActiveSequence, running: Sequence[ActiveSequence]) -> bool:
    """Whether the prompts that are read leave room in a pass, or are much longer, and read nothing
    that it shares."""
    reading = [each for each in running if rows_of_prompts([each.waiting])]
    token_ids = sequence.tokens
    for other in reading:
        shared = num_common(other.request.token_ids, token_ids)
        if shared >= other.slot.num_known(token_ids) + MIN_COPIED_TOKENS:
            return False
    first = next(iter(sequence.slot.verifiers.values()), None)
    if first is None or sum(rows_of_prompts(each.waiting for each in reading)) < first.pace.room:
        return True
    return all(_MUCH_LONGER * _num_unread(sequence) <= _num_unread(other) for other in reading)


def _num_unread(sequence: ActiveSequence) -> int:
    """Tokens of a prompt that are not in the sequence's caches."""
    token_ids = sequence.tokens
    return len(token_ids) - sequence.slot.num_known(token_ids)
