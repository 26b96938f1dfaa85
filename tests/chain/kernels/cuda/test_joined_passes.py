"""Passes over a few rows of several sequences, in one launch of attention, are those of each."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from polybasic.chain.formats.checkpoints.awq import round_to_nearest
from polybasic.chain.formats.checkpoints.decoder_config import DecoderConfig, HeadConfig, LayerKind
from polybasic.chain.formats.plan import Window
from polybasic.chain.kernels.cuda import joined_passes
from polybasic.chain.kernels.cuda.executor import CudaExecutor
from polybasic.chain.kernels.cuda.graphs import Graphs
from polybasic.chain.kernels.cuda.joined_passes import ROWS, Size
from polybasic.chain.kernels.executor import DraftRequest, Perturbation
from polybasic.chain.kernels.rotary import RotaryTable
from polybasic.chain.kernels.rows import Rows, consecutive_rows, tree_rows
from polybasic.chain.kernels.torch.executor import TorchExecutor
from polybasic.chain.kernels.torch.operations import DeviceLinear
from polybasic.chain.kernels.torch.packed_weight import PackedWeight
from polybasic.chain.kernels.weights import LayerWeights, ModelWeights
from polybasic.deploy.runtime.rounds.cache import KeyValueCache
from tests.deploy.recorded_graphs import RecordedGraphs

pytestmark = pytest.mark.gpu
HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
CAPACITY, VOCAB_SIZE, HEAD = 640, 96, 32
ROPE = {"rope_type": "default", "rope_theta": 1e4}
TREE = (-1, 0, 0, 1, 2, 2, 4)
PASSES: dict[str, Sequence[Rows]] = {
    "one row": [consecutive_rows(5, 1)],
    "a short prompt": [consecutive_rows(0, 20)],
    "a row each": [consecutive_rows(start, 1) for start in (3, 500, 0)],
    "a tree, a prompt and a row": [
        tree_rows(17, TREE), consecutive_rows(0, 11), consecutive_rows(9, 1),
    ],
    "blocks": [consecutive_rows(30 * number, 9) for number in range(5)],
    "many trees": [tree_rows(9 * number, (*TREE, *range(20))) for number in range(4)],
    "windows": [
        tree_rows(40, TREE, Window(sinks=2, tokens=12)),
        consecutive_rows(50, 3, Window(sinks=2, tokens=12)),
    ],
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A random decoder: K key/value heads, G queries for each."""

    K: int = 2
    G: int = 2
    window: int | None = None
    is_packed: bool = False
    is_head: bool = False
    dtype: torch.dtype = torch.bfloat16 if HAS_GPU else torch.float32

    def made(self) -> CudaExecutor:
        generator = torch.Generator().manual_seed(1)
        heads, inner = self.K * self.G * HEAD, 256

        def linear(outs: int, ins: int) -> DeviceLinear:
            weight = torch.randn(outs, ins, generator=generator) / ins**0.5
            if self.is_packed:
                return DeviceLinear(PackedWeight.pack(round_to_nearest(weight), DEVICE))
            return DeviceLinear(weight.to(DEVICE, self.dtype))

        def norm() -> torch.Tensor:
            return (1 + torch.randn(heads, generator=generator) / 8).to(DEVICE, self.dtype)

        config = DecoderConfig(
            vocab_size=VOCAB_SIZE, hidden_size=heads, intermediate_size=inner, num_layers=2,
            num_heads=self.K * self.G, num_kv_heads=self.K, head_dim=HEAD, rms_norm_eps=1e-5,
            context_tokens=CAPACITY, tie_word_embeddings=False,
            rope=ROPE, layer_kinds=(LayerKind(ROPE, self.window), LayerKind(ROPE, None)),
        )  # fmt: skip
        layers = [
            LayerWeights(
                kind,
                linear(heads + 2 * self.K * HEAD, heads),
                linear(heads, heads),
                linear(2 * inner, heads),
                linear(heads, inner),
                norm(),
                norm(),
            )
            for kind in map(config.kind_of, range(2))
        ]
        embedding = torch.randn(VOCAB_SIZE, heads, generator=generator).to(DEVICE, self.dtype)
        if self.is_head:
            sizes = {name: getattr(config, name) for name in DecoderConfig.__dataclass_fields__}
            config = HeadConfig(**(sizes | {"num_layers": 1}), kind="eagle2")
            layers = [replace(layers[0], input_norm=None)]
        rotary = RotaryTable(config, CAPACITY, self.dtype, DEVICE)
        head = linear(VOCAB_SIZE, heads)
        weights = ModelWeights(
            config,
            embedding,
            tuple(layers),
            rotary,
            head,
            final_norm=None if self.is_head else norm(),
            fc=linear(heads, 2 * heads) if self.is_head else None,
        )
        return CudaExecutor(weights, runs_on_device=True)


