"""What a head gains by learning from the answers of its server: tokens a pass, with and without.

    python benchmarks/learning.py CHAIN [--prompts FILE] [--num-prompts-per-task N]
        [--max-new-tokens N] [--temperature T] [--record FILE]

Each question is answered by the chain as it is and by one that has learned from the answers to all
questions before it, in turns. What is learned is kept in a temporary folder.
"""

import random
import time
from argparse import Namespace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from command import PROMPT_OPTIONS, begin, load, options, run
from systems import prompts_of

from polybasic.deploy.runtime.request import Statistics
from polybasic.recipes.pipeline.learning import ChainLearner

SEED = 1
PARTS = 4
"""Of the questions, in the order in which they are asked."""


def rate(answer: Statistics) -> float:
    return answer.num_later / (answer.seconds - answer.prefill_seconds)


def tokens_a_pass(answers: list[Statistics]) -> float:
    passes = sum(next(iter(answer.forward_passes.values())) for answer in answers)
    return sum(answer.num_later for answer in answers) / passes


def row_of(name: str, pairs: list[tuple[Statistics, Statistics]]) -> list[str]:
    """Of the table; the ratio is the median of those of each answer."""
    without, learning = map(list, zip(*pairs, strict=True))
    before, after = tokens_a_pass(without), tokens_a_pass(learning)
    ratio = median(rate(own) / rate(other) for other, own in pairs)
    return [name, f"{before:.2f}", f"{after:.2f}", f"{after / before:.3f}", f"{ratio:.3f}"]


def main() -> None:
    names = ("chain", "--dtype", "--temperature", *PROMPT_OPTIONS)
    arguments = options(__doc__, *names, num_prompts_per_task=12).parse_args()
    report = begin(__file__, __doc__, arguments)
    given = {"max_new_tokens": arguments.max_new_tokens, "temperature": arguments.temperature}
    given |= {"seed": SEED} if arguments.temperature else {}
    with TemporaryDirectory() as folder:
        other, link = load(arguments), Path(folder) / "chain"
        link.symlink_to(arguments.chain.resolve())
        chain = load(Namespace(**vars(arguments) | {"chain": link}))
        learner = ChainLearner(chain)
        prompts = prompts_of(arguments, chain)
        random.Random(SEED).shuffle(prompts)
        pairs, seconds, taken = [], 0.0, []
        for prompt in prompts:
            own, without = chain.generate(prompt, **given), other.generate(prompt, **given)
            if own.text != without.text:
                raise AssertionError(f"another text of a head that has learned: {prompt!r}")
            pairs.append((without.statistics, own.statistics))
            begun = time.perf_counter()
            learner.add(prompt, own.token_ids)
            while learner.work():
                pass
            seconds += time.perf_counter() - begun
            taken.append(learner.progress.num_heads)
    columns = ["questions", "tokens/pass without", "learning", "ratio", "tokens/s, ratio"]
    size = -(-len(pairs) // PARTS)
    parts = [(first, pairs[first : first + size]) for first in range(0, len(pairs), size)]
    rows = [row_of(f"{first + 1} to {first + len(part)}", part) for first, part in parts]
    rows.append(row_of("all", pairs))
    title = (
        f"{len(pairs)} answers, {taken[-1]} heads taken, {seconds / len(pairs):.2f} s of learning "
        f"for each, all texts equal"
    )
    report.table(title, columns, rows)
    report.write(arguments.record)


if __name__ == "__main__":
    run(main)
