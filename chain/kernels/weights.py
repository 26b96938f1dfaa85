"""The weights of a loaded model: one record, read by every executor.

#   D = hidden size, V = vocabulary, V' = tokens that a draft head can draft
#   L = positions that a head gives at once
#   K = key/value heads, G = query heads that read one of them, H = head size
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from polybasic.chain.formats.checkpoints.decoder_config import DecoderConfig
from polybasic.chain.kernels.rotary import RotaryTable


class Linear(Protocol):
    """A matrix in the layout of an executor, dense or in 4 bits, with its bias."""

    def __call__(self, x_RI: Tensor) -> Tensor:
        """x [R, I] -> [R, O], both in the compute dtype."""


class StoredEmbedding(Protocol):
    """An embedding in an executor's own layout.

    Attributes:
        linear: the product with its rows, D -> V.
    """

    dtype: torch.dtype
    device: torch.device

    @property
    def linear(self) -> Linear: ...

    def rows(self, token_ids: Tensor) -> Tensor:
        """int64 [R] -> [R, D], in the compute dtype."""


Embedding: TypeAlias = Tensor | StoredEmbedding
"""[V, D] in the compute dtype, or as an executor keeps it."""


def embed(embedding: Embedding, token_ids: Tensor) -> Tensor:
    """int64 [R] -> [R, D] in the compute dtype, not scaled."""
    if isinstance(embedding, Tensor):
        return F.embedding(token_ids, embedding)
    return embedding.rows(token_ids)


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Norms are in the compute dtype, or in float32 if the norm is computed in float32.

    Attributes:
        kind: index into the config's `kinds`.
        qkv: D -> (K*G + K + K) * H, queries first, then keys, then values; 2D -> for an EAGLE-3
            head.
        out: K*G*H -> D.
        gate_up: D -> 2 * intermediate size, gate first.
        down: intermediate size -> D.
        mlp_norm: weight [D] of the norm before the MLP.
        input_norm: weight [D] of the norm before attention; a draft head's layer has none.
        query_norm: weight [H] of the norm of each query; comes with `key_norm`.
        attention_post_norm: weight [D] of the norm of attention's output.
        mlp_post_norm: weight [D] of the norm of the MLP's output.
    """

    kind: int
    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    mlp_norm: Tensor
    input_norm: Tensor | None = None
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    attention_post_norm: Tensor | None = None
    mlp_post_norm: Tensor | None = None


@dataclass(frozen=True)
class PositionWeights:
    """What a block-parallel head has to give all positions of a draft at once.

    Rows after the last token read that token and its feature, or a mask.

    Attributes:
        place_features: [L - 1, D], added to the feature of the last token; of a head with a mask,
            what its rows have instead.
        markov_in: [V, rank], of the token before a position; None where nothing is corrected.
        markov_out: [V', rank]: products of the two are added to a position's logits.
        mask_token_id: that the rows read in place of the last token; None for this.
    """

    place_features: Tensor
    markov_in: Tensor | None = None
    markov_out: Tensor | None = None
    mask_token_id: int | None = None

    def with_rows_ahead(self, features: Tensor, num_rows: int) -> Tensor:
        """Features [R, D], and after them those of rows for further positions, [num_rows, D]."""
        ahead = self.place_features[:num_rows]
        if self.mask_token_id is None:
            ahead = features[-1:] + ahead
        return torch.cat([features, ahead])


