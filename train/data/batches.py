"""Training batches: a pure function of the seed and the step, so that nothing must be saved."""

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.processes.group import is_first_process
from polybasic.train.data.chat import EncodedConversation, RefusedConversation, encode_accepted
from polybasic.train.data.packing import PackedWindows

WINDOW_BATCHES = 8
MIN_TOKENS = 3  # the first row reads tokens 0 and 1 and predicts token 2
_KEPT_PER_ROW = 16  # encoded conversations


@dataclass(frozen=True)
class LocalBatch:
    """The rows of a batch that one process trains on, padded as the whole batch is.

    Attributes:
        token_ids: [B, T].
        is_assistant: bool [B, T].
        rows: B places in the whole batch.
        document_ids: int64 [B, T], as of the batch, or None.
        conversation_ids: for each row the ids of its conversations, in order.
        lengths: for each row the tokens of its conversations, which follow upon each other.
    """

    token_ids: Tensor
    is_assistant: Tensor
    rows: range
    document_ids: Tensor | None = None
    conversation_ids: Sequence[Sequence[str]] = ()
    lengths: Sequence[Sequence[int]] = ()


@dataclass(frozen=True)
class Batch:
    """Right-padded rows of one conversation each, or of several where they are packed.

    Attributes:
        token_ids: [B, T].
        is_assistant: bool [B, T]. In packed rows false for the first two tokens of a conversation:
            a row of the head that predicts them would read the one before.
        num_tokens: without the padding.
        document_ids: int64 [B, T] of packed rows: 0, 1, 2, ... by conversation in the row, -1 in
            the padding; None where each row is one conversation.
        conversation_ids: for each row the ids of its conversations, in order.
        lengths: for each row the tokens of its conversations, which follow upon each other.
    """

    token_ids: Tensor
    is_assistant: Tensor
    num_tokens: int
    document_ids: Tensor | None = None
    conversation_ids: Sequence[Sequence[str]] = ()
    lengths: Sequence[Sequence[int]] = ()

    def share(self, index: int, count: int, device: torch.device | str = "cpu") -> LocalBatch:
        """Each `count`-th row from `index` on.

        Where none is left for a process it gets the first one without an assistant's token, so
        that it takes part in what all processes do together and adds nothing.
        """
        rows = range(index, len(self.token_ids), count)
        is_assistant = self.is_assistant
        if not rows:
            rows, is_assistant = range(1), torch.zeros_like(is_assistant)
        picked = slice(rows.start, rows.stop, rows.step)
        documents = self.document_ids
        return LocalBatch(
            self.token_ids[picked].to(device),
            is_assistant[picked].to(device),
            rows,
            None if documents is None else documents[picked].to(device),
            self.conversation_ids[picked],
            self.lengths[picked],
        )


class Drawn(NamedTuple):
    """An encoded conversation and the id that its file gives it."""

    conversation_id: str
    encoded: EncodedConversation

    @property
    def num_tokens(self) -> int:
        """As it was cut."""
        return len(self.encoded.input_ids)


Row = list[Drawn]
"""The conversations of a row of a batch: one, or several where rows are packed."""


