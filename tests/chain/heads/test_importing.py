"""Heads in the layout of EAGLE's checkpoints: read, refused, computed as EAGLE computes them."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.checkpoint import load_tensors
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.lineage import weights_digest
from polybasic.chain.formats.package import Part
from polybasic.chain.formats.plan import Plan, Tree
from polybasic.chain.heads.importing import import_head
from polybasic.chain.kernels.rows import consecutive_rows
from polybasic.chain.model.loading import load_decoder, load_head
from polybasic.deploy import load_chain
from polybasic.deploy.runtime.rounds.cache import KeyValueCache
from tests.checkpoints import CONTEXT_TOKENS, VOCAB_SIZE, write_family
from tests.conftest import package_around

H, I, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 128, 256, 4, 2, 32  # noqa: E741
TOLERANCE = 1e-5
# Of eagle/train/EAGLE-LLaMA3-Instruct-8B.json in SafeAILab/EAGLE, with the sizes of these tests.
EAGLE_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": H,
    "initializer_range": 0.02,
    "intermediate_size": I,
    "max_position_embeddings": 64,
    "model_type": "llama",
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.28.1",
    "use_cache": True,
    "vocab_size": VOCAB_SIZE,
    "rope_theta": 500000.0,
    "bias": False,
}
Tensors = dict[str, Tensor]


def eagle_tensors(
    target: Path, *, has_fc_bias: bool = False, has_qkv_biases: bool = False, seed: int = 5
) -> Tensors:
    """Random weights under EAGLE's names, in float16 as its trainer saves them."""
    generator = torch.Generator().manual_seed(seed)
    k_size = NUM_KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (H, 2 * H),
        "layers.0.self_attn.q_proj.weight": (H, H),
        "layers.0.self_attn.k_proj.weight": (k_size, H),
        "layers.0.self_attn.v_proj.weight": (k_size, H),
        "layers.0.self_attn.o_proj.weight": (H, H),
        "layers.0.mlp.gate_proj.weight": (I, H),
        "layers.0.mlp.up_proj.weight": (I, H),
        "layers.0.mlp.down_proj.weight": (H, I),
        "layers.0.post_attention_layernorm.weight": (H,),
    }
    if has_fc_bias:
        shapes["fc.bias"] = (H,)
    if has_qkv_biases:
        for part, size in (("q", H), ("k", k_size), ("v", k_size)):
            shapes[f"layers.0.self_attn.{part}_proj.bias"] = (size,)
    tensors = {
        name: (0.1 * torch.randn(shape, generator=generator)).half()
        for name, shape in shapes.items()
    }
    tensors["layers.0.post_attention_layernorm.weight"] += 1
    tensors["embed_tokens.weight"] = load_tensors(target)["model.embed_tokens.weight"].half()
    return tensors


def write_eagle(folder: Path, tensors: Tensors, is_pickle: bool = True, **config: Any) -> None:
    """A head as the hub has it; a config value of None removes the key."""
    folder.mkdir()
    content = {key: value for key, value in (EAGLE_CONFIG | config).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(content, indent=2))
    if is_pickle:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("eagle_targets")

    def target(family: str) -> Path:
        if not (folder / family).exists():
            write_family(folder / family, family, dtype=torch.float32)
        return folder / family

    return target


def refusal(source: Path, target: Path) -> str:
    with pytest.raises(UserError) as refused:
        import_head(source, target, source.with_name("imported"))
    assert not source.with_name("imported").exists()
    return str(refused.value)