@dataclass(frozen=True)
class ModelWeights:
    """A decoder, its first layers as an early exit, or a draft head.

    An EAGLE-2 head (Li et al., 2024) has `fc`: row t reads token t+1 and the feature of token t,
    the verifier's state after its final norm, and predicts the feature of token t+1. An EAGLE-3
    head (Li et al., arXiv 2503.01840) also has `embedding_norm` and `feature_norm`: `fc` fuses the
    inputs of some of the verifier's layers to the feature, and attention reads the token's
    embedding and the feature, each normed, side by side. A row's position is t in both.

    Attributes:
        embedding: a head's is its verifier's.
        rotary: of all positions that the model is loaded for.
        lm_head: D -> V or V', before soft-capping.
        logit_softcap: of its outputs; None for none.
        embedding_scale: factor of the embeddings, as the compute dtype rounds it.
        final_norm: [D], before `lm_head`; an EAGLE-2 head has none.
        adapter: of an early exit, D -> rank and rank -> D: what they make of the last layer's
            output is added to it, before `final_norm`.
        fc: of a head: 2D -> D, or of an EAGLE-3 head from its feature layers -> D.
        embedding_norm: [D] of an EAGLE-3 head.
        feature_norm: [D] of an EAGLE-3 head.
        feature_norms: of an EAGLE-3 head, weights [F] of the norms of equal parts of what `fc`
            reads, in order; none where it reads that as it is.
        norms_residual: an EAGLE-3 head's residual starts from the normed feature.
        norms_output: a head's states are normed by `final_norm`, as a decoder's are.
        feature_layers: the verifier's layers whose inputs an EAGLE-3 head reads.
        draft_token_ids: int64 [V'], the token of each output; None if outputs are token ids.
        positions: of a block-parallel head.
        draft_lm_head: of a verifier: token ids (int64 [V'], or None for all) -> the output
            projection of a head that has none of its own.
        all_reduce: of one of several parts of a model, whose config has the heads and the MLP of
            this part: sums what the parts' `out` or `down` have computed, [R, D]. None for a whole
            model. `lm_head` has the part's own tokens.
        in_few_bits: whether its products are with codes of 4 to 8 bits, as it was stored.
        is_checked: whether another model checks the tokens of this one, a decoder.
    """

    config: DecoderConfig
    embedding: Embedding
    layers: tuple[LayerWeights, ...]
    rotary: RotaryTable
    lm_head: Linear
    logit_softcap: float | None = None
    embedding_scale: float | None = None
    final_norm: Tensor | None = None
    adapter: tuple[Linear, Linear] | None = None
    fc: Linear | None = None
    embedding_norm: Tensor | None = None
    feature_norm: Tensor | None = None
    feature_norms: tuple[Tensor, ...] = ()
    norms_residual: bool = False
    norms_output: bool = False
    feature_layers: tuple[int, ...] = ()
    draft_token_ids: Tensor | None = None
    positions: PositionWeights | None = None
    draft_lm_head: Callable[[Tensor | None], Linear] | None = None
    all_reduce: Callable[[Tensor], Tensor] | None = None
    in_few_bits: bool = False
    is_checked: bool = False

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def is_head(self) -> bool:
        """Whether it continues a verifier's features."""
        return self.fc is not None

    @property
    def has_normed_states(self) -> bool:
        """Whether its states come from its final norm; else its logits need that norm."""
        return self.norms_output or not self.is_head

    @property
    def fuses_features(self) -> bool:
        """Whether a head reads several layers of its verifier, as EAGLE-3 does."""
        return self.feature_norm is not None

    def tokens_ahead(self, last: int, num_rows: int) -> list[int]:
        """What rows after the last token read."""
        mask = None if self.positions is None else self.positions.mask_token_id
        return [last if mask is None else mask] * num_rows

    def rows_ahead(self, depth: int) -> int:
        """Rows for positions that a pass reads after the last token, before a draft this deep."""
        return 0 if self.positions is None else depth - 1

    @property
    def max_levels(self) -> int | None:
        """The deepest draft of a head for so many positions; None for any other."""
        return None if self.positions is None else len(self.positions.place_features) + 1

    @property
    def num_draft_tokens(self) -> int:
        """V'."""
        ids = self.draft_token_ids
        return self.config.vocab_size if ids is None else len(ids)

    @property
    def input_width(self) -> int:
        """Of a head: how many columns of the verifier's states it reads."""
        return max(1, len(self.feature_layers)) * self.config.hidden_size

    def select_inputs(self, states: Tensor) -> Tensor:
        """Of a head: the columns of the verifier's states [R, W] that it reads.

        States are the hidden state after the final norm, and whatever feature layers a pass of the
        verifier was asked for.
        """
        width = self.config.hidden_size
        return states[:, width:] if self.fuses_features else states[:, :width]
