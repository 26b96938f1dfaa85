"""The parts of a round, each a function over persistent tensors that is captured as a graph.

The host sets a few numbers before a part runs and reads a few after the round; everything in
between, the tree, masks, the walk and the moving of rows, stays on the device. Running a part twice
has the same effect as running it once: it changes in place only what it has written itself.

#   R = rows of a pass, padding included, D = most tokens of a walk, W = width of the states
#   B = tokens of a block, V = vocabulary, S = stop tokens
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polybasic.chain.formats.plan import Tree, Window
from polybasic.chain.kernels.torch.executor import TorchExecutor
from polybasic.chain.kernels.torch.rows import device_consecutive_rows, device_tree_rows
from polybasic.chain.kernels.torch.trees import DeviceTree
from polybasic.deploy.runtime.drafters.expansion import ExpandingDrafter
from polybasic.deploy.runtime.drafters.head import EagleDrafter
from polybasic.deploy.runtime.graphs.device_passes import PADDING, InputNumbers
from polybasic.deploy.runtime.graphs.device_sampling import verify, verify_greedy
from polybasic.deploy.runtime.graphs.drawing import NOT_FINITE, DeviceNoise, Drawing, checked
from polybasic.deploy.runtime.rounds.sampling import NotFiniteError
from polybasic.deploy.runtime.rounds.verifier import Verifier

UNREAD_BUCKETS = (8, 16, 32, 64)
"""Rows that a drafter reads before it drafts: the tokens gained since its last draft."""
NO_TOKEN = -1
"""The token of padding rows of a tree, which no walk ever reaches."""


def device_executor(verifier: Verifier) -> TorchExecutor:
    """The verifier's model, whose passes may stay on the device."""
    decoder = verifier.decoder
    assert isinstance(decoder, TorchExecutor), f"{verifier.name} runs on {decoder.name}"
    return decoder


class TreeRows:
    """A buffer for a tree that one part writes and another reads.

    Args:
        num_rows: R.
        max_depth: of any row; a walk gains at most one token more.
    """

    def __init__(self, num_rows: int, max_depth: int, device: torch.device) -> None:
        zeros = torch.zeros(num_rows, dtype=torch.int64, device=device)
        itself = torch.eye(num_rows, dtype=torch.bool, device=device)
        self.tree = DeviceTree(zeros, zeros.clone(), zeros.clone(), itself)
        self.max_depth = max_depth

    def set(self, tree: DeviceTree) -> None:
        """Copy a tree into the buffer; if it has fewer rows, the rest become padding."""
        kept, num_rows = self.tree, len(tree.tokens)
        if num_rows < len(kept.tokens):
            kept.tokens.fill_(NO_TOKEN)
            kept.parents.zero_()
            kept.depths.zero_()
            kept.ancestors.zero_().fill_diagonal_(True)
        kept.tokens[:num_rows].copy_(tree.tokens)
        kept.parents[:num_rows].copy_(tree.parents)
        kept.depths[:num_rows].copy_(tree.depths)
        kept.ancestors[:num_rows, :num_rows].copy_(tree.ancestors)

    def set_root(self, token: int) -> None:
        """Copy a tree of one row."""
        self.tree.tokens.fill_(token)


@dataclass(frozen=True)
class DeviceDrafter:
    """A drafter's model as captured rounds run it.

    Attributes:
        lag: see `ExpandingDrafter`.
        observed: states by position, for a head; see `EagleDrafter`.
    """

    model: TorchExecutor
    cache: Sequence[Tensor]
    lag: int
    observed: Tensor | None

    @classmethod
    def of(cls, drafter: ExpandingDrafter) -> "DeviceDrafter | None":
        """None if the drafter's model has no passes on the device."""
        model = drafter.model
        if not isinstance(model, TorchExecutor) or not model.runs_on_device:
            return None
        observed = drafter.observed.inputs if isinstance(drafter, EagleDrafter) else None
        return cls(model, drafter.cache.layers, drafter.lag, observed)

    def read(
        self, token_ids: Tensor, start: Tensor, num: Tensor, window: Window | None, num_ahead: int
    ) -> Tensor:
        """States [1 + num_ahead, D] of the last of the first `num` tokens, and of rows after it.

        Args:
            token_ids: that have not been read yet, and padding; their features were observed.
            start: committed rows.
            num: int64 [1].
            num_ahead: see `ModelWeights.rows_ahead`; then these rows are in the padding's place.
        """
        places = torch.arange(len(token_ids) + num_ahead, device=token_ids.device)
        rows = device_consecutive_rows(start, len(places), window)
        features, known = None, places.clamp(max=num - 1) if num_ahead else places
        if self.observed is not None:
            features = self.model.features_on_device(self.observed.index_select(0, start + known))
        ids = token_ids.index_select(0, known)
        if num_ahead and features is not None:
            positions = self.model.weights.positions
            assert positions is not None, "only such heads read rows ahead"
            is_ahead, mask = places >= num, positions.mask_token_id
            added = positions.place_features.index_select(0, (places - num).clamp(0, num_ahead - 1))
            if mask is not None:
                features = features.masked_fill(is_ahead[:, None], 0)
                ids = ids.masked_fill(is_ahead, mask)
            features = features + added * is_ahead[:, None]
        states = self.model.forward(ids, [self.cache], [rows], features)
        return states.index_select(0, num - 1 + places[: 1 + num_ahead])


