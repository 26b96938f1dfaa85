"""A trained head on disk, in the layout of its kind."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from polybasic.chain.formats.checkpoints.draft_vocabulary import draft_tables
from polybasic.chain.formats.files import whole_file, write_json
from polybasic.chain.formats.head_kinds.early_exit import EARLY_EXIT, early_exit_config
from polybasic.chain.formats.head_kinds.steering import STEERED_KEY, STEERING, steering_config
from polybasic.chain.formats.head_kinds.table import HEAD_KINDS, KIND_KEY
from polybasic.chain.formats.lineage import TRAINED_FOR_KEY
from polybasic.chain.formats.origin import ORIGIN_KEY
from polybasic.chain.heads.eagle_config import block_config, eagle3_config, eagle_config
from polybasic.chain.heads.medusa import medusa_config
from polybasic.train.features.head_shape import HeadShape
from polybasic.train.head.eagle2 import DraftHead


def write_head(
    out: Path, head: DraftHead, weights: dict[str, Tensor], target_sha256: str, dtype: str
) -> None:
    """Write model.safetensors and config.json of a head, each whole.

    Beside `weights` the file holds the embedding, if heads of its kind have a copy, the tables of a
    draft vocabulary and, of an EAGLE-2 head without an `fc.bias`, one of zeros.

    Args:
        out: the folder.
        head: gives shape, embedding and draft vocabulary.
        weights: from `polybasic.train.head.start.trained_weights`.
        target_sha256: digest of the weights that the head was trained for.
        dtype: of `weights`, as config.json names it.

    Raises:
        UserError: the disk is full or not writable.
    """
    tensors = dict(weights)
    if HEAD_KINDS[head.shape.kind].layer is not None:
        embedding = head.embed_tokens.weight.detach()
        tensors["embed_tokens.weight"] = embedding.to("cpu").contiguous()
    if head.shape.kind == "eagle2":
        # engines disagree on a missing bias: one leaves it at random values
        tensors.setdefault("fc.bias", torch.zeros_like(weights["fc.weight"][:, 0]))
    if head.draft_token_ids is not None:
        tensors |= draft_tables(head.draft_token_ids.cpu(), head.shape.vocab_size)
    with whole_file(out / "model.safetensors") as partial:
        save_file(tensors, partial, metadata={"format": "pt"})
    write_json(out / "config.json", head_config(head.shape, target_sha256, dtype))


def head_config(shape: HeadShape, target_sha256: str, dtype: str) -> dict[str, Any]:
    """The head's config.json: its kind's, and the weights that the head was trained for."""
    origin = {TRAINED_FOR_KEY: target_sha256}
    if shape.kind == EARLY_EXIT.name:
        origin[KIND_KEY] = shape.kind
        config = early_exit_config(
            shape, shape.exit_layer, shape.adapter_rank, dtype, shape.draft_vocab_size
        )
    elif shape.kind == STEERING.name:
        origin |= {KIND_KEY: shape.kind, STEERED_KEY: shape.steered_sha256}
        config = steering_config(
            shape, shape.adapter_rank, shape.steered_layers, shape.steered_size, dtype
        )
    elif shape.num_blocks and shape.num_positions is not None:
        config = medusa_config(
            HEAD_KINDS[shape.kind],
            shape,
            shape.num_positions,
            shape.num_blocks,
            dtype,
            shape.draft_vocab_size,
        )
    elif shape.num_positions is not None:
        config = block_config(
            shape,
            shape.has_qkv_bias,
            dtype,
            shape.num_layers,
            shape.num_positions,
            shape.markov_rank,
            shape.draft_vocab_size,
        )
        origin[KIND_KEY] = shape.kind
    elif shape.feature_layers is None:
        config = eagle_config(shape, shape.has_qkv_bias, dtype, shape.draft_vocab_size)
    else:
        config = eagle3_config(
            shape,
            shape.has_qkv_bias,
            dtype,
            shape.feature_layers,
            shape.draft_vocab_size,
            shape.variants,
        )
    return {**config, ORIGIN_KEY: origin}
