"""What members proposed, counted."""

from dataclasses import dataclass, field
from itertools import zip_longest


@dataclass
class Proposals:
    """What a member proposed to the verifier above it.

    Attributes:
        num_drafts: trees or blocks.
        num_tokens: of all of them.
        accepted: at [i], how often the token at place i of a draft was accepted.
    """

    num_drafts: int = 0
    num_tokens: int = 0
    accepted: list[int] = field(default_factory=list)

    def count(self, num_tokens: int, num_accepted: int) -> None:
        """Add a draft of so many tokens, of which the first `num_accepted` of a path were kept."""
        self.num_drafts += 1
        self.num_tokens += num_tokens
        self.accepted += [0] * (num_accepted - len(self.accepted))
        for place in range(num_accepted):
            self.accepted[place] += 1

    def add(self, other: "Proposals") -> None:
        """Add another's counts."""
        self.num_drafts += other.num_drafts
        self.num_tokens += other.num_tokens
        self.accepted = [
            sum(two) for two in zip_longest(self.accepted, other.accepted, fillvalue=0)
        ]
