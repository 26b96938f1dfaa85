"""Drafts of DFlash heads (arXiv 2602.06036): a block of tokens in one pass.

A row of the cache is a token that the verifier has read: its keys and values are made of the
features of that token alone. A draft's own rows, the anchor's and those of the masks, come after
them and stay provisional.

#   R = rows, D = hidden size, L = levels, V = tokens to draft
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from polybasic.chain.formats.checkpoints.decoder_config import LayerKind
from polybasic.chain.formats.head_kinds.dflash import DFlashBlock
from polybasic.chain.kernels.drafts import Candidates
from polybasic.chain.kernels.executor import DraftRequest, Layers
from polybasic.chain.kernels.torch.corrections import Corrector
from polybasic.chain.kernels.torch.executor import (
    REFERENCE,
    SequenceRows,
    TorchExecutor,
    features_of,
)
from polybasic.chain.kernels.torch.operations import Norm, Operations
from polybasic.chain.kernels.torch.positions import expand_positions
from polybasic.chain.kernels.torch.rows import DeviceRows
from polybasic.chain.kernels.weights import ModelWeights, embed


@dataclass(frozen=True)
class DFlashWeights(ModelWeights):
    """A DFlash head; `feature_norm` norms what `fc` makes of the verifier's layers.

    Attributes:
        block: what is drafted in one pass.
        corrector: of the block's logits; None leaves them as they are.
    """

    block: DFlashBlock = field(kw_only=True)
    corrector: Corrector | None = None

    @property
    def max_levels(self) -> int:
        """Those of a block."""
        return self.block.num_levels


class DFlashExecutor(TorchExecutor):
    """Runs DFlash heads.

    A state is what a draft needs of the token that its row holds: the token's embedding, and what
    the corrector reads of it. Products are those of the backend that laid the weights out; rounds
    run through the host.
    """

    weights: DFlashWeights

    def __init__(self, weights: DFlashWeights) -> None:
        super().__init__(weights)
        mask = torch.tensor([weights.block.mask_token_id], device=weights.device)
        self._mask_1D = embed(weights.embedding, mask)

    def features(self, inputs: Tensor) -> Tensor:
        norm = self._norm(self.weights.feature_norm)
        assert norm is not None, "a DFlash head norms what it fuses"
        return REFERENCE.norm(features_of(self.weights, inputs), norm)

    def drafts(self, requests: Sequence[DraftRequest]) -> list[Candidates]:
        hidden = self._blocks(requests)
        found = []
        for request, block in zip(requests, hidden, strict=True):
            weights, corrector = self.weights, self.weights.corrector
            first = block.shape[0] - weights.block.num_levels
            rows = block[first : first + request.depth]
            anchor = request.state[:, self.config.hidden_size :]
            found.append(
                expand_positions(
                    REFERENCE.product(weights.lm_head, rows),
                    REFERENCE,
                    torch.tensor(request.start, device=self.device),
                    request.top_k,
                    None if corrector is None else corrector.after(anchor, rows),
                    weights.draft_token_ids,
                    request.perturbation,
                )
            )
        return found

    def _blocks(self, requests: Sequence[DraftRequest]) -> list[Tensor]:
        """The rows [size, D] of each sequence's block after the final norm."""
        size, D = self.weights.block.size, self.config.hidden_size
        sees_all = torch.ones(size, size, dtype=torch.bool, device=self.device)
        sees_before = sees_all.tril()
        masks = self._mask_1D.expand(size - 1, -1)
        embedded, sequences = [], []
        for number, request in enumerate(requests):
            assert isinstance(request.start, int), "rounds run through the host"
            prefix = torch.tensor(request.start, device=self.device)
            positions = prefix + torch.arange(size, device=self.device)
            rows, causal = (
                DeviceRows(prefix, positions, positions, seen, request.window, request.start)
                for seen in (sees_all, sees_before)
            )
            spans = [
                (causal if self._is_causal(kind) else rows).span_of(kind)
                for kind in self.config.kinds
            ]
            place = slice(number * size, (number + 1) * size)
            sequences.append(SequenceRows(place, request.cache, rows, spans))
            embedded += [request.state[:, :D], masks]
        x_RD, attend = torch.cat(embedded), self._attend(REFERENCE, sequences)
        for index, layer in enumerate(self.weights.layers):
            x_RD = self._layer(REFERENCE, index, layer, x_RD, attend, None)
        assert self.weights.final_norm is not None
        normed = REFERENCE.norm(x_RD, Norm(self.weights.final_norm, self._eps))
        return list(normed.split(size))

    def _is_causal(self, kind: LayerKind) -> bool:
        """Whether a block's rows see none after them in layers of this kind."""
        is_causal = self.weights.block.is_causal
        return kind.window is not None if is_causal is None else is_causal

    def _pass_over(
        self,
        operations: Operations,
        token_ids: Tensor,
        caches: Sequence[Layers],
        rows: Sequence[DeviceRows],
        features: Tensor | None,
        feature_layers: tuple[int, ...],
    ) -> Tensor:
        """Write the keys and values of features [R, D]; the states of the tokens after them."""
        weights = self.weights
        assert features is not None, "of a verifier"
        parts = features.split([read.num_rows for read in rows])
        for cache, read, part in zip(caches, rows, parts, strict=True):
            spans = [read.span_of(kind) for kind in self.config.kinds]
            for index, layer in enumerate(weights.layers):
                operations.write_rows(
                    operations.product(layer.qkv, part),
                    cache[index],
                    read,
                    spans[layer.kind],
                    self.heads[index],
                    weights.rotary.tables[layer.kind],
                )
        embedded = embed(weights.embedding, token_ids)
        if weights.corrector is None:
            return embedded
        return torch.cat([embedded, weights.corrector.read(token_ids)], -1)
