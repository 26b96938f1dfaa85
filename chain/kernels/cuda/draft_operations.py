"""A round's work between its passes, by Triton kernels where they support the size."""

from torch import Tensor

from polybasic.chain.kernels.cuda import (
    candidates,
    draw_kernels,
    noise_kernels,
    nucleus_kernels,
    tree_kernels,
)
from polybasic.chain.kernels.torch.operations import Operations
from polybasic.chain.kernels.torch.trees import Beam, DeviceTree, Walk


class DraftOperations(Operations):
    """Chooses, draws, prunes and walks trees in Triton; passes are left to `Operations`.

    Results equal those of `Operations`, except that of equal scores the first is always taken.
    """

    def best(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        if k > candidates.MAX_BEST:
            return super().best(logits, k)
        return candidates.best(logits, k)

    def most_probable(self, logits: Tensor) -> Tensor:
        return candidates.most_probable(logits)

    def draw(self, probabilities: Tensor, uniforms: Tensor) -> Tensor:
        return draw_kernels.draw(probabilities, uniforms)

    def noise(self, key: Tensor, positions: Tensor, num_tokens: int) -> Tensor:
        return noise_kernels.gumbel_noise(key, positions, num_tokens)

    def without_tail(self, logits: Tensor, probabilities: Tensor, top_p: Tensor) -> Tensor:
        return nucleus_kernels.without_tail(logits, probabilities, top_p)

    def continuations(
        self, logits: Tensor, k: int, above: Tensor | None, token_ids: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if k > candidates.MAX_BEST:
            return super().continuations(logits, k, above, token_ids)
        return candidates.continuations(logits, k, above, token_ids)

    def next_beam(self, scores: Tensor, tokens: Tensor, states: Tensor, visible: Tensor) -> Beam:
        if len(states) > candidates.MAX_BEST:
            return super().next_beam(scores, tokens, states, visible)
        return candidates.next_beam(scores, tokens, states, visible)

    def keep_best(
        self, top_k: int, tokens: Tensor, scores: Tensor, beams: Tensor, root: Tensor, rows: int
    ) -> DeviceTree:
        is_large = len(tokens) > tree_kernels.MAX_CANDIDATES or rows > tree_kernels.MAX_ROWS
        keep = super().keep_best if is_large else tree_kernels.keep_best
        return keep(top_k, tokens, scores, beams, root, rows)

    def walk(
        self, tree: DeviceTree, drawn: Tensor, limit: Tensor, stop_tokens: Tensor, max_tokens: int
    ) -> Walk:
        return tree_kernels.walk(tree, drawn, limit, stop_tokens, max_tokens)
