"""The structures of the native kernels: source/passes/decoder.h, passes.h and draft.h."""

import ctypes

from polybasic.chain.kernels.cpu.matrices import MatrixStruct


class RowsStruct(ctypes.Structure):
    _fields_ = (
        ("num_rows", ctypes.c_int32),
        ("start", ctypes.c_int32),
        ("prefix", ctypes.c_int32),
        ("path_ends", ctypes.c_void_p),
        ("paths", ctypes.c_void_p),
    )


class LayerStruct(ctypes.Structure):
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


class ModelStruct(ctypes.Structure):
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
                "num_corrected",
                "markov_rank",
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
            for name in (
                "layers",
                "embedding",
            )
        ),
        ("embedding_codes", MatrixStruct),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "final_norm",
                "embedding_norm",
                "feature_norm",
                "markov_in",
                "markov_out",
            )
        ),
        ("fc", MatrixStruct),
        ("lm_head", MatrixStruct),
        ("adapter_down", MatrixStruct),
        ("adapter_up", MatrixStruct),
    )


class SequenceStruct(ctypes.Structure):
    _fields_ = (
        ("rows", RowsStruct),
        ("caches", ctypes.c_void_p),
        ("capacity", ctypes.c_int32),
        ("window_tokens", ctypes.c_int32),
        ("window_sinks", ctypes.c_int32),
    )


class PassStruct(ctypes.Structure):
    _fields_ = (
        ("tokens", ctypes.c_void_p),
        ("sequences", ctypes.c_void_p),
        ("num_sequences", ctypes.c_int32),
        ("num_rows", ctypes.c_int32),
        ("features", ctypes.c_void_p),
        ("feature_layers", ctypes.c_void_p),
        ("num_feature_layers", ctypes.c_int32),
        ("states", ctypes.c_void_p),
    )


class DraftStruct(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_int32)
            for name in ("depth", "top_k", "start", "capacity", "window_tokens", "window_sinks")
        ),
        ("logit_scale", ctypes.c_float),
        ("least_score", ctypes.c_float),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "added",
                "caches",
                "state",
                "token_ids",
                "list",
                "tokens",
                "scores",
                "beams",
                "num_levels",
            )
        ),
    )
