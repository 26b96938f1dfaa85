"""llama.cpp by its C interface: python -m workers.llama_engine MODEL.gguf --threads 2.

Nothing but passes and the choice of tokens is timed: no HTTP, no text. With `--lookup` it drafts by
the prompt lookup of llama-cpp-python, with `--draft` by another model; a drafted token is kept
where the model chooses it too, as llama.cpp's own programs do.
"""

import argparse
import ctypes
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .lines import Lines, Question, Reply

Choose = Callable[[int], int]
"""A row of the last pass -> the token that follows it."""


class LlamaModel:
    """One sequence of a model.

    Attributes:
        length: tokens that were read.
    """

    def __init__(self, api: Any, path: Path, threads: int, context: int) -> None:
        self.api, self.length = api, 0
        self._model = api.llama_model_load_from_file(
            str(path).encode(), api.llama_model_default_params()
        )
        assert self._model, f"llama.cpp cannot load {path.name}"
        params = api.llama_context_default_params()
        params.n_ctx = params.n_batch = context
        params.n_threads = params.n_threads_batch = threads
        params.no_perf = True
        self._context = api.llama_init_from_model(self._model, params)
        assert self._context, f"llama.cpp cannot run {path.name}"
        self._memory = api.llama_get_memory(self._context)
        self._batch = api.llama_batch_init(context, 0, 1)
        self._vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._first = 0

    def cut(self, length: int) -> None:
        """Forget what follows the first tokens."""
        if length < self.length:
            self.api.llama_memory_seq_rm(self._memory, 0, length, -1)
            self.length = length

    def read(self, tokens: list[int], rows: int) -> None:
        """A pass over tokens, after which one can follow each of the last `rows`."""
        batch = self._batch
        self._first = len(tokens) - rows
        batch.n_tokens = len(tokens)
        for place, token in enumerate(tokens):
            batch.token[place] = token
            batch.pos[place] = self.length + place
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = 0
            batch.logits[place] = place >= self._first
        assert self.api.llama_decode(self._context, batch) == 0, "llama.cpp cannot read"
        self.length += len(tokens)

    def best(self, row: int) -> int:
        """The most probable token after a row."""
        found = self.api.llama_get_logits_ith(self._context, self._first + row)
        return int(np.ctypeslib.as_array(found, shape=(self._vocab_size,)).argmax())

    def sampler(self, temperature: float, seed: int | None) -> tuple[Choose, Callable[[], None]]:
        """Draws a token after a row; the second function frees it."""
        api = self.api
        chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        api.llama_sampler_chain_add(chain, api.llama_sampler_init_temp(temperature))
        number = api.LLAMA_DEFAULT_SEED if seed is None else seed % (2**32 - 1)
        api.llama_sampler_chain_add(chain, api.llama_sampler_init_dist(number))

        def draw(row: int) -> int:
            return int(api.llama_sampler_sample(chain, self._context, self._first + row))

        return draw, lambda: api.llama_sampler_free(chain)


class Llama:
    """A model, and what drafts for it.

    Args:
        draft: file of a draft model.
        lookup: tokens that prompt lookup drafts; 0 for none.
        num_drafted: tokens that the draft model drafts.
    """

    def __init__(
        self,
        model: Path,
        threads: int,
        context: int,
        dtype: str,
        draft: Path | None = None,
        lookup: int = 0,
        num_drafted: int = 8,
    ) -> None:
        import llama_cpp
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        flags = llama_cpp.llama_print_system_info().decode().removeprefix("CPU : ")
        used = ", ".join(one.split(" = ")[0].strip() for one in flags.split("|") if "= 1" in one)
        self.dtype = dtype
        self.version = f"llama.cpp of llama-cpp-python {llama_cpp.__version__} ({used})"
        # the package's own callback drops what llama.cpp says
        self._log = llama_cpp.llama_log_callback(_log_faults)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.model = LlamaModel(llama_cpp, model, threads, context)
        self.drafter, self.lookup, self.num_drafted = None, None, num_drafted
        if draft is not None:
            self.drafter = LlamaModel(llama_cpp, draft, threads, context)
        elif lookup:
            self.lookup = LlamaPromptLookupDecoding(num_pred_tokens=lookup)

    def answer(self, question: Question) -> Reply:
        begin = time.perf_counter()
        choose: Choose = self.model.best
        free: Callable[[], None] = _nothing
        if question.temperature:
            choose, free = self.model.sampler(question.temperature, question.seed)
        prompt, tokens = question.prompt, list(question.prompt)
        self.model.cut(0)
        if self.drafter is not None:
            self.drafter.cut(0)
        self.model.read(prompt, rows=1)
        tokens.append(choose(0))
        first_seconds = time.perf_counter() - begin
        end = len(prompt) + question.max_new_tokens
        while len(tokens) < end and tokens[-1] not in question.stop:
            drafted = self._draft(tokens, end - len(tokens) - 1)
            self.model.read([tokens[-1], *drafted], rows=len(drafted) + 1)
            for row in range(len(drafted) + 1):
                tokens.append(choose(row))
                if tokens[-1] in question.stop or drafted[row : row + 1] != tokens[-1:]:
                    break
            self.model.cut(len(tokens) - 1)
        seconds = time.perf_counter() - begin
        free()
        return Reply(tokens[len(prompt) :], seconds, 1, first_seconds)

    def _draft(self, tokens: list[int], most: int) -> list[int]:
        if most <= 0:
            return []
        if self.lookup is not None:
            found: list[int] = self.lookup(np.array(tokens)).tolist()
            return found[:most]
        drafter, drafted = self.drafter, list[int]()
        if drafter is None:
            return []
        drafter.cut(min(drafter.length, len(tokens) - 1))
        unread = tokens[drafter.length :]
        for _ in range(min(self.num_drafted, most)):
            drafter.read(unread, rows=1)
            drafted.append(drafter.best(0))
            unread = drafted[-1:]
        return drafted


def _nothing() -> None:
    """Greedy answers leave nothing to free."""


def _log_faults(level: int, text: bytes, _: Any) -> None:
    """Errors alone, which the worker's reader is shown."""
    if level == 4:
        sys.stderr.write(text.decode(errors="replace"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--context", type=int, required=True, help="tokens")
    parser.add_argument("--dtype", required=True, help="to say")
    parser.add_argument("--lookup", type=int, default=0, help="tokens that prompt lookup drafts")
    parser.add_argument("--draft", type=Path, help="file of a draft model")
    parser.add_argument("--num-drafted", type=int, default=8, help="tokens of --draft")
    arguments = parser.parse_args()
    lines = Lines()
    lines.serve(Llama(**vars(arguments)))


if __name__ == "__main__":
    main()
