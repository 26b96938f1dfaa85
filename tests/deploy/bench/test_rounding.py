"""Rounding is measured along the target's answers, and a fault is not taken for it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.decoder_config import LayerKind
from polybasic.chain.formats.plan import AdaptiveFlush, Flush, Ngram, Plan, Tree
from polybasic.chain.kernels.cuda.graphs import Graphs
from polybasic.chain.kernels.torch.rows import DeviceRows, Span
from polybasic.deploy.bench.exactness.outputs import Comparer, gap_at_divergence
from polybasic.deploy.bench.exactness.rereading import (
    ONE_ROW,
    ReadPattern,
    answer_logits,
    perturbed_logits,
    read_patterns_of,
)
from polybasic.deploy.bench.exactness.rounding import (
    MAX_SOUND_RATIO,
    NUM_ANSWERS,
    NUM_POSITIONS,
    Answered,
    LogitChange,
    Rounding,
    measure_rounding,
)
from polybasic.deploy.runtime.rounds.noise import Noise
from polybasic.deploy.runtime.rounds.sampling import (
    CoupledSampler,
    GreedySampler,
    Prefixes,
    Sampling,
)
from polybasic.deploy.runtime.rounds.verifier import Verifier
from polybasic.deploy.runtime.rounds.warping import process_logits
from tests.chain.native_models import CPU, cache_of, decoder, eager
from tests.deploy.changed_kernels import kernels_that, rounds_otherwise

VERIFYING = ("target", "intermediate")
TREE = Tree(depth=3, top_k=2, rows=6)
FLUSH = {"target": Flush(length=5)}
TWO = Plan(members=("target", "draft"), tree=TREE, flush=FLUSH)
THREE = Plan(members=(*VERIFYING, "draft"), tree=TREE, flush=FLUSH)
PATTERNS = read_patterns_of([TWO, THREE], VERIFYING, 48)
GREEDY = GreedySampler(Sampling(), 0)
HALVES = (torch.bfloat16, torch.float16)


@contextmanager
def device_path() -> Iterator[None]:
    """What is made inside runs what GPUs run, in PyTorch's operations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYBASIC_KERNELS", "device")
        yield


@torch.inference_mode()
def on_device(dtype: torch.dtype) -> Verifier:
    with device_path():
        model = decoder(dtype)
        verifier = Verifier("target", model, cache_of(model), Graphs(CPU))
    assert verifier.passes is not None
    return verifier


@torch.inference_mode()
def on_host(dtype: torch.dtype) -> Verifier:
    with eager():
        model = decoder(dtype)
        return Verifier("target", model, cache_of(model))


