"""Answers of a model alone, many at a time: what a token of each takes, and how many come a second.

python benchmarks/sequences.py MODEL [--sequences 1 16 64] [--temperature 0.8]
"""

import time

from command import begin, device_of, options, positive, run
from measuring import Spread

from polybasic.chain.formats.checkpoints.models import resolve_model
from polybasic.deploy.runtime.answering import LoneTarget
from polybasic.deploy.runtime.rounds.warping import Sampling

PROMPT_TOKENS, NEW_TOKENS = 4, 64
TOP_P = 0.95
"""At temperatures above 0."""


def seconds_a_token(target: LoneTarget, temperature: float) -> float:
    """Of answers to as many prompts as the target takes at a time, prompts included."""
    top_p = TOP_P if temperature else None
    running = [
        target.begin(
            [*range(3, 2 + PROMPT_TOKENS), 3 + number],
            NEW_TOKENS,
            Sampling(temperature=temperature, top_p=top_p, seed=number),
        )
        for number in range(target.sequences)
    ]
    began = time.perf_counter()
    while not all(answer.is_over for answer in running):
        target.step()
    for answer in running:
        answer.close()
    return (time.perf_counter() - began) / NEW_TOKENS


def main() -> None:
    parser = options(__doc__, "--device", "--dtype", "--turns", "--temperature", turns=3)
    parser.add_argument("model", help="folder, hub id, GGUF file or package:NAME/FILE")
    parser.add_argument("--sequences", type=positive, nargs="+", default=(1, 16, 64))
    arguments = parser.parse_args()
    report, device = begin(__file__, __doc__, arguments), device_of(arguments)
    folder, rows = resolve_model(arguments.model), []
    for number in arguments.sequences:
        num_tokens = PROMPT_TOKENS + NEW_TOKENS
        target = LoneTarget(folder, folder, num_tokens, number, device, arguments.dtype)
        seconds_a_token(target, arguments.temperature)  # kernels are compiled, graphs captured
        turns = [seconds_a_token(target, arguments.temperature) for _ in range(arguments.turns)]
        spread = Spread.of_turns(turns)
        times = [f"{1e3 * each:.2f}" for each in (spread.min, spread.median, spread.max)]
        rows.append([str(number), *times, f"{number / spread.median:.0f}"])
    columns = ["sequences", "min", "median", "max", "tokens/s"]
    report.table("Milliseconds a token of each sequence", columns, rows)
    report.write(arguments.record)


if __name__ == "__main__":
    run(main)
