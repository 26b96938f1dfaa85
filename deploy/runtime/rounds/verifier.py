"""A model together with the cache that it reads and writes, one pass at a time.

#   R = rows (tokens of one pass), W = width of the model's states, V = vocabulary
"""

import time
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from polybasic.chain.formats.plan import MAX_TREE_ROWS, Window
from polybasic.chain.kernels.drafts import DraftTree
from polybasic.chain.kernels.executor import Executor
from polybasic.chain.kernels.rows import Rows, consecutive_rows, tree_rows
from polybasic.chain.kernels.shortlist import Shortlist
from polybasic.deploy.runtime.rounds.cache import KeyValueCache
from polybasic.deploy.runtime.rounds.pace import PromptPace

SPARE_ROWS = MAX_TREE_ROWS
"""Rows of every cache beyond the context, for the draft or tree after the last token."""


@dataclass
class PassClock:
    """Number and seconds of a member's forward passes.

    On a CUDA device seconds are read from events on demand, so that counting never waits for the
    device.

    Attributes:
        num_levels: of a drafter's drafts, which may be one pass each.
    """

    device: torch.device
    num_passes: int = 0
    num_levels: int = 0
    _seconds: float = 0.0
    _events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def running(self, num_passes: int) -> AbstractContextManager[None]:
        """Time the enclosed code and count it as `num_passes` passes."""
        return all_running([self], num_passes)

    def reset(self) -> None:
        """Count from zero again."""
        self.num_passes, self.num_levels, self._seconds = 0, 0, 0.0
        self._events.clear()

    @property
    def seconds(self) -> float:
        if self._events:
            torch.cuda.synchronize(self.device)
            self._seconds += sum(begin.elapsed_time(end) for begin, end in self._events) / 1e3
            self._events.clear()
        return self._seconds


class ShortPasses(Protocol):
    """Another way to run a decoder's passes over few consecutive tokens, with the same states.

    Attributes:
        max_rows: longer passes run on the decoder itself.
    """

    max_rows: int

    def read(
        self, token_ids: Sequence[int], window: Window | None, feature_layers: tuple[int, ...]
    ) -> Tensor:
        """States [R, W] of consecutive tokens after the committed ones of the cache."""


class Verifier:
    """Runs a decoder over rows after the committed ones of its cache.

    Verifiers whose layers have the same shapes may share one cache: each overwrites the other's
    provisional rows.

    Args:
        passes: runs passes over few consecutive tokens, except prompts.
        window: the part of a long context that its rows see; None for all of it.
        feature_layers: layers whose inputs are a part of the states, for an EAGLE-3 head.
        pace: of prompts, shared by all verifiers that run the decoder; default: one of its own.
        shortlist: the tokens that have logits; what it reads is added. None for all.
    """

    def __init__(
        self,
        name: str,
        decoder: Executor,
        cache: KeyValueCache,
        passes: ShortPasses | None = None,
        window: Window | None = None,
        feature_layers: tuple[int, ...] = (),
        pace: PromptPace | None = None,
        shortlist: Shortlist | None = None,
    ) -> None:
        self.name, self.decoder, self.cache, self.passes = name, decoder, cache, passes
        self.window, self.feature_layers = window, feature_layers
        self.pace, self.shortlist = pace or PromptPace.of(decoder), shortlist
        self.clock = PassClock(decoder.device)
        self.num_rows = 0

    def seeing(
        self,
        window: Window | None,
        feature_layers: tuple[int, ...] | None = None,
        seen: Iterable[int] | None = None,
    ) -> "Verifier":
        """The same model and cache for one request, which counts its own passes.

        Args:
            feature_layers: default: as here.
            seen: tokens that have logits wherever the decoder leaves some out; None: it leaves
                none out.
        """
        layers = self.feature_layers if feature_layers is None else feature_layers
        shortlist = None if seen is None else self.decoder.shortlist()
        given = self.name, self.decoder, self.cache, self.passes, window, layers, self.pace
        made = Verifier(*given, shortlist)
        made.see(seen or ())
        return made

    def read(self, token_ids: Sequence[int]) -> Tensor:
        """States [R, W] of consecutive tokens; their rows are provisional."""
        passes = self.passes
        # a prompt is read once, by kernels for many rows
        if passes is not None and self.cache.length > 0 and len(token_ids) <= passes.max_rows:
            self.num_rows += len(token_ids)
            with self.clock.running(num_passes=1):
                return passes.read(token_ids, self.window, self.feature_layers)
        return read_together([self], [list(token_ids)])[0]

    def read_tree(self, tree: DraftTree) -> Tensor:
        """States [R, W] of a tree's rows; each sees the committed rows and its ancestors."""
        if len(tree) == 1:
            return self.read(tree.tokens)
        return read_together([self], [tree])[0]

    def logits(self, states: Tensor) -> Tensor:
        """Logits [R, V] in the decoder's dtype."""
        with self.clock.running(num_passes=0):
            return _logits([self], [states])

    def see(self, token_ids: Iterable[int]) -> None:
        """Tokens that it may propose from now on."""
        if self.shortlist is not None:
            self.shortlist.add(token_ids)

    @property
    def states_width(self) -> int:
        """W."""
        return self.decoder.states_width(self.feature_layers)

    @property
    def kind(self) -> Hashable:
        """Verifiers of one kind can run a pass together, each over its own sequence."""
        return id(self.decoder), self.feature_layers

    def rows_of(self, read: list[int] | DraftTree) -> Rows:
        """The rows of consecutive tokens or of a tree after the committed ones."""
        start = self.cache.length
        if isinstance(read, DraftTree) and len(read) > 1:
            rows = tree_rows(start, read.parents, self.window)
        else:
            rows = consecutive_rows(start, len(read), self.window)
        assert rows.end <= self.cache.capacity, f"{rows.end} of {self.cache.capacity} rows"
        return rows


