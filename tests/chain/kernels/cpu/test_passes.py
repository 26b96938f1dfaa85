"""Native kernels: products, passes and drafts against plain arithmetic, and the same to the bit."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from polybasic.chain.formats.checkpoints.awq import dequantize
from polybasic.chain.formats.checkpoints.block_types import BLOCK_TYPES, GROUP, NESTED
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.kernels.cpu.executor import MAX_ROWS
from polybasic.chain.kernels.cpu.matrices import NativeLinear
from polybasic.chain.kernels.executor import Executor
from polybasic.chain.kernels.rows import consecutive_rows, tree_rows
from polybasic.chain.kernels.selection import backend_for
from polybasic.chain.kernels.weights import embed
from polybasic.chain.model.loading import load_decoder
from tests.chain.native_models import (
    CONFIG,
    CPU,
    cache_of,
    decoder,
    eager,
    head_of,
    random_blocks,
    random_quantized,
    threads,
)
from tests.conftest import ChainParts

pytestmark = pytest.mark.processor
DTYPES = [torch.float32, torch.bfloat16]
KINDS = [
    (torch.float32, "dense"),
    (torch.bfloat16, "dense"),
    (torch.bfloat16, "int4"),
    *((torch.float32, name) for name in BLOCK_TYPES),
]


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("out_size", "in_size"), [(16, 16), (7, 48), (100, 128), (200, 272)])
def test_a_dense_product_is_the_product(dtype: torch.dtype, out_size: int, in_size: int) -> None:
    generator = torch.Generator().manual_seed(in_size)
    weight = torch.randn(out_size, in_size, generator=generator).to(dtype)
    bias = torch.randn(out_size, generator=generator).to(dtype)
    product = backend_for(CPU, dtype).dense(weight, bias)
    assert isinstance(product, NativeLinear)
    for rows in (1, 3, 24, 25, 60):
        x = torch.randn(rows, in_size, generator=generator).to(dtype)
        expected = x.double() @ weight.double().T + bias.double()
        found = product(x)
        assert found.dtype == dtype
        assert relative(found, expected) < (1e-6 if dtype == torch.float32 else 3e-3)
        assert relative(found, x.double() @ weight.double().T) > 1e-2  # the bias counts


def rounded_to_bytes(x: Tensor, group_size: int) -> Tensor:
    """What a 4-bit product reads of its rows: 255 steps for each group of inputs."""
    groups = x.float().unflatten(1, (-1, group_size))
    step = groups.abs().amax(-1, keepdim=True) / 127
    return ((groups / step).round() * step).flatten(1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("out_size", "in_size", "group_size"), [(16, 128, 128), (40, 192, 64), (104, 288, 32)]
)
def test_an_int4_product_rounds_its_rows_to_bytes_and_nothing_else(
    dtype: torch.dtype, out_size: int, in_size: int, group_size: int
) -> None:
    generator = torch.Generator().manual_seed(out_size)
    weight = random_quantized(generator, out_size, in_size, group_size)
    bias = torch.randn(out_size, generator=generator).to(dtype)
    product, dense = backend_for(CPU, dtype).int4(weight, bias), dequantize(weight).double()
    for rows in (1, 4, 13, 24, 31):
        x = torch.randn(rows, in_size, generator=generator).to(dtype)
        expected = rounded_to_bytes(x, group_size).double() @ dense.T + bias.double()
        found = product(x)
        assert relative(found, expected) < (1e-5 if dtype == torch.float32 else 3e-3)
        unrounded = x.double() @ dense.T + bias.double()
        assert relative(found, unrounded) < 2e-2
        if dtype == torch.float32:
            assert relative(found, unrounded) > 1e-3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_a_product_with_blocks_rounds_its_rows_to_bytes_and_nothing_else(
    dtype: torch.dtype, kind: str
) -> None:
    size = BLOCK_TYPES[kind].size
    for out_size, in_size in ((7, size), (104, 3 * size), (256, 9 * size)):
        generator = torch.Generator().manual_seed(out_size)
        weight = random_blocks(generator, kind, out_size, in_size)
        bias = torch.randn(out_size, generator=generator).to(dtype)
        product = backend_for(CPU, dtype).blocks([weight], bias)
        dense = weight.dequantized().double()
        for rows in (1, 4, 13, 24, 31):
            x = torch.randn(rows, in_size, generator=generator).to(dtype)
            expected = rounded_to_bytes(x, GROUP).double() @ dense.T + bias.double()
            assert relative(product(x), expected) < (1e-6 if dtype == torch.float32 else 3e-3)
            assert relative(expected, x.double() @ dense.T + bias.double()) > 1e-3


def test_types_may_differ_from_some_outputs_of_a_product_to_others() -> None:
    """As those of queries, keys and values do."""
    generator = torch.Generator().manual_seed(2)
    kinds = {"Q4_K": 64, "Q6_K": 32, "Q8_0": 16, "Q5_0": 24}
    parts = [random_blocks(generator, kind, size, NESTED) for kind, size in kinds.items()]
    bias, x = torch.randn(136, generator=generator), torch.randn(31, NESTED, generator=generator)
    backend = backend_for(CPU, torch.float32)
    alone = torch.cat([backend.blocks([part])(x) for part in parts], dim=1)
    assert torch.equal(backend.blocks(parts, bias)(x), alone + bias)
    with threads(3):
        assert torch.equal(backend.blocks(parts)(x), alone)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_weights_in_blocks_take_the_bytes_of_their_file(kind: str) -> None:
    """But for integers of six bits, which lie in bytes."""
    weight = random_blocks(torch.Generator().manual_seed(1), kind, 64, 2 * NESTED)
    product = backend_for(CPU, torch.float32).blocks([weight])
    assert isinstance(product, NativeLinear)
    blocks = BLOCK_TYPES[kind]
    in_file = 64 * 2 * NESTED // blocks.size * blocks.num_bytes
    num_bytes = sum(tensor.nbytes for tensor in product.tensors)
    assert num_bytes <= 1.03 * in_file
    assert (num_bytes == in_file) == (blocks.factor_bytes != 12)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
@torch.inference_mode()
def test_an_embedding_in_blocks_is_read_like_a_dense_one(kind: str) -> None:
    weight = random_blocks(torch.Generator().manual_seed(4), kind, CONFIG.vocab_size, 256)
    ids, dense = random_ids(60), weight.dequantized()
    model = decoder(torch.float32)
    for dtype in DTYPES:
        in_blocks = backend_for(CPU, dtype).embedding(weight)
        assert torch.equal(embed(in_blocks, ids), dense[ids].to(dtype))
    found, expected = (
        model.over(replace(model.weights, embedding=embedding)).forward(
            ids, [cache_of(model).layers], [consecutive_rows(0, 60)]
        )
        for embedding in (backend_for(CPU, torch.float32).embedding(weight), dense)
    )
    assert torch.equal(found, expected)


def test_groups_of_zeros_and_large_values_stay_exact() -> None:
    weight = random_quantized(torch.Generator().manual_seed(3), 16, 256)
    x = torch.zeros(2, 256)
    x[1, 130] = 1e6
    found = backend_for(CPU, torch.float32).int4(weight)(x)
    assert torch.equal(found[0], torch.zeros(16))
    assert relative(found[1], 1e6 * dequantize(weight)[:, 130]) < 1e-6


@pytest.mark.parametrize(("dtype", "weights"), KINDS, ids=str)
def test_passes_are_batch_invariant(dtype: torch.dtype, weights: str) -> None:
    generator = torch.Generator().manual_seed(0)
    if weights == "int4":
        product = backend_for(CPU, dtype).int4(random_quantized(generator, 200, 256))
    elif weights != "dense":
        product = backend_for(CPU, dtype).blocks([random_blocks(generator, weights, 200, 256)])
    else:
        product = backend_for(CPU, dtype).dense(
            torch.randn(200, 256, generator=generator).to(dtype)
        )
    x = torch.randn(60, 256, generator=generator).to(dtype)
    alone = torch.cat([product(row[None]) for row in x])
    for rows in range(1, 61):
        assert torch.equal(product(x[:rows]), alone[:rows])
    for num in (1, 2, 3):
        with threads(num):
            assert torch.equal(product(x), alone)


def one_by_one(model: Executor, token_ids: Tensor) -> Tensor:
    cache, states = cache_of(model), []
    for position, token in enumerate(token_ids):
        rows = [consecutive_rows(position, 1)]
        states.append(model.forward(token[None], [cache.layers], rows))
    return torch.cat(states)


def random_ids(num: int) -> Tensor:
    return torch.randint(0, CONFIG.vocab_size, (num,), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize(("dtype", "weights"), KINDS, ids=str)
@torch.inference_mode()
def test_a_text_gives_the_same_bits_however_it_is_read(dtype: torch.dtype, weights: str) -> None:
    model, ids = decoder(dtype, weights), random_ids(MAX_ROWS + 30)
    expected = one_by_one(model, ids)
    for num in (1, 2, 3):
        cache = cache_of(model)
        with threads(num):
            whole = model.forward(ids, [cache.layers], [consecutive_rows(0, len(ids))])
        assert torch.equal(whole, expected)
    cache, first = cache_of(model), 0
    for size in (5, 24, 1, 60, 100, 96):
        part = model.forward(
            ids[first : first + size], [cache.layers], [consecutive_rows(first, size)]
        )
        assert torch.equal(part, expected[first : first + size])
        first += size
    changed = ids.clone()
    changed[3] = (changed[3] + 1) % CONFIG.vocab_size
    other = model.forward(changed, [cache_of(model).layers], [consecutive_rows(0, len(ids))])
    assert torch.equal(other[:3], expected[:3])
    assert not any(torch.equal(*rows) for rows in zip(other[3:], expected[3:], strict=True))


@pytest.mark.parametrize(("dtype", "weights"), KINDS, ids=str)
@torch.inference_mode()
def test_a_path_of_a_tree_gives_the_bits_of_its_text(dtype: torch.dtype, weights: str) -> None:
    model, prompt = decoder(dtype, weights), random_ids(37)
    parents = [-1, 0, 0, 1, 1, 2, 4, 6, 5, 7]
    tokens = torch.arange(20, 20 + len(parents))
    cache = cache_of(model)
    model.forward(prompt, [cache.layers], [consecutive_rows(0, 37)])
    states = model.forward(tokens, [cache.layers], [tree_rows(37, parents)])
    for row in range(len(parents)):
        path = [row]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        text = torch.cat([prompt, tokens[path]])
        assert torch.equal(one_by_one(model, text)[-1], states[row])
    # the accepted path, moved into place, is what a text of its own would have written
    cache.length = 37
    cache.keep([0, 1, 4, 6])
    following = model.forward(tokens[:1], [cache.layers], [consecutive_rows(41, 1)])
    text = torch.cat([prompt, tokens[[0, 1, 4, 6]], tokens[:1]])
    assert torch.equal(following[0], one_by_one(model, text)[-1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.inference_mode()
def test_a_native_pass_is_the_eager_one(dtype: torch.dtype) -> None:
    native, prompt, parents = decoder(dtype), random_ids(40), [-1, 0, 0, 2]
    with eager():
        plain = decoder(dtype)
    assert (native.name, plain.name) == ("cpu", "torch")
    found = []
    for model in (native, plain):
        cache = cache_of(model)
        states = model.forward(prompt, [cache.layers], [consecutive_rows(0, 40)])
        tree = model.forward(prompt[:4], [cache.layers], [tree_rows(40, parents)])
        found.append(torch.cat([states, tree]))
    assert relative(*found) < (5e-6 if dtype == torch.float32 else 2.5e-2)


@torch.inference_mode()
def test_a_native_head_is_the_eager_one() -> None:
    target = decoder(torch.float32)
    with eager():
        plain_target = decoder(torch.float32)
        plain = head_of(plain_target)
    head, ids = head_of(target), random_ids(30)
    assert (head.name, plain.name) == ("cpu", "torch")
    features = target.forward(ids, [cache_of(target).layers], [consecutive_rows(0, 30)])
    found = [
        model.forward(
            ids[1:], [cache_of(model, 1).layers], [consecutive_rows(0, 29)], features[:-1]
        )
        for model in (head, plain)
    ]
    assert relative(*found) < 5e-6


@torch.inference_mode()
def test_feature_layers_are_inputs_of_their_layers() -> None:
    model, ids = decoder(torch.float32), random_ids(20)
    with eager():
        plain = decoder(torch.float32)
    states = []
    for executor in (model, plain):
        cache, rows = cache_of(executor), [consecutive_rows(0, 20)]
        states.append(executor.forward(ids, [cache.layers], rows, feature_layers=(1, 0)))
    assert states[0].shape == (20, 3 * CONFIG.hidden_size)
    assert relative(*states) < 5e-6
    embedded = torch.nn.functional.embedding(ids, model.weights.embedding)
    assert torch.equal(states[0][:, 2 * CONFIG.hidden_size :], embedded)


def test_a_long_prompt_is_read_in_blocks_into_one_cache() -> None:
    model, ids = decoder(torch.float32), random_ids(2 * MAX_ROWS + 5)
    with eager():
        plain = decoder(torch.float32)
    caches = [cache_of(model), cache_of(plain)]
    with torch.inference_mode():
        found = [
            executor.forward(ids, [cache.layers], [consecutive_rows(0, len(ids))])
            for executor, cache in zip((model, plain), caches, strict=True)
        ]
    assert relative(*found) < 5e-6
    assert relative(caches[0].layers[1], caches[1].layers[1]) < 5e-6


@torch.inference_mode()
def test_threads_that_make_room_may_use_the_cores_that_they_could() -> None:
    def cores() -> set[frozenset[int]]:
        tasks = Path("/proc/self/task").iterdir()
        return {frozenset(os.sched_getaffinity(int(task.name))) for task in tasks}

    model, ids, before = decoder(torch.float32), random_ids(60), cores()
    with threads(len(os.sched_getaffinity(0)) + 1):  # so that two share a core
        cache = cache_of(model)
        for position in range(60):
            rows = [consecutive_rows(position, 1)]
            model.forward(ids[position : position + 1], [cache.layers], rows)
    assert cores() == before


def test_small_checkpoints_run_native(tiny_chain_parts: ChainParts) -> None:
    folder = tiny_chain_parts.target
    assert load_decoder(read_config(folder), torch.bfloat16, CPU, 64).name == "cpu"
    assert load_decoder(read_config(folder), torch.float16, CPU, 64).name == "torch"


def test_native_code_gets_no_numbers_of_another_type_or_order() -> None:
    model, ids, rows = decoder(torch.bfloat16), torch.tensor([5, 9]), consecutive_rows(0, 2)
    states = model.forward(ids, [cache_of(model).layers], [rows])
    wide = [layer.float() for layer in cache_of(model).layers]
    turned = [layer.transpose(0, 1) for layer in cache_of(model).layers]
    for call in (
        lambda: model.forward(ids.float(), [cache_of(model).layers], [rows]),
        lambda: model.forward(ids, [wide], [rows]),
        lambda: model.forward(ids, [turned], [rows]),
        lambda: model.forward(ids, [cache_of(decoder(torch.float32)).layers], [rows]),
        lambda: head_of(model).draft(states[-1].float(), cache_of(model, 1).layers, 1, 2, 2),
        lambda: model.noise(torch.zeros(3), ids),
        lambda: model.noise(torch.zeros(3, dtype=torch.int64), ids.int()),
        lambda: model.weights.lm_head(states[:, 1:]),
    ):
        with pytest.raises(AssertionError):
            call()
