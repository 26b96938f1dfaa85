"""Stages whose rounds stay on the device: the host reads the tokens of a round, and nothing else.

A round of a `DeviceTreeStage` is two graphs, draft and verification, one of a `DeviceBlockStage` is
one; between two reads the host only launches them.
"""

from collections.abc import Callable, Collection, Hashable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from polybasic.chain.formats.plan import Flush, Rule, Tree
from polybasic.deploy.drafters.expansion import ExpandingDrafter
from polybasic.deploy.drafters.head import EagleDrafter
from polybasic.deploy.drafters.interface import Drafter
from polybasic.deploy.drafters.model import ModelDrafter
from polybasic.deploy.graphs.capture import Graphs
from polybasic.deploy.graphs.device_draws import DeviceDraws, DeviceSampler, Drawing
from polybasic.deploy.graphs.device_passes import Captured, DevicePasses, bucket_of
from polybasic.deploy.graphs.device_rounds import (
    NO_TOKEN,
    UNREAD_BUCKETS,
    BlockPart,
    Drafted,
    DraftPart,
    TreePart,
    TreeRows,
)
from polybasic.deploy.graphs.device_sampling import Warping
from polybasic.deploy.graphs.device_tree import DeviceTree
from polybasic.deploy.rounds.stages import BaseBlockStage, BaseTreeStage, Block, Round, Stage
from polybasic.deploy.rounds.tree import DraftTree
from polybasic.deploy.rounds.verifier import Verifier
from polybasic.deploy.rounds.warping import Sampling

LEAST_STOP_TOKENS = 8
"""Room for them: requests with other ones run the same graphs."""
Made = TypeVar("Made")


class DeviceParts:
    """The parts of the rounds of one engine, each made once, for all requests.

    Args:
        graphs: run them.
        device: where they run.
    """

    def __init__(self, graphs: Graphs, device: torch.device) -> None:
        self.graphs, self.device = graphs, device
        self._made: dict[Hashable, Any] = {}

    def drawing(self, sampling: Sampling, tells_confidence: bool) -> Drawing:
        """How a request's tokens are drawn."""
        warping = None if sampling.is_greedy else Warping.of(sampling)
        key = "drawing", warping, tells_confidence
        return self._once(key, lambda: Drawing(warping, tells_confidence, self.device))

    def stop_tokens(self, tokens: frozenset[int]) -> Tensor:
        """The stop tokens of the next request, int64 [S]; sets of about one size share a tensor."""
        size = max(LEAST_STOP_TOKENS, 1 << (len(tokens) - 1).bit_length() if tokens else 0)
        kept = self._once(
            ("stop", size), lambda: torch.zeros(size, dtype=torch.int64, device=self.device)
        )
        padded = [*sorted(tokens), *[NO_TOKEN] * (size - len(tokens))]
        kept.copy_(torch.tensor(padded, dtype=torch.int64), non_blocking=True)
        return kept

    def tree_rows(self, rows: int, depth: int) -> TreeRows:
        """Where a draft leaves its tree, of rows at most so deep, for the verifier."""
        return self._once(("rows", rows, depth), lambda: TreeRows(rows, depth, self.device))

    def drafted(self, drafter: Drafter) -> Drafted | None:
        """What a drafter's model reads, where the device drafts by itself."""
        if not isinstance(drafter, EagleDrafter | ModelDrafter):
            return None
        return self._once(("drafted", drafter), lambda: Drafted.of(drafter))

    def draft(self, drafted: Drafted, shape: Tree, num_unread: int, left: TreeRows) -> DraftPart:
        """The draft of trees of one shape, over so many unread tokens at most."""
        key = "draft", id(drafted), shape.depth, shape.top_k, shape.rows, num_unread
        return self._once(key, lambda: DraftPart(drafted, shape, num_unread, left))

    def tree(
        self, verifier: Verifier, rows: int, depth: int, drawing: Drawing, stop_tokens: Tensor
    ) -> TreePart:
        """The verification of trees of so many rows, at most so deep."""
        key = "tree", verifier, rows, depth, drawing, id(stop_tokens)
        return self._once(
            key, lambda: TreePart(verifier, self.tree_rows(rows, depth), drawing, stop_tokens)
        )

    def block(self, verifier: Verifier, rows: int, rule: Rule, drawing: Drawing) -> BlockPart:
        """The verification of blocks which make at most so many rows with what is unread."""
        key = "block", verifier, rows, rule, drawing
        return self._once(key, lambda: BlockPart(verifier, rows, rule, drawing))

    def _once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        if key not in self._made:
            self._made[key] = make()
        made: Made = self._made[key]
        return made


