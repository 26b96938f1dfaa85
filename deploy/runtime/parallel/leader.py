"""Rank 0 of a divided chain: its executors and caches look like those of whole models."""

import itertools
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from polybasic.chain.base.errors import LostProcessError, UserError
from polybasic.chain.formats.files import lies_anywhere
from polybasic.chain.formats.verify import CheckedChain
from polybasic.chain.kernels.cpu.library import kernels_for
from polybasic.chain.kernels.drafts import Candidates
from polybasic.chain.kernels.executor import DraftRequest, Executor, Layers
from polybasic.chain.kernels.product_times import name_of
from polybasic.chain.kernels.rows import Rows
from polybasic.chain.kernels.weights import ModelWeights
from polybasic.deploy.runtime.parallel.group import Group, Order
from polybasic.deploy.runtime.parallel.processes import Followers, end, gathered
from polybasic.deploy.runtime.parallel.runner import (
    NumberedLayers,
    ParallelRunner,
    PartCache,
    load_parts,
    sent_rows,
)
from polybasic.deploy.runtime.rounds.cache import KeyValueCache
from polybasic.deploy.runtime.rounds.verifier import SPARE_ROWS


class Leader:
    """Leads the other processes of a chain: each pass is told to them, then run here as well.

    What they do beside passes, which is to allocate and to move rows, is told with the next pass.
    Passes are run one after the other, as an engine does.

    Args:
        count: processes, this one included.
        device: of this one.

    Attributes:
        device: of this process's part.
        num_parts: processes, this one included.

    Raises:
        UserError: fewer GPUs than processes, or they do not find each other.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._group, self._followers = gathered(count, device)
        self.device, self.num_parts = self._group.device, count
        self._pending: deque[Order] = deque()
        self._numbers = itertools.count()
        self._runner: ParallelRunner | None = None
        self._finalizer = weakref.finalize(self, _leave, self._group, self._followers)

    def load(
        self,
        checked: CheckedChain,
        dtype: torch.dtype,
        context_tokens: int,
        graphs: bool,
        follower_bytes: int,
    ) -> "dict[str, Executor]":
        """The verifying members, divided over all processes.

        Args:
            follower_bytes: that each of the others needs at most.

        Raises:
            UserError: one of the processes cannot load its part.
        """
        target = checked.named_target
        if target is not None and lies_anywhere(Path(target)):
            target = str(checked.target.absolute())
        files = str(checked.folder.absolute()), list(checked.elsewhere), target
        given = name_of(dtype), context_tokens, graphs, follower_bytes
        self.tell("load", *files, *given)
        self._group.send(self._orders())
        failure, members = None, {}
        try:
            members = load_parts(checked, self._group, dtype, context_tokens + SPARE_ROWS)
        except UserError as error:
            failure = error
        self._group.agree(failure)
        self._runner = ParallelRunner(self._group, members, graphs, weakref.WeakValueDictionary())
        return {name: LeaderExecutor(self, name, part.weights) for name, part in members.items()}

    def new_cache(self, model: Executor, capacity: int) -> KeyValueCache:
        """A cache of one of the members, in all processes."""
        assert isinstance(model, LeaderExecutor), f"{model.name} is not divided"
        number = next(self._numbers)
        cache = LeaderCache(self, self.runner, model.member, capacity, number)
        self.tell("new_cache", number, model.member, capacity)
        weakref.finalize(cache, self._pending.append, ["free_cache", number])
        self.runner.caches[number] = cache
        return cache

    @property
    def runner(self) -> ParallelRunner:
        """Of this process's part.

        Raises:
            UserError: the chain was closed.
        """
        if self._runner is None:
            raise UserError("chain was closed", "its processes have ended", "load it again")
        return self._runner

    def tell(self, *order: object) -> None:
        """Give the others an order that they need not follow before the next pass."""
        self._pending.append(list(order))

    def run(self, *order: object) -> None:
        """Give the others an order now; this process has to do the same."""
        if self._group.is_passing:
            raise LostProcessError("a pass was interrupted in this process; load the chain again")
        self._pending.append(list(order))
        self._group.is_passing = True
        self._group.send(self._orders())

    def done(self) -> None:
        """The order that was given last has been followed here."""
        self._group.is_passing = False

    def close(self) -> None:
        """Give the memory of all processes back, and end those that were started here."""
        self._runner = None
        self._finalizer()

    def _orders(self) -> list[Order]:
        return [self._pending.popleft() for _ in range(len(self._pending))]


def _leave(group: Group, followers: Followers | None) -> None:
    if followers is not None:
        end(group)
        followers.close()
    elif group.is_passing:
        group.close()
    elif group.is_open:
        group.send([["unload"]])


class LeaderCache(PartCache):
    """Rank 0's part of a cache, which the others change as this one is changed."""

    def __init__(
        self, leader: Leader, runner: ParallelRunner, member: str, capacity: int, number: int
    ) -> None:
        super().__init__(runner.members[member], capacity, number)
        self._leader = leader

    def move(self, sources: list[int], first: int) -> None:
        self._leader.tell("move_rows", self.layers.number, sources, first)
        super().move(sources, first)

    def copy_from(self, other: KeyValueCache, num_rows: int) -> None:
        assert isinstance(other, LeaderCache)
        super().copy_from(other, num_rows)
        self._leader.tell("copy_rows", self.layers.number, other.layers.number, self.length)


class LeaderExecutor(Executor):
    """Runs the passes of a member that is divided over several processes.

    Rounds pass through the host, which tells the others what to read.

    Args:
        member: its name in the chain.
        weights: of this process's part; a head takes embedding and output projection of them.
    """

    name: ClassVar[str] = "tensor-parallel"

    def __init__(self, leader: Leader, member: str, weights: ModelWeights) -> None:
        super().__init__(weights)
        self.leader, self.member = leader, member

    def over(self, weights: ModelWeights) -> "LeaderExecutor":
        raise AssertionError("the other processes have the weights that were loaded")

    def forward(
        self,
        token_ids: Tensor,
        caches: Sequence[Layers],
        rows: Sequence[Rows],
        features: Tensor | None = None,
        feature_layers: tuple[int, ...] = (),
    ) -> Tensor:
        assert features is None, "a head's features; heads are not divided"
        numbers = [cache.number for cache in caches if isinstance(cache, NumberedLayers)]
        sent = list(map(sent_rows, rows))
        ids = token_ids.tolist()
        runner = self.leader.runner
        self.leader.run("read", self.member, ids, numbers, sent, list(feature_layers))
        states = runner.forward(self.member, token_ids, numbers, rows, feature_layers)
        self.leader.done()
        return states

    def logits(self, states: Tensor) -> Tensor:
        states = states[:, : self.config.hidden_size].contiguous()
        runner = self.leader.runner
        self.leader.run("logits", self.member, len(states))
        logits = runner.logits(self.member, len(states), states)
        self.leader.done()
        assert logits is not None
        return logits

    def features(self, inputs: Tensor) -> Tensor:
        raise AssertionError("a head's features; heads are not divided")

    def drafts(self, requests: Sequence[DraftRequest]) -> list[Candidates]:
        raise AssertionError("a verifying member does not draft")

    def noise(self, key: Tensor, positions: Tensor) -> Tensor:
        kernels = kernels_for(self.device, self.dtype)
        if kernels is not None:
            return kernels.noise(key, positions, self.config.vocab_size)
        return self.leader.runner.members[self.member].noise(key, positions)
