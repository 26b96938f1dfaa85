"""OpenVINO GenAI's pipeline: python -m workers.openvino_pipeline FOLDER --threads 2.

It computes in bfloat16 where it is asked to and the processor has it, else in float32. Prefixes are
not cached.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

from .lines import Lines, PeerQuestion, PeerReply

NAMES = {"bf16": "bfloat16", "f32": "float32"}


class Pipeline:
    """A model as optimum-intel exports it.

    Args:
        precision: "bf16" or "f32".
        lookup: tokens that prompt lookup drafts; 0 for none.
        ngram: most tokens that it looks for.
        draft: folder of a draft model.
        num_drafted: tokens that it drafts.
    """

    def __init__(
        self,
        folder: Path,
        threads: int,
        context: int,
        precision: str,
        lookup: int = 0,
        ngram: int = 2,
        draft: Path | None = None,
        num_drafted: int = 4,
    ) -> None:
        import openvino
        import openvino_genai as genai

        can = set(openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"))
        if os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() == "AVX2":
            can.discard("BF16")  # the processor has it, and the library is kept from it
        cache = "f16" if precision == "bf16" and "BF16" not in can else precision
        precision = precision if precision != "bf16" or "BF16" in can else "f32"
        self._genai, self._tensor = genai, openvino.Tensor
        self.dtype = NAMES[precision]
        self.version = f"OpenVINO GenAI {genai.__version__} ({', '.join(sorted(can))})"
        properties = {
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": cache,
        }
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = context
        self._options: dict[str, int] = {}
        more: dict[str, Any] = {}
        if lookup:
            more["prompt_lookup"] = True
            self._options = {"num_assistant_tokens": lookup, "max_ngram_size": ngram}
        elif draft is not None:
            more["draft_model"] = genai.draft_model(str(draft), "CPU", **properties)
            self._options = {"num_assistant_tokens": num_drafted}
        self._pipeline = genai.LLMPipeline(
            str(folder), "CPU", scheduler_config=scheduler, **properties, **more
        )

    def answer(self, question: PeerQuestion) -> PeerReply:
        import numpy as np

        config = self._genai.GenerationConfig()
        config.max_new_tokens = question.max_new_tokens
        config.stop_token_ids = set(question.stop)
        config.apply_chat_template = False
        config.do_sample = question.temperature > 0
        if config.do_sample:
            config.temperature = question.temperature
            config.top_k = 2**31 - 1
            config.top_p = 1.0
            if question.seed is not None:
                config.rng_seed = question.seed
        for name, value in self._options.items():
            setattr(config, name, value)
        ids = np.array([question.prompt], dtype=np.int64)
        inputs = self._genai.TokenizedInputs(self._tensor(ids), self._tensor(np.ones_like(ids)))
        begin = time.perf_counter()
        result = self._pipeline.generate(inputs, config)
        seconds = time.perf_counter() - begin
        token_ids = list(result.tokens[0])
        first_seconds = result.perf_metrics.get_ttft().mean / 1e3
        num_first = result.perf_metrics.raw_metrics.m_batch_sizes[0]
        return PeerReply(
            token_ids, seconds, min(num_first, len(token_ids)), min(first_seconds, seconds)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--context", type=int, required=True, help="tokens")
    parser.add_argument("--precision", choices=NAMES, default="bf16")
    parser.add_argument("--lookup", type=int, default=0, help="tokens that prompt lookup drafts")
    parser.add_argument("--ngram", type=int, default=2, help="most tokens that it looks for")
    parser.add_argument("--draft", type=Path, help="folder of a draft model")
    parser.add_argument("--num-drafted", type=int, default=4, help="tokens of --draft")
    arguments = vars(parser.parse_args())
    lines = Lines()
    lines.serve(Pipeline(arguments.pop("folder"), **arguments))


if __name__ == "__main__":
    main()
