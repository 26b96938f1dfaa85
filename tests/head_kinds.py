"""Random draft heads of both kinds, over all tokens and over a part of them."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from polybasic.chain.formats.config import read_config
from polybasic.chain.formats.decoder_config import HeadConfig
from polybasic.chain.formats.draft_vocabulary import draft_tables
from polybasic.chain.formats.files import write_json
from polybasic.chain.formats.lineage import weights_digest
from polybasic.chain.formats.shapes import expected_shapes
from polybasic.chain.heads.eagle_config import eagle3_config

FEATURE_LAYERS = (0, 1, 1)
"""Of a target of two layers."""


def write_eagle3(
    folder: Path,
    target: Path,
    token_ids: Tensor | None = None,
    feature_layers: tuple[int, ...] = FEATURE_LAYERS,
    seed: int = 3,
) -> None:
    """An EAGLE-3 head that says it was trained for `target`, of the same shape; none is replaced.

    Args:
        token_ids: that it can draft, ascending; None for all.
    """
    generator = torch.Generator().manual_seed(seed)
    num_tokens = None if token_ids is None else len(token_ids)
    shape = read_config(target).decoder
    head = HeadConfig(
        **vars(shape),
        kind="eagle3",
        draft_vocab_size=num_tokens,
        feature_layers=tuple(feature_layers),
    )
    tensors = {
        name: torch.randn(size, generator=generator) / size[-1] ** (0.5 if len(size) > 1 else 0)
        for name, size in expected_shapes("eagle3", head, None, set())
        if name not in ("d2t", "t2d")
    }
    # else what a random target's layers read would drown all else
    tensors["fc.weight"] *= 0.02
    tensors["midlayer.self_attn.o_proj.weight"] *= 4
    tensors["lm_head.weight"] *= 4
    stored = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    if token_ids is not None:
        stored |= draft_tables(token_ids, shape.vocab_size)
    folder.mkdir(exist_ok=True)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = eagle3_config(shape, False, "bfloat16", feature_layers, num_tokens)
    origin = {"target_sha256": weights_digest(target)}
    write_json(folder / "config.json", config | {"polybasic": origin})


def trim(folder: Path, token_ids: Tensor) -> None:
    """Let an EAGLE-2 head draft these tokens alone, in ascending order."""
    tensors = load_file(folder / "model.safetensors")
    tables = draft_tables(token_ids, len(tensors["embed_tokens.weight"]))
    save_file(tensors | tables, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", config | {"draft_vocab_size": len(token_ids)})