MODELS = {
    "grouped": Model(),
    "one query a head, a window": Model(K=4, G=1, window=15),
    "packed": Model(is_packed=True, dtype=torch.float16),
}


# together every pass and every model, where kernels are interpreted
JOINED = list(product(PASSES, MODELS)) if HAS_GPU else [
    ("one row", "packed"),
    ("a short prompt", "one query a head, a window"),
    ("a row each", "grouped"),
    ("a tree, a prompt and a row", "packed"),
    ("blocks", "grouped"),
    ("many trees", "grouped"),
    ("windows", "one query a head, a window"),
]  # fmt: skip

DRAFTERS = {
    "head": Model(is_head=True),
    "head, a window": Model(K=4, G=1, is_head=True, window=6),
    "decoder": Model(),
}


def decoder(name: str) -> CudaExecutor:
    return MODELS[name].made()


def runner() -> Graphs:
    return Graphs(DEVICE) if HAS_GPU else RecordedGraphs()


def filled(executor: TorchExecutor, rows: Sequence[Rows]) -> list[KeyValueCache]:
    generator = torch.Generator().manual_seed(3)
    caches = [KeyValueCache.of(executor, CAPACITY) for _ in rows]
    for cache in caches:
        numbers = torch.randn(cache.block.shape, generator=generator)
        cache.block.copy_(numbers)
    return caches


@pytest.mark.parametrize(("name", "model"), JOINED)
def test_joined_rows_are_those_of_each(name: str, model: str) -> None:
    executor, rows = decoder(model), PASSES[name]
    graphs = runner()
    executor.capture_by(graphs)
    reference = TorchExecutor(executor.weights)
    layers = (1,) if name == "blocks" else ()
    for turn in range(2):
        tokens = torch.arange(sum(part.num_rows for part in rows), device=DEVICE)
        tokens = (tokens + turn) % VOCAB_SIZE
        found, expected = filled(executor, rows), filled(executor, rows)
        # of other sequences, and in another order
        order = np.roll(np.arange(len(rows)), turn)
        given = [rows[place] for place in order]
        with torch.inference_mode():
            states, wanted = (
                runs.forward(tokens, [cache.layers for cache in caches], given, None, layers)
                for runs, caches in ((executor, found), (reference, expected))
            )
        tolerance = 2e-5 if states.dtype == torch.float32 else 3e-2
        assert (states - wanted).abs().max() < tolerance * wanted.abs().max()
        for cache, other in zip(found, expected, strict=True):
            assert (cache.block - other.block).abs().max() < tolerance * other.block.abs().max()
    assert graphs.counts.captures == 1
    assert graphs.counts.replays == 1


def test_one_graph_serves_all_passes_of_a_size() -> None:
    sizes = {Size.of([consecutive_rows(start, 3)] * 4, (), False) for start in (0, 7, 300)}
    assert len(sizes) == 1
    largest = Size.of([consecutive_rows(0, 1)] * ROWS[-1], (), False)
    assert largest is not None
    assert largest.rows == ROWS[-1]


@pytest.mark.parametrize(
    "rows",
    [
        [consecutive_rows(0, 65)],
        [consecutive_rows(0, 64)] * 5,
        [consecutive_rows(0, 2), consecutive_rows(0, 2, Window(sinks=1, tokens=8))],
    ],
    ids=["a long prompt", "too many rows", "two windows"],
)
def test_other_passes_have_no_size(rows: Sequence[Rows]) -> None:
    assert Size.of(rows, (), False) is None


