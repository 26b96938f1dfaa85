"""Shared fixtures: a tiny chain of random weights. No network, and no GPU but for `make gpu`."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# a process either compiles Triton's kernels for a GPU or interprets them on the CPU
if "TEST_ON_GPU" not in os.environ:
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "DS_ACCELERATOR": "cpu"}


import gc
import json
import logging
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import save_file

from polybasic.chain.base.caching import CACHE_VARIABLE, cache_folder
from polybasic.chain.formats.checkpoints.awq import round_to_nearest
from polybasic.chain.formats.checkpoints.checkpoint import load_tensors
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.checkpoints.quantization import GROUP_SIZE, quantization_config
from polybasic.chain.formats.lineage import origin_of_copy, weights_digest
from polybasic.chain.formats.manifest import Manifest, Provenance
from polybasic.chain.formats.package import Part, package_chain
from polybasic.chain.formats.plan import Flush, Plan, Tree
from polybasic.deploy.runtime.engine import Engine
from polybasic.deploy.runtime.request import Request
from polybasic.deploy.runtime.rounds.noise import Noise

# a shell starts background jobs so that they ignore Ctrl-C, which tests send
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure() -> None:
    """Ask for what `make gpu` needs."""
    if "TEST_ON_GPU" in os.environ and not torch.cuda.is_available():
        raise pytest.UsageError("TEST_ON_GPU is set, and torch finds no GPU")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests that need a GPU to processes that see one, and to these no others."""
    on_gpu, left_out = torch.cuda.is_available(), []
    for item in items:
        mark = item.get_closest_marker("gpu")
        if mark is None if on_gpu else mark is not None and mark.kwargs.get("needed", False):
            left_out.append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


VOCAB_SIZE, HIDDEN_SIZE, INTERMEDIATE_SIZE, NUM_LAYERS = 64, 128, 256, 2
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 4, 2, 32
PLAN = Plan(
    members=("target", "intermediate", "draft"),
    tree=Tree(depth=3, top_k=2, rows=6),
    flush={"target": Flush(length=5)},
)
FOUR_MEMBER_PLAN = Plan(
    members=("target", "intermediate", "small", "small_draft"),
    tree=Tree(depth=3, top_k=2, rows=6),
    flush={"target": Flush(length=6), "intermediate": Flush(length=3)},
)
PROVENANCE = Provenance(
    recipe={"name": "tiny", "seed": 0},
    command="polybasic run recipes/own-model.yaml",
    package_versions={"polybasic": "0.1.0"},
    data_digests={"conversations": "0" * 64},
)


@dataclass(frozen=True)
class ChainParts:
    """Folders of the models of a chain, free to be changed by a test."""

    target: Path
    intermediate: Path
    draft: Path

    @property
    def parts(self) -> list[Part]:
        """All but the target, in order."""
        return [
            Part("intermediate", "intermediate", "awq", self.intermediate),
            Part("draft", "drafter", "eagle2", self.draft),
        ]

    def package(self, out: Path, **changes: Any) -> Manifest:
        """`package_chain` with everything named."""
        arguments: dict[str, Any] = {
            "target": self.target,
            "target_reference": str(self.target),
            "copy_target": True,
            "parts": self.parts,
            "plan": PLAN,
            "provenance": PROVENANCE,
            "quality": {"intermediate": {"mean_kl": 0.012345, "top1_agreement": 0.97}},
            "training": {"draft": {"simulated_accepted_length": 3.5, "steps": 10}},
        }
        return package_chain(out, **(arguments | changes))


@dataclass(frozen=True)
class FourChainParts(ChainParts):
    """As `ChainParts`, with a smaller model in 4 bits that has a head of its own.

    Attributes:
        small_target: the smaller model before it was quantized; no member of the chain.
    """

    small_target: Path
    small: Path
    small_draft: Path

    @property
    def parts(self) -> list[Part]:
        """All but the target, in order."""
        intermediate, draft = super().parts
        small = Part("small", "intermediate", "awq", self.small)
        return [
            intermediate,
            small,
            draft,
            Part("small_draft", "drafter", "eagle2", self.small_draft),
        ]

    def package(self, out: Path, **changes: Any) -> Manifest:
        """`package_chain` with everything named."""
        return super().package(out, **({"plan": FOUR_MEMBER_PLAN} | changes))


def package_around(
    chain: Path,
    target: Path,
    parts: list[Part],
    plan: Plan,
    copy_target: bool | Literal["auto"] = False,
) -> None:
    """`package_chain` of parts that a test made itself, with nothing known of their making."""
    package_chain(
        chain,
        target=target,
        target_reference=str(target),
        copy_target=copy_target,
        parts=parts,
        plan=plan,
        provenance=PROVENANCE,
        quality={},
        training={},
    )


def write_target(folder: Path, seed: int = 0, **changes: Any) -> None:
    """A random bfloat16 Llama and its tokenizer, written by transformers.

    Args:
        folder: to write.
        seed: of the weights.
        changes: of the shape, as LlamaConfig names it.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    shape = {
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "max_position_embeddings": 128,
        "vocab_size": VOCAB_SIZE,
    }
    config = LlamaConfig(initializer_range=0.2, **(shape | changes))
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    words = {f"w{index}": index for index in range(VOCAB_SIZE - 2)}
    words |= {"<unk>": VOCAB_SIZE - 2, "<eos>": VOCAB_SIZE - 1}
    tokenizer = Tokenizer(models.WordLevel(words, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="<eos>",
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
    ).save_pretrained(folder)


def write_intermediate(folder: Path, target: Path, group_size: int = GROUP_SIZE) -> None:
    """A model in 4 bits by rounding to the nearest, in AutoAWQ's GEMM layout."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_tensors(target).items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor.half()
            continue
        weight, prefix = round_to_nearest(tensor.float(), group_size), name.removesuffix(".weight")
        for part, packed in zip(("qweight", "qzeros", "scales"), weight.pack(), strict=True):
            tensors[f"{prefix}.{part}"] = packed.contiguous()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = quantization_config(group_size)
    config["polybasic"] = origin_of_copy(read_config(target))
    (folder / "config.json").write_text(json.dumps(config))


