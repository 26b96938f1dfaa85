"""Every step against hand-worked values and against transformers' own processors."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from polybasic.chain.base.errors import UserError
from polybasic.deploy.runtime.rounds.warping import (
    Prefixes,
    Sampling,
    Warping,
    process_logits,
    truncate,
    warp,
)


def warped(logits: Tensor, sampling: Sampling) -> Tensor:
    return warp(logits, sampling, Prefixes([], [[]] * len(logits)), 0)


def processed(logits: list[float], prefixes: Prefixes, num_prompt: int, **settings: Any) -> Any:
    rows = torch.tensor([logits]).repeat(len(prefixes.suffixes), 1)
    return process_logits(rows, Sampling(**settings), prefixes, num_prompt)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [None, 0, 1, 5, 70, 500])
@pytest.mark.parametrize("top_p", [None, 0.2, 0.9, 1.0])
@pytest.mark.parametrize("min_p", [None, 0.0, 0.1, 1.0])
def test_warping_is_transformers(
    temperature: float, top_k: int | None, top_p: float | None, min_p: float | None
) -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 100) * 3
    warpers: list[Any] = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p is not None and top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p is not None else []
    expected = LogitsProcessorList(warpers)(None, logits)
    found = warped(logits, Sampling(temperature, top_k, top_p, min_p))
    assert torch.allclose(found, expected.softmax(-1), atol=1e-6)
    assert ((found > 0) == (expected > float("-inf"))).all()


def test_top_k_keeps_what_ties_with_its_last() -> None:
    found = warped(torch.tensor([[0.0, 2.0, 1.0, 1.0]]), Sampling(1.0, top_k=2))
    assert (found > 0).tolist() == [[False, True, True, True]]


# The same bits in any company


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def num_rows_that_depend_on_others(num_rows: int, vocab_size: int) -> int:
    """Of a tree's rows, each also alone, as a row of a tree and as the end of a longer sequence."""
    generator = torch.Generator().manual_seed(num_rows)
    logits = 3 * torch.randn(num_rows, vocab_size, generator=generator)
    sequence, later = range(20), list(range(10, 60, 7))
    prefixes = Prefixes(list(sequence), [later[: row % 8] for row in range(num_rows)])
    sampling = Sampling(
        0.9, top_k=vocab_size // 8, top_p=0.95, min_p=0.002, repetition_penalty=1.2,
        presence_penalty=0.3, frequency_penalty=0.2, logit_bias={3: 1.5},
    )  # fmt: skip
    together = truncate(logits, sampling, prefixes, 5)
    assert 0.005 < together.isfinite().float().mean() < 0.12
    differing = 0
    for row in range(0, num_rows, 5):
        suffix = prefixes.suffixes[row]
        own = logits[row : row + 1].clone()
        for alone in (Prefixes([*sequence], [suffix]), Prefixes([*sequence, *suffix], [[]])):
            differing += not truncate(own, sampling, alone, 5)[0].equal(together[row])
    return differing


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(2, 4096), (64, 4096), (7, 50000)])
def test_a_row_has_the_same_bits_in_any_company(num_rows: int, vocab_size: int) -> None:
    assert num_rows_that_depend_on_others(num_rows, vocab_size) == 0


def test_a_row_that_depends_on_others_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "amax", lambda rows, *_, **__: rows.max())
    assert num_rows_that_depend_on_others(64, 4096) > 0


def test_warpings_of_equal_parts_differ_in_values_alone() -> None:
    few, more = Sampling(temperature=1, top_k=5), Sampling(temperature=2, top_k=8, top_p=1.0)
    assert Warping.of(few) == Warping.of(more) == Warping(max_top_k=8)
    assert Warping.values_of(few) == [1, 5, 0, 0]
    assert Warping.of(few) != Warping.of(Sampling(temperature=1, top_k=9))
    assert Warping.of(Sampling(temperature=1, top_k=0, min_p=0.0)) == Warping()
    assert Warping.of(Sampling(temperature=1, top_k=1)).max_top_k == 1


