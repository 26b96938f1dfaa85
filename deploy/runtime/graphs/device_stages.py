"""Stages whose rounds stay on the device: the host reads the tokens of a round and nothing else.

A round of a `DeviceTreeStage` is two graphs, draft and verification; a round of a
`DeviceBlockStage` is one. Between two reads the host only launches them.
"""

from collections.abc import Callable, Collection, Hashable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from polybasic.chain.formats.plan import Flush, Rule, Tree
from polybasic.chain.kernels.cuda.graphs import Graphs
from polybasic.chain.kernels.drafts import DraftTree
from polybasic.chain.kernels.torch.trees import DeviceTree
from polybasic.deploy.runtime.drafters.expansion import ExpandingDrafter
from polybasic.deploy.runtime.drafters.interface import Drafter
from polybasic.deploy.runtime.graphs.device_passes import DevicePasses, NamedStep, bucket_of
from polybasic.deploy.runtime.graphs.drawing import DeviceDraws, DeviceNoise, DeviceSampler, Drawing
from polybasic.deploy.runtime.graphs.round_parts import (
    NO_TOKEN,
    UNREAD_BUCKETS,
    BlockPart,
    DeviceDrafter,
    DraftPart,
    TreePart,
    TreeRows,
)
from polybasic.deploy.runtime.rounds.passes import OwnPass, Passes, draft
from polybasic.deploy.runtime.rounds.stages import (
    BaseBlockStage,
    BaseTreeStage,
    Block,
    Kept,
    Round,
    Stage,
)
from polybasic.deploy.runtime.rounds.verifier import Verifier
from polybasic.deploy.runtime.rounds.warping import Sampling, Warping

STOP_TOKENS_SIZE = 8
"""Smallest buffer for stop tokens, so that requests with different ones run the same graphs."""
Part = TypeVar("Part")


class RoundParts:
    """The parts of one engine's rounds, each made once for all requests.

    Args:
        graphs: runs the parts.
        device: where the parts run.
    """

    def __init__(self, graphs: Graphs, device: torch.device) -> None:
        self.graphs, self.device = graphs, device
        self.noise = DeviceNoise(device)
        self._made: dict[Hashable, Any] = {}

    def drawing(self, sampling: Sampling, rule: Rule, reports_confidence: bool) -> Drawing:
        """The drawing of a request's tokens."""
        kind: tuple[Warping | None, Rule | None, DeviceNoise | None] = None, None, None
        if not sampling.is_greedy:
            kind = Warping.of(sampling), rule, self.noise if rule == "coupled" else None
        key = "drawing", kind, reports_confidence
        return self._cached(key, lambda: Drawing(*kind, reports_confidence, self.device))

    def stop_tokens(self, tokens: frozenset[int]) -> Tensor:
        """Set the next request's stop tokens, int64 [S]; sets of similar size share a tensor."""
        size = max(STOP_TOKENS_SIZE, 1 << (len(tokens) - 1).bit_length() if tokens else 0)
        kept = self._cached(
            ("stop", size), lambda: torch.zeros(size, dtype=torch.int64, device=self.device)
        )
        padded = [*sorted(tokens), *[NO_TOKEN] * (size - len(tokens))]
        kept.copy_(torch.tensor(padded, dtype=torch.int64), non_blocking=True)
        return kept

    def tree_rows(self, rows: int, depth: int) -> TreeRows:
        """The buffer in which a draft passes its tree, at most `depth` deep, to the verifier."""
        return self._cached(("rows", rows, depth), lambda: TreeRows(rows, depth, self.device))

    def device_drafter(self, drafter: Drafter) -> DeviceDrafter | None:
        """The drafter's model, if it can draft on the device."""
        if not isinstance(drafter, ExpandingDrafter):
            return None
        return self._cached(("device_drafter", drafter.cache), lambda: DeviceDrafter.of(drafter))

    def draft(
        self,
        device_drafter: DeviceDrafter,
        shape: Tree,
        num_unread: int,
        tree_out: TreeRows,
        noise: DeviceNoise | None,
    ) -> DraftPart:
        """The draft of trees of one shape, over at most `num_unread` unread tokens."""
        key = "draft", id(device_drafter), shape.depth, shape.top_k, shape.rows, num_unread, noise
        return self._cached(
            key, lambda: DraftPart(device_drafter, shape, num_unread, tree_out, noise)
        )

    def tree(
        self, verifier: Verifier, rows: int, depth: int, drawing: Drawing, stop_tokens: Tensor
    ) -> TreePart:
        """The verification of trees of `rows` rows, at most `depth` deep."""
        name, layers = verifier.name, verifier.feature_layers
        key = "tree", name, layers, rows, depth, drawing, id(stop_tokens)
        return self._cached(
            key, lambda: TreePart(verifier, self.tree_rows(rows, depth), drawing, stop_tokens)
        )

    def block(self, verifier: Verifier, rows: int, drawing: Drawing) -> BlockPart:
        """The verification of a block, at most `rows` rows together with the unread tokens."""
        key = "block", verifier.name, verifier.feature_layers, rows, drawing
        return self._cached(key, lambda: BlockPart(verifier, rows, drawing))

    def launch(self, step: NamedStep) -> None:
        """Run a step; the host does not wait for it."""
        name, key, function = step
        self.graphs.run(key, function, name)

    def verifying(self, verifier: Verifier, num_rows: int, step: NamedStep) -> OwnPass:
        """A step that is a verifier's pass over so many rows."""

        def launch() -> None:
            verifier.num_rows += num_rows
            with verifier.clock.running(num_passes=1):
                self.launch(step)

        return OwnPass(launch)

    def _cached(self, key: Hashable, make: Callable[[], Part]) -> Part:
        if key not in self._made:
            self._made[key] = make()
        part: Part = self._made[key]
        return part


