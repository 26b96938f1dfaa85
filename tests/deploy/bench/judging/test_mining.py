"""The semi-greedy search, on a chain whose answers come to a number by a rule of their text."""

from collections import deque
from collections.abc import Callable
from itertools import pairwise
from zlib import crc32

import pytest
import torch

from polybasic.chain.formats.plan import Flush, Plan, Tree
from polybasic.deploy import Chain, load_chain
from polybasic.deploy.bench.judging.mining import Mined, Miner, Mismatch
from polybasic.deploy.bench.judging.questions import CheckedQuestion
from polybasic.deploy.planner.measuring.budget import Budget
from polybasic.deploy.runtime.rounds.sampling import Sampling
from tests.deploy.noisy_chain import write_noisy_chain

NUM_TOKENS = 24
PLAN = Plan(
    members=("target", "near"),
    tree=Tree(depth=1, top_k=1, rows=2),
    flush={"target": Flush(length=5)},
)
PROMPTS = [[3, 1, 4, 1, 5], [7, 2, 9], [11, 5, 11, 5]]


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    folder = write_noisy_chain(tmp_path_factory.mktemp("mining"))
    return load_chain(folder, dtype="float32", plan=PLAN, share_caches=False)


class Search(Miner):
    """Notes each answer that it asks for."""

    def __init__(self, chain: Chain) -> None:
        super().__init__(chain, PLAN, NUM_TOKENS)
        self.asked: list[tuple[list[int], list[int]]] = []

    def _answered(self, begun: list[int], num_prompt: int) -> tuple[list[int], deque[Mismatch]]:
        tokens, mismatches = super()._answered(begun, num_prompt)
        self.asked.append((begun, tokens))
        return tokens, mismatches


def search(
    chain: Chain, result: Callable[[str], float | None], max_seconds: float = 1e9
) -> tuple[Search, Mined]:
    miner, question = Search(chain), CheckedQuestion("any", "", result, 1)
    asked = [(question, prompt) for prompt in PROMPTS]
    return miner, miner.mine(asked, Budget(max_seconds), 1.0)


def own(chain: Chain, prompt: list[int], num: int) -> list[int]:
    stream = chain.stream_ids(prompt, num, Sampling(0.0), chain.plan_of(("target",)))
    return [token for part in stream for token in part]


def test_every_answer_is_the_targets_own_behind_what_it_begins_with(chain: Chain) -> None:
    miner, found = search(chain, lambda text: len(text) % 2)
    assert len(miner.asked) > 2 * len(PROMPTS)
    for begun, tokens in miner.asked:
        prompt = next(each for each in PROMPTS if begun[: len(each)] == each)
        assert tokens[: len(begun)] == begun
        num = NUM_TOKENS - (len(begun) - len(prompt))
        assert tokens[len(begun) :] == (own(chain, begun, num) if num else [])
    features, matters, questions = found.arrays
    assert len(features) == len(matters) == len(questions)
    assert 0 < matters.sum() < len(matters)
    width = sum(decoder.config.hidden_size for decoder in chain.engine.models.decoders.values())
    assert features.shape[1] == width
    assert torch.isfinite(torch.from_numpy(features)).all()
    assert set(questions) <= {1, 2, 3}


def test_what_leaves_the_answer_the_same_stays_and_other_tokens_are_taken_back(
    chain: Chain,
) -> None:
    easy, all_same = search(chain, lambda text: 7)
    assert not any(all_same.matters)
    # each trial goes on from the one before
    for prompt in PROMPTS:
        trials = [asked for asked in easy.asked if asked[0][: len(prompt)] == prompt]
        for (_, before), (begun, _) in pairwise(trials):
            assert begun[:-1] == before[: len(begun) - 1]
            assert begun[-1] != before[len(begun) - 1]
        lengths = [len(begun) for begun, _ in trials]
        assert lengths == sorted(lengths)
    strict, found = search(chain, lambda text: crc32(text.encode()))
    assert found.num_searched == len(PROMPTS)
    for prompt in PROMPTS:
        (_, tokens), *trials = [each for each in strict.asked if each[0][: len(prompt)] == prompt]
        # all trials are of the first answer, as each of them becomes another text
        assert trials
        for begun, _ in trials:
            assert begun[:-1] == tokens[: len(begun) - 1]
    assert all(found.matters)


def test_a_token_that_ends_an_answer_is_judged_by_what_stands_before_it(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    miner, _ = search(chain, lambda text: 7)
    ends = miner.asked[1][0][-1]
    monkeypatch.setattr(chain, "stop_tokens", frozenset({ends}))
    miner, _ = search(chain, lambda text: 7)
    over = [(begun, tokens) for begun, tokens in miner.asked if begun[-1] == ends]
    assert over
    assert all(tokens == begun for begun, tokens in over)
    assert all(ends not in tokens[len(begun) : -1] for begun, tokens in miner.asked)


def test_answers_to_nothing_and_spent_time_judge_nothing(chain: Chain) -> None:
    _, none = search(chain, lambda text: None)
    assert (none.num_asked, none.num_searched, none.matters) == (3, 0, [])
    _, late = search(chain, lambda text: 1, max_seconds=1e-9)
    assert (late.num_asked, late.matters) == (1, [])
    assert chain.engine.slots.first.tokens == []
