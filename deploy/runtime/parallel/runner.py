"""The passes of one part of a chain's models: what every process does for each order."""

from collections.abc import MutableMapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from polybasic.chain.formats.checkpoints.shard import Shard
from polybasic.chain.formats.plan import Window
from polybasic.chain.formats.verify import CheckedChain
from polybasic.chain.kernels.cpu.library import FixedTensors
from polybasic.chain.kernels.cuda.graphs import Graphs
from polybasic.chain.kernels.rows import Rows, tree_rows
from polybasic.chain.kernels.torch.executor import TorchExecutor
from polybasic.chain.model.loading import load_decoder
from polybasic.deploy.runtime.graphs.device_passes import DevicePasses
from polybasic.deploy.runtime.parallel.group import Group
from polybasic.deploy.runtime.rounds.cache import KeyValueCache

SentRows = tuple[int, int, list[int] | None, tuple[int, int] | None]
"""Rows of a sequence in an order: committed ones, how many, parents of a tree, and a window."""


class NumberedLayers(FixedTensors):
    """The layers of a cache, with its number in orders."""

    number: int


class PartCache(KeyValueCache):
    """This process's part of a cache: its key/value heads.

    Attributes:
        passes: captured with this cache, by member.
    """

    def __init__(self, model: TorchExecutor, capacity: int, number: int) -> None:
        num_layers = len(model.weights.layers)
        super().__init__(model.config, num_layers, capacity, model.dtype, model.device)
        self.layers: NumberedLayers = NumberedLayers(self.block)
        self.layers.number = number
        self.passes: dict[str, DevicePasses] = {}

    def copy_from(self, other: KeyValueCache, num_rows: int) -> None:
        """A copy: what is shared may not be truncated unheard, as parts of other processes are."""
        self._commit(min(num_rows, other.length))
        self.block[:, :, : self.length] = other.block[:, :, : self.length]

    def num_shareable(self, num_rows: int) -> int:
        return 0


class ParallelRunner:
    """Runs one part of the models, over its part of the caches.

    Args:
        members: parts of the verifying models, by name.
        graphs: on a GPU, capture passes over few consecutive rows.
        caches: by number; rank 0's live as long as others use them.
    """

    def __init__(
        self,
        group: Group,
        members: dict[str, TorchExecutor],
        graphs: bool,
        caches: MutableMapping[int, PartCache],
    ) -> None:
        self.group, self.members, self.caches = group, members, caches
        self._graphs = Graphs(group.device, graphs)

    def new_cache(self, number: int, member: str, capacity: int) -> None:
        """Allocate a cache of a member."""
        self.caches[number] = PartCache(self.members[member], capacity, number)

    def free_cache(self, number: int) -> None:
        """Give a cache's memory back."""
        del self.caches[number]

    def move_rows(self, number: int, sources: list[int], first: int) -> None:
        """See `KeyValueCache.move`."""
        self.caches[number].move(sources, first)

    def copy_rows(self, number: int, other: int, num_rows: int) -> None:
        """Take over the first rows of another cache."""
        source = self.caches[other]
        source.length = num_rows
        self.caches[number].copy_from(source, num_rows)

    def read(
        self,
        member: str,
        token_ids: list[int],
        numbers: list[int],
        sent: list[SentRows],
        feature_layers: list[int],
    ) -> None:
        """A pass, of which only rank 0 needs the states."""
        ids = torch.tensor(token_ids, device=self.group.device)
        self.forward(member, ids, numbers, list(map(received_rows, sent)), tuple(feature_layers))

    def forward(
        self,
        member: str,
        token_ids: Tensor,
        numbers: Sequence[int],
        rows: Sequence[Rows],
        feature_layers: tuple[int, ...],
    ) -> Tensor:
        """States of a pass; see `polybasic.chain.kernels.executor.Executor.forward`.

        Few consecutive rows of one sequence are read by a captured pass where there are graphs.
        """
        model, first = self.members[member], rows[0]
        caches = [self.caches[number] for number in numbers]
        is_short = (
            model.runs_on_device
            and len(rows) == 1
            and first.paths is None
            and first.start > 0
            and first.num_rows <= DevicePasses.max_rows
        )
        if not is_short:
            layers = [cache.layers for cache in caches]
            return model.forward(token_ids, layers, rows, feature_layers=feature_layers)
        cache = caches[0]
        if member not in cache.passes:
            name = f"{member} of cache {numbers[0]}"
            cache.passes[member] = DevicePasses(name, model, cache, self._graphs)
        cache.length = first.start
        return cache.passes[member].read(token_ids.tolist(), first.window, feature_layers)

    def logits(self, member: str, num_rows: int, states: Tensor | None = None) -> Tensor | None:
        """Logits [R, V] at rank 0, of its states [R, D]; None elsewhere.

        Every process has the output projection of some of the tokens.
        """
        model, shard = self.members[member], self.group.shard
        config = model.config
        if states is None:
            shape = num_rows, config.hidden_size
            states = torch.empty(shape, dtype=model.dtype, device=model.device)
        self.group.broadcast(states)
        parts = [Shard(rank, shard.count).tokens(config) for rank in range(shard.count)]
        sizes = [part.stop - part.start for part in parts]
        logits = model.logits(states)
        gathered = self.group.gather(F.pad(logits, (0, max(sizes) - logits.shape[1])))
        if not gathered:
            return None
        return torch.cat(
            [columns[:, :size] for columns, size in zip(gathered, sizes, strict=True)], -1
        )


def load_parts(
    checked: CheckedChain, group: Group, dtype: torch.dtype, num_positions: int
) -> dict[str, TorchExecutor]:
    """This process's parts of a chain's verifying members, by name.

    Raises:
        UserError: as `load_decoder`.
    """
    parts: dict[str, TorchExecutor] = {}
    for member in checked.loaded:
        if member.role == "drafter":
            continue
        file = checked.configs[member.name]
        given = file, dtype, group.device, num_positions, group.shard, group.all_reduce
        part = load_decoder(*given, is_checked=member.role != "target")
        assert isinstance(part, TorchExecutor), f"{member.name} runs on {part.name}"
        parts[member.name] = part
    return parts


def sent_rows(rows: Rows) -> SentRows:
    """How rows are sent; a path of a tree ends with a row's parent and the row itself."""
    parents = None
    if rows.paths is not None:
        parents = [path[-2] - rows.start if len(path) > 1 else -1 for path in rows.paths]
    window = None if rows.window is None else (rows.window.tokens, rows.window.sinks)
    return rows.start, rows.num_rows, parents, window


def received_rows(sent: SentRows) -> Rows:
    """The rows of `sent_rows`."""
    start, num_rows, parents, window = sent
    seen = None if window is None else Window(tokens=window[0], sinks=window[1])
    return Rows(start, num_rows, None, seen) if parents is None else tree_rows(start, parents, seen)