@pytest.mark.parametrize("num_rows", [1, 24, 64, 65] if HAS_GPU else [1, 64, 65])
def test_few_rows_are_multiplied_by_packed_weights(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass that makes a dense matrix of a packed one fails, unless it is a long prompt's."""
    from polybasic.chain.kernels.cuda.products import launch

    executor = decoder("packed")
    rows = [consecutive_rows(4, num_rows)]

    def run() -> None:
        caches = filled(executor, rows)
        tokens = torch.zeros(num_rows, dtype=torch.int64, device=DEVICE)
        with torch.inference_mode():
            executor.logits(executor.forward(tokens, [caches[0].layers], rows))

    if HAS_GPU:
        run()  # kernels are chosen, which are compared with dense products
    made = list[tuple[int, int]]()

    def dequantized(weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
        made.append(weight.shape)
        return weight.dequantized(dtype)

    def refuse(self: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
        raise AssertionError(f"dequantized by many launches: {self.shape}")

    monkeypatch.setattr(launch, "dequantized", dequantized)
    if num_rows <= 64:
        monkeypatch.setattr(PackedWeight, "dequantized", refuse)
    run()
    executor.capture_by(runner())
    run()
    num_packed = 4 * len(executor.weights.layers) + 1
    assert len(made) == (0 if num_rows <= 64 else 2 * num_packed)


@pytest.mark.skipif(HAS_GPU, reason="what 16 bits round decides between near candidates")
@pytest.mark.parametrize(
    ("name", "has_noise"), [("head", True), ("head, a window", False), ("decoder", True)]
)
def test_joined_drafts_are_those_of_each(name: str, has_noise: bool) -> None:
    executor = DRAFTERS[name].made()
    graphs, reference = runner(), TorchExecutor(executor.weights)
    executor.capture_by(graphs)
    generator = torch.Generator().manual_seed(5)
    for starts in ((40, 3, 17, 5), (300, 3, 0, 20)):
        states = torch.randn(len(starts), 1, executor.config.hidden_size, generator=generator)
        noise = torch.randn(len(starts), 5, VOCAB_SIZE, generator=generator).to(DEVICE)
        rows = [consecutive_rows(start, 1) for start in starts]
        found, expected = filled(executor, rows), filled(executor, rows)
        drafted = []
        for runs, caches in ((executor, found), (reference, expected)):
            # three of one depth, which are four in a graph, and one of another
            requests = [
                DraftRequest(
                    state.to(DEVICE, executor.dtype), cache.layers, start, 3 - (start == 3), 3,
                    perturbation=Perturbation(1.5 + place, added) if has_noise else None,
                )
                for place, (state, cache, start, added) in enumerate(
                    zip(states, caches, starts, noise, strict=True)
                )
            ]  # fmt: skip
            with torch.inference_mode():
                drafted.append(runs.drafts(requests))
        for draft, other in zip(*drafted, strict=True):
            assert torch.equal(draft.tokens, other.tokens)
            assert torch.equal(draft.beams, other.beams)
            assert (draft.scores - other.scores).abs().max() < 2e-4
    assert graphs.counts.captures == 2
    assert graphs.counts.replays == 2


@pytest.mark.parametrize("is_divided", [True, False])
def test_what_is_divided_or_has_too_many_heads_is_not_captured(
    is_divided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = decoder("grouped").weights
    if is_divided:
        weights = replace(weights, all_reduce=lambda tensor: tensor)
    else:
        monkeypatch.setattr(joined_passes, "MAX_TICKETS", 1)
    executor = CudaExecutor(weights, runs_on_device=True)
    graphs = runner()
    executor.capture_by(graphs)
    caches = filled(executor, [consecutive_rows(0, 2)])
    with torch.inference_mode():
        executor.forward(
            torch.zeros(2, dtype=torch.int64, device=DEVICE), [caches[0].layers],
            [consecutive_rows(0, 2)],
        )  # fmt: skip
    assert graphs.counts.captures == 0
