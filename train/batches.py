"""Training batches: a pure function of the seed and the step, so that nothing must be saved."""

import itertools
import sys
from dataclasses import dataclass

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from polybasic.chain.errors import UserError
from polybasic.train.chat import EncodedConversation, RefusedConversation, encode_accepted
from polybasic.train.processes import is_first_process

WINDOW_BATCHES = 8
MIN_TOKENS = 3  # the first row reads tokens 0 and 1 and predicts token 2


@dataclass(frozen=True)
class Share:
    """The conversations of a batch that one process trains on, padded as the whole batch is.

    Attributes:
        token_ids: [B, T].
        is_assistant: bool [B, T].
        rows: B places in the whole batch.
    """

    token_ids: Tensor
    is_assistant: Tensor
    rows: range


@dataclass(frozen=True)
class Batch:
    """Right-padded conversations, both [B, T]; `num_tokens` counts without the padding."""

    token_ids: Tensor
    is_assistant: Tensor
    num_tokens: int

    def share(self, index: int, count: int, device: torch.device | str = "cpu") -> Share:
        """Each `count`-th conversation from `index` on.

        Where none is left for a process it gets the first one without an assistant's token, so
        that it takes part in what all processes do together and adds nothing.
        """
        rows = range(index, len(self.token_ids), count)
        is_assistant = self.is_assistant
        if not rows:
            rows, is_assistant = range(1), torch.zeros_like(is_assistant)
        picked = slice(rows.start, rows.stop, rows.step)
        return Share(self.token_ids[picked].to(device), is_assistant[picked].to(device), rows)


class BatchStream:
    """Batches by step number; conversations of like length share one.

    Conversations are drawn in a new order each epoch. So many as fill `WINDOW_BATCHES` batches
    are encoded together, sorted by length and cut into batches, whose order is drawn again.
    """

    def __init__(
        self,
        conversations: Dataset,
        tokenizer: PreTrainedTokenizerBase,
        batch_size: int,
        max_tokens: int,
        seed: int,
    ) -> None:
        self._conversations = conversations
        self._tokenizer = tokenizer
        self._batch_size = batch_size
        self._max_tokens = max_tokens
        self._seed = seed
        self._window_index = -1
        self._window: list[list[EncodedConversation]] = []
        self._epoch = -1
        self._order: list[int] = []
        self._has_told = False

    def batch(self, step: int) -> Batch:
        """The batch of a step, counted from 0.

        Raises:
            UserError: no conversation of the window has an assistant's token to train on, or the
                chat template refuses them all.
        """
        index, offset = divmod(step, WINDOW_BATCHES)
        if index != self._window_index:
            self._window_index, self._window = index, self._encode_window(index)
        return collate(self._window[offset % len(self._window)])

    def _encode_window(self, index: int) -> list[list[EncodedConversation]]:
        size = WINDOW_BATCHES * self._batch_size
        rows = [self._row(position) for position in range(index * size, (index + 1) * size)]
        encoded, refusal = encode_accepted(
            self._tokenizer, self._conversations.select(rows)["messages"], self._max_tokens
        )
        if refusal is not None:
            self._tell(refusal)
        usable = [each for each in encoded if any(each.is_assistant[MIN_TOKENS - 1 :])]
        if not usable:
            raise refusal or UserError(
                "no assistant tokens to train on",
                f"{size} conversations cut at data.max_tokens = {self._max_tokens}",
                "raise data.max_tokens, or check that the chat template keeps the answers",
            )
        usable.sort(key=lambda each: len(each.input_ids))
        cuts = [len(usable) * number // WINDOW_BATCHES for number in range(WINDOW_BATCHES + 1)]
        batches = [usable[a:b] for a, b in itertools.pairwise(cuts) if a < b]
        return [batches[number] for number in self._permutation(len(batches), index, "window")]

    def _tell(self, refusal: RefusedConversation) -> None:
        """Say once that conversations are left out."""
        if not self._has_told and is_first_process():
            print(
                f"conversations that the chat template refuses are left out, as: {refusal}",
                file=sys.stderr,
            )
        self._has_told = True

    def _row(self, position: int) -> int:
        """The conversation at a position of the endless stream of epochs."""
        epoch, offset = divmod(position, len(self._conversations))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = self._permutation(len(self._conversations), epoch, "epoch")
        return self._order[offset]

    def _permutation(self, size: int, index: int, purpose: str) -> list[int]:
        generator = step_generator(self._seed, index, purpose)
        return torch.randperm(size, generator=generator).tolist()


def step_generator(
    seed: int, index: int, purpose: str, device: torch.device | str = "cpu"
) -> torch.Generator:
    """A generator whose state depends on seed, index and purpose only."""
    mixed = seed
    for value in (index, *purpose.encode("ascii")):
        mixed = (mixed * 6364136223846793005 + value + 1442695040888963407) % 2**63
    return torch.Generator(device).manual_seed(mixed)


def row_noise(shape: torch.Size, rows: range, seed: int, step: int, device: torch.device) -> Tensor:
    """Uniform numbers in [-1, 1), float32 [B, R, H]; a row's depend on its place in the batch."""
    noise = torch.empty(shape, device=device)
    for place, row in zip(noise, rows, strict=True):
        place.uniform_(-1, 1, generator=step_generator(seed, step, f"noise {row}", device))
    return noise


def collate(conversations: list[EncodedConversation]) -> Batch:
    """Pad on the right with token 0, which nothing before it attends to."""
    length = max(len(each.input_ids) for each in conversations)
    token_ids = torch.zeros(len(conversations), length, dtype=torch.long)
    is_assistant = torch.zeros(len(conversations), length, dtype=torch.bool)
    for row, each in enumerate(conversations):
        token_ids[row, : len(each.input_ids)] = torch.tensor(each.input_ids)
        is_assistant[row, : len(each.is_assistant)] = torch.tensor(each.is_assistant)
    return Batch(token_ids, is_assistant, sum(len(each.input_ids) for each in conversations))
