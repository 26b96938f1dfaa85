"""Caches that take memory by need: what is kept, what gives way, and that no text changes by it."""

import mmap
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.plan import Plan
from polybasic.deploy import Chain, load_chain
from polybasic.deploy.runtime import batching, slots
from polybasic.deploy.runtime import load as loading
from polybasic.deploy.runtime.batching import ActiveSequence
from polybasic.deploy.runtime.hardware import usage
from polybasic.deploy.runtime.rounds import lazy_rows
from polybasic.deploy.runtime.rounds.lazy_rows import LazyRows
from polybasic.deploy.runtime.slots import Slots
from tests.deploy.runtime.sequences.asking import (
    PLANS,
    alone,
    forget,
    in_company,
    pieces_of,
    requests,
)

CONTEXT_TOKENS, CACHE_TOKENS = 120, 200
ROUNDS = 20
"""Rows that those which run may add at most until they are looked at again."""
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _short_texts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if they were long ones."""
    monkeypatch.setattr(slots, "SOON_READ", 0)


@pytest.fixture(scope="module")
def _narrow(folder: Path) -> Chain:
    return load_chain(
        folder, context_tokens=CONTEXT_TOKENS, sequences=64, cache_tokens=CACHE_TOKENS
    )


@pytest.fixture
def narrow(_narrow: Chain) -> Chain:
    """Many sequences whose caches hold less than two contexts."""
    forget(_narrow)
    return _narrow


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[ActiveSequence]:
    """Sequences that gave their caches up, each as often as it did."""
    paused: list[ActiveSequence] = []
    pause = ActiveSequence.pause

    def noted(sequence: ActiveSequence) -> None:
        paused.append(sequence)
        pause(sequence)

    monkeypatch.setattr(ActiveSequence, "pause", noted)
    monkeypatch.setattr(batching, "_ROOM_TO_GO_ON", 1)
    return paused


def num_rows(chain: Chain) -> int:
    return sum(slot.num_rows for slot in chain.engine.slots.made)


def test_answers_that_pause_keep_their_text(
    folder: Path, narrow: Chain, pauses: list[ActiveSequence], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = requests(64)
    expected = alone(load_chain(folder, context_tokens=CONTEXT_TOKENS), asked)
    most, step = [0], narrow.engine.step

    def watched() -> bool:
        ran = step()
        most.append(num_rows(narrow))
        return ran

    monkeypatch.setattr(narrow.engine, "step", watched)
    assert in_company(narrow, asked) == expected
    assert len(pauses) > 10
    # what a round adds to each of those that run is in the rows that each has beyond its context
    assert CACHE_TOKENS < max(most) < CACHE_TOKENS + ROUNDS


def test_a_pause_that_forgot_its_answer_would_be_noticed(
    folder: Path, narrow: Chain, pauses: list[ActiveSequence], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = requests(24)
    expected = alone(load_chain(folder, context_tokens=CONTEXT_TOKENS), asked)
    tokens = property(lambda sequence: sequence.request.token_ids)
    monkeypatch.setattr(ActiveSequence, "tokens", tokens)
    assert in_company(narrow, asked) != expected
    assert pauses


def test_without_pauses_there_would_be_more_rows(
    narrow: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Slots, "make_room", lambda _: True)
    monkeypatch.setattr(Slots, "has_room", lambda *_: True)
    live = [narrow.begin([place] * 30, max_new_tokens=40, ignore_eos=True) for place in range(6)]
    while narrow.step():
        pass
    assert num_rows(narrow) > CACHE_TOKENS + ROUNDS
    assert all(answering.is_over for answering in live)


def test_streams_that_wait_to_be_read_give_way(narrow: Chain, pauses: list[ActiveSequence]) -> None:
    options: dict[str, Any] = {"max_new_tokens": 60, "ignore_eos": True, "plan": PLANS[2]}
    prompts = [[place, 3, place, 4] * 10 for place in range(4)]
    expected = [narrow.generate(prompt, **options).token_ids for prompt in prompts]
    streams: list[Iterator[Any]] = [narrow.stream(prompt, **options) for prompt in prompts]
    found: list[list[int]] = [[] for _ in streams]
    while any(len(tokens) < 60 for tokens in found):
        for stream, tokens in zip(streams, found, strict=True):
            if len(tokens) < 60:
                tokens += next(stream).token_ids
    assert found == expected
    assert pauses


def test_draws_after_a_pause_are_not_those_of_the_beginning(
    narrow: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int | None] = []
    stages = narrow.engine.stages

    def noted(request: Any, **given: Any) -> Any:
        seeds.append(request.sampling.seed)
        return stages(request, **given)

    monkeypatch.setattr(narrow.engine, "stages", noted)
    options: dict[str, Any] = {"temperature": 1.0, "seed": 5, "rule": "block", "plan": PLANS[2]}
    answering = narrow.begin([1, 2, 3], max_new_tokens=9, ignore_eos=True, **options)
    while len(answering.take()) < 1:
        narrow.step()
    narrow.engine._running[0].pause()
    while narrow.step():
        pass
    first, second = seeds
    assert first == 5 != second
    assert answering.statistics.num_tokens == 9
    assert answering.statistics.seed == 5


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: "-".join(plan.members))
def test_conversations_in_turn_are_all_kept(folder: Path, plan: Plan) -> None:
    chain = load_chain(folder, context_tokens=CONTEXT_TOKENS, sequences=1, cache_tokens=400)
    talks = [[place, 7, 8, 9] * 6 for place in range(3)]
    for _ in range(2):
        for place, talk in enumerate(talks):
            answer = pieces_of(chain, talk, 10, plan=plan)
            known = answer.statistics.num_cached_tokens
            assert known == (len(talk) - 4 if len(talk) > 24 else 0)
            talks[place] = [*talk, *answer.token_ids, 1, 2, 3]
    # a beginning that is the smaller part of what another one holds is copied from that
    branch = [*talks[0][:20], *range(20, 40)]
    assert pieces_of(chain, branch, 5, plan=plan).statistics.num_cached_tokens == 20
    again = pieces_of(chain, talks[0], 5, plan=plan)
    assert again.statistics.num_cached_tokens == len(talks[0]) - 4


def test_the_least_recently_used_gives_way(folder: Path) -> None:
    # by default as many sequences as there is memory for, and what is over keeps one context
    chain = load_chain(folder, context_tokens=CONTEXT_TOKENS)
    assert chain.engine.slots.cache_tokens == 16 * CONTEXT_TOKENS
    talks = [[place] * 40 for place in range(4)]
    for talk in talks:
        pieces_of(chain, talk, 10)
    assert num_rows(chain) <= CONTEXT_TOKENS
    cached = [pieces_of(chain, talk, 1).statistics.num_cached_tokens for talk in talks[:1:-1]]
    assert cached == [39, 39]
    assert pieces_of(chain, talks[0], 1).statistics.num_cached_tokens == 0


def test_what_is_kept_gives_way_to_the_next_turns_that_wait(folder: Path) -> None:
    chain = load_chain(folder, context_tokens=CONTEXT_TOKENS, cache_tokens=CONTEXT_TOKENS)
    options: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True, "plan": PLANS[2]}
    talks = [[place, 5] * 20 for place in range(2)]
    for place, talk in enumerate(talks):
        talks[place] = [*talk, *chain.generate(talk, **options).token_ids, 1, 2, 3]
    live = [chain.begin(talk, **options) for talk in talks]
    while chain.step():
        pass
    assert [answering.statistics.num_tokens for answering in live] == [20, 20]
    assert live[0].statistics.num_cached_tokens == 59


@pytest.mark.skipif(usage(CPU) is None, reason="the system does not tell what is in use")
def test_memory_is_taken_by_need_and_given_back() -> None:
    def resident() -> int:
        used = usage(CPU)
        assert used is not None
        return used.now

    before, megabyte = resident(), 1 << 20
    lazy = LazyRows((16, 8 * megabyte // 256, 64), dtype=torch.float32, device=CPU)
    assert resident() - before < 4 * megabyte
    lazy.tensor[:, :1000] = 1
    assert 3 * megabyte < resident() - before < 12 * megabyte
    lazy.tensor.fill_(1)
    assert resident() - before > 120 * megabyte
    lazy.give_back(1000)
    assert resident() - before < 12 * megabyte
    assert bool((lazy.tensor[:, :1000] == 1).all())
    lazy.give_back(0)
    assert resident() - before < 4 * megabyte


def test_caches_hold_what_there_is_memory_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(**options: Any) -> Chain:
        return load_chain(folder, context_tokens=CONTEXT_TOKENS, **options)

    one, many = load(sequences=1).memory, load(sequences=50).memory
    assert many.cache_tokens == 50 * one.cache_tokens == 50 * CONTEXT_TOKENS
    between = (many.holding(CONTEXT_TOKENS).peak_bytes + many.peak_bytes) // 2
    monkeypatch.setattr(loading, "available_bytes", lambda _: between)
    fits = load(sequences=50)
    assert fits.engine.slots.cache_tokens == fits.memory.cache_tokens
    assert 20 * CONTEXT_TOKENS < fits.memory.cache_tokens < 30 * CONTEXT_TOKENS
    assert fits.memory.peak_bytes == pytest.approx(between, rel=0.01)
    with pytest.raises(UserError, match=r"not enough memory: .* needed for 50 sequences of 120"):
        load(sequences=50, cache_tokens=50 * CONTEXT_TOKENS)
    with pytest.raises(UserError, match="do not hold one context: cache_tokens=119, context_tok"):
        load(cache_tokens=CONTEXT_TOKENS - 1)
    with pytest.raises(UserError, match="each hold a whole context: cache_tokens=500"):
        loading.load_target(folder, context_tokens=CONTEXT_TOKENS, cache_tokens=500)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is shared under Linux alone")
@pytest.mark.parametrize(
    ("plan", "may_share"), [(PLANS[0], True), (PLANS[6], True), (PLANS[7], True), (PLANS[5], False)]
)
def test_sequences_that_begin_alike_have_room_together(
    folder: Path,
    plan: Plan,
    may_share: bool,
    pauses: list[ActiveSequence],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Six times 300 tokens where there is room for 800: those that they share count once."""
    monkeypatch.setattr(lazy_rows, "MIN_SHARED_BYTES", 2 * mmap.PAGESIZE)
    if not may_share:
        monkeypatch.setattr(lazy_rows, "MAX_MAPPINGS", 0)
    common = [place * 7 % 60 for place in range(290)]
    asked: list[tuple[list[int], dict[str, Any]]] = [
        ([*common, *[place] * 10], {"max_new_tokens": 20, "ignore_eos": True, "plan": plan})
        for place in range(6)
    ]
    options: dict[str, Any] = {"context_tokens": 400, "beyond_declared": True}
    expected = alone(load_chain(folder, **options), asked)
    chain = load_chain(folder, sequences=6, cache_tokens=800, **options)
    live: list[Any] = []
    tokens: list[list[int]] = [[] for _ in asked]
    most_running = most_rows = 0
    while not live or chain.step():
        if len(tokens[0]) < 3:  # after the first one the members below the target read the prompt
            live = live or [chain.begin(asked[0][0], **asked[0][1])]
        elif len(live) == 1:
            live += [chain.begin(prompt, **settings) for prompt, settings in asked[1:]]
        for place, answering in enumerate(live):
            tokens[place] += [token for piece in answering.take() for token in piece.token_ids]
        slots_made = chain.engine.slots.made
        most_running = max(most_running, sum(slot.num_reserved > 0 for slot in slots_made))
        most_rows = max(most_rows, chain.engine.slots.num_rows)
    assert tokens == expected
    assert most_rows < 800 + ROUNDS
    assert most_running == (6 if may_share else 2)
    assert not (may_share and pauses)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is shared under Linux alone")
@pytest.mark.parametrize(
    ("plans", "options"),
    [
        ((PLANS[0], PLANS[0]), {"prompt_logprobs": 0}),  # reads its prompt itself
        ((PLANS[0], PLANS[5]), {}),  # by members that have not read the other's
        ((PLANS[0], PLANS[2]), {}),
    ],
)
def test_what_would_not_be_shared_waits(
    folder: Path,
    plans: tuple[Plan, Plan],
    options: dict[str, Any],
    pauses: list[ActiveSequence],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lazy_rows, "MIN_SHARED_BYTES", 2 * mmap.PAGESIZE)
    common = [place * 7 % 60 for place in range(290)]
    chain = load_chain(folder, context_tokens=400, beyond_declared=True, cache_tokens=450)
    first = chain.begin([*common, 1], max_new_tokens=60, ignore_eos=True, plan=plans[0])
    while len(first.take()) < 1:
        chain.step()
    settings = {"max_new_tokens": 20, "ignore_eos": True, "plan": plans[1], **options}
    second = chain.begin([*common, 2], **settings)
    while chain.step():
        pass
    assert first.is_over
    assert second.is_over
    assert not pauses
