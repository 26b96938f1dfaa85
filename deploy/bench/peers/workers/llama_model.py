"""A model of llama.cpp by its C functions; nothing but numpy is needed beside the library."""

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from .llama_library import LlamaBatch, LlamaError, failure, library_path, load_library

RANDOM_SEED = 2**32 - 1
"""The seed by which llama.cpp takes any."""
F32_CACHE, NO_FLASH_ATTENTION = 0, 0
"""Values of `type_k` and `type_v`, and of `flash_attn_type`."""


class LlamaModel:
    """A GGUF file, and one sequence of tokens that it reads.

    Args:
        threads: of a pass.
        context_tokens: that a sequence may have.
        is_exact: keys and values stay float32 and attention is not fused; otherwise they are
            float16, as llama.cpp has it by default.

    Attributes:
        length: tokens of the sequence that were read.
        vocab_size: tokens of the vocabulary.

    Raises:
        LlamaError: the library or the file cannot be used.
    """

    def __init__(
        self, path: Path, threads: int, context_tokens: int, is_exact: bool = False
    ) -> None:
        self._api = api = load_library(library_path())
        self._model = self._context = None
        self._batch: LlamaBatch | None = None
        self._context_tokens, self.length, self._first = context_tokens, 0, 0
        self._model = api.llama_model_load_from_file(
            str(path).encode(), api.llama_model_default_params()
        )
        if not self._model:
            raise failure(f"load {path.name}")
        params = api.llama_context_default_params()
        params.n_ctx = params.n_batch = context_tokens
        params.n_threads = params.n_threads_batch = threads
        if is_exact:
            params.type_k = params.type_v = F32_CACHE
            params.flash_attn_type = NO_FLASH_ATTENTION
        self._context = api.llama_init_from_model(self._model, params)
        if not self._context:
            error = failure(f"run {path.name}")
            self.close()
            raise error
        self._memory = api.llama_get_memory(self._context)
        self._vocab = api.llama_model_get_vocab(self._model)
        self.vocab_size: int = api.llama_vocab_n_tokens(self._vocab)
        self._batch = batch = api.llama_batch_init(context_tokens, 0, 1)
        arrays = (batch.token, batch.pos, batch.logits, batch.n_seq_id)
        self._tokens, self._places, self._wanted, counts = (
            np.ctypeslib.as_array(array, (context_tokens,)) for array in arrays
        )
        counts[:] = 1
        for place in range(context_tokens):
            batch.seq_id[place][0] = 0

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        """Ids of a text.

        Args:
            add_special: put what the file says before and behind it, such as its first token.
            parse_special: read control tokens where they are written.
        """
        data = text.encode()
        ids = (ctypes.c_int32 * (len(data) + 16))()
        num = self._api.llama_tokenize(
            self._vocab, data, len(data), ids, len(ids), add_special, parse_special
        )
        if num < 0:
            raise failure("tokenize")
        return list(ids[:num])

    def piece(self, token: int) -> bytes:
        """The text of a token; that of a control token is written."""
        piece = ctypes.create_string_buffer(1024)
        num = self._api.llama_token_to_piece(self._vocab, token, piece, len(piece), 0, True)
        if num < 0:
            raise failure(f"write token {token}")
        return piece.raw[:num]

    def cut(self, length: int) -> None:
        """Forget what follows the first tokens."""
        if length < self.length:
            self._api.llama_memory_seq_rm(self._memory, 0, length, -1)
            self.length = length

    def read(self, tokens: Sequence[int], rows: int) -> None:
        """A pass over tokens, after which one can follow each of the last `rows`.

        Raises:
            LlamaError: the context is full, or a token is none of the vocabulary.
        """
        num, batch = len(tokens), self._batch
        if self.length + num > self._context_tokens:
            raise LlamaError(f"more than the {self._context_tokens} tokens of the context")
        assert batch is not None
        assert num >= rows
        self._first = num - rows
        self._tokens[:num] = tokens
        self._places[:num] = range(self.length, self.length + num)
        self._wanted[:num] = 0
        self._wanted[self._first : num] = 1
        batch.n_tokens = num
        if self._api.llama_decode(self._context, batch):
            raise failure("read")
        self.length += num

    def wait(self) -> None:
        """Until the last pass is done."""
        self._api.llama_synchronize(self._context)

    def row(self, row: int) -> np.ndarray:
        """float32 [vocab_size], logits after a row of the last pass; the next one overwrites it."""
        logits = self._api.llama_get_logits_ith(self._context, self._first + row)
        if not logits:
            raise failure(f"give logits of row {row}")
        return np.ctypeslib.as_array(logits, (self.vocab_size,))

    def best(self, row: int) -> int:
        """The most probable token after a row."""
        return int(self.row(row).argmax())

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """float32 [tokens, vocab_size], what follows each token of a new sequence."""
        self._api.llama_memory_clear(self._memory, True)
        self.length = 0
        self.read(token_ids, rows=len(token_ids))
        return np.stack([self.row(row) for row in range(len(token_ids))])

    def sampler(
        self, temperature: float, seed: int | None
    ) -> tuple[Callable[[int], int], Callable[[], None]]:
        """Draws a token after a row; the second function frees it."""
        api = self._api
        chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        api.llama_sampler_chain_add(chain, api.llama_sampler_init_temp(temperature))
        number = RANDOM_SEED if seed is None else seed % RANDOM_SEED
        api.llama_sampler_chain_add(chain, api.llama_sampler_init_dist(number))

        def draw(row: int) -> int:
            return int(api.llama_sampler_sample(chain, self._context, self._first + row))

        return draw, lambda: api.llama_sampler_free(chain)

    def close(self) -> None:
        """Free it; nothing else may be asked afterwards."""
        if self._batch is not None:
            self._api.llama_batch_free(self._batch)
        if self._context:
            self._api.llama_free(self._context)
        if self._model:
            self._api.llama_model_free(self._model)
        self._batch = self._context = self._model = None