class DraftPart:
    """Reads the tokens that the drafter has not read yet and writes a tree.

    Args:
        num_unread: most tokens to read.
        tree_out: receives the tree.
        noise: that the verifier draws with; None if it draws without.
    """

    def __init__(
        self,
        drafter: DeviceDrafter,
        shape: Tree,
        num_unread: int,
        tree_out: TreeRows,
        noise: DeviceNoise | None,
    ) -> None:
        self.drafter, self.shape, self.num_unread = drafter, shape, num_unread
        self.tree_out, self.noise = tree_out, noise
        device = drafter.cache[0].device
        self.numbers = InputNumbers(2 + num_unread, device)
        self.set(0, [PADDING])

    def set(self, start: int, unread: Sequence[int]) -> None:
        """Set the drafter's committed rows and the tokens after them; the last one is the root.

        A head reads the first of these tokens with the state of the token before it.
        """
        padding = [PADDING] * (self.num_unread - len(unread))
        self.numbers.set([start, len(unread), *unread, *padding])

    def run(self, window: Window | None) -> None:
        """Read the tokens, expand candidates, and keep the best."""
        drafter, shape, model = self.drafter, self.shape, self.drafter.model
        depth = min(shape.depth, model.max_levels or shape.depth)
        start, num_unread, token_ids = self.numbers.values.split([1, 1, self.num_unread])
        last, end = num_unread - 1, (start + num_unread)[0]
        num_ahead = model.weights.rows_ahead(depth)
        states = drafter.read(token_ids, start[0], num_unread, window, num_ahead)
        perturbation = None
        if self.noise is not None:
            perturbation = self.noise.draft(model, end + drafter.lag, depth)
        found = model.draft(
            states,
            drafter.cache,
            end,
            depth,
            shape.top_k,
            window,
            perturbation,
        )
        root = token_ids.index_select(0, last)[0]
        tree = model.operations.keep_best(
            shape.top_k, found.tokens, found.scores, found.beams, root, shape.rows
        )
        self.tree_out.set(tree)


class TreePart:
    """A pass of a verifier over a tree, the walk, and the moving of the accepted rows.

    Args:
        tree_in: the tree; D is one more than its maximum depth.
        stop_tokens: int64 [S].

    Attributes:
        uniforms: float32 [R] in [0, 1), set before each run.
        states: [D, W], of the accepted rows; undefined beyond the gained tokens.
        path: int64 [D], the accepted rows.
        probabilities: float32 [R, V] that tokens were drawn from; None if the largest is drawn.
    """

    def __init__(
        self, verifier: Verifier, tree_in: TreeRows, drawing: Drawing, stop_tokens: Tensor
    ) -> None:
        decoder, depth = device_executor(verifier), tree_in.max_depth + 1
        self.decoder, self.feature_layers = decoder, verifier.feature_layers
        self.cache, self.tree_in, self.drawing = verifier.cache, tree_in, drawing
        self.stop_tokens, self.depth = stop_tokens, depth
        self.num_rows, device = len(tree_in.tree.tokens), decoder.device
        self.numbers = InputNumbers(2, device)
        self.set(0, 1)
        self.uniforms = torch.zeros(self.num_rows, device=device)
        self.levels = torch.arange(depth, device=device)
        width = verifier.states_width
        self.states = torch.zeros(depth, width, dtype=decoder.dtype, device=device)
        self.path = torch.zeros(depth, dtype=torch.int64, device=device)
        self.probabilities = drawing.buffer(self.num_rows, decoder.config.vocab_size)
        self._results = torch.zeros(1 + 2 * depth, dtype=torch.float64, device=device)

    def set(self, prefix: int, limit: int) -> None:
        """Set the committed rows of the cache and the number of tokens that may be gained."""
        self.numbers.set([prefix, limit])

    def run(self, window: Window | None) -> None:
        """Read the tree, draw a token after each of its rows, and walk."""
        tree, cache, drawing = self.tree_in.tree, self.cache, self.drawing
        model = self.decoder
        prefix, limit = self.numbers.values
        states = model.forward(
            tree.tokens.clamp(min=PADDING),
            [cache.layers],
            [device_tree_rows(prefix, tree.depths, tree.ancestors, window)],
            feature_layers=self.feature_layers,
        )
        logits = drawing.scores(
            model, model.logits_on_device(states), prefix + 1 + self.levels, tree.depths
        )
        drawing.fill(model.operations, logits, self.probabilities)
        drawn = drawing.draw(model.operations, logits, self.uniforms, self.probabilities)
        walked = model.operations.walk(tree, drawn, limit, self.stop_tokens, self.depth)
        cache.move_on_device(prefix + walked.path, prefix)
        self.path.copy_(walked.path)
        self.states.copy_(states.index_select(0, walked.path))
        confidence = drawing.confidence(logits, self.probabilities, walked.path, walked.gained)
        self._results.copy_(
            torch.cat([walked.num[None].double(), walked.gained.double(), confidence])
        )

    def read_back(self) -> tuple[list[int], list[float]]:
        """The gained tokens and how probable each was; the host waits for them.

        Raises:
            NotFiniteError: the verifier computed no numbers to draw from.
        """
        num, *rest = self._results.tolist()
        gained = [int(token) for token in rest[: int(num)]]
        if gained[-1] == NOT_FINITE:
            raise NotFiniteError
        return gained, rest[self.depth : self.depth + int(num)]


