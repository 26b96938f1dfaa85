"""How many rows of prompts a pass takes, so that no sequence waits long for another's prompt."""

import torch

from polybasic.chain.kernels.executor import Executor

_MOST_ROWS, _MOST_ROWS_ON_GPU = 256, 2048
_LEAST_ROWS = 4
_ALL_ROWS = 1 << 30
"""More than any context has, shared by all sequences that may read."""
_SECONDS = {True: 0.1, False: 1.0}
"""That the rows of prompts add to a pass: while other sequences run, and while none does."""
_NEW_SHARE = 0.25  # of the latest pass in a moving mean


class PromptPace:
    """Of one model, whose passes all sequences share.

    What a row of a prompt costs is measured on a CPU alone: a GPU's passes take 2,048 rows. Where
    products over another number of rows may round differently, a sequence that runs alone gets
    blocks of one size, so that its answer does not depend on the time that passes take.

    Args:
        device: of the model.
        is_batch_invariant: whether a row gets the same bits in passes of any number of rows.
        reads_whole_prompts: whether a prompt comes in one pass, however long.

    Attributes:
        num_running: sequences that have not ended.
        num_reading: of them, those that read their prompts.
    """

    def __init__(
        self,
        device: torch.device,
        is_batch_invariant: bool = True,
        reads_whole_prompts: bool = False,
    ) -> None:
        self._is_timed = device.type == "cpu"
        self._most = _MOST_ROWS_ON_GPU if device.type == "cuda" else _MOST_ROWS
        self._is_batch_invariant = is_batch_invariant
        self._reads_whole_prompts = reads_whole_prompts
        self.num_running = self.num_reading = 0
        self._pass_seconds = self._row_seconds = 0.0

    @classmethod
    def of(cls, model: Executor) -> "PromptPace":
        """Of a verifying member."""
        return cls(model.device, model.is_batch_invariant, model.reads_whole_prompts)

    @property
    def room(self) -> int:
        """Rows of all prompts in a pass."""
        if self._reads_whole_prompts:
            return _ALL_ROWS
        is_shared = self.num_running > 1
        if not self._row_seconds or not (is_shared or self._is_batch_invariant):
            return self._most
        fitting = int(_SECONDS[is_shared] / self._row_seconds)
        return min(max(fitting, _LEAST_ROWS), self._most)

    @property
    def rows(self) -> int:
        """Rows of one prompt in a pass."""
        return max(self.room // max(self.num_reading, 1), _LEAST_ROWS)

    def took(self, num_rows: int, seconds: float) -> None:
        """Learn from a pass.

        Args:
            num_rows: of prompts in it; 0 where it only verified.
            seconds: that it took.
        """
        if not self._is_timed:
            return
        if not num_rows:
            self._pass_seconds = _moved(self._pass_seconds, seconds)
        elif seconds > self._pass_seconds:
            more = (seconds - self._pass_seconds) / num_rows
            self._row_seconds = _moved(self._row_seconds, more)


def _moved(mean: float, latest: float) -> float:
    return mean + _NEW_SHARE * (latest - mean) if mean else latest
