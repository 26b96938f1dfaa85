"""What the systems of a benchmark are asked: each turn of each question, as token ids."""

import hashlib
from dataclasses import dataclass

from polybasic.deploy.bench.schema import PromptReport
from polybasic.deploy.planner.prompts import Question, choose_fitting
from polybasic.deploy.planner.settings import BenchSettings
from polybasic.deploy.runtime.chain import Chain

_TEMPLATE_TOKENS = 16
"""Room for what a chat template writes around an answer."""


@dataclass(frozen=True)
class BenchPrompt:
    """One turn to answer.

    Attributes:
        turn: 1 for the first.
        token_ids: up to where the answer begins.
    """

    question: Question
    turn: int
    token_ids: list[int]

    def described(self, text: str = "") -> PromptReport:
        """As a report holds it.

        Args:
            text: of its tokens.
        """
        return PromptReport(
            question_id=self.question.question_id,
            task=self.question.task,
            turn=self.turn,
            group=self.question.group,
            num_tokens=len(self.token_ids),
            sha256=hashlib.sha256(str(self.token_ids).encode()).hexdigest()[:16],
            token_ids=self.token_ids,
            text=text,
        )


def asked_prompts(
    chain: Chain, questions: list[Question], settings: BenchSettings
) -> tuple[list[BenchPrompt], int]:
    """Turns of questions that fit the context, and how many questions do not.

    Earlier turns are answered by the target, greedily, for all systems alike: all get the same
    token ids.

    Raises:
        UserError: prompts that are all too long.
    """
    chosen, num_too_long = _fitting(chain, questions, settings)
    prompts: list[BenchPrompt] = []
    target = [chain.manifest.members[0].name]
    for question in chosen:
        messages: list[dict[str, str]] = []
        for turn, text in enumerate(question.turns, 1):
            messages.append({"role": "user", "content": text})
            prompts.append(BenchPrompt(question, turn, chain.encode(messages)))
            if turn < len(question.turns):
                answer = chain.generate(
                    messages,
                    max_new_tokens=settings.max_new_tokens,
                    temperature=0.0,
                    members=target,
                )
                messages.append({"role": "assistant", "content": answer.text})
    return prompts, num_too_long


def _fitting(
    chain: Chain, questions: list[Question], settings: BenchSettings
) -> tuple[list[Question], int]:
    def num_tokens(question: Question) -> int:
        messages = [{"role": "user", "content": "\n".join(question.turns)}]
        answers = (len(question.turns) - 1) * (settings.max_new_tokens + _TEMPLATE_TOKENS)
        return len(chain.encode(messages)) + answers

    return choose_fitting(questions, num_tokens, chain.engine.context_tokens, settings, "bench")
