"""Models that people have in 4 bits as targets: AutoAWQ's checkpoints, and GPTQ's."""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.card import weight_notes
from polybasic.chain.formats.checkpoints.awq import dequantize, packed_weight
from polybasic.chain.formats.checkpoints.checkpoint import copy_files, load_tensors, tokenizer_files
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.checkpoints.gptq import as_awq
from polybasic.chain.formats.checkpoints.models import resolve_model
from polybasic.chain.formats.plan import Plan, Tree
from polybasic.chain.kernels.cpu.executor import CpuExecutor
from polybasic.chain.kernels.rows import consecutive_rows
from polybasic.chain.model.loading import load_decoder, serving_dtype
from polybasic.chain.model.reference import load_reference_model
from polybasic.deploy.bench.peers import systems
from polybasic.deploy.bench.systems.chain_systems import weight_type
from polybasic.deploy.runtime.load import load_chain
from polybasic.deploy.runtime.rounds.cache import KeyValueCache
from tests.chain.native_models import CPU
from tests.checkpoints import write_family
from tests.conftest import write_intermediate

ALONE = Plan(members=("target",), tree=Tree(depth=1, top_k=1, rows=2))
GPTQ = {"quant_method": "gptq", "bits": 4, "desc_act": False, "sym": False}


@pytest.fixture(scope="module")
def awq(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as AutoAWQ writes them, in float16."""
    folder = tmp_path_factory.mktemp("quantized")
    write_family(folder / "model", "qwen2", dtype=torch.float16)
    write_intermediate(folder / "awq", folder / "model")
    copy_files(folder / "model", folder / "awq", tokenizer_files(folder / "model"))
    return folder / "awq"


@pytest.mark.parametrize("kernels", ["native", "device", "eager"])
@torch.inference_mode()
def test_logits_are_those_of_the_dequantized_model(
    kernels: str, awq: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for rows that native kernels round to bytes, and eager ones to bfloat16."""
    monkeypatch.setenv("POLYBASIC_KERNELS", kernels)
    model, config = load_reference_model(awq, torch.float32), read_config(awq)
    loaded = load_decoder(config, torch.float32, CPU, 64)
    assert isinstance(loaded, CpuExecutor) == (kernels == "native")
    ids = torch.randint(0, config.decoder.vocab_size, (40,))
    cache = KeyValueCache(config.decoder, config.decoder.num_layers, 64, torch.float32, CPU)
    states = loaded.forward(ids, [cache.layers], [consecutive_rows(0, 40)])
    found, expected = loaded.logits(states), model(ids[None]).logits[0]
    off = float((found - expected).norm() / expected.norm())
    assert off < (1e-5 if kernels == "device" else 0.06)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_checkpoint_in_4_bits_gives_the_text_of_itself_alone(
    temperature: float, awq: Path
) -> None:
    chain, alone = load_chain(awq), load_chain(awq, plan=ALONE)
    target = chain.manifest.members[0]
    assert (target.kind, target.dtype) == ("awq", "int4")
    assert chain.engine.models.target.dtype == serving_dtype(read_config(awq), CPU)
    assert weight_type(chain) == "int4"
    assert "are in 4 bits, in groups of" in weight_notes(chain.manifest)[0]
    for seed, prompt in enumerate(("the the the", [{"role": "user", "content": "hello"}])):
        asked: dict[str, Any] = {"max_new_tokens": 32, "temperature": temperature, "seed": seed}
        answer = chain.generate(prompt, **asked)
        assert answer.token_ids == alone.generate(prompt, **asked).token_ids


def test_llama_cpp_is_measured_on_the_same_codes(awq: Path, tmp_path: Path) -> None:
    modes = systems._llama_modes(load_chain(awq), Path("python"), tmp_path)
    assert [(mode.name, mode.weights) for mode in modes] == [
        ("llama.cpp", "Q4_1"),
        ("llama.cpp lookup", "Q4_1"),
    ]
    (path,) = {path for mode in modes for path in mode.files}
    kinds = {tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(path).tensors}
    assert kinds["blk.0.ffn_up.weight"] == gguf.GGMLQuantizationType.Q4_1


def words(codes: Tensor) -> Tensor:
    """Codes [N, 8] in words [N], the first one lowest."""
    word = sum(int(16**place) * codes[:, place].long() for place in range(8))
    assert isinstance(word, Tensor)
    return torch.where(word < 1 << 31, word, word - (1 << 32)).int()


def write_gptq(source: Path, folder: Path, **changes: Any) -> None:
    """AutoAWQ's checkpoint as GPTQ's tools write it: zeros less one, codes along the inputs."""
    shutil.copytree(source, folder)
    tensors, written = load_tensors(source), {}
    for name, tensor in tensors.items():
        linear, _, part = name.rpartition(".")
        if part == "qweight":
            weight = packed_weight(tensors, linear)
            (out_size, in_size), groups = weight.codes.shape, weight.scales.shape[1]
            by_input = weight.codes.unflatten(1, (-1, 8)).transpose(0, 1).reshape(-1, 8)
            written[name] = words(by_input).view(in_size // 8, out_size)
            stored_zeros = (weight.zeros.int() - 1) & 15
            by_output = stored_zeros.t().reshape(-1, 8)
            written[f"{linear}.qzeros"] = words(by_output).view(groups, out_size // 8)
            written[f"{linear}.g_idx"] = torch.arange(in_size).int() // weight.group_size
        elif part != "qzeros":
            written[name] = tensor.clone()
    save_file(written, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    group_size = config["quantization_config"]["group_size"]
    config["quantization_config"] = {**GPTQ, "group_size": group_size, **changes}
    (folder / "config.json").write_text(json.dumps(config))


def test_gptq_becomes_the_same_numbers(awq: Path, tmp_path: Path) -> None:
    write_gptq(awq, tmp_path / "gptq")
    folder = resolve_model(str(tmp_path / "gptq"))
    assert folder == as_awq(tmp_path / "gptq")
    expected, found = load_tensors(awq), load_tensors(folder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert read_config(folder).group_size == read_config(awq).group_size
    chain = load_chain(tmp_path / "gptq")
    assert chain.generate("the", max_new_tokens=8).token_ids == (
        load_chain(awq).generate("the", max_new_tokens=8).token_ids
    )


def test_zeros_may_be_stored_as_they_are(awq: Path, tmp_path: Path) -> None:
    write_gptq(awq, tmp_path / "gptq", checkpoint_format="gptq_v2")
    linear = "model.layers.0.mlp.down_proj"
    found = packed_weight(load_tensors(as_awq(tmp_path / "gptq")), linear)
    expected = packed_weight(load_tensors(awq), linear)
    assert torch.equal(found.zeros, (expected.zeros.int() - 1).to(torch.uint8) & 15)
    assert not torch.equal(dequantize(found), dequantize(expected))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bits": 8}, r"quantization_config\.bits 8 in .*only 4 is read"),
        ({"group_size": -1}, r"quantization_config\.group_size -1 in .*only 128, 64 or 32 is read"),
        ({"lm_head": True}, r"quantization_config\.lm_head True in "),
    ],
)
def test_other_formats_of_gptq_are_refused(
    changes: dict[str, Any], said: str, awq: Path, tmp_path: Path
) -> None:
    write_gptq(awq, tmp_path / "gptq", **changes)
    with pytest.raises(UserError, match=said):
        resolve_model(str(tmp_path / "gptq"))


def test_inputs_in_another_order_are_refused(awq: Path, tmp_path: Path) -> None:
    write_gptq(awq, tmp_path / "gptq", desc_act=True)
    resolve_model(str(tmp_path / "gptq"))  # the order is that of the groups all the same
    file = tmp_path / "gptq" / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_tensors(file.parent).items()}
    name = "model.layers.1.mlp.down_proj.g_idx"
    assert int(tensors[name].max()) > 0
    save_file({**tensors, name: tensors[name].flip(0).contiguous()}, file)
    with pytest.raises(UserError, match=r"down_proj\.g_idx in .*desc_act false"):
        resolve_model(str(tmp_path / "gptq"))
