"""Small random decoders and heads in any dtype, dense or quantized, for tests of the kernels."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from polybasic.chain.formats.checkpoints.awq import QuantizedWeight
from polybasic.chain.formats.checkpoints.block_types import BLOCK_TYPES
from polybasic.chain.formats.checkpoints.blocks import BlockWeight
from polybasic.chain.formats.checkpoints.decoder_config import DecoderConfig
from polybasic.chain.kernels.executor import Executor
from polybasic.chain.kernels.rotary import RotaryTable
from polybasic.chain.kernels.rows import consecutive_rows
from polybasic.chain.kernels.selection import backend_for
from polybasic.chain.kernels.weights import (
    Embedding,
    LayerWeights,
    Linear,
    ModelWeights,
    PositionWeights,
)
from polybasic.deploy.runtime.rounds.cache import KeyValueCache

CPU = torch.device("cpu")
CONFIG = DecoderConfig(
    vocab_size=100,
    hidden_size=256,
    intermediate_size=512,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    rms_norm_eps=1e-5,
    context_tokens=1200,
    tie_word_embeddings=False,
    rope={"rope_type": "default", "rope_theta": 10000.0},
)


DRAFTED = torch.arange(1, CONFIG.vocab_size, 3)
"""Tokens of a trimmed head."""
SCALES = {"model": 1.25, "head": 1e-3, "trimmed head": 1e-3, "block head": 1e-3}
"""That bring logits to the size of the noise: those of random heads are thousands."""


@contextmanager
def eager() -> Iterator[None]:
    """What is made inside runs on the reference executor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYBASIC_KERNELS", "eager")
        yield


