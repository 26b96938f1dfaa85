"""A decoder or a draft head as one native call a pass.

#   R = rows (tokens of one pass), D = hidden size, W = width of the states, V = tokens to draft
#   K = children of each row of a draft, L = its levels
"""

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polybasic.chain.formats.config import DecoderConfig
from polybasic.chain.formats.plan import Window
from polybasic.chain.kernels.cpu.library import ELEMENTS, Kernels
from polybasic.chain.kernels.cpu.matrices import LANES, MatrixStruct, NativeLinear
from polybasic.chain.kernels.torch.attend import Attend, attend_causally
from polybasic.chain.kernels.torch.rotary import RotaryTable

MAX_ROWS = 256
"""Most rows of one native pass; longer prompts are read in blocks, with the same bits."""
_MAX_HEAD_DIM = 256
_ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}
_HEAD_KINDS = {"decoder": 0, "eagle2": 2, "eagle3": 3}
_MAX_BEAM = 64


class _RowsStruct(ctypes.Structure):
    _fields_ = (
        ("num_rows", ctypes.c_int32),
        ("start", ctypes.c_int32),
        ("prefix", ctypes.c_int32),
        ("path_ends", ctypes.c_void_p),
        ("paths", ctypes.c_void_p),
    )


class _LayerStruct(ctypes.Structure):
    _fields_ = (
        *((name, MatrixStruct) for name in ("qkv", "out", "gate_up", "down")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "input_norm",
                "mlp_norm",
                "query_norm",
                "key_norm",
                "attention_post_norm",
                "mlp_post_norm",
                "cosines",
                "sines",
            )
        ),
        ("window", ctypes.c_int32),
    )


class _ModelStruct(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_int32)
            for name in (
                "element",
                "num_layers",
                "hidden_size",
                "intermediate_size",
                "num_heads",
                "num_kv_heads",
                "head_dim",
                "activation",
                "head_kind",
            )
        ),
        *(
            (name, ctypes.c_float)
            for name in (
                "norm_eps",
                "attention_scale",
                "attention_softcap",
                "embedding_scale",
                "logit_softcap",
            )
        ),
        *(
            (name, ctypes.c_void_p)
            for name in ("layers", "embedding", "final_norm", "embedding_norm", "feature_norm")
        ),
        ("fc", MatrixStruct),
        ("lm_head", MatrixStruct),
    )


class _PassStruct(ctypes.Structure):
    _fields_ = (
        ("rows", _RowsStruct),
        ("tokens", ctypes.c_void_p),
        ("caches", ctypes.c_void_p),
        ("capacity", ctypes.c_int32),
        ("window_tokens", ctypes.c_int32),
        ("window_sinks", ctypes.c_int32),
        ("features", ctypes.c_void_p),
        ("feature_layers", ctypes.c_void_p),
        ("num_feature_layers", ctypes.c_int32),
        ("states", ctypes.c_void_p),
    )


class _DraftStruct(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_int32)
            for name in ("depth", "top_k", "start", "capacity", "window_tokens", "window_sinks")
        ),
        *(
            (name, ctypes.c_void_p)
            for name in ("caches", "state", "token_ids", "tokens", "scores", "beams")
        ),
    )


@dataclass(frozen=True)
class NativeLayer:
    """Parts of one layer; see `polybasic.chain.model.decoder.DecoderLayer`."""

    qkv: NativeLinear
    out: NativeLinear
    gate_up: NativeLinear
    down: NativeLinear
    input_norm: Tensor | None
    mlp_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    attention_post_norm: Tensor | None
    mlp_post_norm: Tensor | None
    kind: int


