"""Which conversation's features go into which shard, known before any is computed."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from polybasic.train.data.batches import BatchStream
from polybasic.train.features.feature_shards import (
    KEY_BYTES,
    conversation_key,
    open_shard,
    shard_path,
)
from polybasic.train.features.head_shape import FeatureLayers
from polybasic.train.features.states import Features
from polybasic.train.features.target import Target

PASS_TOKENS = 8192
"""Of one pass of the verifier, padding included; a conversation that is longer has its own."""

_LENGTH_BYTES = 8
_HEADER_BYTES = 1024  # at most


@dataclass(frozen=True)
class FeatureLayout:
    """What the verifier's passes leave of a token.

    Attributes:
        one: of a single token, [1, 1, ...].
        feature_layers: of an EAGLE-3 head; None for an EAGLE-2 head.
        num_top: of the most probable next tokens; 0: none.
    """

    one: Features
    feature_layers: FeatureLayers | None
    num_top: int

    @classmethod
    def of(
        cls, verifier: Target, feature_layers: FeatureLayers | None, num_top: int = 0
    ) -> "FeatureLayout":
        """Find it by a pass over one token, in which all processes take part."""
        token_ids = torch.zeros(1, 1, dtype=torch.long, device=verifier.device)
        features = verifier.features(token_ids, None, feature_layers, num_top)
        return cls(features, feature_layers, num_top)

    @property
    def token_bytes(self) -> int:
        """Of one token's features."""
        return sum(tensor.nbytes for tensor in self.one.tensors().values())

    def identity(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "feature_layers": None if self.feature_layers is None else list(self.feature_layers),
            "hidden_size": self.one.states.shape[-1],
            "dtype": str(self.one.states.dtype).removeprefix("torch."),
            "top_tokens": self.num_top,
        }


@dataclass(frozen=True)
class PlannedShard:
    """The conversations of a shard.

    Attributes:
        index: of the shard, from 0.
        conversations: token ids by their key, in the shard's order.
        token_bytes: of one token's features.
    """

    index: int
    conversations: dict[bytes, "array[int]"]
    token_bytes: int

    @property
    def lengths(self) -> list[int]:
        """Tokens of each conversation."""
        return list(map(len, self.conversations.values()))

    @property
    def num_tokens(self) -> int:
        """Of all conversations."""
        return sum(self.lengths)

    @property
    def tensor_bytes(self) -> int:
        """Of the file without its header."""
        of_tokens = self.num_tokens * self.token_bytes
        return of_tokens + len(self.conversations) * (KEY_BYTES + _LENGTH_BYTES)

    @property
    def most_bytes(self) -> int:
        """What the file takes at most."""
        return self.tensor_bytes + _HEADER_BYTES

    def is_written(self, folder: Path) -> bool:
        """Whether its file has all its conversations; a longer run may have appended more.

        Raises:
            UserError: the file is damaged.
        """
        path, keys = shard_path(folder, self.index), list(self.conversations)
        return path.exists() and open_shard(path).keys[: len(keys)] == keys

    def passes(self) -> list[list[int]]:
        """Conversations, counted from 0, that one pass of the verifier reads; of like length."""
        lengths = self.lengths
        passes: list[list[int]] = [[]]
        for number in sorted(range(len(lengths)), key=lengths.__getitem__):
            if passes[-1] and (len(passes[-1]) + 1) * lengths[number] > PASS_TOKENS:
                passes.append([])
            passes[-1].append(number)
        return passes


def planned_shards(
    batches: BatchStream, num_steps: int, token_bytes: int, shard_bytes: int
) -> Iterator[PlannedShard]:
    """The shards of a run; a conversation that is drawn often, or is there twice, counts once.

    A longer run has the same shards, but for the last one, and more.

    Args:
        batches: of the run.
        num_steps: of the run.
        token_bytes: of one token's features.
        shard_bytes: a shard's features take no more, unless of a single conversation.

    Raises:
        UserError: there is no conversation to train on.
    """
    index, num_tokens = 0, 0
    seen: set[bytes] = set()
    conversations: dict[bytes, array[int]] = {}
    for encoded in batches.conversations(num_steps):
        token_ids = array("i", encoded.input_ids)
        key = conversation_key(token_ids)
        if key in seen:
            continue
        seen.add(key)
        num_tokens += len(token_ids)
        if conversations and num_tokens * token_bytes > shard_bytes:
            yield PlannedShard(index, conversations, token_bytes)
            index, num_tokens, conversations = index + 1, len(token_ids), {}
        conversations[key] = token_ids
    yield PlannedShard(index, conversations, token_bytes)
