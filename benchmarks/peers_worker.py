"""Another engine, in an environment of its own: answers each line of stdin with a line of stdout.

    python benchmarks/peers_worker.py {llama.cpp,openvino} MODEL.gguf --threads 2 [options]

Runs in the environment of `peers-requirements.txt` and imports nothing of this project. Prompts and
answers are token ids and greedy, so that all engines are asked the same.
"""

import argparse
import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

MAX_CONTEXT = 2048 + 64
Tokens = list[int]


class Peer(Protocol):
    """An engine with a model.

    Attributes:
        version: of the engine, and what it says of the processor.
    """

    version: str

    def answer(self, prompt: Tokens, num_tokens: int, stop: Tokens) -> Tokens:
        """Greedily, a stop token included."""

    def pass_seconds(self, context: int, rows: int, repeats: int) -> float:
        """Median seconds of a pass over so many tokens after others; 0 tokens: a prompt."""


# llama.cpp


class LlamaCpp:
    """llama.cpp by its C interface.

    Args:
        draft: of "": one token a pass; "lookup N": prompt lookup of the package, N tokens at most;
            "model FILE N": another model drafts N tokens.
    """

    def __init__(self, path: Path, threads: int, draft: str) -> None:
        import llama_cpp

        self.api = llama_cpp
        features = llama_cpp.llama_print_system_info().decode().removeprefix("CPU : ")
        used = ", ".join(one.split(" = ")[0].strip() for one in features.split("|") if "= 1" in one)
        self.version = f"llama-cpp-python {llama_cpp.__version__} ({used})"
        # the package's own callback drops what llama.cpp says
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.model = _LlamaModel(llama_cpp, path, threads)
        kind, *words = draft.split()
        self._lookup, self._drafter, self._num_drafted = None, None, 0
        if kind == "lookup":
            from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

            self._num_drafted = int(words[0])
            self._lookup = LlamaPromptLookupDecoding(num_pred_tokens=self._num_drafted)
        elif kind == "model":
            self._drafter = _LlamaModel(llama_cpp, Path(words[0]), threads)
            self._num_drafted = int(words[1])

    def answer(self, prompt: Tokens, num_tokens: int, stop: Tokens) -> Tokens:
        model, tokens = self.model, list(prompt)
        model.cut(0)
        if self._drafter is not None:
            self._drafter.cut(0)
        tokens.append(model.read(prompt, rows=1)[-1])
        while len(tokens) - len(prompt) < num_tokens and tokens[-1] not in stop:
            most = len(prompt) + num_tokens - len(tokens) - 1
            drafted = self._draft(tokens, most)
            chosen = model.read([tokens[-1], *drafted], rows=len(drafted) + 1)
            kept = 0
            while (
                kept < len(drafted) and drafted[kept] == chosen[kept] and chosen[kept] not in stop
            ):
                kept += 1
            tokens += chosen[: kept + 1]
            model.cut(len(tokens) - 1)
        return tokens[len(prompt) :]

    def _draft(self, tokens: Tokens, most: int) -> Tokens:
        if most <= 0:
            return []
        if self._lookup is not None:
            return self._lookup(np.array(tokens)).tolist()[:most]
        if self._drafter is None:
            return []
        drafter, drafted = self._drafter, Tokens()
        drafter.cut(min(drafter.length, len(tokens) - 1))
        unread = tokens[drafter.length :]
        for _ in range(min(self._num_drafted, most)):
            drafted.append(drafter.read(unread, rows=1)[-1])
            unread = drafted[-1:]
        return drafted

    def pass_seconds(self, context: int, rows: int, repeats: int) -> float:
        return self.model.pass_seconds(context, rows, repeats)


class _LlamaModel:
    """One sequence of a model of llama.cpp."""

    def __init__(self, api: Any, path: Path, threads: int) -> None:
        self.api, self.length = api, 0
        self._model = api.llama_model_load_from_file(
            str(path).encode(), api.llama_model_default_params()
        )
        assert self._model, f"llama.cpp cannot load {path.name}"
        params = api.llama_context_default_params()
        params.n_ctx = MAX_CONTEXT
        params.n_batch = params.n_ubatch = 2048
        params.n_threads = params.n_threads_batch = threads
        params.no_perf = True
        self._context = api.llama_init_from_model(self._model, params)
        self._memory = api.llama_get_memory(self._context)
        self.vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._batch = api.llama_batch_init(2048, 0, 1)

    def cut(self, length: int) -> None:
        """Forget what follows the first tokens."""
        if length < self.length:
            self.api.llama_memory_seq_rm(self._memory, 0, length, -1)
            self.length = length

    def read(self, tokens: Tokens, rows: int) -> Tokens:
        """Read tokens; the most probable token after each of the last rows."""
        batch, first = self._batch, len(tokens) - rows
        batch.n_tokens = len(tokens)
        for place, token in enumerate(tokens):
            batch.token[place] = token
            batch.pos[place] = self.length + place
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = 0
            batch.logits[place] = place >= first
        assert self.api.llama_decode(self._context, batch) == 0
        self.length += len(tokens)
        found = self.api.llama_get_logits(self._context)
        logits = np.ctypeslib.as_array(found, shape=(rows, self.vocab_size))
        chosen: Tokens = logits.argmax(1).tolist()
        return chosen

    def pass_seconds(self, context: int, rows: int, repeats: int) -> float:
        """See `Peer`."""
        drawn = np.random.default_rng(0).integers(3, self.vocab_size, context + rows).tolist()
        self.cut(0)
        if rows == 0:
            self.read(drawn, rows=1)
            return statistics.median(self._timed(drawn, 0, 1) for _ in range(repeats))
        self.read(drawn[:context], rows=1)
        new = drawn[context:]
        for _ in range(3):
            self._timed(new, context, rows)
        return statistics.median(self._timed(new, context, rows) for _ in range(repeats))

    def _timed(self, tokens: Tokens, length: int, rows: int) -> float:
        self.cut(length)
        begin = time.perf_counter()
        self.read(tokens, rows)
        return time.perf_counter() - begin


