"""A process that runs the code of a checkout: answers one prompt for each line of stdin.

    python benchmarks/worker.py CHAIN --dtype bfloat16 --device cpu --code FOLDER

Of the code that it runs only what every checkout has is used, wherever it keeps its modules.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import torch

import polybasic
from polybasic import Chain, UserError, load_chain


def answer(
    chain: Chain, token_ids: list[int], max_new_tokens: int, sampling: Any, plan: Any
) -> dict[str, Any]:
    """One answer, as `answering.MeasuredAnswer` has it.

    The clock is read when tokens were handed over, for which the host has waited.
    """
    begin = time.perf_counter()
    stream = chain.stream_ids(token_ids, max_new_tokens, sampling, plan)
    first = next(stream)
    first_seconds = time.perf_counter() - begin
    tokens = [*first, *(token for batch in stream for token in batch)]
    seconds = time.perf_counter() - begin
    # other checkouts may keep them at the chain
    statistics = stream.statistics if hasattr(stream, "statistics") else chain.last_statistics
    return {
        "token_ids": tokens,
        "seconds": seconds,
        "first_seconds": first_seconds,
        "first_tokens": len(first),
        "target_passes": int(next(iter(statistics.forward_passes.values())))
        + getattr(statistics, "num_first", 0),
    }


def serve(chain: Chain, questions: TextIO, replies: TextIO) -> None:
    """Answer each line of `questions` with a line of `replies`.

    Raises:
        UserError: a plan that this checkout's code does not know.
    """
    for line in questions:
        asked = json.loads(line)
        try:
            plan = type(chain.plan).model_validate(asked["plan"])
        except ValueError as error:
            raise UserError(
                "unknown plan", json.dumps(asked["plan"]), "compare with plans that both know"
            ) from error
        sampling = type(chain.default_sampling)(**asked["sampling"])
        found = answer(chain, asked["token_ids"], asked["max_new_tokens"], sampling, plan)
        print(json.dumps(found), file=replies, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("chain", type=Path)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--code", type=Path, required=True, help="the checkout that must run")
    parser.add_argument("--threads", type=int)
    parsed = parser.parse_args(arguments)
    running = Path(polybasic.__file__).resolve().parent
    assert running == parsed.code, f"runs {running}, not {parsed.code}"
    # what anybody else prints must not be taken for a reply
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if parsed.threads is not None:
        torch.set_num_threads(parsed.threads)
    chain = load_chain(parsed.chain, device=parsed.device, dtype=parsed.dtype)
    print(json.dumps({"is_loaded": True}), file=replies, flush=True)
    serve(chain, sys.stdin, replies)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
