"""llama.cpp's C functions, as the prebuilt library of the package xllamacpp exports them.

xllamacpp's is built for AVX2: $LLAMA_CPP_LIB_PATH names a folder whose libllama.so, built for this
processor, is taken instead. Structs follow include/llama.h of llama.cpp b11549; a library with
others is known by its default values, and refused.
"""

import ctypes
import functools
import importlib.util
import os
from importlib import metadata
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "LLAMA_CPP_LIB_PATH"
ERROR_LEVEL = 4
_POINTER, _INT, _UINT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint32
_FLOAT, _BOOL = ctypes.c_float, ctypes.c_bool
_INTS = ctypes.POINTER(_INT)
_SPACE = ctypes.c_ubyte * 64
"""Behind each struct of settings: of a longer one, the rest is handed back as it came."""


class LlamaError(RuntimeError):
    """llama.cpp cannot do what it is asked, in a line."""


def _fields(names: str, kind: Any) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class ModelParams(ctypes.Structure):
    _fields_ = [
        *_fields("devices tensor_buft_overrides", _POINTER),
        *_fields("n_gpu_layers split_mode load_mode lazy_mode main_gpu", _INT),
        *_fields("tensor_split progress_callback progress_callback_user_data", _POINTER),
        *_fields("kv_overrides", _POINTER),
        *_fields("vocab_only check_tensors use_extra_bufts no_host no_alloc load_mtp", _BOOL),
        ("space", _SPACE),
    ]


class ContextParams(ctypes.Structure):
    _fields_ = [
        *_fields("n_ctx n_batch n_ubatch n_seq_max n_rs_seq", _UINT),
        *_fields("n_outputs_max n_outputs_max_per_seq", _UINT),
        *_fields("n_threads n_threads_batch ctx_type rope_scaling_type", _INT),
        *_fields("pooling_type attention_type flash_attn_type", _INT),
        *_fields("rope_freq_base rope_freq_scale yarn_ext_factor yarn_attn_factor", _FLOAT),
        *_fields("yarn_beta_fast yarn_beta_slow", _FLOAT),
        ("yarn_orig_ctx", _UINT),
        ("defrag_thold", _FLOAT),
        *_fields("cb_eval cb_eval_user_data", _POINTER),
        *_fields("type_k type_v", _INT),
        ("moe_cache_size", ctypes.c_size_t),
        *_fields("abort_callback abort_callback_data", _POINTER),
        *_fields("embeddings offload_kqv no_perf op_offload swa_full kv_unified", _BOOL),
        ("samplers", _POINTER),
        ("n_samplers", ctypes.c_size_t),
        ("ctx_other", _POINTER),
        ("space", _SPACE),
    ]


class SamplerParams(ctypes.Structure):
    _fields_ = [("no_perf", _BOOL)]


class LlamaBatch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", _INT),
        ("token", _INTS),
        ("embd", ctypes.POINTER(_FLOAT)),
        *_fields("pos n_seq_id", _INTS),
        ("seq_id", ctypes.POINTER(_INTS)),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


_DEFAULTS: dict[str, dict[str, float]] = {
    "llama_model_default_params": {
        "n_gpu_layers": -1, "split_mode": 1, "load_mode": -1, "lazy_mode": 1, "use_extra_bufts": 1,
    },
    "llama_context_default_params": {
        "n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "n_outputs_max_per_seq": 1,
        "n_threads": 4, "n_threads_batch": 4, "rope_scaling_type": -1, "pooling_type": -1,
        "attention_type": -1, "flash_attn_type": -1, "yarn_ext_factor": -1, "yarn_attn_factor": -1,
        "yarn_beta_fast": -1, "yarn_beta_slow": -1, "defrag_thold": -1, "type_k": 1, "type_v": 1,
        "offload_kqv": 1, "no_perf": 1, "op_offload": 1, "swa_full": 1,
    },
    "llama_sampler_chain_default_params": {"no_perf": 1},
}  # fmt: skip
"""Of each function that returns settings, those that are not 0; all others are."""

