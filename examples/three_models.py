"""Speculative sampling with three models, over tables small enough to check by hand.

    python examples/three_models.py

The drafter proposes tokens and the intermediate verifies them. What it accepts, and what it draws
itself, collects in a verification block. The target verifies a full block, cuts it at the first
token that it rejects, and adds a token of its own. The answer has exactly the target's law.

Names in backticks are the runtime's, in polybasic.deploy.runtime.rounds. Its drafts are trees, down
which the intermediate draws from its own rows, and by default all models draw with the same noise
(`sampling.CoupledSampler`). Here a draft is a line, and draws are independent: the rule "token"
of `sampling.RandomSampler`.
"""

from bisect import bisect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, product
from math import prod, sqrt
from random import Random

Row = dict[str, int]  # next word -> its share
Model = dict[str, Row]  # last word -> row; all rows of a chain add up to the same, here to 100
WORDS = ("the", "cat", "mat", "sat", "on")
TABLES = {  # target, intermediate, drafter
    "the": ((0, 52, 38, 4, 6), (0, 45, 43, 8, 4), (0, 40, 45, 5, 10)),
    "cat": ((5, 0, 0, 52, 43), (4, 2, 0, 44, 50), (10, 0, 0, 60, 30)),
    "mat": ((10, 5, 0, 25, 60), (14, 0, 2, 34, 50), (30, 0, 0, 50, 20)),
    "sat": ((15, 0, 5, 0, 80), (25, 0, 3, 2, 70), (0, 10, 0, 0, 90)),
    "on": ((80, 5, 15, 0, 0), (70, 10, 20, 0, 0), (60, 20, 20, 0, 0)),
}
TARGET, INTERMEDIATE, DRAFTER = (
    {last: dict(zip(WORDS, rows[i], strict=True)) for last, rows in TABLES.items()}
    for i in range(3)
)
NUM_DRAFTED, BLOCK_LENGTH, NUM_ANSWERS = 3, 4, 20_000


@dataclass
class Chain:
    target: Model
    intermediate: Model
    drafter: Model
    random: Random
    tell: Callable[[str], None] = lambda line: None
    passes: Counter[str] = field(default_factory=Counter)  # verifying all of a draft is one pass


def draw(row: Row, random: Random) -> str:
    """A word, as likely as its share of the row: `sampling.RandomSampler.draw`."""
    ends = list(accumulate(row.values()))
    return list(row)[bisect(ends, random.random() * ends[-1])]


def sample(model: Model, last: str, num_tokens: int, random: Random) -> list[str]:
    """The next tokens by one model alone, a pass for each: a draft, as of `passes.draft`."""
    tokens = [last]
    for _ in range(num_tokens):
        tokens.append(draw(model[tokens[-1]], random))
    return tokens[1:]


def residual(p: Row, q: Row) -> Row:
    """Shares to draw by after a rejection: `verification.residual`."""
    return {word: max(p[word] - q[word], 0) for word in p}


def verify(p: Model, q: Model, last: str, tokens: list[str], random: Random) -> tuple[int, str]:
    """How many tokens of q are accepted by p, and p's own after them: `verification.cut`.

    A word is proposed and accepted with probability min(p, q), and the residual adds what p has
    beyond that. So what results is distributed as p, provided that the tokens were drawn from q.
    """
    for num_accepted, (before, token) in enumerate(pairwise([last, *tokens])):
        acceptance = min(1, p[before][token] / q[before][token])  # `verification.token_acceptance`
        if random.random() >= acceptance:
            return num_accepted, draw(residual(p[before], q[before]), random)
    return len(tokens), draw(p[[last, *tokens][-1]], random)  # the bonus token


def intermediate_round(chain: Chain, last: str, limit: int) -> list[str]:
    """One to `limit` tokens by the intermediate's law: a round of `stages.TreeStage`."""
    draft = sample(chain.drafter, last, min(NUM_DRAFTED, limit - 1), chain.random)
    num_accepted, own = verify(chain.intermediate, chain.drafter, last, draft, chain.random)
    chain.passes.update(intermediate=1, drafter=len(draft))
    chain.tell(f"  draft [{' '.join(draft)}]: intermediate {told(draft, num_accepted, own)}")
    return [*draft[:num_accepted], own]


def target_round(chain: Chain, last: str, limit: int) -> list[str]:
    """One to `limit` tokens by the target's law: a round of `stages.BlockStage`.

    Each token of the block follows the intermediate's law, whoever proposed it, so its q is the
    intermediate's row and the drafter's plays no part. What follows a rejected token is dropped,
    and all models go on from the target's own token: `stages.Stage.resolve`.
    """
    block: list[str] = []
    # whether the block goes on is decided before its next token is drawn: `stages.Stage.propose`
    while len(block) < min(BLOCK_LENGTH, limit - 1):
        block += intermediate_round(chain, [last, *block][-1], limit - 1 - len(block))
    num_accepted, own = verify(chain.target, chain.intermediate, last, block, chain.random)
    chain.passes.update(target=1)
    chain.tell(f"block [{' '.join(block)}]: target {told(block, num_accepted, own)}")
    return [*block[:num_accepted], own]


def told(tokens: list[str], num_accepted: int, own: str) -> str:
    if num_accepted == len(tokens):
        return f"accepts all, bonus token {own}"
    return f"accepts {num_accepted}, rejects {tokens[num_accepted]}, draws {own} from the residual"


def answer(chain: Chain, prompt: str, num_tokens: int) -> list[str]:
    tokens = [prompt]
    while limit := num_tokens + 1 - len(tokens):
        tokens += target_round(chain, tokens[-1], limit)
    return tokens[1:]


def greedy(model: Model) -> Model:
    """The best word of each row alone: only an equal token is kept (`sampling.GreedySampler`)."""
    best = {last: max(row, key=row.__getitem__) for last, row in model.items()}
    return {last: {word: int(word == best[last]) for word in WORDS} for last in model}


def main() -> None:
    chain = Chain(TARGET, INTERMEDIATE, DRAFTER, Random(1250), print)
    print("answer: the", *answer(chain, "the", 11))
    chain = Chain(greedy(TARGET), greedy(INTERMEDIATE), greedy(DRAFTER), Random(0))
    tokens = answer(chain, "the", 11)
    is_equal = tokens == sample(chain.target, "the", 11, Random(0))
    print("greedy: the", *tokens, f"| equal to the target's alone: {is_equal}")
    chain = Chain(TARGET, INTERMEDIATE, DRAFTER, Random(0))
    counts = Counter(tuple(answer(chain, "the", 11)[:3]) for _ in range(NUM_ANSWERS))
    passes = [f"{name} {n / NUM_ANSWERS / 11:.2f}" for name, n in sorted(chain.passes.items())]
    print("passes a token:", ", ".join(passes))
    law = {
        words: prod(TARGET[last][word] / 100 for last, word in pairwise(["the", *words]))
        for words in product(WORDS, repeat=3)
    }
    worst = max(law, key=lambda words: abs(counts[words] / NUM_ANSWERS - law[words]))
    exact, share = law[worst], counts[worst] / NUM_ANSWERS
    error = sqrt(exact * (1 - exact) / NUM_ANSWERS)
    found = f"{' '.join(worst)} begins {share:.2%}, by the target's law {exact:.2%}"
    print(f"largest difference over {NUM_ANSWERS} answers: {found}, standard error {error:.2%}")


if __name__ == "__main__":
    main()