class DeviceTreeStage(BaseTreeStage):
    """A tree stage whose drafts, walks and moves stay on the device.

    Drafts are made there where the drafter expands a model, else handed over. Stages of one engine
    share tensors: a stage is used until the next one is made.

    Args:
        parts: of the engine.
    """

    def __init__(
        self,
        verifier: Verifier,
        drafter: Drafter,
        sampler: DeviceSampler,
        stop_tokens: Collection[int],
        parts: DeviceParts,
    ) -> None:
        super().__init__(verifier, drafter, sampler, stop_tokens)
        self.sampler, self.parts = sampler, parts
        self._stop_tokens = parts.stop_tokens(self.stop_tokens)

    @property
    def most_tokens(self) -> int:
        """That a round can gain."""
        return 1 + self.drafter.tree.depth

    def captured(self) -> Iterator[Captured]:
        """What a round may run, for graphs to be captured ahead."""
        yield self._verification(self._part(1, 0))
        drafter, drafted = self.drafter, self.parts.drafted(self.drafter)
        if drafted is None or not isinstance(drafter, ExpandingDrafter):
            return
        part = self._part_of(drafter.tree)
        for num_unread in UNREAD_BUCKETS:
            yield self._drafting(drafter, self._draft_part(drafter, drafted, num_unread, part))
        yield self._verification(part)

    def _draft(self, limit: int) -> TreePart:
        drafter, drafted = self.drafter, self.parts.drafted(self.drafter)
        if drafted is None or not isinstance(drafter, ExpandingDrafter):
            return self._handed_over(drafter.draft(self.tokens, max_depth=limit - 1))
        if limit == 1 or len(self.tokens) < drafter.least_tokens:
            return self._handed_over(DraftTree.of_root(self.tokens[-1]))
        return self._draft_on_device(drafter, drafted)

    def _handed_over(self, tree: DraftTree) -> TreePart:
        rows = bucket_of(len(tree))
        part = self._part(rows, rows - 1)
        if rows == 1:
            part.read.set_root(tree.tokens[0])
        else:
            part.read.set(DeviceTree.of(tree, self.parts.device))
        return part

    def _draft_on_device(self, drafter: ExpandingDrafter, drafted: Drafted) -> TreePart:
        part, tokens = self._part_of(drafter.tree), self.tokens
        with drafter.clock.running(num_passes=drafter.tree.depth):
            start = drafter.begin(tokens)
            if len(tokens) - drafter.lag - start > UNREAD_BUCKETS[-1]:
                drafter.read(tokens, len(tokens) - drafter.lag - 1)
                start = drafter.cache.length
            unread = tokens[start + drafter.lag :]
            draft = self._draft_part(drafter, drafted, bucket_of(len(unread), UNREAD_BUCKETS), part)
            draft.set(start, unread)
            name, key, function = self._drafting(drafter, draft)
            self.parts.graphs.run(key, function, name)
        drafter.cache.keep(range(len(unread)))
        return part

    def _verify(self, part: TreePart, limit: int) -> Round:
        verifier, cache = self.verifier, self.verifier.cache
        verifier.num_rows += part.num_rows
        part.set(cache.length, limit)
        self.sampler.fill(part.uniforms)
        name, key, function = self._verification(part)
        with verifier.clock.running(num_passes=1):
            self.parts.graphs.run(key, function, name)
        gained, confidence = part.told()
        cache.keep(range(len(gained)))
        self.drafter.observe(part.states[: len(gained)])
        self.tokens += gained
        self.accepted_lengths.append(len(gained))
        draws = DeviceDraws(part.probabilities, part.path, confidence)
        return Round(gained, draws, list(range(len(gained))))

    def _part_of(self, shape: Tree) -> TreePart:
        num_candidates = shape.top_k + (shape.depth - 1) * shape.top_k**2
        return self._part(min(shape.rows, 1 + num_candidates), shape.depth)

    def _part(self, rows: int, depth: int) -> TreePart:
        drawing, stop_tokens = self.sampler.drawing, self._stop_tokens
        return self.parts.tree(self.verifier, rows, depth, drawing, stop_tokens)

    def _draft_part(
        self, drafter: ExpandingDrafter, drafted: Drafted, num_unread: int, part: TreePart
    ) -> DraftPart:
        return self.parts.draft(drafted, drafter.tree, num_unread, part.read)

    def _drafting(self, drafter: ExpandingDrafter, draft: DraftPart) -> Captured:
        window = drafter.window
        name = f"draft behind {draft.num_unread} rows"
        return name, (draft, str(window)), partial(draft.run, window)

    def _verification(self, part: TreePart) -> Captured:
        window = self.verifier.window
        name = f"{self.verifier.name} over a tree of {part.num_rows}"
        return name, (part, str(window)), partial(part.run, window)


class DeviceBlockStage(BaseBlockStage):
    """A block stage that reads and cuts a block without a look by the host in between.

    Args:
        parts: of the engine.
    """

    def __init__(
        self,
        verifier: Verifier,
        below: Stage,
        sampler: DeviceSampler,
        flush: Flush,
        stop_tokens: Collection[int],
        parts: DeviceParts,
    ) -> None:
        super().__init__(verifier, below, sampler, flush, stop_tokens)
        self.sampler, self.parts = sampler, parts

    def captured(self, most_tokens: int) -> Iterator[Captured]:
        """What runs over blocks of up to so many tokens, and between two of them."""
        below = self.below.verifier
        if not self.shares_cache and isinstance(below.passes, DevicePasses):
            yield from below.passes.captured(most_tokens, below.window)
        for rows in sorted({bucket_of(1 + max(num, 1)) for num in range(most_tokens + 1)}):
            yield self._verification(self._part(rows))

    def _verify(self, unread: list[int], block: Block) -> tuple[int, int, Tensor, DeviceDraws]:
        verifier, num_rows = self.verifier, len(unread) + len(block.tokens)
        part = self._part(bucket_of(max(num_rows, 2)))
        part.set(verifier.cache.length, unread, block.tokens)
        if part.proposed is not None and block.tokens:
            part.proposed[: len(block.tokens)].copy_(block.distributions)
        self.sampler.fill(part.uniforms)
        verifier.num_rows += num_rows
        name, key, function = self._verification(part)
        with verifier.clock.running(num_passes=1):
            self.parts.graphs.run(key, function, name)
        num_kept, next_token, confidence = part.told()
        draws = DeviceDraws(part.probabilities, part.places, confidence)
        return num_kept, next_token, part.states[:num_rows], draws

    def _part(self, rows: int) -> BlockPart:
        return self.parts.block(self.verifier, rows, self.flush.rule, self.sampler.drawing)

    def _verification(self, part: BlockPart) -> Captured:
        window = self.verifier.window
        name = f"{self.verifier.name} over a block of {part.num_rows}"
        return name, (part, str(window)), partial(part.run, window)