_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_backend_init": (None, ()),
    "llama_log_set": (None, (_POINTER, _POINTER)),
    "llama_print_system_info": (ctypes.c_char_p, ()),
    "llama_model_default_params": (ModelParams, ()),
    "llama_context_default_params": (ContextParams, ()),
    "llama_sampler_chain_default_params": (SamplerParams, ()),
    "llama_model_load_from_file": (_POINTER, (ctypes.c_char_p, ModelParams)),
    "llama_model_free": (None, (_POINTER,)),
    "llama_init_from_model": (_POINTER, (_POINTER, ContextParams)),
    "llama_free": (None, (_POINTER,)),
    "llama_model_get_vocab": (_POINTER, (_POINTER,)),
    "llama_vocab_n_tokens": (_INT, (_POINTER,)),
    "llama_tokenize": (_INT, (_POINTER, ctypes.c_char_p, _INT, _INTS, _INT, _BOOL, _BOOL)),
    "llama_token_to_piece": (_INT, (_POINTER, _INT, ctypes.c_char_p, _INT, _INT, _BOOL)),
    "llama_batch_init": (LlamaBatch, (_INT, _INT, _INT)),
    "llama_batch_free": (None, (LlamaBatch,)),
    "llama_decode": (_INT, (_POINTER, LlamaBatch)),
    "llama_synchronize": (None, (_POINTER,)),
    "llama_get_logits_ith": (ctypes.POINTER(_FLOAT), (_POINTER, _INT)),
    "llama_get_memory": (_POINTER, (_POINTER,)),
    "llama_memory_clear": (None, (_POINTER, _BOOL)),
    "llama_memory_seq_rm": (_BOOL, (_POINTER, _INT, _INT, _INT)),
    "llama_sampler_chain_init": (_POINTER, (SamplerParams,)),
    "llama_sampler_chain_add": (None, (_POINTER, _POINTER)),
    "llama_sampler_init_temp": (_POINTER, (_FLOAT,)),
    "llama_sampler_init_dist": (_POINTER, (_UINT,)),
    "llama_sampler_sample": (_INT, (_POINTER, _POINTER, _INT)),
    "llama_sampler_free": (None, (_POINTER,)),
}

_faults: list[str] = []


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _keep_faults(level: int, text: bytes, _: Any) -> None:
    """Of what llama.cpp says, errors alone, for the next `LlamaError`."""
    if level == ERROR_LEVEL:
        _faults.append(text.decode(errors="replace").strip())


def failure(what: str) -> LlamaError:
    """An error with the last that llama.cpp said."""
    said = f": {_faults[-1]}" if _faults else ""
    _faults.clear()
    return LlamaError(f"llama.cpp cannot {what}{said}")


def library_path() -> Path:
    """Where the library is.

    Raises:
        LlamaError: it is nowhere.
    """
    if folder := os.environ.get(FOLDER_VARIABLE):
        return Path(folder) / "libllama.so"
    spec = importlib.util.find_spec("xllamacpp")  # the package itself is not imported
    files = [
        file
        for place in (spec and spec.submodule_search_locations) or ()
        for file in sorted(Path(place).glob("xllamacpp*.so"))
    ]
    if not files:
        raise LlamaError("xllamacpp is not installed: pip install xllamacpp==2026.10.11549")
    return files[0]


def origin() -> str:
    """Whose library that is, for reports."""
    if FOLDER_VARIABLE in os.environ:
        return f"${FOLDER_VARIABLE}"
    return f"xllamacpp {metadata.version('xllamacpp')}"


@functools.cache
def load_library(path: Path) -> Any:
    """The functions above, with their types, and quiet.

    Raises:
        LlamaError: the file cannot be loaded, or its functions or structs are other ones.
    """
    try:
        library = ctypes.CDLL(str(path))
        for name, (returned, taken) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = returned, taken
    except (OSError, AttributeError) as error:
        raise LlamaError(f"{path.name} cannot be used: {error}") from error
    for name in _DEFAULTS:
        check_defaults(name, getattr(library, name)())
    library.llama_log_set(_keep_faults, None)
    library.llama_backend_init()
    return library


def check_defaults(name: str, params: ctypes.Structure) -> None:
    """See that settings are where this module looks for them.

    Args:
        name: of the function that returned them.

    Raises:
        LlamaError: they are not.
    """
    for field in (key for key, *_ in params._fields_ if key != "space"):
        given = getattr(params, field) or 0
        if given != (due := _DEFAULTS[name].get(field, 0)):
            raise LlamaError(
                f"another version of llama.cpp: {name} gives {field} {given}, b11549 gives {due}"
            )


def instruction_sets(library: Any) -> str:
    """What the library was built for and the processor has, such as "AVX2, FMA"."""
    flags = library.llama_print_system_info().decode().removeprefix("CPU : ")
    return ", ".join(flag.split(" = ")[0].strip() for flag in flags.split("|") if "= 1" in flag)
