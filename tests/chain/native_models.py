"""Small random decoders and heads in any dtype, dense or in 4 bits, for tests of the kernels."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from polybasic.chain.formats.awq import QuantizedWeight
from polybasic.chain.formats.decoder_config import DecoderConfig
from polybasic.chain.kernels.torch.rotary import RotaryTable
from polybasic.chain.model import linear
from polybasic.chain.model.decoder import Decoder, DecoderLayer
from polybasic.chain.model.head import EagleHead
from polybasic.chain.model.linear import Linear, dense_linear, int4_linear
from polybasic.deploy.rounds.cache import KeyValueCache

CPU = torch.device("cpu")
CONFIG = DecoderConfig(
    vocab_size=100,
    hidden_size=128,
    intermediate_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rms_norm_eps=1e-5,
    context_tokens=1200,
    tie_word_embeddings=False,
    rope={"rope_type": "default", "rope_theta": 10000.0},
)


@contextmanager
def eager() -> Iterator[None]:
    """What is made inside runs eager operations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "kernels_for", lambda device, dtype: None)
        yield


def random_quantized(generator: torch.Generator, out_size: int, in_size: int) -> QuantizedWeight:
    groups = in_size // 128
    return QuantizedWeight(
        torch.randint(0, 16, (out_size, in_size), dtype=torch.uint8, generator=generator),
        torch.randint(5, 11, (out_size, groups), dtype=torch.uint8, generator=generator),
        (torch.rand(out_size, groups, generator=generator) * 0.02 + 0.01).half(),
    )


def decoder(dtype: torch.dtype, is_quantized: bool = False, seed: int = 0) -> Decoder:
    """A decoder of `CONFIG` with random weights; the same for a seed, whatever the kernels."""
    generator = torch.Generator().manual_seed(seed)

    def product(out_size: int, in_size: int) -> Linear:
        if is_quantized:
            return int4_linear(random_quantized(generator, out_size, in_size), dtype, CPU)
        weight = torch.randn(out_size, in_size, generator=generator) * 2 / in_size**0.5
        return dense_linear(weight.to(dtype))

    layers = [_layer(dtype, product, has_input_norm=True) for _ in range(CONFIG.num_layers)]
    embedding = torch.randn(CONFIG.vocab_size, CONFIG.hidden_size, generator=generator).to(dtype)
    lm_head = product(CONFIG.vocab_size, CONFIG.hidden_size)
    rotary = RotaryTable(CONFIG, CONFIG.context_tokens, dtype, CPU)
    final_norm = torch.ones(CONFIG.hidden_size, dtype=dtype)
    return Decoder(CONFIG, embedding, layers, final_norm, lm_head, rotary, lambda ids: lm_head)


def head_of(target: Decoder, seed: int = 1) -> EagleHead:
    """An EAGLE-2 head with random weights that drafts for a decoder."""
    generator, dtype = torch.Generator().manual_seed(seed), target.dtype

    def product(out_size: int, in_size: int) -> Linear:
        weight = torch.randn(out_size, in_size, generator=generator) * 2 / in_size**0.5
        return dense_linear(weight.to(dtype))

    width = CONFIG.hidden_size
    fc, layer = product(width, 2 * width), _layer(dtype, product, has_input_norm=False)
    return EagleHead(CONFIG, target.embedding, fc, layer, target.rotary, target.lm_head)


def cache_of(model: Decoder | EagleHead, num_layers: int = CONFIG.num_layers) -> KeyValueCache:
    return KeyValueCache(CONFIG, num_layers, CONFIG.context_tokens, model.dtype, CPU)


def _layer(dtype: torch.dtype, product: object, has_input_norm: bool) -> DecoderLayer:
    assert callable(product)
    width, inner = CONFIG.hidden_size, CONFIG.intermediate_size
    heads = CONFIG.num_heads + 2 * CONFIG.num_kv_heads
    ones = torch.ones(width, dtype=dtype)
    return DecoderLayer(
        CONFIG,
        ones if has_input_norm else None,
        product(heads * CONFIG.head_dim, width),
        product(width, CONFIG.num_heads * CONFIG.head_dim),
        ones,
        product(2 * inner, width),
        product(width, inner),
    )
