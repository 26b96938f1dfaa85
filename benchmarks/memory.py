"""The memory that a chain takes, measured against what was stated before it was loaded.

    python benchmarks/memory.py CHAIN [--device cpu] [--contexts 512 2048]
        [--dtypes bfloat16 float32] [--kernels auto eager device] [--record FILE]

Each case loads the chain in a fresh process and answers a prompt that fills the context. Printed
are the bytes that stay (weights and caches) and the peak, stated and measured; the stated peak has
its margin, and a measured one beyond it is a failure (exit code 1).
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from command import ScriptReport, begin, device_of, in_a_process, load, options, positive, run

from polybasic.chain.base.errors import UserError
from polybasic.deploy.runtime.hardware import forget_peak, usage
from polybasic.deploy.runtime.rounds.sampling import Sampling

NUM_ANSWERED = 16
"""Tokens after a prompt that fills the context with them."""
SIZES = ("staying_bytes", "peak_bytes")


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """What is stated and measured of a chain; to be called once, in a fresh process."""
    device, context_tokens = device_of(arguments), arguments.measure
    forget_peak(device)
    before = usage(device)
    chain = load(arguments, context_tokens, beyond_declared=True)
    loaded = usage(device)
    vocab_size = chain.engine.models.target.config.vocab_size
    prompt = [place % (vocab_size - 1) for place in range(context_tokens - NUM_ANSWERED)]
    for _ in chain.stream_ids(prompt, NUM_ANSWERED, Sampling()):
        pass
    answered = usage(device)
    if before is None or loaded is None or answered is None:
        raise UserError("memory in use is not known", f"{device} of this system", "run it on Linux")
    sizes = (loaded.now - before.now, answered.peak - before.now)
    measured = dict(zip(SIZES, sizes, strict=True))
    return {"stated": chain.memory.to_json(), "measured": measured}


def report_memory(report: ScriptReport, cases: Sequence[Mapping[str, Any]]) -> None:
    """A row for each case."""
    rows = []
    for case in cases:
        stated, measured = case["stated"], case["measured"]
        row = [stated["kernels"], stated["dtype"], str(stated["context_tokens"])]
        for key in SIZES:
            row += [f"{size / 1e6:.1f}" for size in (stated[key], measured[key])]
            row.append(f"{measured[key] / stated[key]:.2f}")
        rows.append(row)
    columns = ["kernels", "dtype", "context", "staying", "measured", "ratio"]
    report.table("Megabytes", [*columns, "peak", "measured", "ratio"], rows)


def main() -> int:
    parser = options(__doc__, "chain", "--device", "--dtype")
    parser.add_argument("--contexts", type=positive, nargs="+", default=[512, 2048])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--kernels", nargs="+", default=["auto", "eager"])
    parser.add_argument("--measure", type=positive, help="a context; for the script itself")
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments)))
        return 0
    if min(arguments.contexts) <= NUM_ANSWERED:
        shortest, least = min(arguments.contexts), f"use more than {NUM_ANSWERED}"
        raise UserError("context out of range", f"--contexts {shortest}", least)
    report, cases = begin(__file__, __doc__, arguments), []
    for kernels, dtype, context in product(arguments.kernels, arguments.dtypes, arguments.contexts):
        environment = {} if kernels == "auto" else {"POLYBASIC_KERNELS": kernels}
        words = [*sys.argv[1:], "--dtype", dtype, "--measure", str(context)]
        cases.append(in_a_process(__file__, words, **environment))
    report_memory(report, cases)
    report.write(arguments.record)
    return int(any(case["measured"]["peak_bytes"] > case["stated"]["peak_bytes"] for case in cases))


if __name__ == "__main__":
    run(main)
