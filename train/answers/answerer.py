"""The interface between regeneration and whoever answers: a server, or this runtime."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from polybasic.train.data.chat import Messages


@dataclass(frozen=True)
class AskedPrompt:
    """What is asked for one answer.

    Attributes:
        messages: up to the user's turn that is to be answered.
        token_ids: the same by the target's chat template, with the opening of the answer.
        max_new_tokens: of the answer; they fit the context after the prompt.
        temperature: 0 is greedy.
        seed: of the random numbers; the same in every run.
    """

    messages: Messages
    token_ids: list[int]
    max_new_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True)
class WrittenTurn:
    """What a model wrote in one turn.

    Attributes:
        text: without special tokens.
        is_cut: it was ended by the number of tokens, not by the model.
    """

    text: str
    is_cut: bool


class FailedAnswer(Exception):
    """There is no answer to one prompt, for this reason; others may get theirs."""


class Answerer(Protocol):
    """Who answers.

    Attributes:
        identity: JSON content that distinguishes its answers from those of others.
        context_tokens: of a prompt with its answer.
        num_parallel: prompts that it answers at once.
    """

    @property
    def identity(self) -> Mapping[str, Any]: ...

    @property
    def context_tokens(self) -> int: ...

    @property
    def num_parallel(self) -> int: ...

    async def answer(self, prompt: AskedPrompt) -> WrittenTurn:
        """Answer one prompt.

        Raises:
            FailedAnswer: there is none to this one.
            UserError: there will be none to any other one either.
        """