def read_together(
    verifiers: Sequence[Verifier], read: Sequence[list[int] | DraftTree]
) -> list[Tensor]:
    """States [R, W] for each of several verifiers of one kind, in one pass.

    Args:
        read: for each, consecutive tokens or a tree; their rows are provisional.
    """
    first = verifiers[0]
    rows = [verifier.rows_of(tokens) for verifier, tokens in zip(verifiers, read, strict=True)]
    ids: list[int] = []
    for verifier, tokens in zip(verifiers, read, strict=True):
        own = tokens.tokens if isinstance(tokens, DraftTree) else tokens
        verifier.see(own)
        verifier.num_rows += len(own)
        ids += own
    with all_running([verifier.clock for verifier in verifiers]):
        states = first.decoder.forward(
            torch.tensor(ids, device=first.decoder.device),
            [verifier.cache.layers for verifier in verifiers],
            rows,
            feature_layers=first.feature_layers,
        )
    return [states] if len(rows) == 1 else list(states.split([part.num_rows for part in rows]))


def logits_together(
    verifiers: Sequence[Verifier], states: Sequence[Tensor], firsts: Sequence[int | None]
) -> list[Tensor | None]:
    """Logits of the states of several verifiers of one kind, in one product.

    Args:
        firsts: for each, the first row whose logits are asked for; None asks for none.
    """
    asked = [
        (verifier, part[first:])
        for verifier, part, first in zip(verifiers, states, firsts, strict=True)
        if first is not None
    ]
    if not asked:
        return [None] * len(states)
    asking, parts = zip(*asked, strict=True)
    with all_running([verifier.clock for verifier in asking], num_passes=0):
        logits = _logits(asking, parts)
    found = iter(logits.split([len(part) for part in parts]))
    return [None if first is None else next(found) for first in firsts]


def _logits(verifiers: Sequence[Verifier], states: Sequence[Tensor]) -> Tensor:
    """Logits of the states of verifiers of one kind, one after the other."""
    decoder = verifiers[0].decoder
    rows = states[0] if len(states) == 1 else torch.cat(list(states))
    shortlists = [verifier.shortlist for verifier in verifiers]
    if not any(shortlists):
        return decoder.logits(rows)
    return decoder.listed_logits(rows, shortlists, [len(part) for part in states])


@contextmanager
def all_running(clocks: Sequence[PassClock], num_passes: int = 1) -> Iterator[None]:
    """Time what is enclosed once, and charge it to each of several clocks of one device."""
    for clock in clocks:
        clock.num_passes += num_passes
    device = clocks[0].device
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(device)
        begin.record(stream)
        yield
        end.record(stream)
        for clock in clocks:
            clock._events.append((begin, end))
    else:
        begin_seconds = time.perf_counter()
        yield
        seconds = time.perf_counter() - begin_seconds
        for clock in clocks:
            clock._seconds += seconds
