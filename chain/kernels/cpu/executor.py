"""The executor of CPUs: a decoder or a draft head as one native call a pass.

#   R = rows (tokens of one pass), D = hidden size, W = width of the states, V = tokens to draft
#   K = children of each row of a draft, L = its levels
"""

import ctypes
import weakref
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from polybasic.chain.formats.checkpoints.awq import QuantizedWeight
from polybasic.chain.formats.checkpoints.blocks import BlockWeight
from polybasic.chain.formats.checkpoints.decoder_config import DecoderConfig, HeadConfig
from polybasic.chain.formats.plan import MAX_TOP_K, Window
from polybasic.chain.kernels.backend import Backend
from polybasic.chain.kernels.cpu import matrices
from polybasic.chain.kernels.cpu.library import ELEMENTS, Kernels, Located, address, locate
from polybasic.chain.kernels.cpu.matrices import (
    LANES,
    MatrixStruct,
    NativeEmbedding,
    NativeLinear,
)
from polybasic.chain.kernels.cpu.structures import (
    DraftStruct,
    LayerStruct,
    ModelStruct,
    PassStruct,
    RowsStruct,
    SequenceStruct,
)
from polybasic.chain.kernels.drafts import Candidates
from polybasic.chain.kernels.executor import DraftRequest, Executor, Layers
from polybasic.chain.kernels.rows import Rows, split_rows
from polybasic.chain.kernels.shortlist import Shortlist, addresses
from polybasic.chain.kernels.torch.executor import TorchExecutor, features_of, logits_of
from polybasic.chain.kernels.torch.positions import NUM_CORRECTED
from polybasic.chain.kernels.weights import Embedding, LayerWeights, Linear, ModelWeights

MAX_ROWS = 256
"""Most rows of one native pass; longer prompts are read in blocks, with the same bits."""
_MAX_HEAD_DIM = 256
_ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}
_DECODER, _EAGLE2, _EAGLE3 = 0, 2, 3


class CpuBackend(Backend):
    """Native kernels; matrices lie in their layout, and the given tensors are not kept.

    Products with quantized weights round activations to eight bits, group by group.
    """

    name = "cpu"
    keeps_dense = False
    keeps_blocks = True
    rounds_checked = True

    def __init__(self, kernels: Kernels, dtype: torch.dtype) -> None:
        super().__init__(torch.device("cpu"), dtype)
        self.kernels = kernels

    def takes(self, config: DecoderConfig) -> bool:
        """Sizes are multiples of sixteen, heads at most 256 wide, and the activation is known.

        A head's layer neither adds to a normed feature nor is its output normed.
        """
        if isinstance(config, HeadConfig) and (config.norms_residual or config.norms_output):
            return False
        if not super().takes(config):
            return False
        sizes = config.hidden_size, config.intermediate_size, config.head_dim
        has_sizes = all(size % LANES == 0 for size in sizes) and config.head_dim <= _MAX_HEAD_DIM
        return has_sizes and config.activation in _ACTIVATIONS

    def dense(self, weight: Tensor, bias: Tensor | None = None) -> NativeLinear:
        return matrices.dense(self.kernels, weight, bias)

    def int4(self, weight: QuantizedWeight, bias: Tensor | None = None) -> NativeLinear:
        return matrices.int4(self.kernels, weight, bias)

    def blocks(self, weights: Sequence[BlockWeight], bias: Tensor | None = None) -> NativeLinear:
        return matrices.blocks(self.kernels, weights, bias)

    def embedding(self, weight: BlockWeight) -> NativeEmbedding:
        return NativeEmbedding(self.blocks([weight]), self.dtype)

    def executor(self, weights: ModelWeights) -> Executor:
        # a native pass does not stop for sums over processes; its products are called one by one
        if weights.all_reduce is not None:
            return TorchExecutor(weights)
        return CpuExecutor(self.kernels, weights)