# OpenVINO GenAI


class OpenVino:
    """OpenVINO GenAI's pipeline over the same file.

    Prefixes are not cached: the same prompts are asked in every turn.

    Args:
        precision: of its arithmetic, f32, bf16 or f16.
        draft: as `LlamaCpp` takes it; "SDPA": none, and its other attention.
    """

    def __init__(self, path: Path, threads: int, precision: str, draft: str) -> None:
        import openvino
        import openvino_genai as genai

        self.genai, self.tensor = genai, openvino.Tensor
        self.version = f"OpenVINO GenAI {genai.__version__}"
        properties = {
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": "f16" if precision == "f32" else precision,
        }
        kind, *words = draft.split()
        self._options: dict[str, Any] = {}
        more: dict[str, Any] = {}
        if kind == "SDPA":
            more["ATTENTION_BACKEND"] = kind
        else:
            more["scheduler_config"] = genai.SchedulerConfig()
            more["scheduler_config"].enable_prefix_caching = False
            more["scheduler_config"].max_num_batched_tokens = MAX_CONTEXT
        if kind == "lookup":
            more["prompt_lookup"] = True
            self._options = {"num_assistant_tokens": int(words[0]), "max_ngram_size": 2}
        elif kind == "model":
            # a draft model is read from its own format alone, which a pipeline writes beside GGUF
            genai.LLMPipeline(words[0], "CPU", enable_save_ov_model=True)
            folder = str(Path(words[0]).parent)
            more["draft_model"] = genai.draft_model(folder, "CPU", **properties)
            self._options = {"num_assistant_tokens": int(words[1])}
        self.pipe = genai.LLMPipeline(str(path), "CPU", **properties, **more)

    def answer(self, prompt: Tokens, num_tokens: int, stop: Tokens) -> Tokens:
        config = self.genai.GenerationConfig()
        config.max_new_tokens = num_tokens
        config.stop_token_ids = set(stop)
        config.do_sample = False
        config.apply_chat_template = False
        for name, value in self._options.items():
            setattr(config, name, value)
        ids = np.array([prompt], dtype=np.int64)
        inputs = self.genai.TokenizedInputs(self.tensor(ids), self.tensor(np.ones_like(ids)))
        found: Tokens = list(self.pipe.generate(inputs, config).tokens[0])
        return found

    def pass_seconds(self, context: int, rows: int, repeats: int) -> float:
        raise NotImplementedError("its pipeline has no passes over chosen rows")


def replies(peer: Peer, questions: Iterator[str]) -> Iterator[dict[str, Any]]:
    """What is asked, answered and timed."""
    for line in questions:
        asked = json.loads(line)
        if "prompt" in asked:
            begin = time.perf_counter()
            tokens = peer.answer(asked["prompt"], asked["num_tokens"], asked["stop"])
            yield {"token_ids": tokens, "seconds": time.perf_counter() - begin}
        else:
            seconds = peer.pass_seconds(asked["context"], asked["rows"], asked["repeats"])
            yield {"seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("engine", choices=("llama.cpp", "openvino"))
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--precision", default="bf16", help="of OpenVINO's arithmetic")
    parser.add_argument("--draft", default="none")
    arguments = parser.parse_args()
    # what an engine prints must not be taken for a reply
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peer: Peer
    if arguments.engine == "llama.cpp":
        peer = LlamaCpp(arguments.model, arguments.threads, arguments.draft)
    else:
        peer = OpenVino(arguments.model, arguments.threads, arguments.precision, arguments.draft)
    print(json.dumps({"version": peer.version}), file=out, flush=True)
    for reply in replies(peer, sys.stdin):
        print(json.dumps(reply), file=out, flush=True)


if __name__ == "__main__":
    main()
