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
_MOST_NEW, _SEEN_FOR_NEW = 2, 16
"""A text with more new units than so many, and one for so many tokens, soon needs others."""


class Shortlist:
    """The frequent tokens of a vocabulary, and those that a sequence has seen.

    Frequent are those with low ids: vocabularies are in the order in which they were merged (BPE),
    or of their probabilities. A rare one that is seen often comes again. Where one new one comes
    after the other, as in texts of other scripts than most, all tokens are listed from then on.

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
        self._num_seen = self._num_new = 0

    @staticmethod
    def pays(vocab_size: int) -> bool:
        """Whether a vocabulary is large enough to leave something out."""
        return vocab_size >= _LEAST_VOCABULARY

    def __contains__(self, token: int) -> bool:
        return bool(self.units[token // UNIT_TOKENS])

    def add(self, tokens: Iterable[int]) -> None:
        """Tokens that the sequence has seen."""
        for token in tokens:
            self._num_seen += 1
            if token not in self:
                self._num_new += 1
                self.units[token // UNIT_TOKENS] = 1
        if self._num_new > _MOST_NEW + self._num_seen / _SEEN_FOR_NEW:
            self.units[:] = 1

    def left_out(self, vocab_size: int) -> np.ndarray:
        """Whether each token is not listed, bool [V]."""
        return np.repeat(self.units == 0, UNIT_TOKENS)[:vocab_size]

    @property
    def share(self) -> float:
        """Of the vocabulary, 0 to 1."""
        return float(self.units.mean())


def addresses(shortlists: Sequence[Shortlist | None], num_rows: Sequence[int]) -> np.ndarray:
    """Where the list of each row lies, 0 for none, uint64 [R]; each sequence has so many rows."""
    found = [0 if one is None else one.address for one in shortlists]
    return np.repeat(np.array(found, np.uint64), num_rows)
