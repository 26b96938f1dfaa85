"""GGUF files whose blocks are kept: the same bytes, the same text, and what cannot be kept."""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.card import weight_notes
from polybasic.chain.formats.checkpoints.block_types import BLOCK_TYPES, GROUP, NESTED, typed_name
from polybasic.chain.formats.checkpoints.checkpoint import (
    has_blocks,
    load_tensors,
    read_tensors,
    stored_tensors,
)
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.checkpoints.shapes import check_shapes, num_parameters, tensor_headers
from polybasic.chain.formats.gguf.export import export_gguf
from polybasic.chain.formats.gguf.importing import imported
from polybasic.chain.formats.gguf.tensors import Type
from polybasic.chain.formats.gguf.writing import write_gguf
from polybasic.chain.formats.plan import Plan, Tree
from polybasic.chain.kernels.cpu.executor import CpuExecutor
from polybasic.chain.kernels.product_times import evaluation_dtype, name_of
from polybasic.chain.kernels.rows import consecutive_rows
from polybasic.chain.kernels.torch.operations import JoinedLinear
from polybasic.chain.model.loading import load_decoder, serving_dtype
from polybasic.chain.model.reference import load_reference_model
from polybasic.deploy.bench.peers import systems
from polybasic.deploy.bench.systems.chain_systems import weight_type
from polybasic.deploy.runtime.chain import Chain
from polybasic.deploy.runtime.load import layout_of, load_chain
from polybasic.deploy.runtime.memory import state_memory
from polybasic.deploy.runtime.rounds.cache import KeyValueCache
from polybasic.recipes.pipeline import model_stages
from polybasic.recipes.pipeline.beside import chain_beside
from polybasic.recipes.pipeline.running import Workspace
from polybasic.recipes.schema.loading import load_recipe
from tests.chain.formats.gguf.test_import import replaced, written
from tests.chain.native_models import CPU, eager, random_rows

DOWN = "blk.1.ffn_down.weight"
UP = "blk.0.ffn_up.weight"
WIDE = {"hidden_size": NESTED, "intermediate_size": 2 * NESTED}
ALONE = Plan(members=("target",), tree=Tree(depth=1, top_k=1, rows=2))


def stored(folder: Path, kind: str, family: str = "llama2", **changes: Any) -> tuple[Path, Path]:
    """A file of a random checkpoint with matrices in such blocks, and what was made of it."""
    file = in_blocks(folder, kind, family, **changes)
    return file, imported(file, as_stored=True)


def in_blocks(folder: Path, kind: str, family: str = "llama2", **changes: Any) -> Path:
    """A file with matrices in such blocks, which are random where the library writes none."""
    if BLOCK_TYPES[kind].size == GROUP:
        return written(folder, family, dtype=torch.float32, matrices=kind, **changes)
    file = written(folder, family, dtype=torch.float32, **(WIDE | changes))
    rewrite(file, lambda name: kind)
    return file


def rewrite(file: Path, kind_of: Callable[[str], str]) -> None:
    """Put each matrix of a file into random blocks of the type that its name gets."""
    generator = torch.Generator().manual_seed(0)
    for tensor in gguf.GGUFReader(file).tensors:
        if len(tensor.shape) == 2:
            kind, (in_size, out_size) = kind_of(tensor.name), map(int, tensor.shape)
            rows = random_rows(generator, kind, out_size, in_size)
            replaced(file, tensor.name, rows.numpy(), Type[kind])


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_every_byte_of_a_matrix_is_kept(kind: str, tmp_path: Path) -> None:
    file, folder = stored(tmp_path / "model", kind, "qwen2")
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    ours = read_tensors(folder / "model.safetensors")
    name = f"model.layers.1.mlp.down_proj.weight.{kind}"
    assert np.array_equal(ours[name].numpy(), theirs["blk.1.ffn_down.weight"].data)
    assert {typed_name(key)[1] for key in ours} == {BLOCK_TYPES[kind], None}
    headers, dense = tensor_headers(folder), imported(file)
    assert num_parameters(headers) == num_parameters(tensor_headers(dense))
    check_shapes("decoder", folder, read_config(folder).decoder)
    matrices = {name: tensor for name, tensor in load_tensors(dense).items() if tensor.dim() == 2}
    read = load_tensors(folder)
    assert all(torch.equal(read[name], tensor) for name, tensor in matrices.items())
    assert {headers[name].dtype for name in matrices} == {kind}
    assert {header.dtype for name, header in headers.items() if name not in matrices} == {"float32"}


