"""The tokens of which a model below the target computes logits.

Its output projection is a quarter to a half of all that a pass over layers in 4 bits reads, most of
it for tokens that hardly occur (as FR-Spec, Zhao et al., arXiv 2502.14856, finds of draft heads).
Whatever such a model proposes, the target decides: what is left out costs time at most.
"""

from collections.abc import Iterable, Sequence

import numpy as np

UNIT_TOKENS = 64
"""Consecutive ids that are listed together: what the kernels multiply at a time."""
_MOST_FREQUENT = 49152
_LEAST_VOCABULARY = 16384
"""Of a smaller one all tokens have logits."""


class Shortlist:
    """The frequent tokens of a vocabulary, and those that a sequence has seen.

    Frequent are those with low ids: vocabularies are in the order in which they were merged (BPE),
    or of their probabilities. A rare one that is seen often comes again.

    Args:
        vocab_size: tokens in all.

    Attributes:
        units: uint8 [units of UNIT_TOKENS tokens], 1 for those that are listed.
        address: of `units`.
    """

    def __init__(self, vocab_size: int) -> None:
        self.units = np.zeros(-(-vocab_size // UNIT_TOKENS), np.uint8)
        self.units[: min(vocab_size // 2, _MOST_FREQUENT) // UNIT_TOKENS] = 1
        self.address = self.units.ctypes.data

    @staticmethod
    def pays(vocab_size: int) -> bool:
        """Whether a vocabulary is large enough to leave something out."""
        return vocab_size >= _LEAST_VOCABULARY

    def __contains__(self, token: int) -> bool:
        return bool(self.units[token // UNIT_TOKENS])

    def add(self, tokens: Iterable[int]) -> None:
        """Tokens that the sequence has seen."""
        for token in tokens:
            self.units[token // UNIT_TOKENS] = 1

    @property
    def share(self) -> float:
        """Of the vocabulary, 0 to 1."""
        return float(self.units.mean())


def addresses(shortlists: Sequence[Shortlist | None], num_rows: Sequence[int]) -> np.ndarray:
    """Where the list of each row lies, 0 for none, uint64 [R]; each sequence has so many rows."""
    found = [0 if one is None else one.address for one in shortlists]
    return np.repeat(np.array(found, np.uint64), num_rows)
