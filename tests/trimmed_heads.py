"""Random heads that draft among a quarter of the tokens, for the tiny chain of `conftest`."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from polybasic.chain.formats.draft_vocabulary import draft_tables
from polybasic.chain.formats.lineage import weights_digest
from polybasic.train.features.target import load_target
from polybasic.train.head.eagle3 import Eagle3Head
from polybasic.train.head.files import write_head
from polybasic.train.head.start import trained_weights
from polybasic.train.settings import HeadSettings

DRAFTED = torch.arange(0, 64, 4)
"""The tokens."""


def trim(draft: Path) -> None:
    """Let a head draft among `DRAFTED` alone."""
    weights = load_file(draft / "model.safetensors")
    vocab_size = len(weights["embed_tokens.weight"])
    save_file(
        weights | draft_tables(DRAFTED, vocab_size), draft / "model.safetensors", {"format": "pt"}
    )
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"draft_vocab_size": len(DRAFTED)}))


def replace_by_eagle3(draft: Path, target: Path) -> None:
    """A random EAGLE-3 head that drafts among `DRAFTED` alone, in the place of a head."""
    torch.manual_seed(0)
    loaded = load_target(target, torch.device("cpu"))
    settings = HeadSettings(kind="eagle3", feature_loss_weight=0)
    shape = replace(loaded.head_shape(settings), draft_vocab_size=len(DRAFTED))
    head = Eagle3Head(shape, loaded.embedding, DRAFTED).bfloat16()
    write_head(draft, head, trained_weights(head), weights_digest(target), "bfloat16")
