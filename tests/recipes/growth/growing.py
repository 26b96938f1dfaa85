"""What tells whether a grown chain computes what the small one does."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from polybasic.chain.formats.awq import QuantizedWeight, dequantize
from polybasic.chain.formats.checkpoint import load_tensors
from polybasic.chain.formats.config import read_config
from polybasic.chain.model.loading import load_decoder
from polybasic.deploy.rounds.cache import KeyValueCache
from polybasic.deploy.rounds.verifier import Verifier
from polybasic.recipes.growth.model import NOWHERE, GrownWeights, Growth
from polybasic.recipes.growth.shapes import GrownShape
from tests.conftest import VOCAB_SIZE, ChainParts

CPU = torch.device("cpu")
EPS = 1e-2
"""Of the norms: large enough to be seen in logits."""
TOKEN_IDS = torch.randint(0, VOCAB_SIZE, (24,), generator=torch.Generator().manual_seed(0))


def library_logits(folder: Path) -> Tensor:
    """By transformers, in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return model(TOKEN_IDS[None]).logits[0]


def states_of(folder: Path) -> tuple[Verifier, Tensor]:
    """The runtime's decoder in float32, and its states of TOKEN_IDS."""
    decoder = load_decoder(read_config(folder), torch.float32, CPU, len(TOKEN_IDS) + 8)
    config = decoder.config
    cache = KeyValueCache(config, config.num_layers, len(TOKEN_IDS), torch.float32, CPU)
    verifier = Verifier("target", decoder, cache)
    return verifier, verifier.read(TOKEN_IDS.tolist())


def runtime_logits(folder: Path) -> Tensor:
    verifier, states = states_of(folder)
    return verifier.logits(states)


def assert_same(small: Tensor, large: Tensor, tolerance: float = 1e-4) -> None:
    """Logits of the shared tokens are equal, added tokens are impossible."""
    torch.testing.assert_close(large[:, :VOCAB_SIZE], small, rtol=0, atol=tolerance)
    assert large.softmax(-1)[:, VOCAB_SIZE:].sum(-1).max() < 1e-10 if large.shape[1] > 64 else True


def quantized(folder: Path) -> dict[str, QuantizedWeight]:
    tensors = load_tensors(folder)
    return {
        name: QuantizedWeight.unpack(
            *(tensors[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales"))
        )
        for name in (key.removesuffix(".qweight") for key in tensors if key.endswith(".qweight"))
    }


def assert_moved(parts: ChainParts, shape: GrownShape, grown: Path) -> None:
    """The grown chain has the small one's 4-bit weights, each in its place."""
    small, large = quantized(parts.intermediate), quantized(grown / "intermediate")
    growth = Growth(read_config(parts.target).decoder, shape)
    linears = GrownWeights(growth).linears
    assert len(large) == shape.num_layers * len(linears)
    for key, weight in small.items():
        placing = linears[key.split(".", 3)[3]]
        rows, columns = placing.rows != NOWHERE, placing.columns != NOWHERE
        moved = dequantize(large[key])[rows][:, columns]
        origin = dequantize(weight)[placing.rows[rows]][:, placing.columns[columns]]
        assert torch.equal(moved, origin * placing.scale), key
        if key.endswith(("o_proj", "down_proj")):
            assert not dequantize(large[key])[:, ~columns].any()
        if key.endswith(("o_proj", "down_proj", "k_proj")):
            assert not dequantize(large[key])[~rows][:, columns].any()


def change_config(folder: Path, changes: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