@pytest.mark.parametrize("penalty", [0.7, 1.3])
def test_bias_and_repetition_are_transformers_and_come_in_its_order(penalty: float) -> None:
    torch.manual_seed(1)
    logits, ids = torch.randn(4, 30) * 3, torch.randint(30, (4, 12))
    bias = {3: 2.5, 29: -4.0, int(ids[0, 0]): 6.0}
    before = LogitsProcessorList(
        [
            SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()}),
            RepetitionPenaltyLogitsProcessor(penalty),
            TemperatureLogitsWarper(0.8),
            TopKLogitsWarper(7),
        ]
    )
    sampling = Sampling(0.8, top_k=7, repetition_penalty=penalty, logit_bias=bias)
    found = warp(logits, sampling, Prefixes([], ids.tolist()), 5)
    assert torch.allclose(found, before(ids, logits).softmax(-1), atol=1e-6)
    turned = Sampling(repetition_penalty=penalty)
    swapped = process_logits(logits, turned, Prefixes([], ids.tolist()), 5)
    biased = SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})
    assert not torch.allclose((biased(ids, swapped) / 0.8).softmax(-1), found, atol=1e-3)


def test_repetition_penalty_by_hand() -> None:
    """Prompt and output, once whatever the count; positive logits divided, negative multiplied."""
    prefixes = Prefixes([0, 1, 1], [[], [2]])
    found = processed([4.0, -4.0, 3.0, 2.0, 0.0], prefixes, 1, repetition_penalty=2)
    assert found.tolist() == [[2.0, -8.0, 3.0, 2.0, 0.0], [2.0, -8.0, 1.5, 2.0, 0.0]]


def test_presence_and_frequency_by_hand() -> None:
    """The output only, by vLLM's formula: logit - frequency x count - presence x (count > 0)."""
    prefixes = Prefixes([0, 1, 1], [[], [1, 2]])
    found = processed([4.0, 4.0, 4.0], prefixes, 2, frequency_penalty=0.5)
    assert found.tolist() == [[4.0, 3.5, 4.0], [4.0, 3.0, 3.5]]
    found = processed([4.0, 4.0, 4.0], prefixes, 2, presence_penalty=0.5)
    assert found.tolist() == [[4.0, 3.5, 4.0], [4.0, 3.5, 3.5]]
    found = processed([4.0] * 3, prefixes, 2, presence_penalty=-1, frequency_penalty=2)
    assert found.tolist() == [[4.0, 3.0, 4.0], [4.0, 1.0, 3.0]]
    assert processed([4.0], Prefixes([0], [[]]), 1, presence_penalty=1).tolist() == [[4.0]]


def test_all_steps_together_by_hand() -> None:
    """(1 + 3) / 2 - 0.25 x 2 - 0.5 = 1 for token 0, then the truncations."""
    sampling = Sampling(
        temperature=0.5,
        repetition_penalty=2,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={0: 3},
        min_p=math.exp(-1.9),
    )
    prefixes = Prefixes([0, 0, 0], [[]])
    logits = torch.tensor([[1.0, 0.1, 0.0]])
    assert process_logits(logits, sampling, prefixes, 1)[0].tolist() == pytest.approx([1, 0.1, 0])
    expected = torch.tensor([2.0, 0.2]).softmax(0).tolist()
    assert warp(logits, sampling, prefixes, 1)[0].tolist() == pytest.approx([*expected, 0.0])


def test_each_row_of_a_tree_has_its_own_prefix() -> None:
    settings: dict[str, Any] = {"frequency_penalty": 0.5, "repetition_penalty": 1.3}
    torch.manual_seed(2)
    logits = torch.randn(3, 12) * 3
    suffixes = [[], [5], [5, 5, 9]]
    found = process_logits(logits, Sampling(**settings), Prefixes([1, 2, 5], suffixes), 2)
    for row, suffix in enumerate(suffixes):
        alone = Prefixes([1, 2, 5, *suffix], [[]])
        expected = process_logits(logits[row : row + 1], Sampling(**settings), alone, 2)
        assert torch.equal(found[row : row + 1], expected)
        other = process_logits(logits[row : row + 1], Sampling(**settings), Prefixes([1], [[]]), 1)
        assert not torch.equal(found[row : row + 1], other)


def test_nothing_is_counted_or_copied_where_nothing_is_set(monkeypatch: Any) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr("polybasic.deploy.runtime.rounds.warping._count", fail)
    logits = torch.randn(2, 5).bfloat16()
    prefixes = Prefixes([1], [[], [2]])
    assert process_logits(logits, Sampling(0.5, top_k=2), prefixes, 1) is logits
    with pytest.raises(AssertionError):
        process_logits(logits, Sampling(presence_penalty=1), prefixes, 1)


