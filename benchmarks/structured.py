"""What it costs to hold answers to a JSON schema: masks, their use, and tokens a second.

    python benchmarks/structured.py CHAIN [--turns N] [--max-new-tokens N] [--record FILE]

The same questions are answered freely and under a schema, in turns. "masks" is the share of the
time after the first token that computing and using them takes.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any
from unittest.mock import patch

from command import begin, load, options, run

from polybasic.deploy.grammar import Grammar
from polybasic.deploy.request import Statistics
from polybasic.deploy.rounds.constraint import Constraint

TEXT = {"type": "string"}
PROPERTIES = {
    "name": TEXT,
    "age": {"type": "integer"},
    "city": TEXT,
    "hobbies": {"type": "array", "items": TEXT, "minItems": 3, "maxItems": 5},
    "summary": TEXT,
}
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
    """Seconds and rows of each use of masks in the block."""
    restrict, found = Constraint.restrict, list[tuple[float, int]]()

    def timed(self: Constraint, logits: Any, prefixes: Any, num_prompt_tokens: int) -> Any:
        began = time.perf_counter()
        rows = restrict(self, logits, prefixes, num_prompt_tokens)
        found.append((time.perf_counter() - began, len(rows)))
        return rows

    with patch.object(Constraint, "restrict", timed):
        yield found


def row_of(name: str, answers: list[Statistics], masks: list[tuple[float, int]]) -> list[str]:
    """Of the table, of all answers of one kind."""
    seconds = [one.seconds - one.prefill_seconds for one in answers]
    num_tokens = sum(one.num_later for one in answers)
    rates = [one.num_later / taken for one, taken in zip(answers, seconds, strict=True)]
    spent, num_rows = sum(taken for taken, _ in masks), sum(rows for _, rows in masks)
    num_passes = sum(next(iter(one.forward_passes.values())) for one in answers)
    return [
        name,
        f"{median(rates):.1f}",
        f"{num_tokens / num_passes:.2f}",
        f"{sum(one.stopped_by == 'stop' for one in answers)} of {len(answers)}",
        f"{1e6 * spent / num_rows:.0f}" if masks else "",
        f"{spent / sum(seconds):.1%}" if masks else "",
    ]


def main() -> None:
    parser = options(
        __doc__, "chain", "--dtype", "--turns", "--max-new-tokens", turns=3, max_new_tokens=160
    )
    arguments = parser.parse_args()
    report = begin(__file__, __doc__, arguments)
    chain = load(arguments)
    grammars = {"free": None, "JSON schema": Grammar.json_schema(SCHEMA)}
    answers: dict[str, list[Statistics]] = {name: [] for name in grammars}
    masks: dict[str, list[tuple[float, int]]] = {name: [] for name in grammars}
    for turn in range(arguments.turns + 1):
        for question in QUESTIONS:
            for name, grammar in grammars.items():
                with timed_masks() as spent:
                    answer = chain.generate(
                        question,
                        grammar=grammar,
                        temperature=0.0,
                        max_new_tokens=arguments.max_new_tokens,
                    )
                if turn:  # the first one compiles and reads what later ones have
                    answers[name].append(answer.statistics)
                    masks[name] += spent
    columns = ["answers", "tokens/s, median", "tokens/pass", "ended", "us a row", "masks"]
    title = f"Five questions, {chain.engine.models.vocab_size:,} tokens of vocabulary"
    report.table(title, columns, [row_of(name, answers[name], masks[name]) for name in grammars])
    report.write(arguments.record)


if __name__ == "__main__":
    run(main)
