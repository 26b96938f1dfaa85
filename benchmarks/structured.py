"""What it costs to hold answers to a JSON schema: masks, their use, and tokens a second.

    python benchmarks/structured.py CHAIN [--turns N] [--max-new-tokens N] [--record FILE]

The same questions are answered freely, under a schema, and under it without the drafts that it
foretells, in turns. "grammar" is the share of the time after the first token that masks, their use
and such drafts take. Then passes of the target over rows of an answer are run and masked.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from command import begin, load, options, run

from polybasic.deploy import Chain
from polybasic.deploy.runtime.grammar import Grammar
from polybasic.deploy.runtime.request import Statistics
from polybasic.deploy.runtime.rounds.constraint import Constraint
from polybasic.deploy.runtime.rounds.sampling import Prefixes

TEXT = {"type": "string"}
PROPERTIES = {
    "name": TEXT,
    "age": {"type": "integer"},
    "city": TEXT,
    "hobbies": {"type": "array", "items": TEXT, "minItems": 3, "maxItems": 5},
    "summary": TEXT,
}
ROWS = (1, 4, 16)
CONTEXT = 256
"""Tokens before the rows of a pass."""
SCHEMA = {
    "type": "object",
    "properties": PROPERTIES,
    "required": list(PROPERTIES),
    "additionalProperties": False,
}
QUESTIONS = [
    f"Write a JSON object about a fictional {who}: name, age, city, hobbies (a list), and a "
    "one-sentence summary. Answer with JSON only."
    for who in ("sailor", "baker", "astronaut", "librarian", "farmer")
]


@contextmanager
def timed_masks() -> Iterator[list[tuple[float, int]]]:
    """Seconds and masked rows of each use of a constraint in the block."""
    found = list[tuple[float, int]]()

    def timed(name: str) -> Callable[..., Any]:
        method = getattr(Constraint, name)

        def run(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = method(*arguments)
            num_rows = len(result) if name == "restrict" else 0
            found.append((time.perf_counter() - began, num_rows))
            return result

        return run

    names = ("foretold", "pruned", "restrict")
    with patch.multiple(Constraint, **{name: timed(name) for name in names}):
        yield found


def row_of(name: str, answers: list[Statistics], masks: list[tuple[float, int]]) -> list[str]:
    """Of the table, of all answers of one kind."""
    seconds = [answer.seconds - answer.prefill_seconds for answer in answers]
    num_tokens = sum(answer.num_later for answer in answers)
    rates = [answer.num_later / taken for answer, taken in zip(answers, seconds, strict=True)]
    spent, num_rows = sum(taken for taken, _ in masks), sum(rows for _, rows in masks)
    num_passes = sum(next(iter(answer.forward_passes.values())) for answer in answers)
    return [
        name,
        f"{median(rates):.1f}",
        f"{num_tokens / num_passes:.2f}",
        f"{sum(answer.stopped_by == 'stop' for answer in answers)} of {len(answers)}",
        f"{1e6 * spent / num_rows:.0f}" if masks else "",
        f"{spent / sum(seconds):.1%}" if masks else "",
    ]


def no_drafts(self: Constraint, tokens: list[int], max_tokens: int) -> list[int]:
    """In place of `Constraint.foretold`."""
    return []


@torch.inference_mode()
def rows_of_masks(chain: Chain, grammar: Grammar, answer: list[int]) -> Iterator[list[str]]:
    """Of the table, by the rows of a pass over parts of an answer, as far as it has as many."""
    verifier = next(iter(chain.engine.verifiers.values()))
    for num_rows in (count for count in ROWS if count + 1 < len(answer)):
        constraint = chain.vocabulary.constraint(grammar, overwrites=True)
        passes, masks = list[float](), list[float]()
        for place in [*range(1, len(answer) - num_rows)] * 2:
            rows = answer[place - 1 : place - 1 + num_rows]
            began = time.perf_counter()
            verifier.cache.truncate(0)
            verifier.cache.keep(range(CONTEXT))
            logits = verifier.logits(verifier.read(rows))
            passed = time.perf_counter()
            suffixes = [rows[1 : 1 + length] for length in range(num_rows)]
            constraint.restrict(logits, Prefixes(answer[:place], suffixes))
            passes.append(passed - began)
            masks.append(time.perf_counter() - passed)
        both = median(passes), median(masks)
        shown = [f"{1e3 * seconds:.2f}" for seconds in both]
        yield [str(num_rows), *shown, f"{both[1] / sum(both):.1%}"]


def main() -> None:
    parser = options(
        __doc__, "chain", "--dtype", "--turns", "--max-new-tokens", turns=3, max_new_tokens=160
    )
    arguments = parser.parse_args()
    report = begin(__file__, __doc__, arguments)
    chain = load(arguments)
    schema = Grammar.json_schema(SCHEMA)
    grammars = {"free": None, "JSON schema": schema, "without its drafts": schema}
    answers: dict[str, list[Statistics]] = {name: [] for name in grammars}
    masks: dict[str, list[tuple[float, int]]] = {name: [] for name in grammars}
    for turn in range(arguments.turns + 1):
        for question in QUESTIONS:
            for name, grammar in grammars.items():
                foretold = no_drafts if name == "without its drafts" else Constraint.foretold
                with patch.object(Constraint, "foretold", foretold), timed_masks() as spent:
                    answer = chain.generate(
                        question,
                        grammar=grammar,
                        temperature=0.0,
                        max_new_tokens=arguments.max_new_tokens,
                    )
                if turn:  # the first one compiles and reads what later ones have
                    answers[name].append(answer.statistics)
                    masks[name] += spent
    columns = ["answers", "tokens/s, median", "tokens/pass", "ended", "us a row", "grammar"]
    title = f"Five questions, {chain.engine.models.vocab_size:,} tokens of vocabulary"
    report.table(title, columns, [row_of(name, answers[name], masks[name]) for name in grammars])
    columns = ["rows", "pass, ms", "masks, ms", "share"]
    report.table("Masks by rows", columns, list(rows_of_masks(chain, schema, answer.token_ids)))
    report.write(arguments.record)


if __name__ == "__main__":
    run(main)
