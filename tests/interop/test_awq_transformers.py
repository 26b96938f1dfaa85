"""The 4-bit intermediate as transformers and gptqmodel read it, against our own reading.

Runs in an environment of its own, with gptqmodel: `make interop`.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AwqConfig

from polybasic.chain.formats.checkpoints.awq import QuantizedWeight, dequantize
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.model.loading import load_decoder
from polybasic.deploy.runtime.rounds.cache import KeyValueCache
from polybasic.deploy.runtime.rounds.verifier import Verifier
from polybasic.quantize.awq import quantize_target
from polybasic.quantize.settings import QuantizeSettings
from tests.checkpoints import write_family

TOLERANCE = 1e-2
# of a kernel in float16 against float32: what is left is rounding, so that the codes are equal
EXACT_TOLERANCE = 2e-3
# what gptqmodel chooses on a CPU (PyTorch's int4 kernel in bfloat16), and its plain one in float16
KERNELS = {"auto": "TorchAtenAwqLinear", "torch_awq": "AwqTorchLinear"}
NUM_TOKENS, NUM_IDS = 24, 250
FAMILIES = ("llama3", "qwen2")
CPU = torch.device("cpu")


@pytest.fixture(scope="session", params=FAMILIES)
def intermediate(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target's copy in 4 bits, as `polybasic quantize` writes it."""
    folder = tmp_path_factory.mktemp(request.param)
    # the standard deviation that these families are initialised with
    write_family(folder / "target", request.param, initializer_range=0.02)
    generator = torch.Generator().manual_seed(1)
    samples = torch.randint(0, NUM_IDS, (40, 64), generator=generator).tolist()
    settings = QuantizeSettings(num_calibration_samples=8, calibration_tokens=32)
    quantize_target(folder / "target", samples, settings, 0, folder / "intermediate")
    return folder / "intermediate"


@pytest.fixture(scope="session")
def token_ids() -> list[int]:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, NUM_IDS, (NUM_TOKENS,), generator=generator).tolist()


@torch.inference_mode()
def logits_by_gptqmodel(folder: Path, token_ids: list[int], backend: str = "auto") -> Tensor:
    """[R, V], after a check that each projection is one of gptqmodel's."""
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        device_map="cpu",
        quantization_config=AwqConfig(backend=backend),
    )
    linears = [module for name, module in model.named_modules() if name.endswith("_proj")]
    assert len(linears) == 7 * model.config.num_hidden_layers
    assert {type(linear).__name__ for linear in linears} == {KERNELS[backend]}
    return model(torch.tensor([token_ids])).logits[0]


@torch.inference_mode()
def logits_by_runtime(folder: Path, token_ids: list[int], rows: int) -> Tensor:
    """[R, V], read in passes of so many rows."""
    decoder = load_decoder(read_config(folder), torch.float32, CPU, NUM_TOKENS)
    cache = KeyValueCache(decoder.config, decoder.config.num_layers, 64, torch.float32, CPU)
    verifier, parts = Verifier("intermediate", decoder, cache), []
    for first in range(0, len(token_ids), rows):
        part = token_ids[first : first + rows]
        parts.append(verifier.logits(verifier.read(part)))
        cache.keep(range(len(part)))
    return torch.cat(parts)


@torch.inference_mode()
def logits_in_float32(folder: Path, token_ids: list[int]) -> Tensor:
    """[R, V] of a dense model that is given what our format's code makes of the 4-bit weights."""
    tensors = load_file(folder / "model.safetensors")
    dense = {}
    for name, tensor in tensors.items():
        prefix, _, part = name.rpartition(".")
        if part == "qweight":
            packed = (tensors[f"{prefix}.{part}"] for part in ("qweight", "qzeros", "scales"))
            weight = QuantizedWeight.unpack(*packed, name=prefix)
            dense[f"{prefix}.weight"] = dequantize(weight).float()
        elif part not in ("qzeros", "scales"):
            dense[name] = tensor.float()
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.load_state_dict(dense)
    return model(torch.tensor([token_ids])).logits[0]


def difference(found: Tensor, expected: Tensor) -> float:
    """Relative to the norm of what is expected."""
    return ((found.float() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("rows", [NUM_TOKENS, 1], ids=["prompt", "token by token"])
@pytest.mark.parametrize("backend", KERNELS)
def test_logits_are_those_of_our_runtime(
    intermediate: Path, token_ids: list[int], backend: str, rows: int
) -> None:
    expected = logits_by_runtime(intermediate, token_ids, rows)
    found = difference(logits_by_gptqmodel(intermediate, token_ids, backend), expected)
    print(f"{intermediate.parent.name} {backend} {rows} rows: {found:.1e}")
    assert found < TOLERANCE


def test_codes_and_zeros_are_read_alike(intermediate: Path, token_ids: list[int]) -> None:
    expected = logits_in_float32(intermediate, token_ids)
    found = difference(logits_by_gptqmodel(intermediate, token_ids, "torch_awq"), expected)
    print(f"{intermediate.parent.name} in float32: {found:.1e}")
    assert found < EXACT_TOLERANCE


def in_plain_order(words: Tensor) -> Tensor:
    """Words of int32 whose nibbles stand in the order of the columns, not in AutoAWQ's."""
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # column of nibble i
    nibbles = (words[..., None] >> (4 * torch.arange(8))) & 15
    plain = torch.empty_like(nibbles)
    plain[..., order] = nibbles
    return (plain.long() << (4 * torch.arange(8))).sum(-1).to(torch.int32)


def above_by_one(words: Tensor) -> Tensor:
    """Zeros as GPTQ would read them: one more than is stored."""
    nibbles = (words[..., None] >> (4 * torch.arange(8))) & 15
    shifted = (nibbles + 1).clamp(max=15)
    return (shifted.long() << (4 * torch.arange(8))).sum(-1).to(torch.int32)


@pytest.mark.parametrize(
    ("part", "change"), [("qweight", in_plain_order), ("qzeros", above_by_one)]
)
def test_another_layout_shows(
    intermediate: Path,
    token_ids: list[int],
    tmp_path: Path,
    part: str,
    change: Callable[[Tensor], Tensor],
) -> None:
    tensors = load_file(intermediate / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(part):
            tensors[name] = change(tensor)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((intermediate / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = logits_by_runtime(intermediate, token_ids, NUM_TOKENS)
    assert difference(logits_by_gptqmodel(tmp_path, token_ids), expected) > 10 * TOLERANCE