def write_draft(folder: Path, target: Path) -> None:
    """A random EAGLE-2 head that says it was trained for `target`, of the same shape."""
    torch.manual_seed(2)
    config = json.loads((target / "config.json").read_text())
    hidden_size, intermediate_size = config["hidden_size"], config["intermediate_size"]
    key_size = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "embed_tokens.weight": (config["vocab_size"], hidden_size),
        "fc.weight": (hidden_size, 2 * hidden_size),
        "fc.bias": (hidden_size,),
        "layers.0.self_attn.q_proj.weight": (hidden_size, hidden_size),
        "layers.0.self_attn.k_proj.weight": (key_size, hidden_size),
        "layers.0.self_attn.v_proj.weight": (key_size, hidden_size),
        "layers.0.self_attn.o_proj.weight": (hidden_size, hidden_size),
        "layers.0.mlp.gate_proj.weight": (intermediate_size, hidden_size),
        "layers.0.mlp.up_proj.weight": (intermediate_size, hidden_size),
        "layers.0.mlp.down_proj.weight": (hidden_size, intermediate_size),
        "layers.0.post_attention_layernorm.weight": (hidden_size,),
    }
    folder.mkdir()
    tensors = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    tensors["fc.bias"].zero_()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config |= {"num_hidden_layers": 1, "polybasic": {"target_sha256": weights_digest(target)}}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module", autouse=True)
def _imports_are_kept() -> None:
    """Collections, as at each load of a chain, pass over what lives before a module's tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Servers set the log of their process, which here is that of the tests after them, too."""
    loggers = [logging.getLogger(name) for name in (None, "polybasic", "uvicorn")]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = propagate


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Models go into a folder of the tests' own; kernels come from where they are compiled."""
    folder = tmp_path_factory.mktemp("cache")
    for name in ("kernels", "products", "product_times"):
        (folder / name).symlink_to(cache_folder() / name)  # whoever needs it makes it
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv(CACHE_VARIABLE, str(folder))
        yield


@pytest.fixture(scope="session")
def _tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_target(folder / "target")
    write_intermediate(folder / "intermediate", folder / "target")
    write_draft(folder / "draft", folder / "target")
    return folder


@pytest.fixture(scope="session")
def _tiny_four_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # four bits need widths that are multiples of 128: the target is the wider of the two models
    folder = tmp_path_factory.mktemp("four_models")
    write_target(folder / "target", hidden_size=2 * HIDDEN_SIZE)
    write_target(
        folder / "small_target",
        seed=1,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    for model, copy, head in (
        ("target", "intermediate", "draft"),
        ("small_target", "small", "small_draft"),
    ):
        write_intermediate(folder / copy, folder / model)
        write_draft(folder / head, folder / model)
    return folder


@pytest.fixture
def tiny_target(_tiny_models: Path, tmp_path: Path) -> Path:
    """A random Llama checkpoint with its tokenizer, the test's own copy."""
    return Path(shutil.copytree(_tiny_models / "target", tmp_path / "tiny_target"))


@pytest.fixture
def tiny_chain_parts(_tiny_models: Path, tmp_path: Path) -> ChainParts:
    """The three models that a chain is made of, the test's own copies."""
    models = Path(shutil.copytree(_tiny_models, tmp_path / "models"))
    return ChainParts(models / "target", models / "intermediate", models / "draft")


@pytest.fixture
def tiny_chain(tiny_chain_parts: ChainParts, tmp_path: Path) -> Path:
    """A packed chain that holds its own target."""
    tiny_chain_parts.package(tmp_path / "chain")
    return tmp_path / "chain"


@pytest.fixture
def tiny_four_chain_parts(_tiny_four_models: Path, tmp_path: Path) -> FourChainParts:
    """The models of `tiny_four_chain`, the test's own copies."""
    models = Path(shutil.copytree(_tiny_four_models, tmp_path / "four_models"))
    names = ("target", "intermediate", "draft", "small_target", "small", "small_draft")
    return FourChainParts(*(models / name for name in names))


@pytest.fixture
def tiny_four_chain(tiny_four_chain_parts: FourChainParts, tmp_path: Path) -> Path:
    """A packed chain that holds its own target.

    Members: target (2 layers of width 256), intermediate (the target in 4 bits), small (1 layer of
    width 128, in 4 bits), draft (head of target and intermediate), small_draft (head of small).
    The plan runs target, intermediate, small, small_draft.
    """
    tiny_four_chain_parts.package(tmp_path / "four_chain")
    return tmp_path / "four_chain"


@pytest.fixture
def noise_of_another_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled answers of several members are not those that the target alone draws."""
    noise_of = Engine.noise

    def other(self: Engine, request: Request) -> Noise | None:
        if len(request.plan.members) > 1:
            request = replace(request, sampling=replace(request.sampling, seed=99))
        return noise_of(self, request)

    monkeypatch.setattr(Engine, "noise", other)
