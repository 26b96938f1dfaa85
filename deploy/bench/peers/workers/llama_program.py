"""Programs of llama.cpp, made of what xllamacpp has of them, with their options:

    python workers/llama_program.py llama-server --model MODEL.gguf --port 8080
    python workers/llama_program.py llama-bench --model MODEL.gguf --n-prompt 1,4

llama-server is llama.cpp's own server, HTTP included, in this process. llama-bench times passes as
llama.cpp's does: over any tokens behind others, after one that does not count, with the logits of
the last token alone.
"""

import argparse
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # where `workers` is, for a file that is run

SPECULATION = {"draft-simple": "DRAFT_SIMPLE", "ngram-simple": "NGRAM_SIMPLE"}


def bench(words: list[str]) -> None:
    """Print, by the number of a pass' tokens, nanoseconds of each repetition."""
    from workers.llama_model import LlamaModel

    parser = argparse.ArgumentParser(prog="llama-bench")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--n-prompt", required=True, help="tokens of passes, as 1,4,12")
    parser.add_argument("--n-gen", type=int, choices=(0,), default=0)
    parser.add_argument("--n-depth", type=int, default=0, help="tokens before them")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--output", choices=("json",), default="json")
    asked = parser.parse_args(words)
    sizes = [int(number) for number in asked.n_prompt.split(",")]
    model = LlamaModel(asked.model, asked.threads, asked.n_depth + max(sizes))
    tokens = [(7 * place + 3) % model.vocab_size for place in range(asked.n_depth + max(sizes))]
    if asked.n_depth:
        model.read(tokens[: asked.n_depth], rows=1)
    results = []
    for size in sizes:
        samples = []
        for _ in range(asked.repetitions + 1):
            model.cut(asked.n_depth)
            begin = time.perf_counter_ns()
            model.read(tokens[asked.n_depth : asked.n_depth + size], rows=1)
            model.wait()
            samples.append(time.perf_counter_ns() - begin)
        results.append({"n_prompt": size, "n_depth": asked.n_depth, "samples_ns": samples[1:]})
    model.close()
    print(json.dumps(results))


def serve(words: list[str]) -> None:
    """Answer requests until a signal ends the process."""
    import xllamacpp

    parser = argparse.ArgumentParser(prog="llama-server")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--threads", type=int, default=-1)
    parser.add_argument("--threads-batch", type=int, default=-1)
    parser.add_argument("--parallel", type=int, default=1, help="sequences at a time")
    parser.add_argument("--ctx-size", type=int, default=0, help="tokens of all of them")
    parser.add_argument("--cache-ram", type=int, default=8192, help="MiB of earlier prompts")
    parser.add_argument("--no-kv-unified", action="store_true", help="as it is without")
    parser.add_argument("--no-webui", action="store_true")
    parser.add_argument("--spec-type", choices=SPECULATION)
    parser.add_argument("--spec-draft-model", type=Path)
    parser.add_argument("--spec-draft-n-max", type=int, default=3, help="tokens that it drafts")
    parser.add_argument("--spec-ngram-simple-size-n", type=int, default=12, help="looked for")
    parser.add_argument("--spec-ngram-simple-size-m", type=int, default=48, help="drafted")
    asked = parser.parse_args(words)
    if asked.version:
        print(f"version: xllamacpp {xllamacpp.__version__} ({xllamacpp.get_system_info()})")
        return
    if asked.model is None:
        parser.error("--model is missing")
    server = xllamacpp.Server(server_params(asked, xllamacpp))
    print(f"listening on {server.listening_address}", file=sys.stderr)
    signal.pause()


def server_params(asked: argparse.Namespace, xllamacpp: Any) -> Any:
    """The settings that these options name in llama.cpp."""
    params = xllamacpp.CommonParams()
    params.model.path = str(asked.model)
    params.hostnames, params.port = [asked.host], asked.port
    params.cpuparams.n_threads = asked.threads
    params.cpuparams_batch.n_threads = asked.threads_batch
    params.n_parallel, params.n_ctx = asked.parallel, asked.ctx_size
    params.cache_ram_mib, params.ui = asked.cache_ram, not asked.no_webui
    params.kv_unified, params.fit_params = False, False
    speculative = params.speculative
    if asked.spec_type is not None:
        kind = f"COMMON_SPECULATIVE_TYPE_{SPECULATION[asked.spec_type]}"
        speculative.types = [getattr(xllamacpp.common_speculative_type, kind)]
    if asked.spec_draft_model is not None:
        speculative.draft.mparams.path = str(asked.spec_draft_model)
        speculative.draft.n_max = asked.spec_draft_n_max
        speculative.draft.cpuparams.n_threads = asked.threads
        speculative.draft.cpuparams_batch.n_threads = asked.threads_batch
    speculative.ngram_simple.size_n = asked.spec_ngram_simple_size_n
    speculative.ngram_simple.size_m = asked.spec_ngram_simple_size_m
    return params


PROGRAMS = {"llama-bench": bench, "llama-server": serve}


def main() -> None:
    name, *words = sys.argv[1:] or [""]
    if name not in PROGRAMS:
        sys.exit(f"no such program: {name}; there are {', '.join(PROGRAMS)}")
    PROGRAMS[name](words)


if __name__ == "__main__":
    main()