@contextmanager
def threads(num: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def random_quantized(
    generator: torch.Generator, out_size: int, in_size: int, group_size: int = 128
) -> QuantizedWeight:
    groups = in_size // group_size
    return QuantizedWeight(
        torch.randint(0, 16, (out_size, in_size), dtype=torch.uint8, generator=generator),
        torch.randint(5, 11, (out_size, groups), dtype=torch.uint8, generator=generator),
        (torch.rand(out_size, groups, generator=generator) * 0.02 + 0.01).half(),
    )


def random_rows(generator: torch.Generator, kind: str, out_size: int, in_size: int) -> Tensor:
    """Rows of a weight in blocks as a file has them, whose values are about 0.1: uint8 [O, B]."""
    blocks = BLOCK_TYPES[kind]
    shape = out_size, in_size // blocks.size, blocks.num_bytes
    rows_ONb = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    constants_ONb = rows_ONb[..., blocks.constants]
    drawn = torch.rand((*shape[:2], constants_ONb.shape[2] // 2), generator=generator) + 0.5
    # a scale for codes, and integers beside it, up to the largest; then an offset in their middle
    middle = (1 << blocks.bits - 1) - 0.5
    drawn *= 0.2 / middle / (64 if blocks.factor_bytes else 1)
    if blocks.has_offsets:
        drawn[..., 1] *= middle if blocks.factor_bytes else -middle
    constants_ONb.copy_(drawn.half().view(torch.uint8).flatten(2))
    return rows_ONb.flatten(1)


def random_blocks(
    generator: torch.Generator, kind: str, out_size: int, in_size: int
) -> BlockWeight:
    return BlockWeight(BLOCK_TYPES[kind], random_rows(generator, kind, out_size, in_size))


def decoder(dtype: torch.dtype, weights: str = "dense", seed: int = 0) -> Executor:
    """A decoder of `CONFIG` with random weights; the same for a seed, whatever the kernels.

    Args:
        weights: "dense", "int4", or the name of a type of blocks, which the embedding has, too.
    """
    generator, backend = torch.Generator().manual_seed(seed), backend_for(CPU, dtype, CONFIG)

    def product(out_size: int, in_size: int) -> Linear:
        if weights == "int4":
            return backend.int4(random_quantized(generator, out_size, in_size))
        if weights != "dense":
            return backend.blocks([random_blocks(generator, weights, out_size, in_size)])
        weight = torch.randn(out_size, in_size, generator=generator) * 2 / in_size**0.5
        return backend.dense(weight.to(dtype))

    layers = [_layer(dtype, product, has_input_norm=True) for _ in range(CONFIG.num_layers)]
    embedding: Embedding
    if weights in BLOCK_TYPES:
        read = random_blocks(generator, weights, CONFIG.vocab_size, CONFIG.hidden_size)
        embedding = backend.embedding(read)
    else:
        drawn = torch.randn(CONFIG.vocab_size, CONFIG.hidden_size, generator=generator)
        embedding = drawn.to(dtype)
    lm_head = product(CONFIG.vocab_size, CONFIG.hidden_size)
    rotary = RotaryTable(CONFIG, CONFIG.context_tokens, dtype, CPU)
    final_norm = torch.ones(CONFIG.hidden_size, dtype=dtype)
    return backend.executor(
        ModelWeights(CONFIG, embedding, tuple(layers), rotary, lm_head, final_norm=final_norm)
    )


def head_of(target: Executor, seed: int = 1) -> Executor:
    """An EAGLE-2 head with random weights that drafts for a decoder."""
    generator, verifier = torch.Generator().manual_seed(seed), target.weights
    backend = backend_for(CPU, verifier.dtype, CONFIG)

    def product(out_size: int, in_size: int) -> Linear:
        weight = torch.randn(out_size, in_size, generator=generator) * 2 / in_size**0.5
        return backend.dense(weight.to(verifier.dtype))

    width = CONFIG.hidden_size
    fc, layer = product(width, 2 * width), _layer(verifier.dtype, product, has_input_norm=False)
    weights = ModelWeights(
        CONFIG, verifier.embedding, (layer,), verifier.rotary, verifier.lm_head, fc=fc
    )
    return backend.executor(weights)


def drafting(kind: str, dtype: torch.dtype = torch.float32) -> Executor:
    """What drafts for a decoder: itself, as "model", or a head by its name in `SCALES`."""
    target = decoder(dtype)
    if kind == "model":
        return target
    head = head_of(target)
    if kind == "trimmed head":
        generator = torch.Generator().manual_seed(2)
        rows = torch.randn(len(DRAFTED), CONFIG.hidden_size, generator=generator) / 5
        lm_head = backend_for(CPU, dtype, CONFIG).dense(rows.to(dtype))
        head = head.over(replace(head.weights, lm_head=lm_head, draft_token_ids=DRAFTED))
    if kind == "block head":
        generator = torch.Generator().manual_seed(7)
        size, rank = CONFIG.vocab_size, 16
        places, into, out = (
            torch.randn(shape, generator=generator).to(dtype)
            for shape in ((5, CONFIG.hidden_size), (size, rank), (size, rank))
        )
        positions = PositionWeights(places, 20 * into, 20 * out)
        head = head.over(replace(head.weights, positions=positions))
    return head


def states_before_draft(
    model: Executor,
    cache: KeyValueCache,
    ids: Tensor,
    features: Tensor,
    depth: int,
) -> Tensor:
    """What a draft of this depth follows, after a text that is read into an empty cache.

    Args:
        features: [R, D], which a head reads beside the text.
    """
    num, ahead, positions = len(ids), model.weights.rows_ahead(depth), model.weights.positions
    ids = torch.cat([ids, ids[-1:].expand(ahead)])
    read = None
    if model.weights.is_head:
        read = features.to(model.dtype)
        read = read if positions is None else positions.with_rows_ahead(read, ahead)
    states = model.forward(ids, [cache.layers], [consecutive_rows(0, num + ahead)], read)
    for layer in cache.layers:
        layer[:, num:] = 0
    return states[-1 - ahead :]


def cache_of(model: Executor, num_layers: int = CONFIG.num_layers) -> KeyValueCache:
    return KeyValueCache(CONFIG, num_layers, CONFIG.context_tokens, model.dtype, CPU)


def _layer(
    dtype: torch.dtype, product: Callable[[int, int], Linear], has_input_norm: bool
) -> LayerWeights:
    width, inner = CONFIG.hidden_size, CONFIG.intermediate_size
    heads = CONFIG.num_heads + 2 * CONFIG.num_kv_heads
    ones = torch.ones(width, dtype=dtype)
    return LayerWeights(
        0,
        product(heads * CONFIG.head_dim, width),
        product(width, CONFIG.num_heads * CONFIG.head_dim),
        product(2 * inner, width),
        product(width, inner),
        ones,
        ones if has_input_norm else None,
    )
