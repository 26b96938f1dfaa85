"""Random draft heads of all kinds, over all tokens and over a part of them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from polybasic.chain.formats.checkpoints.config import head_config, read_config
from polybasic.chain.formats.checkpoints.draft_vocabulary import draft_tables
from polybasic.chain.formats.checkpoints.shapes import expected_shapes
from polybasic.chain.formats.files import write_json
from polybasic.chain.formats.head_kinds.early_exit import early_exit_config
from polybasic.chain.formats.head_kinds.steering import steering_config
from polybasic.chain.formats.head_kinds.table import HEAD_KINDS
from polybasic.chain.formats.lineage import weights_digest
from polybasic.chain.heads.dflash import dflash_config
from polybasic.chain.heads.eagle_config import block_config, eagle3_config
from polybasic.chain.heads.medusa import medusa_config

FEATURE_LAYERS = (0, 1, 1)
"""Of a target of two layers."""


def write_eagle3(
    folder: Path,
    target: Path,
    token_ids: Tensor | None = None,
    feature_layers: tuple[int, ...] = FEATURE_LAYERS,
    seed: int = 3,
    variants: tuple[str, ...] = (),
) -> None:
    """An EAGLE-3 head that says it was trained for `target`, of the same shape; none is replaced.

    Args:
        token_ids: that it can draft, ascending; None for all.
        variants: of EAGLE-3.
    """
    num_tokens = None if token_ids is None else len(token_ids)
    shape = read_config(target).decoder
    config = eagle3_config(shape, False, "bfloat16", feature_layers, num_tokens, variants)
    head = head_config(config, f"{folder}")
    tensors = _random(expected_shapes("eagle3", head, None, set()), seed)
    # else what a random target's layers read would drown all else
    tensors["fc.weight"] *= 0.02
    tensors["midlayer.self_attn.o_proj.weight"] *= 4
    tensors["lm_head.weight"] *= 4
    _write(folder, target, config, tensors, token_ids)


def write_block(folder: Path, target: Path, token_ids: Tensor | None = None) -> None:
    """A block-parallel head that says it was trained for `target`; none is replaced.

    Args:
        token_ids: that it can draft, ascending; None for all.
    """
    generator = torch.Generator().manual_seed(5)
    num_tokens = None if token_ids is None else len(token_ids)
    shape = read_config(target).decoder
    config = block_config(shape, False, "bfloat16", 2, 6, 16, num_tokens)
    named = config | {"polybasic": {"kind": "block"}}
    tensors = {
        name: (torch.randn(size, generator=generator) / shape.hidden_size**0.5).bfloat16()
        for name, size in expected_shapes("block", head_config(named, "test"), None, set())
        if name not in ("d2t", "t2d")
    }
    for name in ("markov_in", "markov_out", "place_features"):
        tensors[name] *= shape.hidden_size**0.5
    _write(folder, target, config, tensors, token_ids, kind="block")


PEAGLE_MASK, PEAGLE_POSITIONS = 5, 6


def write_peagle(folder: Path, target: Path, token_ids: Tensor | None = None) -> None:
    """A P-EAGLE head of two layers that says it was trained for `target`; none is replaced.

    Args:
        token_ids: that it can draft, ascending; None for all.
    """
    num_tokens = None if token_ids is None else len(token_ids)
    shape = read_config(target).decoder
    config = eagle3_config(shape, False, "bfloat16", FEATURE_LAYERS, num_tokens, ["fc_norm"])
    config |= {
        "architectures": ["PEagleDraftModel"],
        "num_hidden_layers": 2,
        "mask_token_id": PEAGLE_MASK,
        "num_positions": PEAGLE_POSITIONS,
    }
    head = head_config(config, f"{folder}")
    tensors = _random(expected_shapes("peagle", head, None, set()), seed=11)
    tensors["lm_head.weight"] *= 4
    _write(folder, target, config, tensors, token_ids)


DFLASH_SECTIONS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash with a window": {},
    "dflash with a window that sees ahead": {"causal": False},
    "causal dflash": {"causal": True},
    "domino": {
        "projector_type": "domino",
        "emb_dim": 48,
        "gru_hidden_dim": 32,
        "pure_draft_prefix_len": 1,
    },
    **{
        f"dspark {kind}": {
            "projector_type": "dspark",
            "markov_rank": 16,
            "markov_head_type": kind,
            "shift_label": True,
        }
        for kind in ("vanilla", "gated", "rnn")
    },
}
"""What config.json says of heads of DFlash's kinds, beside masks and layers."""
BLOCK_SIZE, DFLASH_WINDOW = 6, 8