@pytest.mark.parametrize("is_pickle", [True, False], ids=["bin", "safetensors"])
@pytest.mark.parametrize("has_fc_bias", [True, False], ids=["bias", "no bias"])
def test_weights_are_kept_bit_for_bit(
    targets: Callable[[str], Path], tmp_path: Path, is_pickle: bool, has_fc_bias: bool
) -> None:
    target = targets("llama3")
    tensors = eagle_tensors(target, has_fc_bias=has_fc_bias)
    stored = tensors | {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(HEAD_DIM // 2)}
    write_eagle(tmp_path / "eagle", stored, is_pickle, bias=has_fc_bias or None)
    summary = import_head(tmp_path / "eagle", target, tmp_path / "draft")
    expected = {"fc.bias": torch.zeros(H).half()} | tensors
    written = load_file(tmp_path / "draft" / "model.safetensors")
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(written[name], tensor)
        assert written[name].dtype == torch.float16
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert config["polybasic"] == {
        "target_sha256": weights_digest(target),
        "imported_from": "eagle",
    }
    for key in ("hidden_size", "num_key_value_heads", "rms_norm_eps", "rope_theta", "torch_dtype"):
        assert config[key] == EAGLE_CONFIG[key]
    assert config["max_position_embeddings"] == CONTEXT_TOKENS
    num_weights = sum(each.numel() for name, each in expected.items() if "embed" not in name)
    assert summary == {
        "imported_from": "eagle",
        "kind": "eagle2",
        "parameters": num_weights,
        "dtype": "float16",
        "draft_vocab_size": None,
        "feature_layers": [],
        "has_fc_bias": has_fc_bias,
        "has_qkv_biases": False,
    }


def test_missing_keys_are_read_off_the_weights(
    targets: Callable[[str], Path], tmp_path: Path
) -> None:
    target = targets("llama3")
    tensors = eagle_tensors(target)
    del tensors["embed_tokens.weight"]
    filled = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    others = ("rms_norm_eps", "vocab_size", "max_position_embeddings", "hidden_act")
    removed = dict.fromkeys((*filled, *others, "rope_theta", "num_hidden_layers", "model_type"))
    write_eagle(tmp_path / "eagle", tensors, **removed)
    import_head(tmp_path / "eagle", target, tmp_path / "draft")
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    for key in (*filled, "vocab_size", "hidden_act"):
        assert config[key] == EAGLE_CONFIG[key]
    assert (
        config["rms_norm_eps"] == json.loads((target / "config.json").read_text())["rms_norm_eps"]
    )
    # not the target's 500000: EAGLE's code rotates by this base where the head's config has none
    assert config["rope_theta"] == 10000.0
    written = load_file(tmp_path / "draft" / "model.safetensors")
    embedding = load_tensors(target)["model.embed_tokens.weight"]
    assert torch.equal(written["embed_tokens.weight"], embedding.half())


def test_a_head_is_declared_for_the_weights_that_it_was_trained_for(
    targets: Callable[[str], Path], tmp_path: Path
) -> None:
    base, merged = targets("llama3"), targets("qwen2")
    write_eagle(tmp_path / "eagle", eagle_tensors(merged))
    import_head(tmp_path / "eagle", merged, tmp_path / "draft", trained_for=base)
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert config["polybasic"]["target_sha256"] == weights_digest(base) != weights_digest(merged)


def test_a_snapshot_of_the_hub_is_named_by_its_id(
    targets: Callable[[str], Path], tmp_path: Path
) -> None:
    target = targets("llama3")
    snapshot = tmp_path / "models--org--EAGLE-tiny" / "snapshots" / "0a1b2c"
    snapshot.parent.mkdir(parents=True)
    write_eagle(snapshot, eagle_tensors(target))
    summary = import_head(snapshot, target, tmp_path / "draft")
    assert summary["imported_from"] == "org/EAGLE-tiny@0a1b2c"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_an_embedding_may_be_rounded(
    targets: Callable[[str], Path], tmp_path: Path, dtype: torch.dtype
) -> None:
    target = targets("llama3")
    embedding = load_tensors(target)["model.embed_tokens.weight"].to(dtype)
    write_eagle(tmp_path / "eagle", eagle_tensors(target) | {"embed_tokens.weight": embedding})
    import_head(tmp_path / "eagle", target, tmp_path / "draft")
    written = load_file(tmp_path / "draft" / "model.safetensors")["embed_tokens.weight"]
    assert torch.equal(written, embedding)


def test_another_embedding_is_another_model(targets: Callable[[str], Path], tmp_path: Path) -> None:
    target = targets("llama3")
    tensors = eagle_tensors(target)
    tensors["embed_tokens.weight"][7, 3] += 0.01
    write_eagle(tmp_path / "eagle", tensors)
    message = refusal(tmp_path / "eagle", target)
    assert message.startswith("head of another model: embed_tokens.weight in")
    assert "by up to 0.01; name the model that the head was trained for" in message


def without(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(name)


def adding(name: str, *shape: int, dtype: torch.dtype = torch.float16) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__setitem__(name, torch.ones(shape, dtype=dtype))


def unchanged(tensors: Tensors) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (adding("d2t", VOCAB_SIZE), {}, "missing tensor: t2d in"),
        (adding("layers.1.mlp.up_proj.weight", I, H), {}, "head of several layers: layers.1.mlp"),
        (unchanged, {"num_hidden_layers": 2}, "head of several layers: num_hidden_layers 2 in"),
        (adding("lm_head.weight", VOCAB_SIZE, H), {}, "unknown tensor in the head: lm_head.weight"),
        (adding("layers.0.input_layernorm.weight", H), {}, "unknown tensor in the head: layers.0"),
        (without("layers.0.mlp.up_proj.weight"), {}, "missing tensor: layers.0.mlp.up_proj.weight"),
        (unchanged, {"bias": True}, "missing tensor: fc.bias in"),
        (unchanged, {"qkv_bias": True}, "missing tensor: layers.0.self_attn.q_proj.bias in"),
        (
            adding("layers.0.self_attn.v_proj.bias", NUM_KV_HEADS * HEAD_DIM),
            {},
            "missing tensor: layers.0.self_attn.q_proj.bias in",
        ),
        (adding("fc.bias", H), {}, "head and its config disagree: fc.bias in"),
        (unchanged, {"hidden_size": 96}, "head does not fit its target: hidden_size 96 in"),
        (unchanged, {"vocab_size": 32000}, "head does not fit its target: vocab_size 32000 in"),
        (unchanged, {"intermediate_size": 128}, "tensor shape mismatch: layers.0.mlp.gate_proj"),
        (adding("fc.weight", H, 3 * H), {}, "tensor shape mismatch: fc.weight in"),
        (adding("fc.weight", H, 2 * H, dtype=torch.float64), {}, "unsupported dtype: fc.weight in"),
        (unchanged, {"model_type": "x", "auto_map": {}}, "remote code refused: auto_map in"),
        (unchanged, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "unsupported rotary"),
    ],
)
def test_what_is_no_such_head_is_refused(
    targets: Callable[[str], Path],
    tmp_path: Path,
    change: Callable[[Tensors], None],
    config: dict[str, Any],
    message: str,
) -> None:
    target = targets("llama3")
    tensors = eagle_tensors(target)
    change(tensors)
    write_eagle(tmp_path / "eagle", tensors, **config)
    assert refusal(tmp_path / "eagle", target).startswith(message)


def test_a_head_for_a_wider_target_is_refused(tmp_path: Path, targets: Callable[..., Path]) -> None:
    write_family(tmp_path / "wide", "llama3", hidden_size=256, num_hidden_layers=1)
    write_eagle(tmp_path / "eagle", eagle_tensors(targets("llama3")))
    message = refusal(tmp_path / "eagle", tmp_path / "wide")
    assert message.startswith("head does not fit its target: hidden_size 128 in")


def test_the_source_is_not_replaced(targets: Callable[[str], Path], tmp_path: Path) -> None:
    write_eagle(tmp_path / "eagle", eagle_tensors(targets("llama3")))
    with pytest.raises(UserError, match="head would be replaced"):
        import_head(tmp_path / "eagle", targets("llama3"), tmp_path / "eagle")
    assert (tmp_path / "eagle" / "pytorch_model.bin").is_file()


def causal_attention(queries: Tensor, keys: Tensor, values: Tensor, theta: float) -> Tensor:
    """[R, H] of rotated queries and keys over a whole text, in plain torch."""
    num_rows = len(queries)
    queries, keys, values = (each.view(num_rows, -1, HEAD_DIM) for each in (queries, keys, values))
    frequency = theta ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angle = torch.outer(torch.arange(num_rows).float(), frequency).repeat(1, 2)[:, None]

    def rotated(y: Tensor) -> Tensor:
        left, right = y.chunk(2, -1)
        return y * angle.cos() + torch.cat([-right, left], -1) * angle.sin()

    groups = NUM_HEADS // NUM_KV_HEADS
    queries, keys = rotated(queries), rotated(keys).repeat_interleave(groups, 1)
    scores = torch.einsum("rhd,shd->hrs", queries, keys) / math.sqrt(HEAD_DIM)
    scores = scores.masked_fill(torch.ones(num_rows, num_rows).triu(1).bool(), -math.inf)
    values = values.repeat_interleave(groups, 1)
    return torch.einsum("hrs,shd->rhd", scores.softmax(-1), values).flatten(1)


def eagle_formula(tensors: Tensors, token_ids: Tensor, features: Tensor, theta: float) -> Tensor:
    """EAGLE's layer over a whole text, in plain torch: features [R, H] guessed from [R, H]."""
    t = {name: tensor.float() for name, tensor in tensors.items()}

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, t[f"{name}.weight"], t.get(f"{name}.bias"))

    x = linear("fc", torch.cat([t["embed_tokens.weight"][token_ids], features], -1))
    attended = causal_attention(
        *(linear(f"layers.0.self_attn.{part}_proj", x) for part in "qkv"), theta
    )
    x = x + linear("layers.0.self_attn.o_proj", attended)
    normed = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    normed = normed * t["layers.0.post_attention_layernorm.weight"]
    gated = F.silu(linear("layers.0.mlp.gate_proj", normed))
    return x + linear("layers.0.mlp.down_proj", gated * linear("layers.0.mlp.up_proj", normed))


