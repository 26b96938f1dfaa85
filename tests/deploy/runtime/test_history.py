"""Answers that copy from earlier ones: the same text by fewer passes."""

from typing import Any

import pytest

from polybasic import History, load_chain
from polybasic.chain.base.errors import UserError
from polybasic.deploy.runtime.chain import Chain
from tests.deploy.byte_target import write_byte_target
from tests.deploy.serve.serving import serving

KEYS = ("first", "second")


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """A target whose tokens are bytes, and n-grams."""
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_target(folder)
    return load_chain(folder, dtype="float32", sequences=4)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.7, "seed": 3}])
def test_earlier_answers_change_no_text(chain: Chain, options: dict[str, Any]) -> None:
    history, options = History(), {"max_new_tokens": 60, "ignore_eos": True} | options
    for prompt in ("a cat?", "a dog?"):
        expected = chain.generate(prompt, **options)
        first, second = (chain.generate(prompt, history=history, **options) for _ in range(2))
        assert first.token_ids == second.token_ids == expected.token_ids
        assert second.statistics.accepted["history"] > 30
        passes = [
            answer.statistics.forward_passes["target"] for answer in (expected, first, second)
        ]
        assert passes[2] < passes[1] / 2
        assert second.members.count("history") == second.statistics.accepted["history"]
    # a plan without n-grams copies nothing
    held = len(history)
    plan = chain.plan.model_copy(update={"ngram": None, "rule": "coupled"})
    alone = chain.generate("a cat?", history=history, plan=plan, **options)
    assert list(alone.statistics.proposals) == []
    assert len(history) > held


def test_a_seed_by_another_rule_is_refused(chain: Chain) -> None:
    options: dict[str, Any] = {"history": History(), "max_new_tokens": 4}
    with pytest.raises(UserError, match="rule='token', by which drafts decide"):
        chain.generate("a", rule="token", seed=1, **options)
    assert chain.generate("a", rule="token", temperature=1.0, **options).token_ids
    with pytest.raises(UserError, match="history"):
        chain.generate("a", history=[1, 2])  # type: ignore[arg-type]


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_key_is_answered_from_its_own_history(chain: Chain, is_kept: bool) -> None:
    asked = {
        "prompt": "a cat?",
        "max_tokens": 60,
        "ignore_eos": True,
        "temperature": 0,
        "polybasic": {"members": True},
    }
    with serving(chain, api_keys=KEYS, history=is_kept) as server:

        def answer(key: str) -> tuple[str, set[str]]:
            headers = {"Authorization": f"Bearer {key}"}
            [found] = server.post("/v1/completions", asked, headers=headers).json()["choices"]
            return found["text"], {token["member"] for token in found["polybasic"]["tokens"]}

        answers = [answer(key) for key in ("first", "first", "second", "second")]
    assert len({text for text, _ in answers}) == 1
    copied = ["history" in members for _, members in answers]
    assert copied == [False, is_kept, False, is_kept]


def test_a_history_is_a_few_megabytes() -> None:
    """20 bytes a token."""
    history = History(1 << 12)
    arrays = (history._tokens, history._latest, history._earlier)
    assert sum(array.itemsize * len(array) for array in arrays) == 20 * (1 << 12)
    history.add(range(10_000))
    assert len(history) == 1 << 12
