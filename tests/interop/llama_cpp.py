"""llama.cpp by its own C functions, as the prebuilt library of the package xllamacpp exports them.

Structs that functions take and return by value are only as long here as what is set in them needs:
the rest is space, and the fields that are set are recognized by their known defaults.
"""

import ctypes
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import numpy as np

_SPACE_BYTES = 512
_CONTEXT_DEFAULTS = (512, 2048, 512)
"""n_ctx, n_batch and n_ubatch, with which llama_context_params begins."""


class _Params(ctypes.Structure):
    _fields_ = [("fields", ctypes.c_uint32 * (_SPACE_BYTES // 4))]


class _Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


_SIGNATURES = {
    "llama_backend_init": (None, ()),
    "llama_log_set": (None, (ctypes.c_void_p, ctypes.c_void_p)),
    "llama_model_default_params": (_Params, ()),
    "llama_context_default_params": (_Params, ()),
    "llama_model_load_from_file": (ctypes.c_void_p, (ctypes.c_char_p, _Params)),
    "llama_init_from_model": (ctypes.c_void_p, (ctypes.c_void_p, _Params)),
    "llama_model_get_vocab": (ctypes.c_void_p, (ctypes.c_void_p,)),
    "llama_vocab_n_tokens": (ctypes.c_int32, (ctypes.c_void_p,)),
    "llama_tokenize": (
        ctypes.c_int32,
        (
            ctypes.c_void_p,
            ctypes.c_char_p,
            ctypes.c_int32,
            ctypes.POINTER(ctypes.c_int32),
            ctypes.c_int32,
            ctypes.c_bool,
            ctypes.c_bool,
        ),
    ),
    "llama_get_memory": (ctypes.c_void_p, (ctypes.c_void_p,)),
    "llama_memory_clear": (None, (ctypes.c_void_p, ctypes.c_bool)),
    "llama_batch_init": (_Batch, (ctypes.c_int32, ctypes.c_int32, ctypes.c_int32)),
    "llama_batch_free": (None, (_Batch,)),
    "llama_decode": (ctypes.c_int32, (ctypes.c_void_p, _Batch)),
    "llama_get_logits_ith": (
        ctypes.POINTER(ctypes.c_float),
        (ctypes.c_void_p, ctypes.c_int32),
    ),
}
_Log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


@_Log
def _say_nothing(level: int, text: bytes, data: int) -> None:
    """What llama.cpp logs, it logs here."""


def _library() -> ctypes.CDLL:
    found = importlib.util.find_spec("xllamacpp")
    assert found is not None
    [folder] = found.submodule_search_locations or []
    [path] = Path(folder).glob("*.so")
    library = ctypes.CDLL(str(path))
    for name, (returned, taken) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = returned, taken
    library.llama_log_set(_say_nothing, None)
    library.llama_backend_init()
    return library


class LlamaModel:
    """A model that llama.cpp reads and computes.

    Args:
        path: of a GGUF file.
        context_tokens: that are computed at a time at most.
    """

    def __init__(self, path: Path, context_tokens: int = 1024) -> None:
        self._library = library = _library()
        model = library.llama_model_load_from_file(
            str(path).encode(), library.llama_model_default_params()
        )
        assert model, f"llama.cpp does not read {path}"
        params = library.llama_context_default_params()
        assert tuple(params.fields[:3]) == _CONTEXT_DEFAULTS, "another llama_context_params"
        params.fields[:3] = [context_tokens] * 3
        self._context = library.llama_init_from_model(model, params)
        self._vocabulary = library.llama_model_get_vocab(model)
        self._num_tokens = library.llama_vocab_n_tokens(self._vocabulary)

    def tokenize(self, text: str) -> list[int]:
        """Ids of a text, with what the file says is put around it; control tokens are read."""
        data = text.encode()
        ids = (ctypes.c_int32 * (len(data) + 16))()
        num = self._library.llama_tokenize(
            self._vocabulary, data, len(data), ids, len(ids), True, True
        )
        assert num >= 0
        return list(ids[:num])

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """float32 [ids, vocabulary], what follows each of these ids."""
        library = self._library
        library.llama_memory_clear(library.llama_get_memory(self._context), True)
        batch = library.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for place, token in enumerate(ids):
            batch.token[place], batch.pos[place], batch.logits[place] = token, place, 1
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
        assert library.llama_decode(self._context, batch) == 0
        rows = [library.llama_get_logits_ith(self._context, row) for row in range(len(ids))]
        found = [np.ctypeslib.as_array(row, (self._num_tokens,)).copy() for row in rows]
        library.llama_batch_free(batch)
        return np.stack(found)
