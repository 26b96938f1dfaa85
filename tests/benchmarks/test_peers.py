"""How other engines are asked, and that their drafts change no answer."""

import subprocess
import sys
from typing import Any

import pytest

from polybasic.chain.errors import UserError
from tests.benchmarks.scripts import load_script

peers, worker = load_script("peers"), load_script("peers_worker")

ECHO = """
import json, sys
print(json.dumps({"version": "echo 1"}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    tokens = asked["prompt"][: asked["num_tokens"]]
    print(json.dumps({"token_ids": tokens, "seconds": 0.5}), flush=True)
"""


def peer_of(code: str) -> Any:
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return peers.Peer("echo", process, frozenset({2}))


def test_an_engine_in_another_process_answers() -> None:
    peer = peer_of(ECHO)
    peer.wait_until_loaded()
    assert peer.version == "echo 1"
    assert peer.answer([5, 6, 7], 2) == ([5, 6], 0.5)
    peer._process.communicate()


def test_an_engine_that_ends_is_named() -> None:
    peer = peer_of("import sys; sys.exit(3)")
    with pytest.raises(UserError, match=r"another engine failed: echo \(exit code 3"):
        peer.wait_until_loaded()


def test_speeds_are_total_tokens_over_total_seconds() -> None:
    def asked(answer: list[int], seconds: float) -> Any:
        return lambda prompt, num_tokens: (answer[:num_tokens], seconds * len(prompt))

    prompts = [[1], [1, 2, 3]]
    systems = {"target": asked([7, 8, 9], 1.0), "other": asked([7, 8, 8], 0.5)}
    found = peers.speeds(systems, prompts, 3, turns=2)
    assert found["target"] == peers.Speed((1.5, 1.5), 2)
    assert found["other"] == peers.Speed((3.0, 3.0), 0)
    assert peers.speeds(systems, prompts, 2, turns=1)["other"].num_identical == 2


class CountingModel:
    """Says the sum of the last two tokens modulo 7, which repeats itself; `wrong` errs at times."""

    def __init__(self, wrong: int = 0) -> None:
        self.tokens: list[int] = []
        self.wrong, self.num_reads = wrong, 0

    @property
    def length(self) -> int:
        return len(self.tokens)

    def cut(self, length: int) -> None:
        del self.tokens[length:]

    def read(self, tokens: list[int], rows: int) -> list[int]:
        assert tokens
        self.num_reads += 1
        chosen = []
        for token in tokens:
            self.tokens.append(token)
            is_wrong = self.wrong and len(self.tokens) % self.wrong == 0
            chosen.append((sum(self.tokens[-2:]) + bool(is_wrong)) % 7)
        return chosen[-rows:]


class Lookup:
    def __call__(self, tokens: Any) -> Any:
        """What followed the last pair of tokens before."""
        pairs = [tuple(tokens[place : place + 2]) for place in range(len(tokens) - 2)]
        last = tuple(tokens[-2:])
        start = pairs.index(last) + 2 if last in pairs else len(tokens)
        return tokens[start : start + 4]


def engine(lookup: Any = None, drafter: Any = None) -> Any:
    one = object.__new__(worker.LlamaCpp)
    one.model, one._lookup, one._drafter, one._num_drafted = CountingModel(), lookup, drafter, 4
    return one


@pytest.mark.parametrize("stop", [[], [5]])
@pytest.mark.parametrize("num_tokens", [1, 2, 40])
def test_drafts_save_passes_and_change_no_answer(num_tokens: int, stop: list[int]) -> None:
    plain = engine()
    expected = plain.answer([1, 1], num_tokens, stop)
    assert len(expected) == num_tokens or expected[-1] in stop
    for drafted in (engine(Lookup()), engine(drafter=CountingModel(wrong=3))):
        for _ in range(2):
            assert drafted.answer([1, 1], num_tokens, stop) == expected
        if num_tokens == 40 and not stop:
            assert drafted.model.num_reads < 2 * plain.model.num_reads
