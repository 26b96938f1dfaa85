"""Answers under masks: their law, exactly and by counting, is the target's under these masks."""

from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from polybasic.chain.errors import UserError
from polybasic.chain.formats.plan import Flush, Rule
from polybasic.deploy.rounds.constraint import Constraint
from polybasic.deploy.rounds.sampling import Prefixes, Probabilities
from polybasic.deploy.rounds.stages import HostStage, Stage
from tests.deploy.rounds.test_law import (
    CHAINS,
    COUPLED_ANSWERS,
    FEWER_ANSWERS,
    PROMPT,
    SAMPLING,
    SIGNIFICANCE,
    chain_of,
    p_values,
)
from tests.deploy.small_chains import VOCAB_SIZE, RememberedChain, RememberedVerifier
from tests.deploy.tables import (
    Case,
    EnumeratingSampler,
    Outcomes,
    TableVerifier,
    Wiring,
    output_law,
    target_row,
)


class Ascending:
    """Stands in for llguidance's matcher: no token is followed by its like, nor the last one of
    the vocabulary by others than 0 and 2.

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

    def is_error(self) -> bool:
        return False


def constraint() -> Constraint:
    return Constraint(Ascending(), frozenset(), VOCAB_SIZE)


@pytest.fixture(autouse=True)
def _answers_begin_with_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few tokens that are counted, none is drawn by a pass over the prompt alone."""
    monkeypatch.setattr(HostStage, "start", Stage.start)


@torch.inference_mode()
def exact_law() -> Any:
    """Probabilities [V * V * V] of the first three tokens under the masks."""
    from polybasic.chain.kernels.rows import consecutive_rows
    from polybasic.deploy.rounds.cache import KeyValueCache
    from polybasic.deploy.rounds.warping import warp
    from tests.deploy.small_chains import CPU

    decoder = chain_of(3).engine.models.target
    law = np.ones(1)
    for length in range(3):
        rows = []
        for tokens in np.ndindex((VOCAB_SIZE,) * length):
            sequence = [*PROMPT, *tokens]
            num_layers, num_tokens = decoder.config.num_layers, len(sequence)
            cache = KeyValueCache(decoder.config, num_layers, num_tokens, torch.float32, CPU)
            given = [consecutive_rows(0, num_tokens)]
            states = decoder.forward(torch.tensor(sequence), [cache.layers], given)
            prefixes, matcher = Prefixes(sequence, [[]]), Ascending()
            logits = decoder.logits(states[-1:])
            if matcher.try_consume_tokens(list(tokens)) == length:
                refused = [one for one in range(VOCAB_SIZE) if one not in matcher.allowed()]
                logits[:, refused] = float("-inf")
            rows.append(warp(logits, SAMPLING, prefixes, len(PROMPT))[0].tolist())
        law = (law[:, None] * np.array(rows, dtype=np.float64)).reshape(-1)
    return law / law.sum()


@torch.inference_mode()
def count(num_members: int, rule: Rule, num_answers: int) -> Any:
    """Answers [V * V * V] by their first three tokens."""
    remembered = RememberedChain(chain_of(num_members, rule))
    answers: Counter[tuple[int, ...]] = Counter()
    for seed in range(num_answers):
        sampler: Any = remembered.sampler(seed)
        sampler.constraint = constraint()
        answers[remembered.answer(sampler)] += 1
    counts = np.zeros((VOCAB_SIZE,) * 3, dtype=np.int64)
    for tokens, number in answers.items():
        counts[tokens] = number
    return counts.reshape(-1)


@pytest.mark.parametrize(("num_members", "rule"), CHAINS)
def test_law_of_answers_under_masks_is_the_targets(
    num_members: int, rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_answers = COUPLED_ANSWERS if rule == "coupled" else FEWER_ANSWERS
    law = exact_law()
    assert p_values(count(num_members, rule, num_answers), law) >= SIGNIFICANCE
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
        found = count(num_members, rule, num_answers)
    except UserError:  # the models below cannot go on with what it has drawn
        return
    assert p_values(found, law) < SIGNIFICANCE


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
        self.masks = Constraint(Ascending(case.vocab_size), frozenset(), case.vocab_size)

    def distributions(self, logits: Any, prefixes: Prefixes) -> Probabilities:
        if isinstance(logits, Bare):
            return Probabilities(np.asarray(logits))
        masked = self.masks.restrict(torch.zeros(logits.shape), prefixes, self.num_prompt_tokens)
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
    masked = Constraint(matcher, frozenset({4}), VOCAB_SIZE)
    suffixes = [[], [1], [1, 1], [1, 5], [2], [4]]
    found = masked.restrict(torch.zeros(6, VOCAB_SIZE), Prefixes([*PROMPT, 0], suffixes), 4)
    allowed = [row.isfinite().nonzero().flatten().tolist() for row in found]
    every = list(range(VOCAB_SIZE))
    assert allowed == [[1, 2, 3, 4, 5], [0, 2, 3, 4, 5], every, [0, 2], [0, 1, 3, 4, 5], every]
    assert matcher.num_masks == 4, "none after a refused token, and none after the end"
    # another sequence: from where it parts
    found = masked.restrict(torch.zeros(1, VOCAB_SIZE), Prefixes([*PROMPT, 3, 5], [[]]), 4)
    assert found[0].isfinite().nonzero().flatten().tolist() == [0, 2]
    assert matcher.tokens == [3, 5]
    with pytest.raises(UserError, match="no token of the chain's tokenizer spells"):
        masked.restrict(torch.zeros(1, VOCAB_SIZE), Prefixes([*PROMPT, 3, 3], [[]]), 4)
