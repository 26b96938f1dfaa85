"""The weights of a loaded model: one record, read by every executor.

#   D = hidden size, V = vocabulary, V' = tokens that a draft head can draft
#   K = key/value heads, G = query heads that read one of them, H = head size
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from polybasic.chain.formats.decoder_config import DecoderConfig
from polybasic.chain.kernels.rotary import RotaryTable


class Linear(Protocol):
    """A matrix in the layout of an executor, dense or in 4 bits, with its bias."""

    def __call__(self, x_RI: Tensor) -> Tensor:
        """x [R, I] -> [R, O], both in the compute dtype."""


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
class ModelWeights:
    """A decoder or a draft head.

    An EAGLE-2 head (Li et al., 2024) has `fc`: row t reads token t+1 and the feature of token t,
    the verifier's state after its final norm, and predicts the feature of token t+1. An EAGLE-3
    head (Li et al., arXiv 2503.01840) also has `embedding_norm` and `feature_norm`: `fc` fuses the
    inputs of some of the verifier's layers to the feature, and attention reads the token's
    embedding and the feature, each normed, side by side. A row's position is t in both.

    Attributes:
        embedding: [V, D] in the compute dtype; a head's is its verifier's.
        rotary: of all positions that the model is loaded for.
        lm_head: D -> V or V', before soft-capping.
        logit_softcap: of its outputs; None for none.
        embedding_scale: factor of the embeddings, as the compute dtype rounds it.
        final_norm: [D], before `lm_head`; an EAGLE-2 head has none.
        fc: of a head: 2D -> D, or of an EAGLE-3 head from its feature layers -> D.
        embedding_norm: [D] of an EAGLE-3 head.
        feature_norm: [D] of an EAGLE-3 head.
        feature_layers: the verifier's layers whose inputs an EAGLE-3 head reads.
        draft_token_ids: int64 [V'], the token of each output; None if outputs are token ids.
        draft_lm_head: of a verifier: token ids (int64 [V'], or None for all) -> the output
            projection of a head that has none of its own.
        all_reduce: of one of several parts of a model, whose config has the heads and the MLP of
            this part: sums what the parts' `out` or `down` have computed, [R, D]. None for a whole
            model. `lm_head` has the part's own tokens.
    """

    config: DecoderConfig
    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    rotary: RotaryTable
    lm_head: Linear
    logit_softcap: float | None = None
    embedding_scale: float | None = None
    final_norm: Tensor | None = None
    fc: Linear | None = None
    embedding_norm: Tensor | None = None
    feature_norm: Tensor | None = None
    feature_layers: tuple[int, ...] = ()
    draft_token_ids: Tensor | None = None
    draft_lm_head: Callable[[Tensor | None], Linear] | None = None
    all_reduce: Callable[[Tensor], Tensor] | None = None

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def is_head(self) -> bool:
        """Whether it continues a verifier's features; its states are not normed yet."""
        return self.fc is not None

    @property
    def fuses_features(self) -> bool:
        """Whether a head reads several layers of its verifier, as EAGLE-3 does."""
        return self.feature_norm is not None

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
