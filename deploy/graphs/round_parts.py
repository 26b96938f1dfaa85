"""The parts of a round, each a function over tensors that stay, which a graph is captured of.

The host sets some numbers before a part runs and reads some after the round; all between them,
tree, masks, walk and the moving of rows, stays on the device. Running a part twice is as running
it once: what it changes in place it has written itself.

#   R = rows of a pass, padding included, D = tokens that a walk can gain, W = width of the states
#   B = tokens of a block, V = vocabulary, S = stop tokens
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polybasic.chain.formats.plan import Rule, Tree, Window
from polybasic.chain.kernels.torch.rows import DeviceRows, causal_rows, tree_rows
from polybasic.chain.model.device_model import DeviceModel
from polybasic.deploy.drafters.head import EagleDrafter
from polybasic.deploy.drafters.model import ModelDrafter
from polybasic.deploy.graphs.device_draws import Drawing
from polybasic.deploy.graphs.device_passes import PADDING, Numbers, device_model
from polybasic.deploy.graphs.device_sampling import verify, verify_greedy, walk
from polybasic.deploy.graphs.device_tree import DeviceTree, expand, keep_best
from polybasic.deploy.rounds.verifier import Verifier

UNREAD_BUCKETS = (8, 16, 32, 64)
"""Rows that a drafter reads before it drafts: what the sequence gained since its last draft."""
NO_TOKEN = -1
"""In rows of a tree that only fill up: no walk steps there."""


class TreeRows:
    """The rows of a tree where one part leaves them and another reads them.

    Args:
        num_rows: R.
        max_depth: no row lies deeper below the root; a walk gains one token more at most.
    """

    def __init__(self, num_rows: int, max_depth: int, device: torch.device) -> None:
        zeros = torch.zeros(num_rows, dtype=torch.int64, device=device)
        itself = torch.eye(num_rows, dtype=torch.bool, device=device)
        self.tree = DeviceTree(zeros, zeros.clone(), zeros.clone(), itself)
        self.max_depth = max_depth

    def set(self, tree: DeviceTree) -> None:
        """Take over a tree, whose rows may be fewer: the others only fill up."""
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
        """A tree of one row."""
        self.tree.tokens.fill_(token)


@dataclass(frozen=True)
class Drafted:
    """What a drafter's model reads and is asked.

    Attributes:
        token_ids: int64 [V'], the token of each output; None where that is its number.
        observed: of a head, states by position; see `EagleDrafter`.
    """

    model: DeviceModel
    cache: Sequence[Tensor]
    token_ids: Tensor | None
    observed: Tensor | None

    @classmethod
    def of(cls, drafter: EagleDrafter | ModelDrafter) -> "Drafted | None":
        """None where the drafter's model has no passes on the device."""
        layers = drafter.cache.layers
        if isinstance(drafter, EagleDrafter):
            model, token_ids = drafter.head.device_model, drafter.head.draft_token_ids
            return None if model is None else cls(model, layers, token_ids, drafter.observed)
        model = drafter.decoder.device_model
        return None if model is None else cls(model, layers, None, None)

    def read(self, token_ids: Tensor, rows: DeviceRows) -> Tensor:
        """States of the tokens that were not read yet, whose features were observed."""
        features = None
        if self.observed is not None:
            features = self.model.features(self.observed.index_select(0, rows.positions))
        return self.model.forward(token_ids, self.cache, rows, features)

    def forward(self, token_ids: Tensor, states: Tensor, rows: DeviceRows) -> Tensor:
        """States of a level of the draft."""
        features = None if self.observed is None else states
        return self.model.forward(token_ids, self.cache, rows, features)


class DraftPart:
    """Reads what the drafter has not read yet and leaves a tree.

    Args:
        num_unread: tokens that it reads at most.
    """

    def __init__(self, drafted: Drafted, shape: Tree, num_unread: int, left: TreeRows) -> None:
        self.drafted, self.shape, self.num_unread, self.left = drafted, shape, num_unread, left
        device = drafted.cache[0].device
        self.numbers = Numbers(2 + num_unread, device)
        self.set(0, [PADDING])

    def set(self, start: int, unread: Sequence[int]) -> None:
        """The drafter's committed rows, and the tokens behind them, of which the last is the root.

        A head reads the first of them with the state of the token before it.
        """
        padding = [PADDING] * (self.num_unread - len(unread))
        self.numbers.set([start, len(unread), *unread, *padding])

    def run(self, window: Window | None) -> None:
        """Read, expand, and keep the best."""
        drafted, shape = self.drafted, self.shape
        start, num_unread, token_ids = self.numbers.values.split([1, 1, self.num_unread])
        start, last = start[0], num_unread - 1
        states = drafted.read(token_ids, causal_rows(start, self.num_unread, window))
        operations = drafted.model.operations
        candidates = expand(
            drafted.forward,
            drafted.model.logits,
            operations,
            states.index_select(0, last),
            start + num_unread[0],
            shape.depth,
            shape.top_k,
            drafted.token_ids,
            window,
        )
        root = token_ids.index_select(0, last)[0]
        self.left.set(keep_best(shape.top_k, *candidates, root, shape.rows, operations))


class TreePart:
    """A pass of a verifier over a tree, the walk, and the moving of the accepted rows.

    Args:
        read: the tree; D is one more than its greatest depth.
        stop_tokens: int64 [S].

    Attributes:
        uniforms: float32 [R] of [0, 1), set before each run.
        states: [D, W], of the accepted rows; those behind the gained tokens mean nothing.
        path: int64 [D], the accepted rows.
        probabilities: float32 [R, V] that tokens were drawn from; None where they are the most
            probable.
    """

    def __init__(
        self, verifier: Verifier, read: TreeRows, drawing: Drawing, stop_tokens: Tensor
    ) -> None:
        decoder, depth = verifier.decoder, read.max_depth + 1
        self.verifier, self.read, self.drawing = verifier, read, drawing
        self.stop_tokens, self.depth = stop_tokens, depth
        self.num_rows, device = len(read.tree.tokens), decoder.device
        self.numbers = Numbers(2, device)
        self.set(0, 1)
        self.uniforms = torch.zeros(self.num_rows, device=device)
        self.states = torch.zeros(depth, decoder.states_width, dtype=decoder.dtype, device=device)
        self.path = torch.zeros(depth, dtype=torch.int64, device=device)
        self.probabilities = drawing.room(self.num_rows, decoder.config.vocab_size)
        self._told = torch.zeros(1 + 2 * depth, dtype=torch.float64, device=device)

    def set(self, prefix: int, limit: int) -> None:
        """Committed rows of the cache, and the tokens that may be gained."""
        self.numbers.set([prefix, limit])

    def run(self, window: Window | None) -> None:
        """Read the tree, draw behind every row of it, and walk."""
        tree, cache, drawing = self.read.tree, self.verifier.cache, self.drawing
        model = device_model(self.verifier.decoder)
        prefix, limit = self.numbers.values
        states = model.forward(
            tree.tokens.clamp(min=PADDING),
            cache.layers,
            tree_rows(prefix, tree.depths, tree.ancestors, window),
            feature_layers=self.verifier.decoder.feature_layers,
        )
        logits = model.logits(states)
        drawing.fill(logits, self.probabilities)
        drawn = drawing.draw(model.operations, logits, self.uniforms, self.probabilities)
        walked = walk(tree, drawn, limit, self.stop_tokens, self.depth, model.operations)
        cache.move_on_device(prefix + walked.path, prefix)
        self.path.copy_(walked.path)
        self.states.copy_(states.index_select(0, walked.path))
        sure = drawing.confidence(logits, self.probabilities, walked.path, walked.gained)
        self._told.copy_(torch.cat([walked.num[None].double(), walked.gained.double(), sure]))

    def told(self) -> tuple[list[int], list[float]]:
        """The gained tokens and how probable each was; the host waits for them."""
        num, *told = self._told.tolist()
        gained = [int(token) for token in told[: int(num)]]
        return gained, told[self.depth : self.depth + int(num)]


class BlockPart:
    """A pass of a verifier over what it has not read yet and a block behind it, which is cut.

    Args:
        num_rows: R, at least two.

    Attributes:
        uniforms: float32 [R] of [0, 1), set before each run.
        proposed: float32 [R - 1, V] that the block's tokens were drawn from; None where they are
            the most probable.
        states: [R, W].
        probabilities: float32 [R, V] of the verifier, from the block's first token on; or None.
        places: int64 [R], 0 and up.
    """

    def __init__(self, verifier: Verifier, num_rows: int, rule: Rule, drawing: Drawing) -> None:
        decoder, vocab_size = verifier.decoder, verifier.decoder.config.vocab_size
        self.verifier, self.num_rows, self.rule, self.drawing = verifier, num_rows, rule, drawing
        device = decoder.device
        self.numbers = Numbers(3 + num_rows, device)
        self.set(0, [PADDING], [])
        self.places = torch.arange(num_rows, device=device)
        self.uniforms = torch.zeros(num_rows, device=device)
        self.proposed = drawing.room(num_rows - 1, vocab_size)
        self.probabilities = drawing.room(num_rows, vocab_size)
        self.states = torch.zeros(
            num_rows, decoder.states_width, dtype=decoder.dtype, device=device
        )
        self._told = torch.zeros(2 + num_rows, dtype=torch.float64, device=device)

    def set(self, prefix: int, unread: Sequence[int], block: Sequence[int]) -> None:
        """Committed rows of the cache, the tokens behind them, and the block behind those."""
        token_ids = [*unread, *block]
        padding = [PADDING] * (self.num_rows - len(token_ids))
        self.numbers.set([prefix, len(unread), len(block), *token_ids, *padding])

    def run(self, window: Window | None) -> None:
        """Read and cut."""
        model, drawing = device_model(self.verifier.decoder), self.drawing
        prefix, num_unread, num_tokens = self.numbers.values[:3]
        token_ids = self.numbers.values[3:]
        states = model.forward(
            token_ids,
            self.verifier.cache.layers,
            causal_rows(prefix, self.num_rows, window),
            feature_layers=self.verifier.decoder.feature_layers,
        )
        # from the row before the block's first token on
        before = (num_unread - 1 + self.places).clamp(max=self.num_rows - 1)
        logits = model.logits(states.index_select(0, before))
        block = token_ids.index_select(0, (before + 1).clamp(max=self.num_rows - 1)[:-1])
        drawing.fill(logits, self.probabilities)
        if self.proposed is None or self.probabilities is None:
            own = model.operations.most_probable(logits)
            num_kept, next_token = verify_greedy(block, num_tokens, own)
        else:
            num_kept, next_token = verify(
                block,
                num_tokens,
                self.probabilities,
                self.proposed,
                self.uniforms,
                self.rule,
                model.operations,
            )
        self.states.copy_(states)
        tokens = torch.cat([block, next_token[None]])
        tokens = torch.where(self.places == num_kept, next_token, tokens)
        sure = drawing.confidence(logits, self.probabilities, self.places, tokens)
        told = [num_kept[None].double(), next_token[None].double(), sure]
        self._told.copy_(torch.cat(told))

    def told(self) -> tuple[int, int, list[float]]:
        """Tokens that are kept, the token behind them, and how probable each of these was; the
        host waits for them."""
        num_kept, next_token, *sure = self._told.tolist()
        return int(num_kept), int(next_token), sure[: int(num_kept) + 1]
