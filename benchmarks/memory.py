"""The memory that a chain takes, measured against what was stated before it was loaded.

    python benchmarks/memory.py CHAIN [--contexts 512 2048] [--dtypes bfloat16 float32]
        [--kernels auto eager device] [--threads N] [--json FILE]

Each case loads the chain in a fresh process and answers a prompt that fills the context. Printed
are the bytes that stay (weights and caches) and the peak, stated / measured; the stated peak has
its margin, and a measured one beyond it is a failure (exit code 1).
"""

import argparse
import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch
from record import console, header, print_header, write_record
from rich import box
from rich.table import Table

from polybasic.chain.errors import UserError
from polybasic.chain.readable import readable_bytes
from polybasic.deploy import load_chain
from polybasic.deploy.hardware import forget_peak, usage
from polybasic.deploy.load import device_named
from polybasic.deploy.rounds.sampling import Sampling

NUM_ANSWERED = 16
"""Tokens after a prompt that fills the context with them."""


def measure(folder: Path, dtype: str, context_tokens: int) -> dict[str, Any]:
    """What is stated and measured of a chain; to be called once, in a fresh process."""
    device = device_named()
    forget_peak(device)
    before = usage(device)
    chain = load_chain(folder, dtype=dtype, context_tokens=context_tokens, beyond_declared=True)
    loaded = usage(device)
    vocab_size = chain.engine.models.target.config.vocab_size
    prompt = [place % (vocab_size - 1) for place in range(context_tokens - NUM_ANSWERED)]
    list(chain.stream_ids(prompt, NUM_ANSWERED, Sampling()))
    answered = usage(device)
    if before is None or loaded is None or answered is None:
        raise UserError("memory in use is not known", f"{device} of this system", "run it on Linux")
    measured = {
        "staying_bytes": loaded.now - before.now,
        "peak_bytes": answered.peak - before.now,
    }
    return {"stated": chain.memory.to_json(), "measured": measured}


def in_a_fresh_process(arguments: argparse.Namespace, case: tuple[str, str, int]) -> dict[str, Any]:
    """`measure` with some kernels, dtype and context."""
    kernels, dtype, context_tokens = case
    command = [sys.executable, __file__, str(arguments.chain), "--measure", "--dtypes", dtype]
    command += ["--contexts", str(context_tokens), "--threads", str(torch.get_num_threads())]
    environment = os.environ | ({} if kernels == "auto" else {"POLYBASIC_KERNELS": kernels})
    done = subprocess.run(command, stdout=subprocess.PIPE, env=environment, text=True, check=True)
    content: dict[str, Any] = json.loads(done.stdout)
    return content


def print_cases(cases: list[dict[str, Any]]) -> None:
    """A row for each case: stated / measured."""
    table = Table(title="stated / measured", title_justify="left", box=box.SIMPLE)
    for column in ("kernels", "dtype", "context", "staying", "", "peak", ""):
        table.add_column(column, justify="left" if column == "kernels" else "right")
    for case in cases:
        stated, measured = case["stated"], case["measured"]
        row = [stated["kernels"], stated["dtype"], str(stated["context_tokens"])]
        for key in ("staying_bytes", "peak_bytes"):
            row.append(f"{readable_bytes(stated[key])} / {readable_bytes(measured[key])}")
            row.append(f"{measured[key] / stated[key]:.2f}x")
        table.add_row(*row)
    console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chain", type=Path)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--kernels", nargs="+", default=["auto", "eager"])
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    if arguments.measure:
        found = measure(arguments.chain, arguments.dtypes[0], arguments.contexts[0])
        print(json.dumps(found))
        return
    head = header("memory", device_named(), {arguments.chain: "CHAIN", arguments.json: "FILE"})
    print_header(head)
    grid = product(arguments.kernels, arguments.dtypes, arguments.contexts)
    cases = [in_a_fresh_process(arguments, case) for case in grid]
    print_cases(cases)
    write_record(arguments.json, head, {"cases": cases})
    over = [one for one in cases if one["measured"]["peak_bytes"] > one["stated"]["peak_bytes"]]
    sys.exit(1 if over else 0)


if __name__ == "__main__":
    main()
