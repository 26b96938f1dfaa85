"""How the prompts of many requests are read: what is known is not read again, none waits long."""

from pathlib import Path
from typing import Any

import pytest

from polybasic.chain.formats.plan import Plan
from polybasic.deploy import Chain, load_chain
from polybasic.deploy.runtime import engine
from polybasic.deploy.runtime.rounds import passes, verifier
from polybasic.deploy.runtime.rounds.pace import PromptPace
from polybasic.deploy.runtime.rounds.passes import run_together
from polybasic.deploy.runtime.rounds.verifier import read_together
from polybasic.deploy.runtime.slots import MIN_COPIED_TOKENS
from tests.deploy.runtime.sequences.asking import PLANS, forget, pieces_of


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: "-".join(plan.members))
def test_the_next_turn_reads_what_is_new(chain: Chain, plan: Plan) -> None:
    prompt = [7, 8, 9, 10, 11, 12]
    first = pieces_of(chain, prompt, 20, plan=plan)
    turn = [*prompt, *first.token_ids, 30, 31, 32]
    again = pieces_of(chain, turn, 20, plan=plan)
    # the first answer's last token was never read
    assert again.statistics.num_cached_tokens == len(prompt) + 19
    forget(chain)
    fresh = pieces_of(chain, turn, 20, plan=plan)
    assert fresh.statistics.num_cached_tokens == 0
    assert fresh.token_ids == again.token_ids


def test_a_common_beginning_is_read_once(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptPace, "room", 16)
    common = list(range(60))
    asked = [
        ([*common, place], {"max_new_tokens": 4, "plan": PLANS[2], "ignore_eos": True})
        for place in range(5)
    ]
    live = [chain.begin(prompt, **options) for prompt, options in asked]  # type: ignore[arg-type]
    while chain.step():
        pass
    cached = [answering.statistics.num_cached_tokens for answering in live]
    assert cached[0] == 0
    assert min(cached[1:]) > len(common) - MIN_COPIED_TOKENS
    assert [answering.statistics.num_tokens for answering in live] == [4] * 5


def test_a_short_prompt_does_not_wait_for_a_long_one(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PromptPace, "room", 8)
    forget(chain)
    options: dict[str, Any] = {"max_new_tokens": 3, "plan": PLANS[0], "ignore_eos": True}
    long, short = list(range(60)), [1, 2, 3]
    expected = [chain.generate(each, **options).token_ids for each in (long, short)]
    forget(chain)
    first = chain.begin(long, **options)
    chain.step()
    second, third = chain.begin(short, **options), chain.begin(long[::-1], **options)
    while not second.is_over:
        assert chain.step()
    assert not first.take()
    assert not third.take()
    while chain.step():
        pass
    pieces = first.take(), second.take()
    assert [[token for piece in each for token in piece.token_ids] for each in pieces] == expected


def test_others_wait_for_few_rows_of_a_slow_models_prompt(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 30, "plan": PLANS[0], "ignore_eos": True}
    monkeypatch.setattr(PromptPace, "took", lambda *_: None)
    for pace in chain.engine.slots.paces.values():
        monkeypatch.setattr(pace, "_row_seconds", 0.02)
    num_rows: list[int] = []
    for module in (passes, verifier):
        monkeypatch.setattr(module, "read_together", _counting(num_rows))
    forget(chain)
    answering = chain.begin([1, 2, 3], **options)
    while not answering.take():
        chain.step()
    num_rows.clear()
    reading = chain.begin(list(range(40)), **options)
    while not reading.take():
        chain.step()
    assert num_rows == [5 + 1] * 8
    reading.close(), answering.close()
    forget(chain)
    num_rows.clear()
    chain.generate(list(range(59, -1, -1)), **options)
    assert num_rows[:2] == [50, 10]  # alone a pass may take a second


def _remembering(ran: list[Any]) -> Any:
    def remembered(waiting: Any) -> Any:
        ran.extend(waiting)
        return run_together(waiting)

    return remembered


def _counting(num_rows: list[int]) -> Any:
    def counted(verifiers: Any, read: Any) -> Any:
        num_rows.append(sum(map(len, read)))
        return read_together(verifiers, read)

    return counted


@pytest.mark.parametrize("num_prompt", [1, 7, 20])
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: "-".join(plan.members))
def test_the_first_token_waits_for_the_target_alone(
    chain: Chain, plan: Plan, num_prompt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PromptPace, "room", 8)
    prompt = list(range(num_prompt))
    ran: list[Any] = []
    monkeypatch.setattr(engine, "run_together", _remembering(ran))
    answering = chain.begin(prompt, max_new_tokens=9, ignore_eos=True, plan=plan)
    while not (pieces := answering.take()):
        chain.step()
    assert [reading.verifier.name for reading in ran] == ["target"] * -(-num_prompt // 8)
    assert [piece.members for piece in pieces] == [["target"]]
    while chain.step():
        pieces += answering.take()
    tokens = [token for piece in pieces for token in piece.token_ids]
    assert tokens == pieces_of(chain, prompt, 9, plan=PLANS[0]).token_ids
    assert (answering.statistics.num_first, answering.statistics.num_later) == (1, 8)


def test_without_reuse_all_is_read(folder: Path) -> None:
    chain = load_chain(folder, reuses=False)
    for _ in range(2):
        answer = chain.generate([1, 2, 3, 4], max_new_tokens=2)
        assert answer.statistics.num_cached_tokens == 0