class BlockPart:
    """A pass of a verifier over its unread tokens and the block after them, which is then cut.

    Args:
        num_rows: R, at least two.

    Attributes:
        uniforms: float32 [R] in [0, 1), set before each run.
        proposed: float32 [R - 1, V] that the block's tokens were drawn from; None if the largest
            is drawn.
        states: [R, W].
        probabilities: float32 [R, V] of the verifier, from the block's first token on; or None.
        places: int64 [R], 0 to R - 1.
    """

    def __init__(self, verifier: Verifier, num_rows: int, drawing: Drawing) -> None:
        decoder, vocab_size = device_executor(verifier), verifier.decoder.config.vocab_size
        self.decoder, self.feature_layers = decoder, verifier.feature_layers
        self.cache, self.num_rows, self.drawing = verifier.cache, num_rows, drawing
        device = decoder.device
        self.numbers = InputNumbers(3 + num_rows, device)
        self.set(0, [PADDING], [])
        self.places = torch.arange(num_rows, device=device)
        self.uniforms = torch.zeros(num_rows, device=device)
        self.proposed = drawing.buffer(num_rows - 1, vocab_size)
        self.probabilities = drawing.buffer(num_rows, vocab_size)
        width = verifier.states_width
        self.states = torch.zeros(num_rows, width, dtype=decoder.dtype, device=device)
        self._results = torch.zeros(2 + num_rows, dtype=torch.float64, device=device)

    def set(self, prefix: int, unread: Sequence[int], block: Sequence[int]) -> None:
        """Set the committed rows of the cache, the unread tokens, and the block after them."""
        token_ids = [*unread, *block]
        padding = [PADDING] * (self.num_rows - len(token_ids))
        self.numbers.set([prefix, len(unread), len(block), *token_ids, *padding])

    def run(self, window: Window | None) -> None:
        """Read the tokens and cut the block."""
        model, drawing = self.decoder, self.drawing
        prefix, num_unread, num_tokens = self.numbers.values[:3]
        token_ids = self.numbers.values[3:]
        states = model.forward(
            token_ids,
            [self.cache.layers],
            [device_consecutive_rows(prefix, self.num_rows, window)],
            feature_layers=self.feature_layers,
        )
        # from the row before the block's first token on
        before = (num_unread - 1 + self.places).clamp(max=self.num_rows - 1)
        logits = model.logits_on_device(states.index_select(0, before))
        logits = drawing.scores(model, logits, prefix + num_unread + self.places, self.places)
        block = token_ids.index_select(0, (before + 1).clamp(max=self.num_rows - 1)[:-1])
        drawing.fill(model.operations, logits, self.probabilities)
        if self.proposed is None or self.probabilities is None or drawing.rule is None:
            own = drawing.draw(model.operations, logits, self.uniforms, None)
            num_kept, next_token = verify_greedy(block, num_tokens, own)
        else:
            num_kept, next_token = verify(
                block,
                num_tokens,
                self.probabilities,
                self.proposed,
                self.uniforms,
                drawing.rule,
                model.operations,
            )
            row = self.probabilities.index_select(0, num_kept[None])
            next_token = checked(next_token[None], row).squeeze(0)
        self.states.copy_(states)
        tokens = torch.cat([block, next_token[None]])
        tokens = torch.where(self.places == num_kept, next_token, tokens)
        confidence = drawing.confidence(logits, self.probabilities, self.places, tokens)
        results = [num_kept[None].double(), next_token[None].double(), confidence]
        self._results.copy_(torch.cat(results))

    def read_back(self) -> tuple[int, int, list[float]]:
        """The number of tokens kept, the token after them, and how probable each of these was; the
        host waits for them.

        Raises:
            NotFiniteError: the verifier computed no numbers to draw from.
        """
        num_kept, next_token, *confidence = self._results.tolist()
        if int(next_token) == NOT_FINITE:
            raise NotFiniteError
        return int(num_kept), int(next_token), confidence[: int(num_kept) + 1]
