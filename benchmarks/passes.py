"""What one pass of each member of a chain costs, by rows, and what a draft costs, by shape.

    python benchmarks/passes.py CHAIN [--context 256] [--dtype bfloat16] [--json FILE]

Prints medians in milliseconds with minimum and maximum. Members take turns, row count by row
count, so that a drift of the machine hits all alike.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from polybasic.chain.eagle import EagleHead
from polybasic.chain.files import write_json
from polybasic.chain.manifest import Tree
from polybasic.deploy import Chain, load_chain
from polybasic.deploy.eagle_drafter import EagleDrafter
from polybasic.deploy.hardware import describe_hardware

ROWS = (1, 2, 4, 8, 12, 16, 24, 32)
SHAPES = ((1, 4), (2, 4), (5, 4), (7, 2), (7, 4), (7, 8), (10, 4))


def timed(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each run, in turns; the first three turns warm up."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 3):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn >= 3:
                taken[name].append(1e3 * (time.perf_counter() - begin))
    return taken


def member_pass(chain: Chain, name: str, context: int, rows: int) -> Callable[[], object]:
    """A pass of `rows` tokens behind `context` ones, logits included."""
    verifier = chain.engine.verifiers[name]
    tokens = torch.randint(0, verifier.decoder.config.vocab_size, (rows,)).tolist()

    def run() -> object:
        verifier.cache.length = context
        states = verifier.read(tokens)
        return verifier.logits(states).argmax(-1).tolist()

    return run


def draft(chain: Chain, depth: int, top_k: int, context: int) -> Callable[[], object]:
    """A whole draft behind `context` tokens, four of them new."""
    (head, *_) = (
        model for model in chain.engine.models.drafters.values() if isinstance(model, EagleHead)
    )
    tree = Tree(depth=depth, top_k=top_k, rows=2)
    drafter = EagleDrafter(head, tree, context + 200)
    tokens = torch.randint(0, head.config.vocab_size, (context + 1,)).tolist()
    width = chain.engine.models.target.states_width
    states = torch.randn(context, width).to(head.device, head.dtype)
    drafter.observe(states)
    drafter.draft(tokens, depth)

    def run() -> object:
        drafter.rewind(context - 3)
        drafter.observe(states[context - 3 : context])
        return drafter.draft(tokens, depth)

    return run


def summary(milliseconds: list[float]) -> dict[str, float]:
    return {
        "median": statistics.median(milliseconds),
        "min": min(milliseconds),
        "max": max(milliseconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chain", type=Path)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    chain = load_chain(arguments.chain, dtype=arguments.dtype)
    target = chain.engine.models.target
    record: dict[str, object] = {
        "hardware": describe_hardware(target.device),
        "torch": torch.__version__,
        "context": arguments.context,
        "dtype": arguments.dtype,
    }
    print(f"{record['hardware']}\ntorch {torch.__version__}, context {arguments.context}")
    with torch.inference_mode():
        passes: dict[str, dict[str, float]] = {}
        for rows in ROWS:
            runs = {
                name: member_pass(chain, name, arguments.context, rows)
                for name in chain.engine.verifiers
            }
            for name, taken in timed(runs, arguments.repeats).items():
                passes[f"{name} {rows} rows"] = summary(taken)
        shapes = {
            f"draft depth {depth} top {top_k}": draft(chain, depth, top_k, arguments.context)
            for depth, top_k in SHAPES
        }
        for name, taken in timed(shapes, arguments.repeats).items():
            passes[name] = summary(taken)
    for name, one in passes.items():
        print(f"{name:28s} {one['median']:7.3f} ms  ({one['min']:.3f} to {one['max']:.3f})")
    if arguments.json:
        write_json(arguments.json, record | {"milliseconds": passes})


if __name__ == "__main__":
    main()
