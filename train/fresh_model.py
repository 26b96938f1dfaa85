"""A small Llama before its first step: random weights, but for two heads that copy.

To copy from a prompt takes two attention heads (Olsson et al., "In-context Learning and Induction
Heads", 2022): one that writes beside each token which one stood before it, and one in a layer above
that looks for places where the present token stood before, and takes what came next. Small models
find this pair late, after more steps than all else takes here, so it is written into the weights
(as in Trockman and Kolter, "Mimetic Initialization of Self-Attention Layers", 2023), from where
training goes on.

Shapes: H = hidden size, D = size of an attention head, V = vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from polybasic.train.settings import ScratchModelSettings

_ROPE_THETA = 10_000.0
_DEVIATION = 0.02  # of random weights
_NEIGHBOUR_SHARE = 3 / 16  # of a head's frequencies, from the highest: those that tell neighbours
_CONTENT_SHARE = 9 / 16  # from there on, frequencies turn so slowly that all places are alike
_NEIGHBOUR_SCALE = 0.6
_CONTENT_SCALE = 2.35
_MARK_SCALE = 0.03  # of what a token knows of the one before; its embedding has `_DEVIATION`
_COPY_SCALE = 0.15


def build_model(
    settings: ScratchModelSettings,
    tokenizer: PreTrainedTokenizerFast,
    vocab_size: int,
    seed: int,
) -> LlamaForCausalLM:
    """A Llama of the settings' shape, with their first layers alone, and fresh float32 weights.

    Two heads copy where the shape has room for them: two layers, and three heads' sizes in the
    hidden size.
    """
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=min(settings.first_layers or settings.num_layers, settings.num_layers),
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_kv_heads,
        max_position_embeddings=settings.context_tokens,
        rope_parameters={"rope_type": "default", "rope_theta": _ROPE_THETA},
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # Eager attention is faster than sdpa on a CPU for short rows with a mask.
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        layers = model.model.layers
        residual_scale = (2 * len(layers)) ** -0.5
        with torch.no_grad():
            for layer in layers:
                layer.self_attn.o_proj.weight.mul_(residual_scale)
                layer.mlp.down_proj.weight.mul_(residual_scale)
            if len(layers) > 1 and 3 * _head_size(settings) < settings.hidden_size:
                _write_copying_heads(model, _head_size(settings))
    return model


def _write_copying_heads(model: LlamaForCausalLM, head_size: int) -> None:
    """The first query head of the first two layers, with its keys and values.

    The residual stream has a direction that is the same for all tokens and, at right angles to it,
    three spaces of D dimensions: what describes the token itself, where the token before is kept,
    and what is copied.
    """
    embedding_VH, projection_VH = model.model.embed_tokens.weight, model.lm_head.weight
    hidden_size, half = embedding_VH.shape[1], head_size // 2
    spaces_HH, _ = torch.linalg.qr(torch.randn(hidden_size, hidden_size))
    constant_H, rest = spaces_HH[0], spaces_HH[1:]
    token_DH, kept_DH, copied_DH = (rest[n * head_size : (n + 1) * head_size] for n in range(3))
    # what a copying head writes of an embedding comes out as the token that it was
    projection_VH.copy_(embedding_VH)
    embedding_VH.add_(_DEVIATION * hidden_size**0.5 * constant_H)

    first, second = (layer.self_attn for layer in model.model.layers[:2])
    queries_DH, keys_DH = _of_first_head(first, head_size)
    angles = _ROPE_THETA ** (-torch.arange(half) / half)
    for pair in range(int(_NEIGHBOUR_SHARE * half)):
        # keys are turned by one place: the query of the next token is most like them
        queries_DH[pair] = _NEIGHBOUR_SCALE * constant_H
        keys_DH[pair] = _NEIGHBOUR_SCALE * angles[pair].cos() * constant_H
        keys_DH[pair + half] = _NEIGHBOUR_SCALE * angles[pair].sin() * constant_H
    first.v_proj.weight[:head_size] = token_DH
    mark_scale = _MARK_SCALE * (hidden_size / head_size) ** 0.5
    first.o_proj.weight[:, :head_size] = mark_scale * kept_DH.T

    queries_DH, keys_DH = _of_first_head(second, head_size)
    slow = torch.arange(half) >= _CONTENT_SHARE * half
    is_used = torch.cat((slow, slow))
    num_used = int(is_used.sum())
    queries_DH[is_used] = _CONTENT_SCALE * token_DH[:num_used]
    keys_DH[is_used] = _CONTENT_SCALE * kept_DH[:num_used]
    second.v_proj.weight[:head_size] = copied_DH
    second.o_proj.weight[:, :head_size] = _COPY_SCALE * copied_DH.T


def _of_first_head(attention: Any, head_size: int) -> tuple[Tensor, Tensor]:
    """The query's and the key's weights [D, H] of a layer's first head, zeroed in place."""
    parts = []
    for projection in (attention.q_proj, attention.k_proj):
        weight = projection.weight[:head_size]
        parts.append(weight.zero_())
    return parts[0], parts[1]


def _head_size(settings: ScratchModelSettings) -> int:
    return settings.hidden_size // settings.num_heads
