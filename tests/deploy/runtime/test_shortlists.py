"""Models below the target leave rare tokens out: answers stay the target's own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polybasic.chain.formats.plan import BigLittle, Flush, Plan, Tree
from polybasic.chain.kernels.shortlist import UNIT_TOKENS
from polybasic.deploy import Chain, load_chain
from polybasic.deploy.runtime.request import Request
from polybasic.deploy.runtime.rounds.constraint import Constraint
from polybasic.deploy.runtime.rounds.sampling import Prefixes, Sampling
from polybasic.deploy.runtime.rounds.verifier import Verifier, logits_together, read_together
from tests.deploy.noisy_chain import write_noisy_chain

PROMPT = [3, 5, 2 * UNIT_TOKENS + 1, 7]
TREE = Tree(depth=3, top_k=2, rows=6)
MEMBERS = ("target", "near", "copy")
PLANS = [
    Plan(members=members, tree=TREE, flush={"target": Flush(length=5)})
    for members in (
        ("target",),
        ("target", "near"),
        ("target", "copy"),
        ("target", "head"),
        MEMBERS,
    )
]


@pytest.fixture
def chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Chain:
    """Of 320 tokens in five units, of which two count as frequent."""
    monkeypatch.setattr("polybasic.chain.kernels.shortlist._LEAST_VOCABULARY", 1)
    folder = write_noisy_chain(tmp_path, vocab_size=5 * UNIT_TOKENS)
    return load_chain(folder, dtype="bfloat16", context_tokens=100)


def answer(chain: Chain, plan: Plan, sampling: Sampling) -> list[int]:
    return [token for piece in chain.stream_ids(PROMPT, 40, sampling, plan) for token in piece]


@pytest.mark.processor
@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(2.0, seed=4)])
def test_answers_are_those_of_the_target_alone(chain: Chain, sampling: Sampling) -> None:
    alone, *others = (answer(chain, plan, sampling) for plan in PLANS)
    assert all(other == alone for other in others)
    rare = [token for token in alone if token >= 3 * UNIT_TOKENS]
    assert rare, "the target has tokens that the others must have left out"


def units_of(verifier: Verifier) -> list[int]:
    assert verifier.shortlist is not None
    return verifier.shortlist.units.nonzero()[0].tolist()


def test_what_was_read_is_listed_for_its_own_sequence(chain: Chain) -> None:
    whole = chain.engine.verifiers["near"]
    one, other = whole.seeing(None, None, [200]), whole.seeing(None, None, [])
    assert (units_of(one), units_of(other)) == ([0, 1, 3], [0, 1])
    states = one.read([1, 319])
    assert units_of(one) == [0, 1, 3, 4]
    assert chain.engine.verifiers["target"].seeing(None, None, [1]).shortlist is None
    expected = whole.logits(states)
    first, second, third = logits_together([one, other, whole], [states] * 3, [0, 1, 0])
    assert first is not None
    assert second is not None
    for found, wanted, units in ((first, expected, [2]), (second, expected[1:], [2, 3, 4])):
        parts = zip(found.split(UNIT_TOKENS, 1), wanted.split(UNIT_TOKENS, 1), strict=True)
        for unit, (part, right) in enumerate(parts):
            assert torch.isneginf(part).all() if unit in units else torch.equal(part, right)
    assert torch.equal(third, expected)
    read_together([other], [[2 * UNIT_TOKENS]])
    assert units_of(other) == [0, 1, 2]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Verifier, Any]]:
    """Verifiers of requests for the little model, and what these name."""
    told, real = [], Verifier.seeing

    def seeing(self: Verifier, window: Any, layers: Any = None, seen: Any = None) -> Verifier:
        made = real(self, window, layers, seen)
        if made.name == "near":
            told.append((made, seen))
        return made

    monkeypatch.setattr(Verifier, "seeing", seeing)
    return told


def run(chain: Chain, plan: Plan, **of_request: Any) -> None:
    request = Request(PROMPT, 2, Sampling(0.0), chain.stop_tokens, plan, **of_request)
    assert sum(map(len, chain.engine.run(request))) == 2


def test_a_request_lists_what_it_names_and_its_prompt_though_it_was_read_before(
    chain: Chain, told: list[tuple[Verifier, Any]]
) -> None:
    # an id that no token has, as some checkpoints name it, ends no answer
    given: dict[str, Any] = {"logit_bias": {311: 2.0}, "stop_token_ids": [10**6]}
    chain.generate(PROMPT, members=MEMBERS, max_new_tokens=2, **given)
    run(chain, PLANS[1], reuses=True)
    run(chain, PLANS[1], reuses=True)
    (_, named), *_, (again, _) = told
    assert set(named) == {311, *chain.stop_tokens}
    assert again.num_rows < len(PROMPT)
    assert PROMPT[2] // UNIT_TOKENS in units_of(again)


class Everything(Constraint):
    """Of a grammar that any text matches."""

    def __init__(self) -> None:
        super().__init__(None, frozenset(), 5 * UNIT_TOKENS)

    def restrict(self, logits: Tensor, prefixes: Prefixes) -> Tensor:
        return logits


def test_a_constraint_and_a_lossy_rule_see_all_tokens(
    chain: Chain, told: list[tuple[Verifier, Any]]
) -> None:
    lossy = BigLittle(fallback_threshold=0.1, rollback_threshold=3.0)
    run(chain, PLANS[1], constraint=Everything())
    run(chain, PLANS[1].model_copy(update={"lossy": lossy}))
    assert [verifier.shortlist for verifier, _ in told] == [None, None]
