"""Passes of llama.cpp beside those of a chain's verifying members, by rows, in turns.

    make peers
    python benchmarks/peers.py CHAIN [--peers-python .venv-peers/bin/python] [--record FILE]

`polybasic bench --peers` times answers; this says which pass they are made of. llama.cpp's are
those of a loop like llama-bench, over the target as GGUF in bfloat16 and Q4_0, or over the file
where CHAIN is one in GGUF. It computes logits of the last row alone, where members compute those of
all rows.
"""

import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from command import begin, load, options, positive, run
from measuring import all_of, measure_bandwidth, progress
from passes import PassSettings, pass_cases

from polybasic.deploy.bench.peers.catalogue import DEFAULT_PYTHON, check_peers
from polybasic.deploy.bench.peers.process import run_worker
from polybasic.deploy.bench.peers.systems import write_gguf

ROWS, CONTEXT = (1, 4, 8, 12, 24), 256


def llama_seconds(
    python: Path, file: Path, numbers: Sequence[int], repeats: int
) -> dict[int, float]:
    """Median seconds of a pass by rows, after `CONTEXT` tokens."""
    threads = torch.get_num_threads()
    command = (
        *(python.absolute(), "-m", "workers.llama_program", "llama-bench", "--model", file),
        *("--n-prompt", ",".join(map(str, numbers)), "--n-gen", 0, "--n-depth", CONTEXT),
        *("--repetitions", repeats, "--threads", threads, "--output", "json"),
    )
    found = json.loads(run_worker(command, threads))
    return {result["n_prompt"]: statistics.median(result["samples_ns"]) / 1e9 for result in found}


def main() -> None:
    parser = options(__doc__, "chain", "--dtype", "--turns", "--repeats", turns=3)
    parser.add_argument("--rows", type=positive, nargs="+", default=ROWS)
    parser.add_argument("--peers-python", type=Path, default=DEFAULT_PYTHON)
    arguments = parser.parse_args()
    check_peers(["llama.cpp"], arguments.peers_python)
    report = begin(__file__, __doc__, arguments)
    chain, repeats = load(arguments), arguments.repeats
    bandwidth = measure_bandwidth(torch.device("cpu"))
    taken: dict[str, dict[int, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        file, kinds = arguments.chain, ("BF16", "Q4_0")
        is_gguf = file.suffix == ".gguf"
        files = {file.name: file.absolute()} if is_gguf else write_gguf(chain, kinds, Path(folder))
        for _ in progress("passes", arguments.turns):
            for rows in arguments.rows:
                settings = PassSettings((CONTEXT,), (rows,), (), repeats, turns=1)
                for cost in all_of(pass_cases(chain, settings, bandwidth)):
                    of_member = taken.setdefault(cost.member, {})
                    of_member.setdefault(rows, []).append(cost.seconds.median)
            for kind, file in files.items():
                found = llama_seconds(arguments.peers_python, file, arguments.rows, repeats)
                for rows, seconds in found.items():
                    taken.setdefault(f"llama.cpp {kind}", {}).setdefault(rows, []).append(seconds)
    cells = [
        [name, *(f"{1e3 * statistics.median(by_rows[rows]):.2f}" for rows in arguments.rows)]
        for name, by_rows in taken.items()
    ]
    columns = ["pass", *(f"{rows} rows" for rows in arguments.rows)]
    report.table(f"Milliseconds a pass after {CONTEXT} tokens", columns, cells)
    report.write(arguments.record)


if __name__ == "__main__":
    run(main)