HEADS = {
    "llama, no biases": ("llama3", False, False),
    "llama, fc bias": ("llama3", True, False),
    "qwen, q k v biases": ("qwen2", False, True),
    "qwen, all biases": ("qwen2", True, True),
}


@pytest.fixture(params=HEADS.values(), ids=HEADS.keys())
def imported(
    request: pytest.FixtureRequest, targets: Callable[[str], Path], tmp_path: Path
) -> tuple[Path, Path, Tensors]:
    """Target, draft folder, and the tensors as they were before."""
    family, has_fc_bias, has_qkv_biases = request.param
    target = targets(family)
    tensors = eagle_tensors(target, has_fc_bias=has_fc_bias, has_qkv_biases=has_qkv_biases)
    biases = {"bias": has_fc_bias, "qkv_bias": has_qkv_biases or None}
    write_eagle(tmp_path / "eagle", tensors, **biases)
    import_head(tmp_path / "eagle", target, tmp_path / "draft")
    return target, tmp_path / "draft", tensors


@torch.inference_mode()
def test_the_runtime_computes_eagles_formula(imported: tuple[Path, Path, Tensors]) -> None:
    target, draft, tensors = imported
    decoder = load_decoder(read_config(target), torch.float32, torch.device("cpu"), CONTEXT_TOKENS)
    head = load_head(read_config(draft), decoder, CONTEXT_TOKENS)
    torch.manual_seed(0)
    token_ids, features = torch.randint(0, VOCAB_SIZE, (40,)), torch.randn(40, H)
    # the runtime reads the target's own embedding, not its copy in float16
    stored = tensors | {"embed_tokens.weight": load_tensors(target)["model.embed_tokens.weight"]}
    expected = eagle_formula(stored, token_ids, features, theta=500000.0)
    cache = KeyValueCache(head.config, 1, 64, torch.float32, torch.device("cpu"))
    parts = []
    for first, end in ((0, 25), (25, 26), (26, 40)):
        rows = consecutive_rows(first, end - first)
        read = token_ids[first:end], [cache.layers], [rows], features[first:end]
        parts.append(head.forward(*read))
        cache.keep(range(end - first))
    found = torch.cat(parts)
    assert (found - expected).abs().max() < TOLERANCE * expected.abs().max()
    for name in (*(name for name in tensors if name.endswith(".bias")), "fc.weight"):
        wrong = stored | {name: torch.zeros_like(stored[name])}
        without_it = eagle_formula(wrong, token_ids, features, theta=500000.0)
        # a bias on keys moves all scores of a query alike but for the rotation between them
        assert (found - without_it).abs().max() > 10 * TOLERANCE * expected.abs().max(), name


def test_a_chain_drafts_by_an_imported_head(
    imported: tuple[Path, Path, Tensors], tmp_path: Path
) -> None:
    target, draft, _ = imported
    plan = Plan(members=("target", "draft"), tree=Tree(depth=3, top_k=4, rows=24))
    parts = [Part("draft", "drafter", "eagle2", draft)]
    package_around(tmp_path / "chain", target, parts, plan)
    chain = load_chain(tmp_path / "chain", dtype="float32")
    options = {"max_new_tokens": 48, "temperature": 0.0}
    alone = chain.generate("hello there", members=["target"], **options)
    drafted = chain.generate("hello there", **options)
    assert drafted.token_ids == alone.token_ids
    assert drafted.statistics.forward_passes["draft"] > 0
    assert alone.statistics.forward_passes.keys() == {"target"}