def write_dflash(folder: Path, target: Path, case: str, token_ids: Tensor | None = None) -> None:
    """A DFlash head of two layers that says it was trained for `target`; none is replaced.

    Args:
        case: one of `DFLASH_SECTIONS`.
        token_ids: that it can draft, ascending; None for all.
    """
    shape = read_config(target).decoder
    layers = [layer - 1 for layer in FEATURE_LAYERS]
    given = {"mask_token_id": shape.vocab_size - 1, "target_layer_ids": layers}
    config = dflash_config(shape, 2, BLOCK_SIZE, given | DFLASH_SECTIONS[case], "bfloat16")
    if "window" in case:
        layer_types = ["sliding_attention", "full_attention"]
        config |= {"layer_types": layer_types, "sliding_window": DFLASH_WINDOW}
    if token_ids is not None:
        config["draft_vocab_size"] = len(token_ids)
    head = head_config(config, f"{folder}")
    tensors = _random(expected_shapes("dflash", head, None, set()), seed=4)
    # so that all that is read tells in what is drafted
    for name in tensors:
        if name.endswith(("self_attn.o_proj.weight", "markov_w2.weight", "embed_proj.2.weight")):
            tensors[name] *= 6
    _write(folder, target, config, tensors, token_ids)


def _write(
    folder: Path,
    target: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    token_ids: Tensor | None = None,
    **records: str,
) -> None:
    """A head in bfloat16 that says it was trained for `target`, with further records of it.

    Args:
        token_ids: that it can draft, ascending; None for all.
    """
    stored = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    if token_ids is not None:
        stored |= draft_tables(token_ids, config["vocab_size"])
    folder.mkdir(exist_ok=True)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    origin = {"target_sha256": weights_digest(target), **records}
    write_json(folder / "config.json", config | {"polybasic": origin})


def _random(shapes: Iterable[tuple[str, tuple[int, ...]]], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(size, generator=generator) / size[-1] ** (0.5 if len(size) > 1 else 0)
        for name, size in shapes
        if name not in ("d2t", "t2d")
    }


def trim(folder: Path, token_ids: Tensor) -> None:
    """Let an EAGLE-2 head draft these tokens alone, in ascending order."""
    tensors = load_file(folder / "model.safetensors")
    tables = draft_tables(token_ids, len(tensors["embed_tokens.weight"]))
    save_file(tensors | tables, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", config | {"draft_vocab_size": len(token_ids)})


def write_medusa(
    folder: Path,
    target: Path,
    kind: str = "medusa",
    token_ids: Tensor | None = None,
    num_heads: int = 5,
    num_blocks: int = 2,
) -> None:
    """Medusa's or Hydra's heads that say they were trained for `target`; none is replaced.

    Args:
        token_ids: that they can draft, ascending; None for all.
    """
    generator = torch.Generator().manual_seed(4)
    num_tokens = None if token_ids is None else len(token_ids)
    shape = read_config(target).decoder
    config = medusa_config(HEAD_KINDS[kind], shape, num_heads, num_blocks, "bfloat16", num_tokens)
    shapes = dict(expected_shapes(kind, head_config(config, "test"), None, set()))
    biases = {
        f"{name.removesuffix('weight')}bias": size[:1]
        for name, size in shapes.items()
        if name.startswith("blocks")
    }
    tensors = {
        name: (torch.randn(size, generator=generator) / shape.hidden_size**0.5).bfloat16()
        for name, size in (shapes | biases).items()
        if name not in ("d2t", "t2d")
    }
    for name, tensor in tensors.items():
        if name.endswith("residual.weight"):  # else states would drown embeddings
            tensor[..., shape.hidden_size :] *= 16
    _write(folder, target, config, tensors, token_ids)


def write_early_exit(
    folder: Path,
    target: Path,
    exit_layer: int = 1,
    adapter_rank: int = 0,
    token_ids: Tensor | None = None,
    seed: int = 4,
) -> None:
    """A random early exit that says it was trained for `target`.

    Args:
        token_ids: that it can draft, ascending; None for all.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = read_config(target).decoder
    H = shape.hidden_size
    tensors = {"norm.weight": torch.rand(H, generator=generator) + 0.5}
    if adapter_rank:
        tensors["adapter.down.weight"] = torch.randn(adapter_rank, H, generator=generator) / H**0.5
        tensors["adapter.up.weight"] = torch.randn(H, adapter_rank, generator=generator) / 4
    num_tokens = None if token_ids is None else len(token_ids)
    config = early_exit_config(shape, exit_layer, adapter_rank, "bfloat16", num_tokens)
    _write(folder, target, config, tensors, token_ids, kind="early_exit")


def write_steering(folder: Path, target: Path, drafter: Path, rank: int = 32) -> None:
    """A random steering of `drafter` that says it was trained for `target`."""
    generator = torch.Generator().manual_seed(5)
    verifier, steered = read_config(target).decoder, read_config(drafter).decoder
    size = steered.num_layers * steered.hidden_size
    tensors = {
        "down.weight": torch.randn(rank, verifier.hidden_size, generator=generator) / 16,
        "up.weight": torch.randn(size, rank, generator=generator) / 4,
    }
    config = steering_config(verifier, rank, steered.num_layers, steered.hidden_size, "bfloat16")
    of_drafter = weights_digest(drafter)
    _write(folder, target, config, tensors, kind="steering", drafter_sha256=of_drafter)