class BatchStream:
    """Batches by step number, drawn from conversations in a new order each epoch.

    Unpacked, conversations of like length share a batch: so many as fill `WINDOW_BATCHES` batches
    are encoded together, sorted by length and cut into batches, whose order is drawn again.
    Packed, the rows of `WINDOW_BATCHES` batches are filled together and their order is drawn
    again. Where a packed window begins follows from the lengths of the conversations before it, so
    the first batch after a stop takes the time to encode those.

    Args:
        conversations: with the columns id and messages.
        tokenizer: with a chat template.
        batch_size: rows of a batch.
        max_tokens: conversations are cut there; a packed row has room for so many.
        seed: of all orders.
        pack: several conversations in a row.
    """

    def __init__(
        self,
        conversations: Dataset,
        tokenizer: PreTrainedTokenizerBase,
        batch_size: int,
        max_tokens: int,
        seed: int,
        pack: bool = False,
    ) -> None:
        self._conversations = conversations
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._seed = seed
        self._is_packed = pack
        self._num_window_rows = WINDOW_BATCHES * batch_size
        self._window_index = -1
        self._window: list[list[Row]] = []
        self._epoch = -1
        self._order: list[int] = []
        self._refusal: RefusedConversation | None = None
        self._has_reported = False
        # what the packing of a window encodes for its length is then at hand for the batches
        self._encode_once = lru_cache(_KEPT_PER_ROW * self._num_window_rows)(self._encode)
        self._lengths: dict[int, int] = {}
        self._packed = PackedWindows(
            self._length_at,
            self._num_window_rows,
            max_tokens,
            patience=2 * len(conversations),  # one may come first in an epoch, last in the next
        )

    def batch(self, step: int) -> Batch:
        """The batch of a step, counted from 0.

        Raises:
            UserError: no conversation of the window has an assistant's token to train on, or the
                chat template refuses them all.
        """
        index, offset = divmod(step, WINDOW_BATCHES)
        if index != self._window_index:
            self._window = self._packed_window(index) if self._is_packed else self._sorted(index)
            self._window_index = index
        return collate_rows(self._window[offset % len(self._window)], self._is_packed)

    def conversations(self, num_steps: int) -> Iterator[EncodedConversation]:
        """Each conversation that steps 0 .. `num_steps` - 1 draw, once, in order of drawing.

        They are those with a token to train on in all windows that the steps enter. More steps
        append conversations.

        Raises:
            UserError: there is none.
        """
        num_windows, everything = -(-num_steps // WINDOW_BATCHES), len(self._conversations)
        end = num_windows * self._num_window_rows
        if self._is_packed:
            end = self._packed.start(num_windows, enough=everything)
        num_usable = 0
        for position in range(min(end, everything)):
            drawn = self._encode(self._row(position))
            if drawn is not None:
                num_usable += 1
                yield drawn.encoded
        if not num_usable:
            raise self._nothing_usable(min(end, everything))

    def _sorted(self, index: int) -> list[list[Row]]:
        """The batches of an unpacked window."""
        size = self._num_window_rows
        self._refusal = None
        drawn = [self._encode(self._row(index * size + offset)) for offset in range(size)]
        usable = [each for each in drawn if each is not None]
        if not usable:
            raise self._nothing_usable(size)
        usable.sort(key=lambda each: each.num_tokens)
        cuts = [len(usable) * number // WINDOW_BATCHES for number in range(WINDOW_BATCHES + 1)]
        batches = [[[each] for each in usable[a:b]] for a, b in itertools.pairwise(cuts) if a < b]
        return [batches[number] for number in self._permutation(len(batches), index, "window")]

    def _packed_window(self, index: int) -> list[list[Row]]:
        """The batches of a packed window."""
        packed = self._packed.window(index)
        if not packed:
            raise self._nothing_usable(len(self._conversations))
        rows = []
        for number in self._permutation(len(packed), index, "window"):
            drawn = (self._encode_once(self._row(position)) for position in packed[number])
            rows.append([each for each in drawn if each is not None])
        size = self._num_window_rows // WINDOW_BATCHES
        return [rows[start : start + size] for start in range(0, len(rows), size)]

    def _length_at(self, position: int) -> int:
        """Tokens of the conversation at a position of the stream; 0 where it is of no use."""
        row = self._row(position)
        if row not in self._lengths:
            drawn = self._encode_once(row)
            self._lengths[row] = 0 if drawn is None else drawn.num_tokens
        return self._lengths[row]

    def _encode(self, row: int) -> Drawn | None:
        """A conversation of the data set; None where there is no token to train on."""
        found = self._conversations[row]
        encoded, refusal = encode_accepted(self._tokenizer, [found["messages"]], self._max_tokens)
        if refusal is not None:
            self._refusal = refusal
            self._report(refusal)
        if not encoded or not any(encoded[0].is_assistant[MIN_TOKENS - 1 :]):
            return None
        return Drawn(found["id"], encoded[0])

    def _nothing_usable(self, num_conversations: int) -> UserError:
        return self._refusal or UserError(
            "no assistant tokens to train on",
            f"{num_conversations} conversations cut at data.max_tokens = {self._max_tokens}",
            "raise data.max_tokens, or check that the chat template keeps the answers",
        )

    def _report(self, refusal: RefusedConversation) -> None:
        """Report once that conversations are left out."""
        if not self._has_reported and is_first_process():
            print(
                f"conversations that the chat template refuses are left out, as: {refusal}",
                file=sys.stderr,
            )
        self._has_reported = True

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


def collate_rows(rows: Sequence[Row], is_packed: bool = False) -> Batch:
    """Pad on the right with token 0, which nothing before it attends to.

    Args:
        rows: the conversations of each, in order.
        is_packed: whether they may be several.
    """
    lengths = [[each.num_tokens for each in row] for row in rows]
    shape = (len(rows), max(map(sum, lengths)))
    token_ids = torch.zeros(shape, dtype=torch.long)
    is_assistant = torch.zeros(shape, dtype=torch.bool)
    document_ids = torch.full(shape, -1)
    for index, row in enumerate(rows):
        end = 0
        for number, each in enumerate(row):
            start, end = end, end + each.num_tokens
            token_ids[index, start:end] = torch.tensor(each.encoded.input_ids)
            is_assistant[index, start:end] = torch.tensor(each.encoded.is_assistant)
            document_ids[index, start:end] = number
            if is_packed:
                is_assistant[index, start : start + MIN_TOKENS - 1] = False
    return Batch(
        token_ids,
        is_assistant,
        sum(map(sum, lengths)),
        document_ids if is_packed else None,
        [[each.conversation_id for each in row] for row in rows],
        lengths,
    )
