"""What a request answers does not depend on the others: alone and in any company, the same bits.

With native kernels a row gets the same bits however many rows its pass has, so this holds to the
last bit, in bfloat16 too, whatever plans run and however often they change.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.plan import Plan
from polybasic.deploy import BusyError, Chain, load_chain
from polybasic.deploy.runtime.drafters.interface import NoDrafter
from polybasic.deploy.runtime.rounds import draws, passes
from polybasic.deploy.runtime.rounds.verifier import read_together
from tests.deploy.runtime.sequences.asking import (
    PLANS,
    alone,
    forget,
    in_company,
    pieces_of,
    requests,
)

in_float32 = pytest.mark.parametrize("loaded", ["float32"], indirect=True)
in_both = pytest.mark.parametrize("loaded", ["bfloat16", "float32"], indirect=True)
"""For what rounding may change; who runs when is the same in both."""


def changing(plans: list[Plan]) -> Any:
    """A plan for each round, whatever the load and the context."""
    places = count()
    return lambda *_: plans[next(places) % len(plans)]


@in_both
def test_sixty_four_sequences_answer_as_each_alone(folder: Path, chain: Chain) -> None:
    asked = requests(64 if chain.memory.layout.dtype == "bfloat16" else 20)
    single = load_chain(folder, dtype=str(chain.memory.layout.dtype), context_tokens=120)
    expected = alone(single, asked)
    assert in_company(chain, asked) == expected
    # once more, over the caches of other answers, by plans that change from round to round
    chain.engine.measured_plan = changing(PLANS)
    assert in_company(chain, asked[::-1], seed=2) == expected[::-1]


@in_float32
def test_other_sequences_would_be_noticed(
    folder: Path, chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = requests(12)
    expected = alone(load_chain(folder, dtype="float32", context_tokens=120), asked)

    def mixed_up(*arguments: Any) -> list[torch.Tensor]:
        states = read_together(*arguments)
        last = [part[-1:].clone() for part in states]
        for part, other in zip(states, [*last[1:], last[0]], strict=True):
            part[-1:] = other
        return states

    monkeypatch.setattr(passes, "read_together", mixed_up)
    assert in_company(chain, asked) != expected


def test_sequences_share_passes(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = PLANS[2]
    num_sequences: list[int] = []
    target = chain.engine.models.target
    forward = type(target).forward

    def counted(self: Any, ids: Any, caches: Any, *others: Any, **options: Any) -> Any:
        if self is target:
            num_sequences.append(len(caches))
        return forward(self, ids, caches, *others, **options)

    monkeypatch.setattr(type(target), "forward", counted)
    asked = [([place, 3, 4], {"plan": plan, "max_new_tokens": 20}) for place in range(8)]
    live = [chain.begin(prompt, **options) for prompt, options in asked]  # type: ignore[arg-type]
    while chain.step():
        pass
    rounds = [answering.statistics.forward_passes["target"] for answering in live]
    assert len(num_sequences) <= max(rounds) + 2
    assert num_sequences.count(8) >= min(rounds)


def test_what_is_drawn_together_is_what_each_draws_alone(
    folder: Path, chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = requests(24, seed=5)
    expected = alone(load_chain(folder, context_tokens=120), asked)
    monkeypatch.setattr(draws, "is_waited_for", lambda device: True)
    assert in_company(chain, asked) == expected


def test_a_device_is_waited_for_once_a_pass(
    chain: Chain, monkeypatch: pytest.MonkeyPatch, num_drawn: list[int]
) -> None:
    options: dict[str, Any] = {"plan": PLANS[0], "max_new_tokens": 9, "ignore_eos": True}
    asked = [([place, 3, 4], options) for place in range(8)]
    expected = alone(chain, asked)
    forget(chain)
    monkeypatch.setattr(draws, "is_waited_for", lambda device: True)
    live = [chain.begin(prompt, **options) for prompt, _ in asked]
    while chain.step():
        pass
    found = [
        [token for piece in answering.take() for token in piece.token_ids] for answering in live
    ]
    assert found == expected
    assert num_drawn == [8] * 9


def test_states_that_lie_together_are_not_copied(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    observed: list[torch.Tensor] = []
    monkeypatch.setattr(NoDrafter, "observe", lambda self, states: observed.append(states))
    for place in range(4):
        chain.begin([place, 3, 4], plan=PLANS[0], max_new_tokens=5, ignore_eos=True)
    while chain.step():
        pass
    places = {states.untyped_storage().data_ptr() for states in observed}
    assert (len(observed), len(places)) == (4 * 5, 5)


@pytest.mark.parametrize("changes", [False, True])
def test_passes_are_counted_while_an_answer_is_made(
    chain: Chain, monkeypatch: pytest.MonkeyPatch, changes: bool
) -> None:
    if changes:
        monkeypatch.setattr(chain.engine, "measured_plan", changing(PLANS))
    options: dict[str, Any] = {} if changes else {"plan": PLANS[5]}
    live = chain.begin([1, 2, 3], max_new_tokens=30, **options)
    counted: list[dict[str, int]] = []
    while chain.step():
        if live.take():
            counted.append(live.passes)
    assert counted[-1] == live.passes == live.statistics.forward_passes
    for member in live.passes:
        numbers = [counts.get(member, 0) for counts in counted]
        assert numbers == sorted(numbers)
    targets = [counts.get("target", 0) for counts in counted]
    assert targets[0] == 0  # the prompt's last pass gave the first token
    assert len(set(targets)) == len(targets) > 3


def test_streams_are_interleaved_and_given_up(chain: Chain) -> None:
    asked = requests(6, seed=3)
    expected = alone(chain, asked)
    streams = [chain.stream(prompt, **options) for prompt, options in asked]
    found: list[list[int]] = [[] for _ in streams]
    open_ones = set(range(6))
    while open_ones:
        for place in sorted(open_ones):
            piece = next(streams[place], None)
            if piece is None:
                open_ones.remove(place)
            elif place == 2 and found[2]:
                streams[2].close()
                open_ones.remove(2)
            else:
                found[place] += piece.token_ids
    assert expected[2][: len(found[2])] == found[2]
    assert [*found[:2], *found[3:]] == [*expected[:2], *expected[3:]]
    assert chain.engine.num_running == 0
    assert all(slot.is_free for slot in chain.engine.slots.made)


@pytest.mark.parametrize("plan", [PLANS[0], PLANS[5]], ids=["target", "three"])
def test_an_answer_that_is_given_up_has_its_cost(chain: Chain, plan: Plan) -> None:
    whole = pieces_of(chain, [5, 6, 7], 30, plan=plan).statistics
    forget(chain)
    answering = chain.begin([5, 6, 7], max_new_tokens=30, ignore_eos=True, plan=plan)
    assert (answering.spent.num_tokens, answering.spent.forward_passes) == (0, {})
    tokens = 0
    while tokens < 20:
        chain.step()
        tokens += sum(len(piece.token_ids) for piece in answering.take())
    answering.close()
    spent = answering.spent
    assert (spent.num_tokens, spent.stopped_by, spent.seconds_by_member) == (tokens, None, {})
    assert sum(spent.accepted_lengths["target"]) == tokens - 1
    assert len(spent.accepted_lengths["target"]) == spent.forward_passes["target"] > 0
    for name, accepted in whole.accepted.items():
        assert 0 < spent.accepted[name] <= accepted
    with pytest.raises(UserError, match="has not ended"):
        _ = answering.statistics


def test_a_stream_that_nobody_reads_stays_one_piece_ahead(chain: Chain) -> None:
    idle, busy = (chain.stream([1, 2], max_new_tokens=60, ignore_eos=True) for _ in range(2))
    first = next(idle)
    assert len([token for piece in busy for token in piece.token_ids]) == 60
    (running,) = (answering for answering in chain.engine._running if not answering.is_over)
    assert len(running.pieces) <= 1
    rest = [token for piece in idle for token in piece.token_ids]
    assert len(first.token_ids) + len(rest) == 60


def test_threads_get_their_own_answers(chain: Chain) -> None:
    asked = requests(24, seed=4)
    expected = alone(chain, asked)
    with ThreadPoolExecutor(8) as threads:
        answers = threads.map(
            lambda request: chain.generate(request[0], **request[1]).token_ids, asked
        )
        assert list(answers) == expected


def test_more_than_there_is_room_for_is_refused(folder: Path) -> None:
    chain = load_chain(folder, context_tokens=60, sequences=2)
    first, second = (chain.stream([1, 2, 3], max_new_tokens=9) for _ in range(2))
    next(first), next(second)
    with pytest.raises(BusyError, match="too many answers at a time: 2 are being generated"):
        chain.generate([1], max_new_tokens=2)
    second.close()
    assert chain.generate([1], max_new_tokens=2).token_ids
    for wrong in (0, 5000, True, "two"):
        with pytest.raises(UserError, match="sequences"):
            load_chain(folder, sequences=wrong)


def test_caches_are_allocated_as_asked_for(folder: Path) -> None:
    grows, fixed = load_chain(folder), load_chain(folder, sequences=3)
    assert (len(grows.engine.slots.made), len(fixed.engine.slots.made)) == (1, 3)
    streams = [grows.stream([1], max_new_tokens=5) for _ in range(3)]
    for stream in streams:
        next(stream)
    assert len(grows.engine.slots.made) == 3
    cached = [
        sum(parts["cache"] for parts in loaded.memory.members.values()) for loaded in (grows, fixed)
    ]
    assert cached[1] == 3 * cached[0]


def test_a_failed_pass_ends_those_who_waited_for_it(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = chain.generate([5, 6, 7], max_new_tokens=6).token_ids
    target = type(chain.engine.models.target)
    live = [chain.begin([place, 6, 7], max_new_tokens=6) for place in range(3)]
    with monkeypatch.context() as patch:

        def broken(*_: Any, **__: Any) -> Iterator[None]:
            raise MemoryError("no memory for a pass")

        patch.setattr(target, "forward", broken)
        while chain.step():
            pass
    assert all(answering.is_over and isinstance(answering.error, MemoryError) for answering in live)
    with pytest.raises(MemoryError):
        _ = live[0].statistics
    assert chain.generate([5, 6, 7], max_new_tokens=6).token_ids == expected


@in_both
def test_logprobs_are_the_targets(chain: Chain) -> None:
    prompt, target = [3, 1, 4, 1, 5, 9], chain.engine.models.target
    asked = {"max_new_tokens": 12, "ignore_eos": True, "temperature": 0.8, "seed": 3}
    plain = chain.generate(prompt, **asked, logit_bias={4: 2.0})
    for plan in PLANS:
        answer = chain.generate(
            prompt, **asked, logit_bias={4: 2.0}, plan=plan, logprobs=3, prompt_logprobs=0
        )
        assert answer.token_ids == plain.token_ids
        whole = [*prompt, *answer.token_ids]
        slot = chain.engine.slots.made[-1]
        slot.clear()
        with torch.inference_mode():
            states = slot.verifiers["target"].read(whole[:-1])
            expected = target.logits(states).float().log_softmax(-1)
        slot.clear()
        found = [*answer.prompt_logprobs, *answer.logprobs]
        assert [entry.token for entry in found] == whole[1:]
        assert [entry.logprob for entry in found] == [
            float(row[token]) for row, token in zip(expected, whole[1:], strict=True)
        ]
        for entry, row in zip(answer.logprobs, expected[len(prompt) - 1 :], strict=True):
            values, ids = row.topk(3)
            assert entry.top == list(zip(ids.tolist(), values.tolist(), strict=True))
        assert all(entry.top == [] for entry in answer.prompt_logprobs)
    only = chain.generate(prompt, max_new_tokens=0, prompt_logprobs=2)
    assert only.token_ids == []
    assert [entry.token for entry in only.prompt_logprobs] == prompt[1:]
    with pytest.raises(UserError, match="nothing to generate"):
        chain.generate(prompt, max_new_tokens=0)


def test_tokens_name_the_member_that_proposed_them(chain: Chain) -> None:
    for plan in PLANS:
        answer = pieces_of(chain, [1, 2, 3, 1, 2], 30, plan=plan)
        assert len(answer.members) == 30
        statistics = answer.statistics
        proposed = {name for name, num in statistics.accepted.items() if num}
        known = {*plan.members, *(["ngram"] if plan.ngram else [])}
        assert set(answer.members) <= known
        if len(plan.members) <= 2:
            for name in proposed:
                assert answer.members.count(name) == statistics.accepted[name]
        assert statistics.drafted.keys() <= known
        for name, num in statistics.accepted.items():
            assert num <= statistics.drafted[name]


def test_min_tokens_holds_stop_tokens_back(chain: Chain) -> None:
    stop = list(range(60))
    for plan in PLANS[:3]:
        answer = chain.generate(
            [1, 2], max_new_tokens=30, min_tokens=7, stop_token_ids=stop[:50], plan=plan
        )
        assert not set(answer.token_ids[:7]) & set(stop[:50])
    with pytest.raises(UserError, match="outside of the vocabulary: stop token of id 9999"):
        chain.generate([1, 2], max_new_tokens=9, min_tokens=2, stop_token_ids=[9999])
    early = chain.generate([1, 2], max_new_tokens=30, stop_token_ids=stop)
    assert len(early.token_ids) == 1
