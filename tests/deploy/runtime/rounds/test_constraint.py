"""Answers under masks: their law, exactly and by counting, is the target's under these masks."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.plan import Flush, Ngram, Rule, Tree
from polybasic.chain.kernels.drafts import DraftTree
from polybasic.deploy.runtime.drafters.interface import NoDrafter
from polybasic.deploy.runtime.drafters.ngram import NgramDrafter
from polybasic.deploy.runtime.rounds.constraint import GRAMMAR, Constraint
from polybasic.deploy.runtime.rounds.passes import alone, draft
from polybasic.deploy.runtime.rounds.sampling import Prefixes, Probabilities
from tests.deploy.outcomes import Outcomes
from tests.deploy.runtime.rounds.test_law import (
    CHAINS,
    COUPLED_ANSWERS,
    FEWER_ANSWERS,
    PROMPT,
    SIGNIFICANCE,
    chain_of,
    count,
    exact_law,
    p_values,
)
from tests.deploy.small_chains import VOCAB_SIZE, RememberedChain, RememberedVerifier
from tests.deploy.tables import (
    Case,
    EnumeratingSampler,
    TableVerifier,
    Wiring,
    output_law,
    target_row,
)

pytestmark = pytest.mark.usefixtures("answers_begin_with_a_round")


class Ascending:
    """Stands in for llguidance's matcher: no token is followed by its like, nor the last one of
    the vocabulary by others than 0 and 2, where it foretells 0 and 1.

    Attributes:
        num_masks: that were computed.
    """

    def __init__(self, vocab_size: int = VOCAB_SIZE) -> None:
        self.vocab_size = vocab_size
        self.tokens: list[int] = []
        self.num_masks = 0

    def allowed(self) -> list[int]:
        last = self.tokens[-1] if self.tokens else None
        free = [token for token in range(self.vocab_size) if token != last]
        return [token for token in free if token in (0, 2)] if last == self.vocab_size - 1 else free

    def try_consume_tokens(self, tokens: list[int]) -> int:
        for num, token in enumerate(tokens):
            if token not in self.allowed():
                return num
            self.tokens.append(token)
        return len(tokens)

    def rollback(self, num_tokens: int) -> bool:
        assert 0 < num_tokens <= len(self.tokens)
        del self.tokens[-num_tokens:]
        return True

    def unsafe_compute_mask_ptr(self, pointer: int, num_bytes: int) -> None:
        import ctypes

        self.num_masks += 1
        bits = sum(1 << token for token in self.allowed())
        ctypes.memmove(pointer, bits.to_bytes(num_bytes, "little"), num_bytes)

    def compute_ff_tokens(self) -> list[int]:
        return [0, 1] if self.tokens[-1:] == [self.vocab_size - 1] else []

    def is_error(self) -> bool:
        return False


def constraint() -> Constraint:
    return Constraint(Ascending(), frozenset(), VOCAB_SIZE, len(PROMPT))


@pytest.mark.parametrize(("num_members", "rule"), CHAINS)
def test_law_of_answers_under_masks_is_the_targets(
    num_members: int, rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_answers = COUPLED_ANSWERS if rule == "coupled" else FEWER_ANSWERS
    law, remembered = exact_law(restricted_rows), RememberedChain(chain_of(num_members, rule))
    assert p_values(count(remembered, num_answers, constraint), law) >= SIGNIFICANCE
    # a target that draws without them
    restrict, reading = Constraint.restrict, [""]
    read = RememberedVerifier._read
    monkeypatch.setattr(
        RememberedVerifier,
        "_read",
        lambda self, *given: (reading.append(self.name), read(self, *given))[1],
    )
    monkeypatch.setattr(
        Constraint,
        "restrict",
        lambda self, logits, *given: (
            logits if reading[-1] == "target" else restrict(self, logits, *given)
        ),
    )
    try:
        found = count(RememberedChain(chain_of(num_members, rule)), num_answers, constraint)
    except UserError:  # the models below cannot go on with what it has drawn
        return
    assert p_values(found, law) < SIGNIFICANCE


def restricted_rows(logits: torch.Tensor, prefixes: Prefixes) -> torch.Tensor:
    """Masked by a constraint that has seen no other sequence; as it is where none can follow."""
    tokens, matcher = prefixes.sequence[len(PROMPT) :], Ascending()
    if matcher.try_consume_tokens(tokens) < len(tokens):
        return logits
    refused = [token for token in range(VOCAB_SIZE) if token not in matcher.allowed()]
    return logits.index_fill(-1, torch.tensor(refused, dtype=torch.long), float("-inf"))


class Bare(np.ndarray[Any, Any]):
    """Rows that are not masked."""


class BareTarget(TableVerifier):
    """A target that draws without masks."""

    def logits(self, states: torch.Tensor) -> Any:
        return super().logits(states).view(Bare)


class Masked(EnumeratingSampler):
    """Draws from exact rows under masks."""

    def __init__(self, outcomes: Outcomes, case: Case) -> None:
        super().__init__(outcomes, case)
        self.masks = Constraint(
            Ascending(case.vocab_size), frozenset(), case.vocab_size, len(case.prompt)
        )

    def distributions(self, logits: Any, prefixes: Prefixes) -> Probabilities:
        if isinstance(logits, Bare):
            return Probabilities(np.asarray(logits))
        masked = self.masks.restrict(torch.zeros(logits.shape), prefixes)
        allowed = [row.isfinite().nonzero().flatten().tolist() for row in masked]
        pairs = zip(logits, allowed, strict=True)
        return Probabilities(np.array([restricted(*pair) for pair in pairs], dtype=object))


def restricted(row: Any, allowed: list[int]) -> list[Fraction]:
    """A row of probabilities under a mask; uniform where the row has none of these tokens."""
    total = sum(row[token] for token in allowed)
    return [
        (row[token] / total if total else Fraction(1, len(allowed)))
        if token in allowed
        else Fraction(0)
        for token in range(len(row))
    ]


def masked_law(case: Case) -> dict[tuple[int, ...], Fraction]:
    """Of the target alone, prefix by prefix."""
    law, prefixes = {}, [((), Fraction(1))]
    while prefixes:
        tokens, probability = prefixes.pop()
        if len(tokens) == case.num_tokens:
            law[tokens] = probability
            continue
        matcher = Ascending(case.vocab_size)
        assert matcher.try_consume_tokens(list(tokens)) == len(tokens)
        row = restricted(target_row(case, (*case.prompt, *tokens)), matcher.allowed())
        prefixes += [((*tokens, token), probability * p) for token, p in enumerate(row) if p > 0]
    return law


@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize(("lengths", "caches"), [((2,), None), ((2,), (0, 1)), ((2, 1), None)])
def test_law_under_masks_is_the_targets_exactly(
    rule: Rule, lengths: tuple[int, ...], caches: tuple[int, ...] | None
) -> None:
    flushes = tuple(Flush(length=length) for length in lengths)
    caches = caches or (0,) * (len(lengths) + 1)
    case = Case(flushes, 4, rule, seed=5, likeness=2, vocab_size=3, caches=caches)
    assert output_law(case, Wiring(sampler=Masked)) == masked_law(case)
    try:
        bare = output_law(case, Wiring(sampler=Masked, target=BareTarget))
    except UserError:  # the models below cannot go on with what it has drawn
        return
    assert bare != masked_law(case)


def test_rows_are_masked_by_what_stands_before_them() -> None:
    matcher = Ascending()
    masked = Constraint(matcher, frozenset({4}), VOCAB_SIZE, len(PROMPT))
    suffixes = [[], [1], [1, 1], [1, 5], [2], [4]]
    found = masked.restrict(torch.zeros(6, VOCAB_SIZE), Prefixes([*PROMPT, 0], suffixes))
    allowed = [row.isfinite().nonzero().flatten().tolist() for row in found]
    every = list(range(VOCAB_SIZE))
    assert allowed == [[1, 2, 3, 4, 5], [0, 2, 3, 4, 5], every, [0, 2], [0, 1, 3, 4, 5], every]
    assert matcher.num_masks == 4, "none after a refused token, and none after the end"
    # another sequence: from where it parts
    found = masked.restrict(torch.zeros(1, VOCAB_SIZE), Prefixes([*PROMPT, 3, 5], [[]]))
    assert found[0].isfinite().nonzero().flatten().tolist() == [0, 2]
    assert matcher.tokens == [3, 5]
    with pytest.raises(UserError, match="no token of the chain's tokenizer spells"):
        masked.restrict(torch.zeros(1, VOCAB_SIZE), Prefixes([*PROMPT, 3, 3], [[]]))


@pytest.mark.parametrize(
    ("prompt", "output", "drafted", "proposer"),
    [
        ([0, 1, 2, 2], [0, 1], [1, 2], "ngram"),  # a copy, up to a token that is refused
        ([0, 1, 1, 2], [0, 1], [1, 0, 2], "model"),  # of a copy nothing is left
        ([], [0, 1], [1, 0, 2], "model"),  # no copy, and a model drafts 1, too
        ([2, 5, 0, 1, 3], [2, 5], [5, 0, 1, 3], "ngram"),  # a copy begins as is foretold
        ([2, 5, 2, 0, 1], [2, 5], [5, 0, 1], GRAMMAR),  # it does not
        ([2, 5, 0, 3, 1], [4, 5], [5, 0, 1], GRAMMAR),  # no copy
    ],
)
def test_drafts_are_of_the_grammar(
    prompt: list[int], output: list[int], drafted: list[int], proposer: str
) -> None:
    class Model(NoDrafter):
        def draft(self, tokens: list[int], max_depth: int) -> DraftTree:
            return DraftTree([tokens[-1], 1, 0, 2], [-1, 0, 0, 2], "model")

    prompt = [4, 0, *prompt]
    given = Constraint(Ascending(), frozenset(), VOCAB_SIZE, len(prompt))
    settings, shape = Ngram(min_match=2, num_tokens=3), Tree(depth=1, top_k=1, rows=16)
    drafter = NgramDrafter(settings, shape, Model())
    tree = alone(draft(drafter, [*prompt, *output], 3, given))
    assert tree == DraftTree.of_path(drafted, "")
    assert tree.proposer == proposer