class CpuExecutor(Executor):
    """Runs passes and drafts of one model, each in one call.

    A row's results have the same bits alone, in company, and with any number of threads.

    Not thread-safe: passes share buffers, which are allocated here.
    """

    name: ClassVar[str] = "cpu"
    is_batch_invariant = True

    def __init__(self, kernels: Kernels, weights: ModelWeights) -> None:
        super().__init__(weights)
        self.kernels = kernels
        config, tables = weights.config, weights.rotary.tables
        self._kept: list[object] = []  # memory that the structures point into
        self.num_positions = len(tables[0][0])
        layers = (LayerStruct * len(weights.layers))(*map(self._layer, weights.layers))
        self._kept.append(layers)
        scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        kind = _DECODER
        if weights.is_head:
            kind = _EAGLE3 if weights.fuses_features else _EAGLE2
        fc = weights.fc if kind == _EAGLE2 else None
        positions = weights.positions
        markov_in = None if positions is None else positions.markov_in
        markov_out = None if positions is None else positions.markov_out
        self._struct = ModelStruct(
            ELEMENTS[weights.dtype],
            len(weights.layers),
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            _ACTIVATIONS[config.activation],
            kind,
            0 if positions is None else NUM_CORRECTED,
            0 if markov_in is None else markov_in.shape[1],
            config.rms_norm_eps,
            scale,
            config.attention_softcap or 0.0,
            1.0 if weights.embedding_scale is None else weights.embedding_scale,
            weights.logit_softcap or 0.0,
            ctypes.addressof(layers),
            *_embedding(weights.embedding),
            self._norm(weights.final_norm),
            self._norm(weights.embedding_norm),
            self._norm(weights.feature_norm),
            None if markov_in is None else address(markov_in, self.dtype),
            None if markov_out is None else address(markov_out, self.dtype),
            MatrixStruct() if fc is None else _struct(fc),
            _struct(weights.lm_head),
            *map(_struct, weights.adapter or ()),
        )
        self._model = ctypes.addressof(self._struct)
        library = kernels.library
        self._workspace = library.polybasic_new_workspace(self._model, self.num_positions)
        weakref.finalize(self, library.polybasic_delete_workspace, self._workspace)

    def over(self, weights: ModelWeights) -> "CpuExecutor":
        return CpuExecutor(self.kernels, weights)

    def forward(
        self,
        token_ids: Tensor,
        caches: Sequence[Layers],
        rows: Sequence[Rows],
        features: Tensor | None = None,
        feature_layers: tuple[int, ...] = (),
    ) -> Tensor:
        width = self.states_width(feature_layers)
        states = torch.empty(token_ids.shape[0], width, dtype=self.dtype)
        for parts in split_rows(rows, MAX_ROWS):
            tokens = slice(parts[0][1].start, parts[-1][1].stop)
            self._pass(
                token_ids[tokens],
                [_Sequence(caches[place], self.dtype, part) for place, _, part in parts],
                None if features is None else features[tokens],
                feature_layers,
                states[tokens],
            )
        return states

    def logits(self, states: Tensor) -> Tensor:
        return logits_of(self.weights, states)

    def shortlist(self) -> Shortlist | None:
        weights, size = self.weights, self.config.vocab_size
        if not (weights.is_checked or weights.is_head) or weights.draft_token_ids is not None:
            return None
        # a soft cap would make numbers of minus infinity
        if weights.logit_softcap is not None or not Shortlist.pays(size):
            return None
        return Shortlist(size)

    @property
    def bytes_left_out(self) -> int:
        shortlist, lm_head = self.shortlist(), self.weights.lm_head
        if shortlist is None:
            return 0
        assert isinstance(lm_head, NativeLinear), "in this layout"
        return round((1 - shortlist.share) * lm_head.num_bytes)

    def listed_logits(
        self, states: Tensor, shortlists: Sequence[Shortlist | None], num_rows: Sequence[int]
    ) -> Tensor:
        lm_head = self.weights.lm_head
        assert isinstance(lm_head, NativeLinear), "in this layout"
        states = states[:, : self.config.hidden_size]
        return lm_head(states, addresses(shortlists, num_rows))

    def features(self, inputs: Tensor) -> Tensor:
        return features_of(self.weights, inputs)

    def drafts(self, requests: Sequence[DraftRequest]) -> list[Candidates]:
        found: list[Candidates] = []
        for part in _split_requests(requests, MAX_ROWS):
            drafts = [_Draft(self, request) for request in part]
            structs = (DraftStruct * len(drafts))(*(draft.struct for draft in drafts))
            self.kernels.library.polybasic_drafts(
                self._model,
                ctypes.addressof(structs),
                len(drafts),
                self._workspace,
                torch.get_num_threads(),
            )
            found += [draft.candidates for draft in drafts]
        return found

    def noise(self, key: Tensor, positions: Tensor) -> Tensor:
        return self.kernels.noise(key, positions, self.config.vocab_size)

    def _pass(
        self,
        token_ids: Tensor,
        sequences: "Sequence[_Sequence]",
        features: Tensor | None,
        feature_layers: tuple[int, ...],
        states: Tensor,
    ) -> None:
        [num_rows] = token_ids.shape
        assert num_rows <= MAX_ROWS, f"a tree of {num_rows} rows"
        token_ids = token_ids.contiguous()
        if features is not None:
            features = features.contiguous()
        layers = np.array(feature_layers, np.int32)
        structs = (SequenceStruct * len(sequences))(*(sequence.struct for sequence in sequences))
        struct = PassStruct(
            address(token_ids, torch.int64),
            ctypes.addressof(structs),
            len(sequences),
            num_rows,
            None if features is None else address(features, self.dtype),
            layers.ctypes.data,
            len(layers),
            address(states, self.dtype),
        )
        self.kernels.library.polybasic_pass(
            self._model, ctypes.addressof(struct), self._workspace, torch.get_num_threads()
        )

    def _layer(self, layer: LayerWeights) -> LayerStruct:
        cosines, sines = self.weights.rotary.tables[layer.kind]
        self._kept += [layer, cosines, sines]
        return LayerStruct(
            *map(_struct, (layer.qkv, layer.out, layer.gate_up, layer.down)),
            self._norm(layer.input_norm),
            self._norm(layer.mlp_norm),
            self._norm(layer.query_norm),
            self._norm(layer.key_norm),
            self._norm(layer.attention_post_norm),
            self._norm(layer.mlp_post_norm),
            address(cosines, self.dtype),
            address(sines, self.dtype),
            self.config.kinds[layer.kind].window or 0,
        )

    def _norm(self, weight: Tensor | None) -> int | None:
        if weight is None:
            return None
        self._kept.append(wide := weight.float().contiguous())
        return address(wide, torch.float32)