def test_logits_of_the_caller_stay_as_they_are() -> None:
    logits = torch.randn(1, 5)
    before = logits.clone()
    sampling = Sampling(1.0, None, None, 0.1, 2.0, 1.0, 1.0, {1: 5.0})
    warp(logits, sampling, Prefixes([1, 2], [[3]]), 1)
    assert torch.equal(logits, before)


def test_equal_probabilities_are_cut_to_the_mass_and_no_further() -> None:
    found = warped(torch.zeros(1, 4), Sampling(1.0, top_p=0.5))
    assert sorted(found[0].tolist()) == [0.0, 0.0, 0.5, 0.5]


@pytest.mark.parametrize(
    "extreme",
    [
        Sampling(1e-6, repetition_penalty=0.01, logit_bias={0: 100.0}),
        Sampling(1e30, top_p=1e-9),
        Sampling(1e-6, min_p=1.0, repetition_penalty=100),
    ],
)
def test_bounds_keep_probabilities_finite(extreme: Sampling) -> None:
    found = warp(torch.randn(2, 50) * 1e4, extreme, Prefixes([0, 1], [[], [2]]), 1)
    assert torch.allclose(found.sum(-1), torch.ones(2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1}, "temperature=-1; use 0 for greedy, or 1e-06 to 1e+30"),
        ({"temperature": 1e-7}, "temperature=1e-07; use 0"),
        ({"temperature": math.nan}, "temperature=nan; use 0"),
        ({"temperature": math.inf}, "temperature=inf; use 0"),
        ({"temperature": "hot"}, "temperature=hot; use 0"),
        ({"top_k": -1}, "top_k=-1; use 1 or more, or 0 for all"),
        ({"top_k": 2.5}, "top_k=2.5; use 1 or more"),
        ({"top_k": True}, "top_k=True; use 1 or more"),
        ({"top_p": 0}, "top_p=0; use 1e-30 to 1"),
        ({"top_p": 1.5}, "top_p=1.5; use 1e-30 to 1"),
        ({"min_p": -0.1}, "min_p=-0.1; use 0 to 1"),
        ({"min_p": 2}, "min_p=2; use 0 to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty=0; use 0.01 to 100; 1 is off"),
        ({"presence_penalty": 2.1}, "presence_penalty=2.1; use -2 to 2"),
        ({"frequency_penalty": -3}, "frequency_penalty=-3; use -2 to 2"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias of -1; name tokens by id, from 0"),
        ({"logit_bias": {"7": 1.0}}, "logit_bias of '7'; name tokens by id"),
        ({"logit_bias": {7: 101}}, "logit_bias of token 7 = 101; use -100 to 100"),
        ({"logit_bias": {7: math.nan}}, "logit_bias of token 7 = nan; use -100 to 100"),
        ({"seed": -1}, "seed=-1; use a whole number from 0 to 2**64 - 1"),
        ({"seed": 1 << 64}, "seed=18446744073709551616; use a whole number"),
        ({"choice": -1}, "choice=-1; use a whole number from 0 to 2**32 - 1"),
        ({"choice": 1 << 32}, "choice=4294967296; use a whole number from 0 to 2**32 - 1"),
    ],
)
def test_out_of_range_is_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refusal:
        Sampling(**settings)
    assert str(refusal.value).startswith(f"sampling setting out of range: {message}")


def test_bias_outside_of_the_vocabulary_is_refused() -> None:
    Sampling(logit_bias={63: 1.0}).check_vocabulary(64)
    with pytest.raises(UserError, match="vocabulary: logit_bias of id 64 of 64; name ids of the"):
        Sampling(logit_bias={64: 1.0}).check_vocabulary(64)


def test_in_effect_is_what_is_not_neutral() -> None:
    neutral = Sampling(0.0, 0, 1.0, 0.0, seed=3)
    assert neutral.in_effect == {}
    greedy = Sampling(0.0, 5, 0.9, 0.1, repetition_penalty=1.1)
    assert greedy.in_effect == {"repetition_penalty": 1.1}
    assert Sampling(0.7, 5, 1.0, presence_penalty=1).in_effect == {
        "temperature": 0.7,
        "top_k": 5,
        "presence_penalty": 1,
    }
