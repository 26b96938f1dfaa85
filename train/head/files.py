"""A trained head on disk, in the layout of its kind."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from polybasic.chain.formats.draft_vocabulary import draft_tables
from polybasic.chain.formats.files import whole_file, write_json
from polybasic.chain.formats.lineage import TRAINED_FOR_KEY
from polybasic.chain.formats.origin import ORIGIN_KEY
from polybasic.chain.heads.eagle_config import eagle3_config, eagle_config
from polybasic.train.features.head_shape import HeadShape
from polybasic.train.head.eagle2 import DraftHead


def write_head(
    out: Path, head: DraftHead, weights: dict[str, Tensor], target_sha256: str, dtype: str
) -> None:
    """Write model.safetensors and config.json of a head, each whole.

    Beside `weights` the file holds the embedding, the tables of a draft vocabulary and, of an
    EAGLE-2 head without an `fc.bias`, one of zeros.

    Args:
        out: the folder.
        head: gives shape, embedding and draft vocabulary.
        weights: from `polybasic.train.head.start.trained_weights`.
        target_sha256: digest of the weights that the head was trained for.
        dtype: of `weights`, as config.json names it.

    Raises:
        UserError: the disk is full or not writable.
    """
    embedding = head.embed_tokens.weight.detach().to("cpu").contiguous()
    tensors = {**weights, "embed_tokens.weight": embedding}
    if head.shape.kind == "eagle2":
        # engines disagree on a missing bias: one leaves it at random values
        tensors.setdefault("fc.bias", torch.zeros_like(weights["fc.weight"][:, 0]))
    if head.draft_token_ids is not None:
        tensors |= draft_tables(head.draft_token_ids.cpu(), head.shape.vocab_size)
    with whole_file(out / "model.safetensors") as partial:
        save_file(tensors, partial, metadata={"format": "pt"})
    write_json(out / "config.json", head_config(head.shape, target_sha256, dtype))


def head_config(shape: HeadShape, target_sha256: str, dtype: str) -> dict[str, Any]:
    """The head's config.json: EAGLE's, and the weights that the head was trained for."""
    if shape.feature_layers is None:
        config = eagle_config(shape, shape.has_qkv_bias, dtype, shape.draft_vocab_size)
    else:
        config = eagle3_config(
            shape, shape.has_qkv_bias, dtype, shape.feature_layers, shape.draft_vocab_size
        )
    return {**config, ORIGIN_KEY: {TRAINED_FOR_KEY: target_sha256}}
