"""What copying from earlier answers is worth: tokens a second, with and without a history.

    python benchmarks/history.py CHAIN [--prompts FILE] [--num-prompts-per-task N] [--turns N]
        [--max-new-tokens N] [--temperature T] [--record FILE]

Every second question fills a history by its answer. The others are answered without it, with it,
and with one that holds their own answers, too, in turns.
"""

from collections import defaultdict
from copy import deepcopy
from statistics import median

from command import PROMPT_OPTIONS, begin, load, options, run
from systems import prompts_of

from polybasic import History
from polybasic.deploy.runtime.request import Statistics

SEED = 1


def row_of(name: str, answers: list[Statistics], without: list[Statistics]) -> list[str]:
    """Of the table; the ratio is the median of those of each answer."""
    rates = [answer.num_later / (answer.seconds - answer.prefill_seconds) for answer in answers]
    base = [answer.num_later / (answer.seconds - answer.prefill_seconds) for answer in without]
    ratios = [rate / other for rate, other in zip(rates, base, strict=True)]
    num_passes = sum(next(iter(answer.forward_passes.values())) for answer in answers)
    copied = sum(answer.accepted.get("history", 0) for answer in answers)
    num_tokens = sum(answer.num_later for answer in answers)
    return [
        name,
        f"{median(rates):.1f}",
        f"{median(ratios):.2f}",
        f"{num_tokens / num_passes:.2f}",
        f"{copied / num_tokens:.1%}",
    ]


def main() -> None:
    names = ("chain", "--dtype", "--turns", "--temperature", *PROMPT_OPTIONS)
    parser = options(__doc__, *names, turns=3, num_prompts_per_task=4)
    arguments = parser.parse_args()
    report = begin(__file__, __doc__, arguments)
    chain = load(arguments)
    prompts = prompts_of(arguments, chain)
    given = {"max_new_tokens": arguments.max_new_tokens, "temperature": arguments.temperature}
    given |= {"seed": SEED} if arguments.temperature else {}
    filled = History()
    for prompt in prompts[::2]:
        chain.generate(prompt, history=filled, **given)
    histories: dict[str, History | None] = {
        "without": None,
        "of other questions": filled,
        "of the same ones, too": deepcopy(filled),
    }
    for prompt in prompts[1::2]:
        chain.generate(prompt, history=histories["of the same ones, too"], **given)
    answers = defaultdict[str, list[Statistics]](list)
    for _ in range(arguments.turns):
        for prompt in prompts[1::2]:
            texts = set()
            for name, history in histories.items():
                answer = chain.generate(prompt, history=deepcopy(history), **given)
                answers[name].append(answer.statistics)
                texts.add(answer.text)
            if len(texts) > 1:
                raise AssertionError(f"other texts with a history: {texts}")
    columns = ["history", "tokens/s, median", "over without", "tokens/pass", "copied from it"]
    title = f"{len(prompts[1::2])} questions, a history of {len(filled):,} tokens"
    rows = [row_of(name, found, answers["without"]) for name, found in answers.items()]
    report.table(title, columns, rows)
    report.write(arguments.record)


if __name__ == "__main__":
    run(main)
