"""Packages that add families and kinds of heads, installed as pip installs them."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.checkpoints.decoder_config import HeadConfig
from polybasic.chain.formats.checkpoints.shapes import expected_shapes
from polybasic.chain.formats.extensions import offered
from polybasic.chain.formats.files import write_json
from polybasic.chain.formats.lineage import weights_digest
from polybasic.chain.heads.eagle_config import eagle_config

FAMILY = "[polybasic.families]\ntoy = toy.family:FAMILY\n"
HEAD = "[polybasic.drafters]\ntoy = toy.head:KIND\n"


@contextmanager
def installed(folder: Path, *entry_points: str) -> Iterator[None]:
    """Install tests/toy into `folder` once for each text of entry_points.txt, and uninstall it."""
    shutil.copytree(Path(__file__).parent / "toy", folder / "toy")
    for index, text in enumerate(entry_points):
        described = folder / f"toy{index}-0.1.dist-info"
        described.mkdir()
        (described / "METADATA").write_text(f"Name: toy{index}\nVersion: 0.1\n")
        (described / "entry_points.txt").write_text(text)
    sys.path.insert(0, str(folder))
    offered.cache_clear()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        offered.cache_clear()
        for name in [name for name in sys.modules if name.partition(".")[0] == "toy"]:
            del sys.modules[name]


def write_toy_model(folder: Path) -> None:
    """A random checkpoint of the family, written by transformers; the package is installed."""
    from toy.family import ToyConfig

    config = ToyConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def write_toy_head(folder: Path, target: Path, seed: int = 3) -> dict[str, tuple[int, ...]]:
    """A random head of the kind for a target, in the place of another; shapes of its tensors."""
    shape = read_config(target).decoder
    shapes = dict(expected_shapes("toy", HeadConfig(**vars(shape), kind="toy"), None, set()))
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: (torch.randn(size, generator=generator) / size[-1] ** 0.5).bfloat16()
        for name, size in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    origin = {"kind": "toy", "target_sha256": weights_digest(target)}
    config = eagle_config(shape, False, "bfloat16")
    write_json(folder / "config.json", config | {"polybasic": origin})
    return shapes
