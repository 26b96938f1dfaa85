"""What a server asks of a learner, which learns from its answers while there are none to make."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Progress:
    """How far a learner has come.

    Attributes:
        num_tokens: of answers that it has learned from, each as often as it was.
        num_heads: that have taken the place of an earlier one.
        served, learned: tokens a round that the weights that serve, and those that learn, would
            have gained with answers that neither has learned from; None before there are any.
    """

    num_tokens: int
    num_heads: int
    served: float | None
    learned: float | None


class Learner(Protocol):
    """Makes a chain draft better. All calls come from the one thread that runs the chain."""

    @property
    def progress(self) -> Progress: ...

    def add(self, prompt: list[int], answer: list[int]) -> None:
        """Take an answer, to be learned from later."""

    def work(self) -> bool:
        """Do a piece of work, for whose end a request may have to wait; False if there is none.

        No answer is being made meanwhile.
        """