@pytest.mark.parametrize("family", ["llama2", "qwen2"])
@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_a_file_is_written_again_as_it_was(kind: str, family: str, tmp_path: Path) -> None:
    file, folder = stored(tmp_path / "model", kind, family)
    write_gguf(folder, tmp_path / "again.gguf")
    theirs, ours = (
        {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
        for path in (file, tmp_path / "again.gguf")
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].tensor_type == tensor.tensor_type
        assert np.array_equal(ours[name].data, tensor.data)
    write_gguf(folder, tmp_path / "dense.gguf", matrices="F32")
    (dense,) = (
        tensor for tensor in gguf.GGUFReader(tmp_path / "dense.gguf").tensors if tensor.name == UP
    )
    assert np.array_equal(dense.data, gguf.quants.dequantize(theirs[UP].data, Type[kind]))


@pytest.mark.parametrize("kernels", ["native", "device", "eager"])
@pytest.mark.parametrize("kind", BLOCK_TYPES)
@torch.inference_mode()
def test_logits_are_those_of_the_dequantized_model(
    kind: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for rows that native kernels round to bytes."""
    monkeypatch.setenv("POLYBASIC_KERNELS", kernels)
    _, folder = stored(tmp_path / "model", kind)
    model, config = load_reference_model(folder, torch.float32), read_config(folder)
    assert model.dtype == torch.float32
    loaded = load_decoder(config, torch.float32, CPU, 64)
    assert isinstance(loaded, CpuExecutor) == (kernels == "native")
    assert isinstance(loaded.weights.embedding, Tensor) == (kernels == "eager")
    ids = torch.randint(0, config.decoder.vocab_size, (40,))
    cache = KeyValueCache(config.decoder, config.decoder.num_layers, 64, torch.float32, CPU)
    states = loaded.forward(ids, [cache.layers], [consecutive_rows(0, 40)])
    found, expected = loaded.logits(states), model(ids[None]).logits[0]
    off = float((found - expected).norm() / expected.norm())
    assert off < (0.06 if kernels == "native" else 1e-5)
    assert (off > 1e-4) == (kernels == "native")


@pytest.mark.parametrize("kind", BLOCK_TYPES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_file_gives_the_text_of_the_model_alone(
    kind: str, temperature: float, tmp_path: Path
) -> None:
    file, _ = stored(tmp_path / "model", kind, "qwen2")
    chain, alone = load_chain(file), load_chain(file, plan=ALONE)
    assert chain.manifest.members[0].dtype == kind
    assert chain.engine.models.target.dtype == torch.float32
    for seed, prompt in enumerate(("the the the", [{"role": "user", "content": "hello"}])):
        asked = {"max_new_tokens": 32, "temperature": temperature, "seed": seed}
        answer = chain.generate(prompt, **asked)
        assert answer.token_ids == alone.generate(prompt, **asked).token_ids


@pytest.mark.parametrize(("stored_in", "runs_in"), [("Q4_1", "Q4_1"), ("Q8_0", "Q4_0")])
def test_a_smaller_file_below_has_five_bits_a_weight_at_most(
    stored_in: str, runs_in: str, tmp_path: Path
) -> None:
    file = in_blocks(tmp_path / "model", "Q4_K", "qwen2")
    small = in_blocks(tmp_path / "small", stored_in, "qwen2", num_hidden_layers=1)
    chain = load_chain(chain_beside(str(file), [str(small)]))
    assert [(member.kind, member.dtype) for member in chain.manifest.members] == [
        ("decoder", "Q4_K"),
        ("decoder", runs_in),
    ]
    rounded = {"Q4_1": "The weights of small are those of", "Q8_0": "small is a copy in Q4_0 of"}
    assert weight_notes(chain.manifest)[1].startswith(rounded[stored_in])
    assert chain.plan.members == ("target", "small")
    asked = {"max_new_tokens": 32, "temperature": 0.0}
    alone = chain.generate("the the the", members=["target"], **asked)
    drafted = chain.generate("the the the", **asked)
    assert drafted.statistics.forward_passes["small"] > 0
    assert drafted.token_ids == alone.token_ids
    assert drafts_for_llama_cpp(chain, tmp_path) == runs_in
    settings = [f"small.model={small}", "train.kind=none", "quantize=null"]
    workspace = Workspace(load_recipe("llama31-8b-four", settings), tmp_path / "out")
    model_stages._write_in_few_bits(workspace, imported(small), tmp_path / "made")
    made, own = (stored_tensors(path) for path in (tmp_path / "made", chain.folder / "small"))
    assert made.keys() == own.keys()
    assert all(torch.equal(made[name], own[name]) for name in own if ".Q4_" in name)


def drafts_for_llama_cpp(chain: Chain, folder: Path) -> str:
    """The type of most matrices of the file that drafts for the target's there."""
    [*others, drafting] = systems._llama_modes(chain, Path(sys.executable), folder)
    assert [mode.name for mode in others] == ["llama.cpp", "llama.cpp lookup"]
    model, drafter = drafting.files
    assert [model] == list(others[0].files)
    assert drafting.words[-4:] == ("--num-drafted", 3, "--draft", drafter)
    types = Counter(tensor.tensor_type.name for tensor in gguf.GGUFReader(drafter).tensors)
    del types["F32"]
    return types.most_common(1)[0][0]


@pytest.mark.processor
def test_llama_cpp_is_measured_on_the_same_blocks(tmp_path: Path) -> None:
    file, _ = stored(tmp_path / "model", "Q4_1", "qwen2")
    chain = load_chain(file)
    assert weight_type(chain) == "Q4_1"
    modes = systems._llama_modes(chain, Path("python"), tmp_path)
    assert [(mode.name, mode.weights) for mode in modes] == [
        ("llama.cpp", ""),
        ("llama.cpp lookup", ""),
    ]
    (path,) = {path for mode in modes for path in mode.files}
    kinds = {tensor.tensor_type for tensor in gguf.GGUFReader(path).tensors}
    assert kinds == {Type.F32, Type.Q4_1}
    exported = export_gguf(chain.folder, out=tmp_path / "exported")
    assert [output.name for output in exported.files.values()] == ["target-Q4_1.gguf"]
    with pytest.raises(UserError, match="reads no such weights: Q4_1"):
        systems._openvino_modes(chain, Path("python"), tmp_path)
    assert weight_type(load_chain(file, dtype="bfloat16", device="cpu")) == "Q4_1"
    with eager():
        assert weight_type(load_chain(file)) == name_of(evaluation_dtype(torch.bfloat16, CPU))


@pytest.mark.processor
def test_without_kernels_for_blocks_a_file_runs_as_before(tmp_path: Path) -> None:
    _, folder = stored(tmp_path / "model", "Q4_1")
    config = read_config(folder)
    assert config.dtype == "bfloat16"
    assert serving_dtype(config, CPU) == torch.float32
    with eager():
        assert serving_dtype(config, CPU) == evaluation_dtype(torch.bfloat16, CPU)


@torch.inference_mode()
def test_a_file_has_several_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those do that llama.cpp calls Q4_K_M: within a product, too."""
    kinds = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "ffn_gate": "Q8_0", "token_embd": "Q5_0"}
    file = written(tmp_path / "model", "qwen2", dtype=torch.float32, **WIDE)
    rewrite(file, lambda name: kinds.get(name.split(".")[-2], "Q4_K"))
    folder = imported(file, as_stored=True)
    headers = tensor_headers(folder)
    assert headers["model.layers.0.self_attn.v_proj.weight"].dtype == "Q6_K"
    config, ids = read_config(folder), torch.arange(40)
    models, found = {}, {}
    for kernels in ("device", "eager", "native"):
        monkeypatch.setenv("POLYBASIC_KERNELS", kernels)
        models[kernels] = load_decoder(config, torch.float32, CPU, 64)
    assert isinstance(models["device"].weights.layers[0].qkv, JoinedLinear)
    for kernels, model in models.items():
        cache = KeyValueCache(config.decoder, config.decoder.num_layers, 64, torch.float32, CPU)
        states = model.forward(ids, [cache.layers], [consecutive_rows(0, 40)])
        found[kernels] = model.logits(states)
    size = found["eager"].norm()
    assert 1e-4 < float((found["native"] - found["eager"]).norm() / size) < 0.05
    assert float((found["device"] - found["eager"]).norm() / size) < 1e-5
    chain = load_chain(file)
    assert chain.manifest.members[0].dtype == weight_type(chain) == "Q4_K"
    write_gguf(folder, tmp_path / "again.gguf")
    theirs, ours = (gguf.GGUFReader(path).tensors for path in (file, tmp_path / "again.gguf"))
    types = {tensor.name: tensor.tensor_type for tensor in theirs}
    assert {tensor.name: tensor.tensor_type for tensor in ours} == types


@pytest.mark.parametrize("kind", ["IQ4_NL", "Q3_K"])
def test_a_file_with_other_blocks_is_dequantized(kind: str, tmp_path: Path) -> None:
    file = written(tmp_path / "model", "qwen2", dtype=torch.float32, matrices="Q8_0")
    block, size = gguf.GGML_QUANT_SIZES[Type[kind]]
    data = np.zeros((128, 256 // block * size), np.uint8)
    replaced(file, "blk.1.ffn_down.weight", data, Type[kind])
    folder = imported(file, as_stored=True)
    assert not has_blocks(folder)
    assert {header.dtype for header in tensor_headers(folder).values()} == {"bfloat16"}


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q6_K"])
def test_constants_that_are_no_numbers_are_refused(kind: str, tmp_path: Path) -> None:
    file, blocks = in_blocks(tmp_path / "model", kind, "qwen2"), BLOCK_TYPES[kind]
    (tensor,) = (candidate for candidate in gguf.GGUFReader(file).tensors if candidate.name == DOWN)
    data = np.array(tensor.data)
    data.reshape(-1, blocks.num_bytes)[-1, blocks.constants] = 0xFF
    replaced(file, DOWN, data, Type[kind])
    with pytest.raises(UserError, match=r"tensor model\.layers\.1\.mlp\.down_proj\.weight holds"):
        imported(file, as_stored=True)


@pytest.mark.parametrize("family", ["llama2", "qwen2"])
def test_memory_is_stated_as_it_is_taken(family: str, tmp_path: Path) -> None:
    """Of weights, which an embedding that is the output projection, too, has once."""
    _, folder = stored(tmp_path / "model", "Q4_1", family)
    config = read_config(folder)
    member = SimpleNamespace(name="target", role="target", kind="decoder")
    checked: Any = SimpleNamespace(loaded=[member], configs={"target": config})
    layout = layout_of(CPU, torch.float32, config.decoder, in_few_bits=True)
    assert layout.rounds_heads
    in_file = sum(header.num_bytes for header in tensor_headers(folder).values())
    stated = state_memory(checked, layout, 64).members["target"]["weights"]
    assert stated == pytest.approx(in_file, rel=0.01)
