"""One way of answering, whoever computes it: what a benchmark asks and times."""

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, replace

from polybasic.deploy.runtime.request import Statistics
from polybasic.deploy.runtime.rounds.sampling import Sampling


@dataclass(frozen=True)
class TimedAnswer:
    """New tokens and when they came.

    Attributes:
        token_ids: new ones, a stop token included.
        seconds: from the prompt's ids to the last token.
        num_first: tokens that came first, together.
        first_seconds: until they were there.
        statistics: of this runtime; None of others.
    """

    token_ids: list[int]
    seconds: float
    num_first: int
    first_seconds: float
    statistics: Statistics | None = None

    def until_stop(self, stop_tokens: Collection[int], max_new_tokens: int) -> "TimedAnswer":
        """The same without what follows its first stop token or its cut; times are kept."""
        end = next(
            (place for place, token in enumerate(self.token_ids, 1) if token in stop_tokens),
            len(self.token_ids),
        )
        token_ids = self.token_ids[: min(end, max_new_tokens)]
        return replace(self, token_ids=token_ids, num_first=min(self.num_first, len(token_ids)))


class System(ABC):
    """A way of answering prompts with the chain's target.

    Attributes:
        name: as reports show it.
        runtime: "polybasic", "transformers" or a peer's name.
        description: what it is and was given, in a line.
        dtype: name of the dtype of its arithmetic.
        version: of a peer, as it calls itself.
        notes: what a reader must know, a sentence each.
    """

    name: str
    runtime: str
    description: str
    dtype: str
    version: str | None = None
    notes: tuple[str, ...] = ()

    @abstractmethod
    def answer(self, prompt: list[int], max_new_tokens: int, sampling: Sampling) -> TimedAnswer:
        """Continue a prompt until a stop token or the cut, and time it.

        Nothing that was computed for an earlier prompt is reused.

        Raises:
            UserError: it cannot sample so, or it failed.
        """

    def close(self) -> None:  # noqa: B027
        """Give up what it holds: memory, processes, files."""
