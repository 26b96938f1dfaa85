"""Where the time of an answer goes: passes, drafts and draws one by one, each beside its bound.

A pass reads the weights of its model and the keys and values before its rows once, and multiplies
each weight with each of its rows. So it takes at least its bytes over the rate at which memory is
read, and its multiply-adds over the rate at which the model multiplies; both are measured after the
answer: over a buffer that no cache holds, and by a pass over many rows. A draft is bound by the
bytes of its levels. Attention's products are left out: up to some thousand tokens they are few.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.decoder_config import DecoderConfig
from polybasic.chain.formats.checkpoints.names import linear_shapes
from polybasic.chain.kernels.drafts import DraftTree
from polybasic.deploy.runtime.drafters.ngram import NgramDrafter
from polybasic.deploy.runtime.engine import Engine, rounds_of
from polybasic.deploy.runtime.memory import Memory
from polybasic.deploy.runtime.request import Request
from polybasic.deploy.runtime.rounds.passes import DraftPass, Pass, Passes, Read, VerifierPass
from polybasic.deploy.runtime.rounds.verifier import Verifier

T = TypeVar("T")
What = Literal["prompt", "pass", "draft", "copy", "draw", "between"]
"""Reading a part of a prompt, a verifying pass with its logits, a model's draft, a copy of n-grams,
the choice of tokens from logits, and all else: Python, the cut of blocks, cache moves, text."""

_BUFFER_BYTES = 256 << 20
_MANY_ROWS = 64
_REPEATS = 5


@dataclass(frozen=True)
class Event:
    """What an answer waited for.

    Attributes:
        what: see `What`.
        member: whose pass or draft it is; "" of the others.
        rows: of a pass; drafted tokens of a draft or copy; 0 of the others.
        seconds: that it took.
        num_bytes: that it must read.
        multiply_adds: that it must compute.
    """

    what: What
    member: str
    rows: int
    seconds: float
    num_bytes: int = 0
    multiply_adds: int = 0


@dataclass(frozen=True)
class Rates:
    """What this machine reaches.

    Attributes:
        bytes_per_second: of as much memory as the members' weights take, which may fit a cache.
        multiply_adds_per_second: by verifying member, in a pass over many rows.
    """

    bytes_per_second: float
    multiply_adds_per_second: Mapping[str, float]

    def bound(self, event: Event) -> float | None:
        """Least seconds of an event; None where nothing is known."""
        if not event.num_bytes:
            return None
        rate = self.multiply_adds_per_second.get(event.member)
        computing = event.multiply_adds / rate if rate else 0.0
        return max(event.num_bytes / self.bytes_per_second, computing)


@dataclass(frozen=True)
class Subtotal:
    """All events of one kind and member.

    Attributes:
        num: of them.
        rows: of one on average.
        seconds: of all.
        bound_seconds: of all; None where nothing is known.
    """

    what: What
    member: str
    num: int
    rows: float
    seconds: float
    bound_seconds: float | None


@dataclass(frozen=True)
class Timeline:
    """An answer by the events that it waited for.

    Attributes:
        text: of the answer.
        token_ids: of the answer.
        rounds: events of each of the target's rounds, after those that read the prompt and drew
            the first token.
        rates: by which events are bound.
    """

    text: str
    token_ids: list[int]
    rounds: list[list[Event]]
    rates: Rates

    def shares(self, events: Iterable[Event] | None = None) -> list[Subtotal]:
        """By kind and member, the longest first; of the whole answer by default."""
        chosen = [event for each in self.rounds for event in each] if events is None else events
        groups: dict[tuple[What, str], list[Event]] = {}
        for event in chosen:
            groups.setdefault((event.what, event.member), []).append(event)
        found = [self._share(*key, group) for key, group in groups.items()]
        return sorted(found, key=lambda share: -share.seconds)

    @property
    def median_round(self) -> int:
        """The place of the round that took the median time, of those after the prompt."""
        seconds = [sum(event.seconds for event in each) for each in self.rounds]
        places = sorted(range(1, len(seconds)), key=seconds.__getitem__)
        return places[len(places) // 2] if places else 0

    def to_json(self) -> Iterator[dict[str, Any]]:
        """An object for each event: with its round, 0 for the prompt, and its bound."""
        for number, events in enumerate(self.rounds):
            for event in events:
                bound = self.rates.bound(event)
                yield {"round": number, **asdict(event), "bound_seconds": bound}

    def _share(self, what: What, member: str, events: list[Event]) -> Subtotal:
        bounds = [self.rates.bound(event) for event in events]
        known = [bound for bound in bounds if bound is not None]
        return Subtotal(
            what,
            member,
            len(events),
            sum(event.rows for event in events) / len(events),
            sum(event.seconds for event in events),
            sum(known) if known else None,
        )


@torch.inference_mode()
def timeline(engine: Engine, request: Request, memory: Memory) -> Timeline:
    """Answer a request, alone, and time all that it waits for.

    Args:
        request: which `Engine.check` has passed, with a text.
        memory: that the engine's members take.

    Raises:
        UserError: other answers are being made, or the target is on another machine.
    """
    if engine.num_running:
        raise UserError(
            "chain is busy", f"{engine.num_running} answers are being made", "time when they ended"
        )
    if engine.models.remote is not None:
        raise UserError("target is elsewhere", "timeline", "time where all members are")
    request = replace(request, sampling=request.sampling.seeded(), follows_plans=False)
    stages, drafter = engine.stages(request)
    num_bytes = bytes_read(engine, memory)
    watch = _Watch(engine.models.device, num_bytes)
    if isinstance(drafter, NgramDrafter):
        watch.time_copies(drafter)
    token_ids: list[int] = []
    rounds = []
    for tokens, _ in rounds_of(stages[0], request, watch.run):
        token_ids += tokens
        rounds.append(watch.cut())
    assert request.text is not None, "a request of a prompt"
    text = request.text.take() + request.text.finish()
    sequence = [*request.token_ids, *token_ids]
    multiplying = {
        stage.verifier.name: _multiply_rate(watch, stage.verifier, sequence) for stage in stages
    }
    reading = _read_rate(watch, sum(num_bytes.values()))
    return Timeline(text, token_ids, rounds, Rates(reading, multiplying))


def bytes_read(engine: Engine, memory: Memory) -> dict[str, int]:
    """Bytes of weights that a pass of each member reads: all but an embedding that is not the
    output projection, and what a shortlist leaves out, too."""
    found = {name: parts["weights"] for name, parts in memory.members.items()}
    is_copied = memory.layout.device == "cpu" and memory.layout.kernels != "device"
    for name, decoder in engine.models.decoders.items():
        table, config = decoder.weights.embedding, decoder.config
        if isinstance(table, Tensor) and (is_copied or not config.tie_word_embeddings):
            found[name] -= table.nbytes
        found[name] -= decoder.bytes_left_out
    return found


class _Watch:
    """Runs the passes of work as they come, and times them and what lies between.

    Args:
        num_bytes: of the weights that a pass of each member reads.
    """

    def __init__(self, device: torch.device, num_bytes: Mapping[str, int]) -> None:
        self.device, self._num_bytes = device, num_bytes
        self._events: list[Event] = []
        self._mark = self.now()

    def now(self) -> float:
        """Seconds, once the device has finished its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def best(self, call: Callable[[], object]) -> float:
        """Seconds of the fastest of several calls."""
        taken = []
        for _ in range(_REPEATS):
            began = self.now()
            call()
            taken.append(self.now() - began)
        return min(taken)

    def run(self, work: Passes[T]) -> T:
        """As `polybasic.deploy.runtime.rounds.passes.alone`."""
        result: Any = None
        while True:
            try:
                waiting = work.send(result)
            except StopIteration as end:
                returned: T = end.value
                return returned
            result = self._run(waiting)

    def cut(self) -> list[Event]:
        """The events since the last cut."""
        self._end_between()
        found, self._events = self._events, []
        return found

    def time_copies(self, drafter: NgramDrafter) -> None:
        """Make what a drafter copies an event."""
        copied = drafter.copied

        def timed(tokens: list[int], max_depth: int) -> DraftTree | None:
            return self._timed(
                partial(copied, tokens, max_depth),
                lambda tree, took: Event("copy", "ngram", len(tree) - 1 if tree else 0, took),
            )

        drafter.copied = timed  # type: ignore[method-assign]

    def _run(self, waiting: Pass) -> Any:
        if isinstance(waiting, VerifierPass):
            return self._verify(waiting)
        if isinstance(waiting, DraftPass):
            return self._draft(waiting)
        return self._timed(waiting.run, lambda _, took: Event("pass", "", 0, took))

    def _verify(self, waiting: VerifierPass) -> Read:
        verifier, rows = waiting.verifier, len(waiting.rows)
        config, cache = verifier.decoder.config, verifier.cache
        num_bytes = self._num_bytes[verifier.name]
        num_bytes += cache.block.nbytes // cache.capacity * cache.length
        num_logits = 0 if waiting.logits_from is None else rows - waiting.logits_from
        num_products = rows * _layer_weights(config)
        num_products += num_logits * config.vocab_size * config.hidden_size
        what: What = "prompt" if waiting.is_prompt else "pass"
        cost = num_bytes, num_products
        read = self._timed(
            waiting.run, lambda _, took: Event(what, verifier.name, rows, took, *cost)
        )
        if (draw := read.distributions) is None:
            return read
        drawing = partial(
            self._timed, draw, lambda _, took: Event("draw", verifier.name, num_logits, took)
        )
        return read._replace(distributions=drawing)

    def _draft(self, waiting: DraftPass) -> DraftTree:
        drafter, before = waiting.drafter, waiting.drafter.clock.num_levels
        num_bytes = self._num_bytes[drafter.name]

        def event(tree: DraftTree, took: float) -> Event:
            num_levels = drafter.clock.num_levels - before
            return Event("draft", drafter.name, len(tree) - 1, took, num_levels * num_bytes)

        return self._timed(waiting.run, event)

    def _timed(self, call: Callable[[], T], event: Callable[[T, float], Event]) -> T:
        self._end_between()
        found = call()
        now = self.now()
        self._events.append(event(found, now - self._mark))
        self._mark = now
        return found

    def _end_between(self) -> None:
        now = self.now()
        self._events.append(Event("between", "", 0, now - self._mark))
        self._mark = now


def _layer_weights(config: DecoderConfig) -> int:
    """Of the matrices of all layers."""
    return config.num_layers * sum(prod(shape) for shape in linear_shapes(config).values())


def _read_rate(watch: _Watch, num_bytes: int) -> float:
    """Bytes that are read in a second, of so many or of the largest buffer, over and over."""
    buffer = torch.ones(max(min(num_bytes, _BUFFER_BYTES) // 4, 1), device=watch.device)
    seconds = min(watch.best(buffer.sum), watch.best(partial(torch.dot, buffer, buffer)))
    return buffer.nbytes / seconds


def _multiply_rate(watch: _Watch, verifier: Verifier, tokens: list[int]) -> float:
    """Multiply-adds a second of a pass over many rows, which are not kept."""
    rows = (tokens * _MANY_ROWS)[:_MANY_ROWS]
    seconds = watch.best(partial(verifier.read, rows))
    return len(rows) * _layer_weights(verifier.decoder.config) / seconds