class DeviceTreeStage(BaseTreeStage):
    """A tree stage whose drafts, walks and moves stay on the device.

    Drafts are made on the device if the drafter expands a model, else copied to it. The stages of
    an engine share tensors: a stage is used until the next one is made.

    Args:
        parts: of the engine.
    """

    sampler: DeviceSampler

    def __init__(
        self,
        verifier: Verifier,
        drafter: Drafter,
        sampler: DeviceSampler,
        stop_tokens: Collection[int],
        parts: RoundParts,
    ) -> None:
        super().__init__(verifier, drafter, sampler, stop_tokens)
        self.parts = parts
        self._stop_tokens = parts.stop_tokens(self.stop_tokens)
        self._drafted = 0, ""

    @property
    def max_tokens(self) -> int:
        """Most tokens that a round can gain."""
        return 1 + self.drafter.tree.depth

    def steps_to_capture(self) -> Iterator[NamedStep]:
        """What a round may run, to be captured in advance."""
        yield self._verify_step(self._part(1, 0))
        drafter, device_drafter = self.drafter, self.parts.device_drafter(self.drafter)
        if device_drafter is None or not isinstance(drafter, ExpandingDrafter):
            return
        part = self._part_for(drafter.tree)
        for num_unread in UNREAD_BUCKETS:
            yield self._draft_step(
                drafter, self._draft_part(drafter, device_drafter, num_unread, part)
            )
        yield self._verify_step(part)

    def _draft(self, limit: int) -> Passes[TreePart]:
        drafter, device_drafter = self.drafter, self.parts.device_drafter(self.drafter)
        if device_drafter is None or not isinstance(drafter, ExpandingDrafter):
            return self._load_tree((yield from draft(drafter, self.tokens, limit - 1)))
        if limit == 1 or len(self.tokens) < drafter.min_tokens:
            return self._load_tree(DraftTree.of_root(self.tokens[-1]))
        return self._draft_on_device(drafter, device_drafter)

    def _load_tree(self, tree: DraftTree) -> TreePart:
        self._drafted = len(tree) - 1, tree.proposer
        rows = bucket_of(len(tree))
        part = self._part(rows, rows - 1)
        if rows == 1:
            part.tree_in.set_root(tree.tokens[0])
        else:
            part.tree_in.set(DeviceTree.of(tree, self.parts.device))
        return part

    def _draft_on_device(
        self, drafter: ExpandingDrafter, device_drafter: DeviceDrafter
    ) -> TreePart:
        part, tokens = self._part_for(drafter.tree), self.tokens
        self._drafted = part.num_rows - 1, drafter.name
        drafter.clock.num_levels += drafter.max_depth
        with drafter.clock.running(num_passes=drafter.tree.depth):
            start = drafter.begin(tokens)
            if len(tokens) - drafter.lag - start > UNREAD_BUCKETS[-1]:
                drafter.read(tokens, len(tokens) - drafter.lag - 1)
                start = drafter.cache.length
            unread = tokens[start + drafter.lag :]
            draft = self._draft_part(
                drafter, device_drafter, bucket_of(len(unread), UNREAD_BUCKETS), part
            )
            draft.set(start, unread)
            self.parts.launch(self._draft_step(drafter, draft))
        drafter.cache.keep(range(len(unread)))
        return part

    def _verify(self, part: TreePart, limit: int) -> Passes[Round]:
        cache = self.verifier.cache
        part.set(cache.length, limit)
        self.sampler.fill(part.uniforms)
        yield self.parts.verifying(self.verifier, part.num_rows, self._verify_step(part))
        gained, confidence = part.read_back()
        cache.keep(range(len(gained)))
        num_drafted, proposer = self._drafted
        self._commit(gained, part.states[: len(gained)])
        self._count(proposer, num_drafted, len(gained) - 1)
        draws = DeviceDraws(part.probabilities, part.path, confidence)
        rows = list(range(len(gained)))
        # the last token the verifier drew itself
        proposers = [*[proposer] * (len(gained) - 1), self.verifier.name]
        return Round(gained, draws, rows, proposers)

    def _part_for(self, shape: Tree) -> TreePart:
        num_candidates = shape.top_k + (shape.depth - 1) * shape.top_k**2
        return self._part(min(shape.rows, 1 + num_candidates), shape.depth)

    def _part(self, rows: int, depth: int) -> TreePart:
        drawing, stop_tokens = self.sampler.drawing, self._stop_tokens
        return self.parts.tree(self.verifier, rows, depth, drawing, stop_tokens)

    def _draft_part(
        self,
        drafter: ExpandingDrafter,
        device_drafter: DeviceDrafter,
        num_unread: int,
        part: TreePart,
    ) -> DraftPart:
        shape, noise = drafter.tree, self.sampler.drawing.noise
        return self.parts.draft(device_drafter, shape, num_unread, part.tree_in, noise)

    def _draft_step(self, drafter: ExpandingDrafter, draft: DraftPart) -> NamedStep:
        window = drafter.window
        name = f"draft after {draft.num_unread} rows"
        return name, (draft, str(window)), partial(draft.run, window)

    def _verify_step(self, part: TreePart) -> NamedStep:
        window = self.verifier.window
        name = f"{self.verifier.name} over a tree of {part.num_rows}"
        return name, (part, str(window)), partial(part.run, window)


