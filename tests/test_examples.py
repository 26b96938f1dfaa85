"""The example of three models: what it prints, and that its answers are the target's.

Answers are counted by their first three tokens, and Pearson's chi-square over these is tested at
significance 1e-4; cells that expect fewer than 10 answers are pooled into one. The seeds are fixed:
an example that is right fails with one set of them in 10,000.
"""

import re
import subprocess
import sys
from collections import Counter
from functools import reduce
from importlib import import_module
from itertools import product
from math import sqrt
from pathlib import Path
from random import Random
from statistics import NormalDist
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PATH = ROOT / "examples" / "three_models.py"
SOURCE = PATH.read_text("utf-8")
NUM_ANSWERS = 20_000
FEWER_ANSWERS = 5_000
"""Enough to notice what is wrong: chi-square is twice its bound, or more."""
SIGNIFICANCE = 1e-4
LEAST_EXPECTED = 10

WORDS = ("the", "cat", "mat", "sat", "on")
WRONG = {
    "a target that draws from all of its row after a rejection": (
        "draw(residual(p[before], q[before]), random)",
        "draw(p[before] if p is TARGET else residual(p[before], q[before]), random)",
    ),
    "an intermediate that does": (
        "draw(residual(p[before], q[before]), random)",
        "draw(p[before] if p is INTERMEDIATE else residual(p[before], q[before]), random)",
    ),
    "acceptance by the verifier's probability alone": (
        "min(1, p[before][token] / q[before][token])",
        "p[before][token] / 100",
    ),
    "a target that takes the block for the drafter's": (
        "verify(chain.target, chain.intermediate,",
        # without zeros, by which nothing can be divided
        "verify(chain.target, {word: Counter(DRAFTER[word]) + Counter(WORDS) for word in WORDS},",
    ),
    "tokens after the cut that are kept": (
        "    return [*block[:num_accepted], own]",
        "    return [*block[:num_accepted], own, *block[num_accepted + 1 :]]",
    ),
    "a block whose last token decides whether it is in it": (
        "    num_accepted, own = verify(chain.target,",
        "    block = block[: len(block) - (block[-1:] == ['on'])]\n"
        "    num_accepted, own = verify(chain.target,",
    ),
}
"""What would break the law: a piece of the example, and what it is replaced with."""

Model = dict[str, dict[str, int]]
Answers = Counter[tuple[str, ...]]
Law = dict[tuple[str, ...], float]


def load(old: str = "", new: str = "") -> Any:
    """The example, executed anew, with one piece of its text replaced."""
    assert SOURCE.count(old) == 1 or not old
    module = ModuleType("three_models")
    exec(compile(SOURCE.replace(old, new), PATH, "exec"), module.__dict__)
    return module


def count(example: Any, num_tokens: int, num_answers: int) -> Answers:
    """Answers of so many tokens, by the first three."""
    models = example.TARGET, example.INTERMEDIATE, example.DRAFTER
    chain = example.Chain(*models, Random(1))
    answers = (example.answer(chain, "the", num_tokens) for _ in range(num_answers))
    return Counter(tuple(answer[:3]) for answer in answers)


def law_of(target: Model) -> Law:
    """The exact probability of any three tokens after "the"."""
    return {
        (first, second, third): target["the"][first]
        * target[first][second]
        * target[second][third]
        / 100**3
        for first, second, third in product(target, repeat=3)
    }


def follow(answers: Answers, law: Law) -> bool:
    """Whether counted answers pass for draws from a law."""
    cells: dict[tuple[str, ...], list[float]] = {}
    for words, probability in law.items():
        if not probability and answers[words]:
            return False
        expected = probability * answers.total()
        cell = cells.setdefault(words if expected >= LEAST_EXPECTED else (), [0, 0])
        cell[0] += answers[words]
        cell[1] += expected
    assert cells[()][1] >= LEAST_EXPECTED
    chi_square = sum((counted - expected) ** 2 / expected for counted, expected in cells.values())
    return chi_square <= chi_square_bound(len(cells) - 1)


def chi_square_bound(freedom: int) -> float:
    """What chi-square exceeds with probability `SIGNIFICANCE` (Wilson and Hilferty, 1931)."""
    variance = 2 / (9 * freedom)
    return freedom * (1 - variance + NormalDist().inv_cdf(1 - SIGNIFICANCE) * sqrt(variance)) ** 3


def named(name: str) -> object:
    """What has a name such as `stages.Stage.resolve` in the runtime."""
    module, *rest = name.split(".")
    return reduce(getattr, rest, import_module(f"polybasic.deploy.runtime.rounds.{module}"))


def test_it_prints_what_the_readme_shows() -> None:
    done = subprocess.run([sys.executable, PATH], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    readme = (ROOT / "README.md").read_text("utf-8")
    assert f"`python examples/three_models.py`:\n\n```\n{done.stdout}```\n" in readme


def test_it_is_short() -> None:
    assert len(SOURCE.splitlines()) <= 150


def test_what_it_names_is_in_the_runtime() -> None:
    names = set(re.findall(r"`(\w+(?:\.\w+)+)`", SOURCE))
    assert len(names) >= 10
    assert all(callable(named(name)) for name in names)
    with pytest.raises(AttributeError, match="no_such"):
        named("stages.Stage.no_such")


def test_bound_of_chi_square() -> None:
    # of tables: 35.56 with 10 degrees of freedom, 82.06 with 40
    assert chi_square_bound(10) == pytest.approx(35.56, rel=0.015)
    assert chi_square_bound(40) == pytest.approx(82.06, rel=0.015)


@pytest.mark.parametrize(
    ("num_drafted", "block_length", "num_tokens"), [(3, 4, 6), (2, 2, 4), (1, 1, 3)]
)
def test_law_of_sampled_answers_is_the_targets(
    num_drafted: int, block_length: int, num_tokens: int
) -> None:
    example = load()
    example.NUM_DRAFTED, example.BLOCK_LENGTH = num_drafted, block_length
    answers = count(example, num_tokens, NUM_ANSWERS)
    assert follow(answers, law_of(example.TARGET))
    assert not follow(answers, law_of(example.INTERMEDIATE))


@pytest.mark.parametrize("name", WRONG)
def test_what_breaks_the_law_is_noticed(name: str) -> None:
    example = load(*WRONG[name])
    assert not follow(count(example, 4, FEWER_ANSWERS), law_of(example.TARGET))


def random_model(random: Random) -> Model:
    return {last: {word: random.randrange(100) for word in WORDS} for last in WORDS}


def num_unlike_the_target(example: Any) -> int:
    """How many greedy answers differ from what the target's best words are, of 200 chains."""
    num_unlike = 0
    for seed in range(200):
        random = Random(seed)
        example.NUM_DRAFTED, example.BLOCK_LENGTH = 1 + seed % 4, 1 + seed % 5
        target, *others = (random_model(random) for _ in range(3))
        expected = ["the"]
        for _ in range(12):
            row = target[expected[-1]]
            expected.append(max(row, key=row.__getitem__))
        chain = example.Chain(*map(example.greedy, (target, *others)), random)
        num_unlike += example.answer(chain, "the", 12) != expected[1:]
    return num_unlike


def test_greedy_answers_are_the_targets_whatever_the_others_are() -> None:
    assert num_unlike_the_target(load()) == 0
    without_cut = load("return [*block[:num_accepted], own]", "return [*block, own]")
    assert num_unlike_the_target(without_cut) > 100