@dataclass(frozen=True)
class NativeParts:
    """What a native model is made of.

    Attributes:
        kind: "decoder", "eagle2" or "eagle3".
        final_norm: [D]; None for an EAGLE-2 head.
        embedding_norm: [D] of an EAGLE-3 head; so is `feature_norm`.
        fc: 2D -> D of an EAGLE-2 head.
        lm_head: before soft-capping.
        softcap: of its logits, None for none.
        embedding_scale: as the compute dtype rounds it.
    """

    kind: str
    config: DecoderConfig
    embedding: Tensor
    layers: Sequence[NativeLayer]
    rotary: RotaryTable
    lm_head: NativeLinear
    softcap: float | None = None
    embedding_scale: float | None = None
    final_norm: Tensor | None = None
    embedding_norm: Tensor | None = None
    feature_norm: Tensor | None = None
    fc: NativeLinear | None = None


def supports(config: DecoderConfig) -> bool:
    """Whether the kernels support these sizes: multiples of sixteen."""
    sizes = config.hidden_size, config.intermediate_size, config.head_dim
    return all(size % LANES == 0 for size in sizes) and config.head_dim <= _MAX_HEAD_DIM


class NativeModel:
    """Runs passes and drafts of one model, each in one call.

    Not thread-safe: passes share buffers, which are allocated here.
    """

    def __init__(self, kernels: Kernels, parts: NativeParts) -> None:
        self.kernels, self.parts = kernels, parts
        config, tables = parts.config, parts.rotary.tables
        self._kept: list[object] = []  # memory that the structures point into
        self.num_positions = len(tables[0][0])
        layers = (_LayerStruct * len(parts.layers))(*(self._layer(one) for one in parts.layers))
        self._kept.append(layers)
        scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        self._struct = _ModelStruct(
            ELEMENTS[parts.embedding.dtype],
            len(parts.layers),
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            _ACTIVATIONS[config.activation],
            _HEAD_KINDS[parts.kind],
            config.rms_norm_eps,
            scale,
            config.attention_softcap or 0.0,
            1.0 if parts.embedding_scale is None else parts.embedding_scale,
            parts.softcap or 0.0,
            ctypes.addressof(layers),
            parts.embedding.data_ptr(),
            self._norm(parts.final_norm),
            self._norm(parts.embedding_norm),
            self._norm(parts.feature_norm),
            MatrixStruct() if parts.fc is None else parts.fc.struct,
            parts.lm_head.struct,
        )
        self._model = ctypes.addressof(self._struct)
        library = kernels.library
        self._workspace = library.polybasic_new_workspace(self._model, self.num_positions)
        weakref.finalize(self, library.polybasic_delete_workspace, self._workspace)

    def forward(
        self,
        token_ids: Tensor,
        cache: Sequence[Tensor],
        attend: Attend,
        features: Tensor | None = None,
        feature_layers: tuple[int, ...] = (),
    ) -> Tensor:
        """States [R, W] as `Decoder.forward` gives them; a head's [R, D] before its final norm.

        Args:
            token_ids: int64 [R].
            cache: one [2 * key/value heads, capacity, head size] a layer.
            features: [R, D], of a head.
            feature_layers: layers whose inputs are a part of the states.
        """
        rows, width = len(token_ids), (1 + len(feature_layers)) * self.parts.config.hidden_size
        states = torch.empty(rows, width, dtype=self.parts.embedding.dtype)
        if rows <= MAX_ROWS:
            self._pass(token_ids, cache, attend, features, feature_layers, states)
            return states
        assert attend.paths is None, f"a tree of {rows} rows"
        for first in range(0, rows, MAX_ROWS):
            part = slice(first, min(first + MAX_ROWS, rows))
            start = attend.start + first
            self._pass(
                token_ids[part],
                cache,
                attend_causally(start, part.stop - part.start, attend.window),
                None if features is None else features[part],
                feature_layers,
                states[part],
            )
        return states

    def draft(
        self,
        state: Tensor,
        cache: Sequence[Tensor],
        start: int,
        depth: int,
        top_k: int,
        token_ids: Tensor | None,
        window: Window | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens int64 [N], scores float32 [N] and beams int64 [L - 1, K] of an expansion.

        Args:
            state: [1, D], which the first level follows.
            start: committed rows of the cache.
            depth: L.
            top_k: K.
            token_ids: int64 [V], the token of each output; None if outputs are token ids.
            window: the part of a long context that rows see; None for all of it.
        """
        assert top_k <= _MAX_BEAM
        assert start + depth <= self.num_positions
        num = top_k + (depth - 1) * top_k**2
        tokens = torch.empty(num, dtype=torch.int64)
        scores = torch.empty(num)
        beams = torch.empty(depth - 1, top_k, dtype=torch.int64)
        state = state.contiguous()
        caches = _Caches(cache)
        struct = _DraftStruct(
            depth,
            top_k,
            start,
            caches.capacity,
            *_window(window),
            caches.address,
            state.data_ptr(),
            None if token_ids is None else token_ids.data_ptr(),
            tokens.data_ptr(),
            scores.data_ptr(),
            beams.data_ptr(),
        )
        self.kernels.library.polybasic_draft(
            self._model, ctypes.addressof(struct), self._workspace, torch.get_num_threads()
        )
        return tokens, scores, beams

    def _pass(
        self,
        token_ids: Tensor,
        cache: Sequence[Tensor],
        attend: Attend,
        features: Tensor | None,
        feature_layers: tuple[int, ...],
        states: Tensor,
    ) -> None:
        caches = _Caches(cache)
        token_ids = token_ids.contiguous()
        if features is not None:
            features = features.contiguous()
        ends, paths = _paths(attend)
        layers = np.array(feature_layers, np.int32)
        assert attend.start + len(token_ids) <= caches.capacity
        struct = _PassStruct(
            _RowsStruct(
                attend.num_rows,
                attend.start,
                attend.prefix,
                None if ends is None else ends.ctypes.data,
                None if paths is None else paths.ctypes.data,
            ),
            token_ids.data_ptr(),
            caches.address,
            caches.capacity,
            *_window(attend.window),
            None if features is None else features.data_ptr(),
            layers.ctypes.data,
            len(layers),
            states.data_ptr(),
        )
        self.kernels.library.polybasic_pass(
            self._model, ctypes.addressof(struct), self._workspace, torch.get_num_threads()
        )

    def _layer(self, layer: NativeLayer) -> _LayerStruct:
        cosines, sines = self.parts.rotary.tables[layer.kind]
        self._kept += [layer, cosines, sines]
        return _LayerStruct(
            layer.qkv.struct,
            layer.out.struct,
            layer.gate_up.struct,
            layer.down.struct,
            self._norm(layer.input_norm),
            self._norm(layer.mlp_norm),
            self._norm(layer.query_norm),
            self._norm(layer.key_norm),
            self._norm(layer.attention_post_norm),
            self._norm(layer.mlp_post_norm),
            cosines.data_ptr(),
            sines.data_ptr(),
            self.parts.config.kinds[layer.kind].window or 0,
        )

    def _norm(self, weight: Tensor | None) -> int | None:
        if weight is None:
            return None
        self._kept.append(wide := weight.float().contiguous())
        return wide.data_ptr()


class _Caches:
    """Addresses of a cache's layers."""

    def __init__(self, cache: Sequence[Tensor]) -> None:
        assert all(layer.is_contiguous() for layer in cache)
        self._pointers = (ctypes.c_void_p * len(cache))(*(layer.data_ptr() for layer in cache))
        self.address, self.capacity = ctypes.addressof(self._pointers), cache[0].shape[1]


def _paths(attend: Attend) -> tuple[np.ndarray | None, np.ndarray | None]:
    if attend.paths is None:
        return None, None
    ends = np.cumsum([len(path) for path in attend.paths], dtype=np.int32)
    return ends, np.array([row for path in attend.paths for row in path], np.int32)


def _window(window: Window | None) -> tuple[int, int]:
    return (0, 0) if window is None else (window.tokens, window.sinks)