def _embedding(embedding: Embedding) -> tuple[int | None, MatrixStruct]:
    """Where its rows lie, or the codes that it is made of."""
    if isinstance(embedding, Tensor):
        return address(embedding, embedding.dtype), MatrixStruct()
    assert isinstance(embedding, NativeEmbedding), "an embedding in the layout of another executor"
    return None, embedding.linear.struct


def _struct(linear: Linear) -> MatrixStruct:
    assert isinstance(linear, NativeLinear), "weights in the layout of another executor"
    return linear.struct


def _located(cache: Layers, dtype: torch.dtype) -> tuple[Located, int]:
    """Where a cache lies, and its rows."""
    located = locate(cache)
    assert located.dtype == dtype, f"a cache in {located.dtype} of a model in {dtype}"
    return located, located.shape[1]


class _Sequence:
    """One sequence's rows of a pass, and the memory that their structure points into."""

    def __init__(self, cache: Layers, dtype: torch.dtype, rows: Rows) -> None:
        located, capacity = _located(cache, dtype)
        assert rows.end <= capacity, f"{rows.end} of {capacity} rows"
        ends = paths = None
        if rows.paths is not None:
            ends = np.array(list(accumulate(map(len, rows.paths))), np.int32)
            paths = np.array(list(chain.from_iterable(rows.paths)), np.int32)
        self._kept = located, ends, paths
        self.struct = SequenceStruct(
            RowsStruct(
                rows.num_rows,
                rows.start,
                rows.start,
                None if ends is None else ends.ctypes.data,
                None if paths is None else paths.ctypes.data,
            ),
            located.address,
            capacity,
            *_window(rows.window),
        )


class _Draft:
    """One sequence's draft, and the memory that its structure points into."""

    def __init__(self, model: CpuExecutor, request: DraftRequest) -> None:
        depth, top_k, start = request.depth, request.top_k, request.start
        assert isinstance(start, int), "rounds on a device"
        assert top_k <= MAX_TOP_K
        assert start + depth <= model.num_positions
        assert len(request.state) == (1 if model.max_levels is None else depth)
        num = top_k + (depth - 1) * top_k**2
        tokens = torch.empty(num, dtype=torch.int64)
        scores = torch.empty(num)
        beams = torch.empty(depth - 1, top_k, dtype=torch.int64)
        self._num_levels = np.array([depth], np.int32)
        self._candidates = Candidates(top_k, tokens, scores, beams)
        state = request.state.contiguous()
        located, capacity = _located(request.cache, model.dtype)
        token_ids = model.weights.draft_token_ids
        scale, added = 1.0, None
        if request.perturbation is not None:
            scale, added = float(request.perturbation.scale), request.perturbation.added
            assert len(added) >= depth
            if token_ids is not None:
                added = added[:, token_ids]
            added = added.contiguous()
        self._kept = state, located, added
        self.struct = DraftStruct(
            depth,
            top_k,
            start,
            capacity,
            *_window(request.window),
            scale,
            request.least_score,
            None if added is None else address(added, torch.float32),
            located.address,
            address(state, model.dtype),
            None if token_ids is None else address(token_ids, torch.int64),
            None if request.shortlist is None else request.shortlist.address,
            tokens.data_ptr(),
            scores.data_ptr(),
            beams.data_ptr(),
            self._num_levels.ctypes.data,
        )

    @property
    def candidates(self) -> Candidates:
        """Of the levels that were drafted."""
        return self._candidates.first_levels(int(self._num_levels[0]))


def _split_requests(
    requests: Sequence[DraftRequest], max_rows: int
) -> Iterator[Sequence[DraftRequest]]:
    """Requests whose levels have at most `max_rows` rows, in order."""
    first = num_rows = 0
    for place, request in enumerate(requests):
        most = max(request.top_k, len(request.state))
        if num_rows + most > max_rows:
            yield requests[first:place]
            first, num_rows = place, 0
        num_rows += most
    if requests:
        yield requests[first:]


def _window(window: Window | None) -> tuple[int, int]:
    return (0, 0) if window is None else (window.tokens, window.sinks)
