"""Which tokens matter: the semi-greedy search of AutoJudge (Garipov et al., 2025).

The target answers a question. Of its answer the first token at which the proposing member went
another way is replaced by that member's, and the target answers on from there. If the answer still
comes to the same, the token does not matter, the new answer takes the old one's place, and the
search goes on behind it; if not, it matters, and stays the target's own.

#   N = judged tokens, F = features of each: hidden states of the target and of the proposing member
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from polybasic.chain.formats.plan import Plan
from polybasic.deploy.bench.judging.questions import Asked, CheckedQuestion
from polybasic.deploy.planner.measuring.budget import Budget
from polybasic.deploy.runtime.chain import Chain
from polybasic.deploy.runtime.engine import rounds_of
from polybasic.deploy.runtime.request import Request
from polybasic.deploy.runtime.rounds.judging import JudgedBlockStage, RememberingTreeStage
from polybasic.deploy.runtime.rounds.sampling import Sampling
from polybasic.deploy.runtime.rounds.stages import Block, BlockStage, Stage, TreeStage


@dataclass(frozen=True)
class Mismatch:
    """A proposed token that is not the target's own.

    Attributes:
        place: among the tokens of the sequence, prompt included.
        token: that was proposed there.
        features: float32 [F].
    """

    place: int
    token: int
    features: Tensor


@dataclass
class Mined:
    """Tokens that were judged by what became of the answer.

    Attributes:
        questions: for each token, the number of its question.
        num_asked, num_searched: questions, and those whose answers come to something: to a number,
            right or wrong, or to code that passes its tests.
    """

    features: list[Tensor] = field(default_factory=list)
    matters: list[bool] = field(default_factory=list)
    questions: list[int] = field(default_factory=list)
    num_asked: int = 0
    num_searched: int = 0

    @property
    def arrays(self) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.int64]]:
        """Features [N, F], whether tokens matter [N], and questions [N]."""
        rows = [features.numpy() for features in self.features]
        features = np.array(rows, dtype=np.float64).reshape(len(rows), -1)
        return features, np.array(self.matters, dtype=bool), np.array(self.questions, dtype=int)


class Miner:
    """Judges tokens by answering on behind them.

    Args:
        plan: lossless, of the target and one proposing member; blocks are those of the plan that
            the judge is for.
        max_new_tokens: of an answer.
    """

    def __init__(self, chain: Chain, plan: Plan, max_new_tokens: int) -> None:
        self._chain, self._plan, self._max_new_tokens = chain, plan, max_new_tokens

    def mine(
        self,
        asked: Sequence[Asked],
        budget: Budget,
        share: float,
    ) -> Mined:
        """Judge tokens of answers to as many questions as a share of the budget allows."""
        found = Mined()
        try:
            for question, prompt in budget.within(asked, share, "questions to judge tokens of"):
                found.num_asked += 1
                self._search(found, question, prompt, budget, share)
        finally:
            self._chain.engine.slots.first.clear()
        return found

    def _search(
        self,
        found: Mined,
        question: CheckedQuestion,
        prompt: list[int],
        budget: Budget,
        share: float,
    ) -> None:
        tokens, waiting = self._answered(prompt, len(prompt))
        result = self._result(question, tokens, prompt)
        if result is None:
            return
        found.num_searched += 1
        while waiting and budget.left(share):
            mismatch = waiting.popleft()
            begun = [*tokens[: mismatch.place], mismatch.token]
            other, behind = self._answered(begun, len(prompt))
            is_same = self._result(question, other, prompt) == result
            found.features.append(mismatch.features)
            found.matters.append(not is_same)
            found.questions.append(found.num_asked)
            if is_same:
                tokens, waiting = other, behind

    def _result(
        self, question: CheckedQuestion, tokens: list[int], prompt: list[int]
    ) -> float | None:
        return question.result(answer_text(self._chain, tokens[len(prompt) :]))

    def _answered(self, begun: list[int], num_prompt: int) -> tuple[list[int], deque[Mismatch]]:
        """The target's whole sequence behind what has begun, and where another token was proposed.

        Rounds run on the host, where hidden states can be looked at.
        """
        left, engine = self._max_new_tokens - (len(begun) - num_prompt), self._chain.engine
        mismatches: deque[Mismatch] = deque()
        is_over = left <= 0 or (len(begun) > num_prompt and begun[-1] in self._chain.stop_tokens)
        if is_over:
            return begun, mismatches

        def make(kind: type[Stage], *given: Any) -> Stage:
            if kind is TreeStage:
                return RememberingTreeStage(*given)
            assert kind is BlockStage
            return _MiningStage(mismatches, *given)

        logprobs = 0 if engine.captures_rounds else None
        request = Request(
            begun, left, Sampling(0.0), self._chain.stop_tokens, self._plan, logprobs=logprobs
        )
        # what the caches hold of an earlier answer that began alike is not read again
        slot = engine.slots.first
        slot.hold(begun, slot.num_known(begun[:-1]))
        (root, *_), _ = engine.stages(request, make, slot)
        tokens = begun + [token for part, _ in rounds_of(root, request) for token in part]
        slot.tokens = tokens
        return tokens, mismatches


class _MiningStage(JudgedBlockStage):
    """A block stage without a judge: it keeps nothing, and notes the first mismatch of a block."""

    def __init__(self, mismatches: deque[Mismatch], *given: Any) -> None:
        super().__init__(*given)
        self._mismatches = mismatches

    def _tolerates(self, block: Block, place: int, states: Tensor) -> bool:
        self._mismatches.append(
            Mismatch(len(self.tokens) + place, block.tokens[place], self._features(place, states))
        )
        return False


def answer_text(chain: Chain, tokens: list[int]) -> str:
    """The text of an answer, without special tokens."""
    return str(chain.tokenizer.decode(tokens, skip_special_tokens=True))
