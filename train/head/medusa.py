"""Medusa's heads (Cai et al., arXiv 2401.10774) and Hydra's (arXiv 2402.05109), and their loss.

Head s, from 0, reads the verifier's state t and gives token t + 2 + s. Every position of an answer
is such a t: there is no attention, so none costs more than its products.

Shapes: B = batch, T = tokens, S = heads, N = rows of a head that count, H = hidden size.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polybasic.train.data.batches import LocalBatch
from polybasic.train.features.head_shape import HeadShape
from polybasic.train.features.lm_head import LmHead
from polybasic.train.features.states import Features
from polybasic.train.head.eagle2 import DraftHead
from polybasic.train.head.losses import PredictedStates, UnrolledLoss, positions_sum, step_weights
from polybasic.train.settings import HeadSettings


class MedusaHead(DraftHead):
    """Residual blocks and an output projection for each place of a path.

    Blocks start as the identity, as Medusa's own do; projections are to start from the verifier's.
    """

    def __init__(
        self,
        shape: HeadShape,
        embedding: Tensor | None = None,
        draft_token_ids: Tensor | None = None,
    ) -> None:
        super().__init__(shape, embedding, draft_token_ids)
        assert shape.num_positions is not None, f"{shape.kind} heads by place"
        places = range(shape.num_positions)
        self.blocks = nn.ModuleList(self._blocks(place) for place in places)
        self.lm_heads = nn.ModuleList(
            nn.Linear(shape.hidden_size, shape.draft_vocab_size or shape.vocab_size, bias=False)
            for _ in places
        )

    @property
    def dtype(self) -> torch.dtype:
        """See `DraftHead.dtype`."""
        return self.get_parameter("lm_heads.0.weight").dtype

    @property
    def num_positions(self) -> int:
        """Places of a path, each with a head."""
        return len(self.blocks)

    def read(self, states: Tensor, token_ids: Tensor, place: int) -> Tensor:
        """What the blocks of a place read, [N, H].

        Args:
            states: [N, H], of each row.
            token_ids: [N, place + 1], the tokens after it.
        """
        return states

    def projection_at(self, place: int, lm_head: LmHead) -> LmHead:
        """From a place's blocks to logits of the draft vocabulary; `lm_head` is the verifier's."""
        weight = self.get_parameter(f"lm_heads.{place}.weight")
        return replace(lm_head, weight=weight, softcap=None)

    def _blocks(self, place: int) -> nn.Module:
        return _Blocks(self.shape.hidden_size, self.shape.num_blocks)


class HydraHead(MedusaHead):
    """Blocks that also read the embeddings of the path, from the token after the state on.

    They start as Medusa's: the first block's own path takes the state and leaves the embeddings.
    """

    def read(self, states: Tensor, token_ids: Tensor, place: int) -> Tensor:
        """See `MedusaHead.read`; [N, (place + 2) * H]."""
        embedded = self.embed_tokens(token_ids).to(states.dtype)
        return torch.cat((states, embedded.flatten(1)), dim=-1)

    def _blocks(self, place: int) -> nn.Module:
        size = self.shape.hidden_size
        return _Blocks(size, self.shape.num_blocks, (place + 2) * size)


class _Blocks(nn.Module):
    """x + silu(W x + b), one after the other; `residual` stands for x where sizes differ."""

    def __init__(self, size: int, num_blocks: int, input_size: int | None = None) -> None:
        super().__init__()
        sizes = [input_size or size, *[size] * (num_blocks - 1)]
        layers = [nn.Linear(each, size) for each in sizes]
        for layer in layers:
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        self.layers = nn.ModuleList(layers)
        self.residual = None if input_size is None else nn.Linear(input_size, size)
        if self.residual is not None:
            nn.init.eye_(self.residual.weight)
            nn.init.zeros_(self.residual.bias)

    def forward(self, x: Tensor) -> Tensor:
        kept = x if self.residual is None else self.residual(x)
        for layer in self.layers:
            x = kept + F.silu(layer(x))
            kept = x
        return x


def medusa_loss(
    head: MedusaHead,
    settings: HeadSettings,
    share: LocalBatch,
    features: Features,
    lm_head: LmHead,
    noise: Tensor,
    token_counts: Tensor,
) -> UnrolledLoss:
    """The mean of the heads' losses, in which head s weighs `step_decay ** s`.

    Args:
        features: in the head's dtype; all else as `polybasic.train.head.loss_module.LossModule`.
    """
    states = features.states[:, :-2] + noise.to(head.dtype)
    token_ids, taught = share.token_ids[:, 1:-1], features.taught
    teacher = lm_head.to(head.dtype)
    counted = step_weights(share.is_assistant[:, 2:], head.num_positions)
    decays = settings.step_decay ** torch.arange(head.num_positions, device=token_counts.device)

    def predicted(place: int, blocks: nn.Module) -> PredictedStates:
        rows = counted[place, :, place:]  # of the states, moved by what lies between
        num_rows = rows.shape[1]
        path = torch.stack([token_ids[:, s : s + num_rows] for s in range(place + 1)], -1)[rows]
        outputs = blocks(head.read(states[:, :num_rows][rows], path, place))
        student = head.projection_at(place, teacher)
        return PredictedStates(outputs, outputs, taught[:, place:][rows], student)

    return positions_sum(
        (predicted(place, blocks) for place, blocks in enumerate(head.blocks)),
        decays / decays.sum(),
        token_counts,
        teacher,
        head.draft_token_ids,
        settings,
    )