def texts(num: int = 3, length: int = 30) -> list[Answered]:
    """Random prompts and answers: rounding does not ask who wrote them."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, 100, (num, 5 + length), generator=generator).tolist()
    lengths = (1, 4, 5)  # no prompt is read in one row
    return [(tokens[: lengths[place % 3]], tokens[5:]) for place, tokens in enumerate(drawn)]


def measured(verifier: Verifier) -> Rounding:
    return measure_rounding(verifier, texts(), PATTERNS, {})


# What is measured


def test_read_patterns_are_those_of_the_plans() -> None:
    alone = Plan(members=("target",), tree=TREE)
    copies = Plan(members=("target",), tree=Tree(depth=1, top_k=1, rows=9), ngram=Ngram())
    assert read_patterns_of([alone], VERIFYING, 48) == [ONE_ROW]
    assert read_patterns_of([TWO, TWO], VERIFYING, 48) == [ONE_ROW, ReadPattern(6, 3)]
    assert read_patterns_of([copies], VERIFYING, 48) == [ONE_ROW, ReadPattern(9, 8)]
    # an unread token and 5 to 8 tokens: a round that follows 4 may gain 4
    expected = [ONE_ROW, *map(ReadPattern, (6, 8, 9))]
    assert read_patterns_of([THREE], VERIFYING, 48) == expected
    undrafted = THREE.model_copy(update={"members": VERIFYING})
    assert read_patterns_of([undrafted], VERIFYING, 48) == [ONE_ROW, ReadPattern(6)]
    adaptive = AdaptiveFlush(break_even=0.5, acceptance=(0.5,) * 8)
    flush = {"target": Flush(length=5, adaptive=adaptive)}
    found = read_patterns_of([THREE.model_copy(update={"flush": flush})], VERIFYING, 48)
    assert found == [ONE_ROW, ReadPattern(2), ReadPattern(4), ReadPattern(8), ReadPattern(9)]
    four = Plan(
        members=("target", "intermediate", "small", "draft"),
        tree=TREE,
        flush={"target": Flush(length=6), "intermediate": Flush(length=3)},
    )
    # an unread token, and 5 tokens after which a round of the intermediate brings 2 + 4 + 1
    assert read_patterns_of([four], (*VERIFYING, "small"), 48)[-1] == ReadPattern(13)


@pytest.mark.parametrize("verifier_of", [on_device, on_host])
def test_all_patterns_read_the_same_logits(
    verifier_of: Callable[[torch.dtype], Verifier],
) -> None:
    verifier = verifier_of(torch.float32)
    prompt, answer = texts()[2]
    others = texts()[1][1]
    expected = answer_logits(verifier, prompt, answer, ONE_ROW)
    assert expected.shape == (len(answer), 100)
    more = [ReadPattern(*sizes) for sizes in ((17,), (40,), (24, 5), (8, 7), (40, 2))]
    for pattern in (*PATTERNS, *more):
        found = answer_logits(verifier, prompt, answer, pattern)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    other = answer_logits(verifier, prompt, others, ONE_ROW)
    assert torch.equal(other[0], expected[0])
    assert float((other[1:] - expected[1:]).abs().max()) > 1


@pytest.mark.parametrize("dtype", HALVES)
def test_changes_are_those_of_the_logits(dtype: torch.dtype) -> None:
    verifier, largest = on_device(dtype), 0.0
    with kernels_that(rounds_otherwise):
        rounding = measured(verifier)
        for prompt, answer in texts():
            single = answer_logits(verifier, prompt, answer, ONE_ROW)
            eight = answer_logits(verifier, prompt, answer, ReadPattern(8))
            # of all tokens, not of the leading ones alone
            shifts = eight - single
            largest = max(largest, float((shifts.amax(1) - shifts.amin(1)).max()))
    assert rounding.dtype == str(dtype).removeprefix("torch.")
    assert rounding.num_positions == 3 * 30
    assert list(rounding.ways) == ["1 row", "trees of 6 rows, 3 deep", *map(str, PATTERNS[2:])]
    assert rounding.unsound == []
    change = rounding.ways["blocks of 8 rows"].from_one_row
    assert change is not None
    assert largest / 4 < change <= largest
    assert rounding.ways["1 row"].from_one_row == 0
    assert rounding.tolerance == max(way.from_one_row or 0 for way in rounding.ways.values())
    assert 0 < rounding.tolerance < rounding.usual * 2 * MAX_SOUND_RATIO
    assert 0 < rounding.close_share < 0.5


def test_rounding_shrinks_with_the_dtype() -> None:
    found = []
    for dtype in (*HALVES, torch.float32):
        verifier = on_device(dtype)
        with kernels_that(rounds_otherwise):
            found.append(measured(verifier))
    bfloat16, float16, float32 = found
    assert bfloat16.tolerance > 3 * float16.tolerance > 300 * float32.tolerance
    assert bfloat16.usual > 3 * float16.usual > 300 * float32.usual > 0
    assert all(rounding.unsound == [] for rounding in found)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_perturbed_prompt_moves_logits_by_their_rounding(dtype: torch.dtype) -> None:
    verifier, exact = on_host(dtype), on_host(torch.float32)
    prompt, answer = texts()[2]
    right, perturbed, again, wide = (
        logits(model, prompt, answer, ReadPattern(len(answer)))
        for model, logits in (
            (verifier, answer_logits),
            (verifier, perturbed_logits),
            (verifier, perturbed_logits),
            (exact, answer_logits),
        )
    )
    assert torch.equal(perturbed, again)
    error = float((right - wide).abs().mean())
    assert error / 3 < float((perturbed - right).abs().mean()) < 3 * error


@pytest.mark.parametrize("dtype", HALVES)
def test_eager_passes_round_soundly(dtype: torch.dtype) -> None:
    assert measured(on_host(dtype)).unsound == []


def test_a_part_of_many_answers_is_read() -> None:
    rounding = measure_rounding(on_host(torch.float32), texts(40, NUM_POSITIONS + 9), PATTERNS, {})
    assert rounding.num_positions == NUM_ANSWERS * NUM_POSITIONS


# What is a fault


def test_a_fault_over_some_row_counts_excuses_nothing() -> None:
    verifier = on_device(torch.bfloat16)
    with kernels_that(rounds_otherwise):
        right = measured(verifier)

    def lose(rows: int, found: Tensor) -> Tensor:
        return found if rows < 8 else found * 0.9

    with kernels_that(lose):
        rounding = measured(verifier)
    # blocks are padded to 8 and 12 rows, trees stay at 6
    assert rounding.unsound == [str(pattern) for pattern in PATTERNS[2:]]
    assert rounding.tolerance == rounding.ways[str(PATTERNS[1])].from_one_row
    wrong = max(way.from_one_row or 0 for way in rounding.ways.values())
    assert wrong > 3 * right.tolerance, "it would have excused more than rounding does"


def test_a_sound_pattern_still_sets_the_tolerance_despite_a_fault() -> None:
    verifier = on_device(torch.bfloat16)
    with kernels_that(rounds_otherwise):
        right = measured(verifier)

    def lose(rows: int, found: Tensor) -> Tensor:
        return rounds_otherwise(rows, found) if rows < 12 else found * 0.9

    with kernels_that(lose):
        rounding = measured(verifier)
    assert rounding.unsound == ["blocks of 9 rows"]
    sound = [way for name, way in right.ways.items() if name != "blocks of 9 rows"]
    assert rounding.tolerance == max(way.from_one_row or 0 for way in sound) > 0


def test_where_the_target_alone_is_wrong_nothing_is_excused() -> None:
    verifier = on_device(torch.bfloat16)
    with kernels_that(lambda rows, found: found if rows > 1 else found * 0.9):
        rounding = measured(verifier)
    assert rounding.unsound == ["1 row"]
    assert rounding.tolerance == 0
    assert rounding.close_share == 0


def test_rows_of_a_tree_that_see_others_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier = on_device(torch.bfloat16)
    right = DeviceRows.span_of

    def all_before(self: DeviceRows, kind: LayerKind) -> Span:
        if self.visible is not None:
            self = replace(self, visible=torch.ones_like(self.visible).tril())
        return right(self, kind)

    monkeypatch.setattr(DeviceRows, "span_of", all_before)
    assert measured(verifier).unsound == ["trees of 6 rows, 3 deep"]


def test_logits_that_are_not_finite_are_no_rounding() -> None:
    verifier = on_device(torch.float16)

    def overflow(rows: int, found: Tensor) -> Tensor:
        return rounds_otherwise(rows, found) if rows < 12 else found * float("inf")

    with kernels_that(overflow):
        rounding = measured(verifier)
    assert rounding.unsound == ["blocks of 9 rows"]
    assert rounding.ways["blocks of 9 rows"] == LogitChange(None, None, False)
    assert 0 < rounding.tolerance < 1
    with torch.inference_mode():
        final_norm = verifier.decoder.weights.final_norm
        assert final_norm is not None
        final_norm.fill_(60_000)
    with pytest.raises(UserError, match=r"logits are not finite: target in float16; run it in"):
        measured(verifier)


# What other systems and outputs make of it


def test_another_system_is_judged_by_its_own_logits_too() -> None:
    verifier = on_device(torch.bfloat16)
    exact = on_host(torch.float32)

    def in_float32(token_ids: list[int], num: int) -> Tensor:
        answer = [*token_ids[1 - num :], 0]
        return answer_logits(exact, token_ids[: 1 - num], answer, ReadPattern(64))

    others = {"exact": in_float32, "nonsense": lambda ids, num: -10 * in_float32(ids, num)}
    rounding = measure_rounding(verifier, texts(), PATTERNS, others)
    exact_change, nonsense = rounding.others["exact"], rounding.others["nonsense"]
    assert exact_change.is_sound
    assert not nonsense.is_sound
    assert rounding.tolerance_of("exact") == max(rounding.tolerance, exact_change.from_one_row or 0)
    assert rounding.tolerance_of("nonsense") == rounding.tolerance
    assert rounding.tolerance_of("eagle2") == rounding.tolerance
    assert "exact" not in rounding.ways


def test_outputs_diverge_at_a_near_tie_or_for_another_reason() -> None:
    verifier = on_host(torch.bfloat16)
    prompt, answer = texts()[0]
    logits = answer_logits(verifier, prompt, [*answer, 0], ONE_ROW)[-1]
    ordered = logits.argsort(descending=True).tolist()[:12]
    best = [*answer, ordered[0]]
    gaps = [float(logits[ordered[0]] - logits[other]) for other in ordered[1:]]
    tolerance = gaps[3]
    comparer = Comparer(verifier, tolerance)
    for count, (other, gap) in enumerate(zip(ordered[1:], gaps, strict=True), 1):
        assert gap_at_divergence(verifier, GREEDY, prompt, best, [*answer, other, 7]) == gap
        comparer.count(GREEDY, prompt, best, [*answer, other, 7])
        assert comparer.agreement().near_ties == sum(
            distance < tolerance for distance in gaps[:count]
        )
    agreement = comparer.agreement()
    assert 0 < agreement.near_ties < len(gaps)
    assert agreement.widest_near_tie == max(gap for gap in gaps if gap < tolerance)
    assert agreement.tokens_before_parting == len(answer)
    comparer.count(GREEDY, prompt, best, best)
    for shorter in (answer, []):
        comparer.count(GREEDY, prompt, best, shorter)
    after = comparer.agreement()
    assert (after.answers, after.identical) == (len(gaps) + 3, 1)
    assert after.near_ties == agreement.near_ties, "a missing token is no tie"
    assert after.different == len(gaps) - after.near_ties + 2


def test_gaps_of_sampled_outputs_count_noise_and_penalties_in_units_of_logits() -> None:
    verifier = on_host(torch.float32)
    prompt, answer = texts()[0]
    sampling = Sampling(0.5, frequency_penalty=0.3, seed=7)
    sampler = CoupledSampler(sampling, len(prompt), Noise(verifier.decoder, sampling))
    logits = answer_logits(verifier, prompt, [*answer, 0], ONE_ROW)[-1:]
    before = Prefixes([*prompt, *answer], [[]])
    scores = process_logits(logits, sampling, before, len(prompt))[0]
    scores = scores + 0.5 * sampler.noise.at([len(prompt) + len(answer)])[0]
    best, other = scores.topk(2).indices.tolist()
    gap = gap_at_divergence(verifier, sampler, prompt, [*answer, best], [*answer, other])
    assert gap == pytest.approx(float(scores[best] - scores[other]), abs=1e-5)
    plain = gap_at_divergence(verifier, GREEDY, prompt, [*answer, best], [*answer, other])
    assert plain != pytest.approx(gap, abs=1e-3)
    truncated = CoupledSampler(replace(sampling, top_k=1), len(prompt), sampler.noise)
    assert gap_at_divergence(
        verifier, truncated, prompt, [*answer, best], [*answer, other]
    ) == float("inf"), "truncation keeps one of the two"


def test_equal_logits_are_no_tie_where_nothing_rounds() -> None:
    verifier = on_host(torch.float32)
    prompt, answer = texts()[0]
    comparer = Comparer(verifier, tolerance=0.0)
    comparer.count(GREEDY, prompt, answer, [answer[0], (answer[1] + 1) % 100])
    assert (comparer.agreement().identical, comparer.agreement().near_ties) == (0, 0)


def test_patterns_that_were_not_read_may_round_by_a_spacing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unless passes are batch-invariant, or one that was read is unsound."""
    verifier = on_device(torch.bfloat16)
    found = measured(verifier)
    assert found.least > 0
    unmoved = {name: replace(change, from_one_row=0.0) for name, change in found.ways.items()}
    assert replace(found, ways=unmoved).tolerance == found.least
    assert replace(found, ways=unmoved, least=0.0).tolerance == 0
    last = list(unmoved)[-1]
    faulty = unmoved | {last: replace(unmoved[last], is_sound=False)}
    assert replace(found, ways=faulty).tolerance == 0
    monkeypatch.setattr(verifier.decoder, "is_batch_invariant", True)
    assert measured(verifier).least == 0
