"""Small chains to grow, and what tells whether a grown one computes the same."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from polybasic.chain.formats.checkpoints.awq import QuantizedWeight, dequantize
from polybasic.chain.formats.checkpoints.checkpoint import load_tensors
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.lineage import weights_digest
from polybasic.chain.model.loading import load_decoder
from polybasic.deploy.runtime.rounds.cache import KeyValueCache
from polybasic.deploy.runtime.rounds.verifier import Verifier
from tests.benchmarks.scripts import load_script
from tests.conftest import VOCAB_SIZE, ChainParts, write_draft, write_target
from tests.conftest import write_intermediate as write_int4
from tests.head_kinds import trim

chain, model, shapes = (load_script(f"growth.{name}") for name in ("chain", "model", "shapes"))

CPU = torch.device("cpu")
EPS = 1e-2
"""Of the norms: large enough to be seen in logits."""
_GGUF = {"gguf": {"files": {"small.gguf": "0" * 64}, "types": {"Q4_1": 14}}}
TOKEN_IDS = torch.randint(0, VOCAB_SIZE, (24,), generator=torch.Generator().manual_seed(0))


def library_logits(folder: Path) -> Tensor:
    """By transformers, in float32."""
    library = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return library(TOKEN_IDS[None]).logits[0]


def runtime_logits(folder: Path) -> Tensor:
    """By the runtime's decoder, in float32."""
    decoder = load_decoder(read_config(folder), torch.float32, CPU, len(TOKEN_IDS) + 8)
    config = decoder.config
    cache = KeyValueCache(config, config.num_layers, len(TOKEN_IDS), torch.float32, CPU)
    verifier = Verifier("target", decoder, cache)
    return verifier.logits(verifier.read(TOKEN_IDS.tolist()))


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


def assert_moved(parts: ChainParts, shape: Any, grown: Path) -> None:
    """The grown chain has the small one's 4-bit weights, each in its place."""
    small, large = quantized(parts.intermediate), quantized(grown / "intermediate")
    growth = model.Growth(read_config(parts.target).decoder, shape)
    linears = model.GrownWeights(growth).linears
    assert len(large) == shape.num_layers * len(linears)
    for key, weight in small.items():
        placing = linears[key.split(".", 3)[3]]
        rows, columns = placing.rows != model.NOWHERE, placing.columns != model.NOWHERE
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


def write_tied_parts(folder: Path) -> ChainParts:
    """Random models as recipes/smollm2-135m.yaml makes them: of a GGUF file, with tied embeddings,
    4-bit groups of 64 and a head over a part of the vocabulary."""
    parts = ChainParts(*(folder / name for name in ("target", "intermediate", "draft")))
    write_target(
        parts.target,
        hidden_size=192,
        intermediate_size=320,
        num_attention_heads=6,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        rms_norm_eps=EPS,
    )
    change_config(parts.target, {"polybasic": _GGUF})
    assert "lm_head.weight" not in load_tensors(parts.target)
    write_int4(parts.intermediate, parts.target, 64)
    origin = {"quantized_from_sha256": weights_digest(parts.target)}
    change_config(parts.intermediate, {"polybasic": origin | _GGUF})
    write_draft(parts.draft, parts.target)
    trim(parts.draft, torch.arange(0, VOCAB_SIZE, 3))
    return parts
