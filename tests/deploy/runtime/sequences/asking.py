"""Requests of every kind, and their answers: alone, and in the company of others."""

import random
from typing import Any

from polybasic.chain.formats.plan import Flush, Ngram, Plan, Tree, Window
from polybasic.deploy import Chain

TREE = Tree(depth=3, top_k=2, rows=6)
FLUSH = {"target": Flush(length=6), "intermediate": Flush(length=3)}
WINDOWS = {"intermediate": Window(tokens=5, sinks=1)}
MEMBERS: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (("target",), {}),
    (("target",), {"ngram": Ngram(min_match=1)}),
    (("target", "draft"), {}),
    (("target", "copy"), {"tree": Tree(depth=5, top_k=3, rows=20)}),
    (("target", "copy"), {"ngram": Ngram(min_match=1)}),
    (("target", "intermediate", "draft"), {}),
    (("target", "intermediate", "copy"), {"windows": WINDOWS}),
    (("target", "intermediate", "small", "small_draft"), {}),
]
PLANS = [
    Plan(members=members, **{"tree": TREE, "flush": FLUSH, **others}) for members, others in MEMBERS
]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "seed": 2, "top_k": 20, "choice": 3},
    {"temperature": 1.3, "seed": 3, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    {"logit_bias": {5: 3.0}, "frequency_penalty": 0.4},
    {
        "temperature": 0.9,
        "seed": 4,
        "min_p": 0.02,
        "min_tokens": 12,
        "stop_token_ids": list(range(40)),
    },
]


def requests(num: int, seed: int = 0) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts of all lengths, some of which begin alike, with settings and plans in turn."""
    numbers = random.Random(seed)
    common = [numbers.randrange(60) for _ in range(40)]
    found = []
    for place in range(num):
        prompt = [numbers.randrange(60) for _ in range(numbers.randrange(1, 50))]
        if place % 3 == 0:
            prompt = [*common, *prompt[:20]]
        options = {**SETTINGS[place % len(SETTINGS)], "max_new_tokens": numbers.randrange(1, 40)}
        plan = numbers.choice([None, *PLANS])
        if plan is not None:
            options["plan"] = plan
        found.append((prompt, options))
    return found


def in_company(
    chain: Chain, asked: list[tuple[list[int], dict[str, Any]]], seed: int = 1
) -> list[list[int]]:
    """The answers of requests that join at random times."""
    numbers = random.Random(seed)
    waiting = list(enumerate(asked))
    live: dict[int, Any] = {}
    tokens: list[list[int]] = [[] for _ in asked]
    while waiting or live:
        while waiting and numbers.random() < 0.3:
            place, (prompt, options) = waiting.pop(0)
            live[place] = chain.begin(prompt, **options)
        chain.step()
        for place, answering in list(live.items()):
            tokens[place] += [token for piece in answering.take() for token in piece.token_ids]
            if answering.is_over:
                assert answering.error is None
                assert answering.statistics.num_tokens == len(tokens[place])
                del live[place]
    return tokens


def forget(chain: Chain) -> None:
    """Empty all caches."""
    for slot in chain.engine.slots.made:
        slot.clear()


def alone(chain: Chain, asked: list[tuple[list[int], dict[str, Any]]]) -> list[list[int]]:
    """The answers one after the other, none of which knows of another."""
    found = []
    for prompt, options in asked:
        forget(chain)
        answer = chain.generate(prompt, **options)
        assert answer.statistics.num_cached_tokens == 0
        found.append(answer.token_ids)
    return found


def pieces_of(chain: Chain, prompt: list[int], num: int, **options: Any) -> Any:
    return chain.generate(prompt, max_new_tokens=num, ignore_eos=True, **options)