class DeviceBlockStage(BaseBlockStage):
    """A block stage that reads and cuts a block without the host in between.

    Args:
        parts: of the engine.
    """

    sampler: DeviceSampler

    def __init__(
        self,
        verifier: Verifier,
        below: Stage,
        sampler: DeviceSampler,
        flush: Flush,
        stop_tokens: Collection[int],
        parts: RoundParts,
    ) -> None:
        super().__init__(verifier, below, sampler, flush, stop_tokens)
        self.parts = parts

    def steps_to_capture(self, max_tokens: int) -> Iterator[NamedStep]:
        """What runs over blocks of up to `max_tokens` tokens, and between two of them."""
        below = self.below.verifier
        if not self.shares_cache and isinstance(below.passes, DevicePasses):
            yield from below.passes.steps_to_capture(max_tokens, below.window, below.feature_layers)
        for rows in sorted({bucket_of(1 + max(num, 1)) for num in range(max_tokens + 1)}):
            yield self._verify_step(self._part(rows))

    def _verify(self, unread: list[int], block: Block) -> Passes[Kept]:
        verifier, num_rows = self.verifier, len(unread) + len(block.tokens)
        part = self._part(bucket_of(max(num_rows, 2)))
        part.set(verifier.cache.length, unread, block.tokens)
        if part.proposed is not None and block.tokens:
            part.proposed[: len(block.tokens)].copy_(block.distributions)
        self.sampler.fill(part.uniforms)
        yield self.parts.verifying(verifier, num_rows, self._verify_step(part))
        num_kept, next_token, confidence = part.read_back()
        draws = DeviceDraws(part.probabilities, part.places, confidence)
        return Kept(num_kept, next_token, part.states[:num_rows], draws)

    def _part(self, rows: int) -> BlockPart:
        return self.parts.block(self.verifier, rows, self.sampler.drawing)

    def _verify_step(self, part: BlockPart) -> NamedStep:
        window = self.verifier.window
        name = f"{self.verifier.name} over a block of {part.num_rows}"
        return name, (part, str(window)), partial(part.run, window)
