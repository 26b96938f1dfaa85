"""EAGLE-3 heads and draft vocabularies of others: three spellings, read alike or refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from polybasic.chain.formats.checkpoints.checkpoint import load_tensors
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.checkpoints.draft_vocabulary import draft_tables, draft_token_ids
from polybasic.chain.formats.checkpoints.shapes import check_shapes
from polybasic.chain.formats.head_kinds.eagle3 import EAGLE3
from polybasic.chain.formats.lineage import weights_digest
from polybasic.chain.heads.importing import import_head, required_weights
from polybasic.chain.kernels.rows import consecutive_rows
from polybasic.chain.model.loading import load_decoder, load_head
from polybasic.deploy.runtime.rounds.cache import KeyValueCache
from tests.chain.heads.test_importing import (
    EAGLE_CONFIG,
    HEAD_DIM,
    H,
    eagle_tensors,
    refusal,
    write_eagle,
)
from tests.checkpoints import CONTEXT_TOKENS, VOCAB_SIZE, write_family
from tests.deploy.plain_eagle3 import PlainEagle3

I, NUM_LAYERS = 256, 7  # noqa: E741
FEATURE_LAYERS = (2, 3, 4)
"""EAGLE-3's own of a model of seven layers: 2, half of them, the third from the end."""
DRAFTED = torch.arange(3, 99, 2)
FC_NORMS = tuple(f"fc_norm.{number}.weight" for number in range(3))
Tensors = dict[str, Tensor]
Spelling = Callable[[Path, Tensors], None]


def eagle3_tensors(target: Path, drafted: Tensor | None = DRAFTED) -> Tensors:
    """Random weights under EAGLE-3's names, with the target's embedding."""
    generator = torch.Generator().manual_seed(6)
    num_drafted = VOCAB_SIZE if drafted is None else len(drafted)
    attention = {"q": (H, 2 * H), "k": (H // 2, 2 * H), "v": (H // 2, 2 * H), "o": (H, H)}
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (H, 3 * H),
        **{f"midlayer.self_attn.{part}_proj.weight": shape for part, shape in attention.items()},
        "midlayer.mlp.gate_proj.weight": (I, H),
        "midlayer.mlp.up_proj.weight": (I, H),
        "midlayer.mlp.down_proj.weight": (H, I),
        "lm_head.weight": (num_drafted, H),
    }
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    shapes |= {f"midlayer.{name}.weight": (H,) for name in norms} | {"norm.weight": (H,)}
    tensors = {
        name: (0.1 * torch.randn(shape, generator=generator) + (len(shape) == 1)).bfloat16()
        for name, shape in shapes.items()
    }
    embedding = load_tensors(target)["model.embed_tokens.weight"]
    tensors["embed_tokens.weight"] = embedding.bfloat16()
    return tensors if drafted is None else tensors | draft_tables(drafted, VOCAB_SIZE)


def with_norms(tensors: Tensors, names: tuple[str, ...]) -> Tensors:
    """The tensors and those of variants: random norms."""
    sizes = {name: len(tensors["norm.weight"]) for name in FC_NORMS} | {
        "input_norm.weight": 3 * H,
        **{f"midlayer.self_attn.{part}_norm.weight": HEAD_DIM for part in "qk"},
    }
    generator = torch.Generator().manual_seed(9)
    return tensors | {
        name: 1 + 0.2 * torch.randn(sizes[name], generator=generator) for name in names
    }


def as_safeailab(folder: Path, tensors: Tensors, **config: Any) -> None:
    """Without a copy of the embedding, and without a word on layers."""
    kept = {name: each for name, each in tensors.items() if name != "embed_tokens.weight"}
    architecture = {"architectures": ["LlamaForCausalLM"], "bias": None}
    size = {"draft_vocab_size": len(tensors["lm_head.weight"])}
    write_eagle(folder, kept, **(architecture | size | config))


def as_specforge(folder: Path, tensors: Tensors, **config: Any) -> None:
    """With both tables in any case, and layers named by their outputs."""
    size = len(tensors["lm_head.weight"])
    tables = {"d2t": torch.zeros(size).long(), "t2d": torch.zeros(VOCAB_SIZE).bool()}
    section = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    own = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": size,
        "target_hidden_size": H,
        "eagle_config": section,
        "bias": None,
    }
    write_eagle(folder, tables | tensors, is_pickle=False, **(own | config))


def as_speculators(folder: Path, tensors: Tensors, **config: Any) -> None:
    """The layer's config nested, the layer counted, layers named by their inputs."""
    renamed = {name.replace("midlayer.", "layers.0."): each for name, each in tensors.items()}
    layer = {key: value for key, value in EAGLE_CONFIG.items() if key != "bias"}
    own = {
        "architectures": ["Eagle3DraftModel"],
        "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "draft_vocab_size": len(tensors["lm_head.weight"]),
        "eagle_aux_hidden_state_layer_ids": list(FEATURE_LAYERS),
        "norm_before_residual": False,
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3"},
        "target_hidden_size": None,
        "transformer_layer_config": layer,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(own | config))
    save_file(renamed, folder / "model.safetensors")


SPELLINGS: dict[str, Any] = {
    "SafeAILab": as_safeailab,
    "SpecForge": as_specforge,
    "speculators": as_speculators,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eagle3") / "target"
    write_family(folder, "llama3", dtype=torch.float32, num_hidden_layers=NUM_LAYERS)
    return folder


@pytest.mark.parametrize("drafted", [DRAFTED, None], ids=["trimmed", "all tokens"])
@pytest.mark.parametrize("spelled", SPELLINGS.values(), ids=SPELLINGS.keys())
def test_weights_are_kept_bit_for_bit(
    target: Path, tmp_path: Path, spelled: Spelling, drafted: Tensor | None
) -> None:
    tensors = eagle3_tensors(target, drafted)
    spelled(tmp_path / "head", tensors)
    summary = import_head(tmp_path / "head", target, tmp_path / "draft")
    written = load_file(tmp_path / "draft" / "model.safetensors")
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(written[name], tensor), name
        assert written[name].dtype == tensor.dtype
    head = read_config(tmp_path / "draft").head
    assert (head.kind, head.feature_layers) == ("eagle3", FEATURE_LAYERS)
    assert head.num_draft_tokens == (VOCAB_SIZE if drafted is None else len(drafted))
    assert (head.rms_norm_eps, head.rope["rope_theta"]) == (1e-5, 500000.0)
    assert head.context_tokens == CONTEXT_TOKENS
    check_shapes("eagle3", tmp_path / "draft", head)
    no_weights = {"embed_tokens.weight", "d2t", "t2d"}
    assert summary == {
        "imported_from": "head",
        "kind": "eagle3",
        "parameters": sum(each.numel() for name, each in tensors.items() if name not in no_weights),
        "dtype": "bfloat16",
        "draft_vocab_size": None if drafted is None else len(drafted),
        "feature_layers": list(FEATURE_LAYERS),
        "has_fc_bias": False,
        "has_qkv_biases": False,
    }
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert config["polybasic"]["target_sha256"] == weights_digest(target)


def test_an_imported_head_is_imported_again(target: Path, tmp_path: Path) -> None:
    layers = {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
    as_specforge(tmp_path / "head", eagle3_tensors(target), **layers)
    import_head(tmp_path / "head", target, tmp_path / "draft")
    import_head(tmp_path / "draft", target, tmp_path / "again")
    assert read_config(tmp_path / "again").head.feature_layers == (1, 3, 5)
    once, twice = load_tensors(tmp_path / "draft"), load_tensors(tmp_path / "again")
    assert all(torch.equal(once[name], twice[name]) for name in once)


@pytest.mark.parametrize(
    ("named", "read"), [([1, 2, 3], (2, 3, 4)), ([2, 3, 4], (2, 3, 4)), ([], (2, 3, 4))]
)
def test_layers_that_can_be_meant_in_one_way(
    target: Path, tmp_path: Path, named: list[int], read: tuple[int, ...]
) -> None:
    section = {"eagle_aux_hidden_state_layer_ids": named}
    as_specforge(tmp_path / "head", eagle3_tensors(target), eagle_config=section)
    import_head(tmp_path / "head", target, tmp_path / "draft")
    assert read_config(tmp_path / "draft").head.feature_layers == read


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 5]}},
            "feature layers can be meant in two ways:",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [3, 1, 5]}, "feature layers out of order:"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}, "head does not fit its target:"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3]}, "malformed head config:"),
        ({"fc_norm": True}, "missing tensor: fc_norm.0.weight"),
        ({"use_aux_norm": True}, "missing tensor: fc_norm.0.weight"),
        ({"eagle_config": {"norm_before_fc": True}}, "missing tensor: input_norm.weight"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "unsupported variant of EAGLE-3:"),
        ({"target_hidden_size": 2 * H}, "unsupported head:"),
        ({"draft_vocab_size": 40}, "tensor shape mismatch:"),
        ({"vocab_size": VOCAB_SIZE + 1}, "head does not fit its target: vocab_size"),
        ({"num_hidden_layers": 2}, "head of several layers: num_hidden_layers 2"),
    ],
)
def test_what_is_not_computed_is_refused(
    target: Path, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    as_specforge(tmp_path / "head", eagle3_tensors(target), **config)
    assert refusal(tmp_path / "head", target).startswith(message)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"speculators_model_type": "mtp"}, "unsupported head:"),
        ({"transformer_layer_config": {"model_type": "qwen3"}}, "head config lacks a key:"),
        ({"transformer_layer_config": {"model_type": "gemma2"}}, "unsupported head:"),
        ({"transformer_layer_config": None}, "unsupported head:"),
        ({"transformer_layer_config": {"model_type": "llama"}}, "head config lacks a key:"),
        (
            {
                "transformer_layer_config": {
                    "model_type": "llama",
                    "layer_types": ["chunked_attention"],
                }
            },
            "unsupported head:",
        ),
    ],
)
def test_what_speculators_can_be_otherwise_is_refused(
    target: Path, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    as_speculators(tmp_path / "head", eagle3_tensors(target), **config)
    assert refusal(tmp_path / "head", target).startswith(message)


def test_code_next_to_another_head_is_refused(target: Path, tmp_path: Path) -> None:
    code = {"model_type": "eagle3", "auto_map": {"AutoModel": "head.Head"}}
    as_specforge(tmp_path / "head", eagle3_tensors(target), **code)
    assert refusal(tmp_path / "head", target).startswith("remote code refused: auto_map in")


def test_a_norm_that_two_readers_take_otherwise_must_be_named(target: Path, tmp_path: Path) -> None:
    as_speculators(tmp_path / "head", eagle3_tensors(target))
    path = tmp_path / "head" / "config.json"
    config = json.loads(path.read_text())
    del config["norm_before_residual"]
    path.write_text(json.dumps(config))
    message = refusal(tmp_path / "head", target)
    assert message.startswith("head config lacks a key:")
    assert "norm_before_residual" in message


@pytest.mark.parametrize("name", [*required_weights(EAGLE3), "d2t", "t2d"])
def test_every_missing_tensor_is_named(target: Path, tmp_path: Path, name: str) -> None:
    tensors = eagle3_tensors(target)
    del tensors[name]
    write_eagle(
        tmp_path / "head",
        tensors,
        is_pickle=False,
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=len(DRAFTED),
    )
    message = refusal(tmp_path / "head", target)
    assert message == f"missing tensor: {name} in {tmp_path / 'head'}; download the head again"


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("fc.bias", torch.zeros(H), "unknown tensor in the head: fc.bias"),
        ("input_norm.weight", torch.ones(3 * H), "unknown tensor in the head: input_norm.weight"),
        ("layers.1.mlp.up_proj.weight", torch.ones(I, H), "head of several layers: layers.1.mlp"),
        (
            "d2t",
            DRAFTED - torch.arange(len(DRAFTED)) + 1,
            "malformed draft vocabulary: d2t",
        ),
        ("fc.weight", torch.ones(H, 2 * H), "tensor shape mismatch: fc.weight"),
        ("lm_head.weight", torch.ones(90, H), "tensor shape mismatch: lm_head.weight"),
        ("norm.weight", torch.ones(H).double(), "unsupported dtype: norm.weight"),
    ],
)
def test_other_tensors_are_refused(
    target: Path, tmp_path: Path, name: str, tensor: Tensor, message: str
) -> None:
    sizes = {"draft_vocab_size": len(DRAFTED)}
    as_specforge(tmp_path / "head", eagle3_tensors(target) | {name: tensor}, **sizes)
    assert refusal(tmp_path / "head", target).startswith(message)


def eagle3_formula(
    tensors: Tensors, token_ids: Tensor, read: Tensor, **variants: bool
) -> tuple[Tensor, Tensor]:
    """The head over a whole text, in plain torch: features [R, H] and logits [R, D].

    Args:
        tensors: of the head.
        token_ids: [R], token t+1 of each row.
        read: [R, 3H], inputs of three layers.
    """
    weights = {name: tensor.float() for name, tensor in tensors.items()}
    embedding = weights["embed_tokens.weight"]
    plain = PlainEagle3(weights, embedding, HEAD_DIM, eps=1e-5, theta=500000.0, **variants)
    features = plain.layer(token_ids.tolist(), plain.features(read))
    return features, plain.logits(features)


HEAD_NORMS = tuple(f"midlayer.self_attn.{part}_norm.weight" for part in "qk")
COMPUTED: dict[str, tuple[Any, tuple[str, ...], dict[str, Any]]] = {
    **{name: (spelled, (), {}) for name, spelled in SPELLINGS.items()},
    "EAGLE-3.1 in SpecForge": (as_specforge, FC_NORMS, {"fc_norm": True, "norm_output": True}),
    "EAGLE-3.1 in speculators": (as_speculators, FC_NORMS, {"fc_norm": True, "norm_output": True}),
    "speculators' default": (
        as_speculators,
        ("input_norm.weight",),
        {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True},
    ),
    "NVIDIA's": (as_specforge, ("input_norm.weight",), {"eagle_config": {"norm_before_fc": True}}),
    "layers of Qwen3": (as_speculators, HEAD_NORMS, {}),
}


@torch.inference_mode()
@pytest.mark.parametrize(("spelled", "norms", "config"), COMPUTED.values(), ids=COMPUTED.keys())
def test_the_runtime_computes_eagles_formula(
    target: Path,
    tmp_path: Path,
    spelled: Callable[..., None],
    norms: tuple[str, ...],
    config: dict[str, Any],
) -> None:
    tensors = with_norms(eagle3_tensors(target), norms)
    spelled(tmp_path / "head", tensors, **config)
    variants = {
        name: bool(config.get(key))
        for name, key in (
            ("norms_residual", "norm_before_residual"),
            ("norms_output", "norm_output"),
        )
    }
    import_head(tmp_path / "head", target, tmp_path / "draft")
    decoder = load_decoder(read_config(target), torch.float32, torch.device("cpu"), CONTEXT_TOKENS)
    head = load_head(read_config(tmp_path / "draft"), decoder, CONTEXT_TOKENS)
    torch.manual_seed(0)
    token_ids, read = torch.randint(0, VOCAB_SIZE, (30,)), torch.randn(30, 3 * H)
    # the runtime reads the target's own embedding, not its copy in bfloat16
    stored = tensors | {"embed_tokens.weight": load_tensors(target)["model.embed_tokens.weight"]}
    expected, expected_logits = eagle3_formula(stored, token_ids, read, **variants)
    cache = KeyValueCache(head.config, 1, 64, torch.float32, torch.device("cpu"))
    rows = consecutive_rows(0, 30)
    found = head.forward(token_ids, [cache.layers], [rows], head.features(read))
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    logits = head.logits(found)
    assert (logits - expected_logits).abs().max() < 1e-5 * expected_logits.abs().max()
    assert head.weights.draft_token_ids is not None
    assert torch.equal(head.weights.draft_token_ids, DRAFTED)
    for name in ("fc.weight", *(name for name in tensors if "norm" in name)):
        wrong = stored | {name: torch.full_like(stored[name], 0.5)}
        without_it = eagle3_formula(wrong, token_ids, read, **variants)[1]
        assert (logits - without_it).abs().max() > 1e-3 * expected_logits.abs().max(), name
    for name in variants:
        other = variants | {name: not variants[name]}
        otherwise = eagle3_formula(stored, token_ids, read, **other)[0]
        assert (found - otherwise).abs().max() > 1e-3 * expected.abs().max(), name


def test_a_window_is_read_and_kept(target: Path, tmp_path: Path) -> None:
    layer = {key: value for key, value in EAGLE_CONFIG.items() if key != "bias"}
    window = {"layer_types": ["sliding_attention"], "sliding_window": 24}
    nested = {"transformer_layer_config": layer | window}
    as_speculators(tmp_path / "head", eagle3_tensors(target), **nested)
    import_head(tmp_path / "head", target, tmp_path / "draft")
    (kind,) = read_config(tmp_path / "draft").head.kinds
    assert kind.window == 24
    as_speculators(tmp_path / "whole", eagle3_tensors(target))
    import_head(tmp_path / "whole", target, tmp_path / "other")
    assert read_config(tmp_path / "other").head.layer_kinds == ()


def test_biases_of_attention_are_kept(target: Path, tmp_path: Path) -> None:
    biases = {
        f"midlayer.self_attn.{part}_proj.bias": torch.randn(size).bfloat16()
        for part, size in (("q", H), ("k", H // 2), ("v", H // 2))
    }
    as_specforge(tmp_path / "head", eagle3_tensors(target) | biases)
    assert import_head(tmp_path / "head", target, tmp_path / "draft")["has_qkv_biases"]
    written = load_tensors(tmp_path / "draft")
    assert all(torch.equal(written[name], bias) for name, bias in biases.items())


def test_the_draft_vocabulary_of_an_eagle2_head_is_kept(target: Path, tmp_path: Path) -> None:
    tables = draft_tables(DRAFTED, VOCAB_SIZE)
    write_eagle(tmp_path / "eagle", eagle_tensors(target) | tables)
    summary = import_head(tmp_path / "eagle", target, tmp_path / "draft")
    assert (summary["kind"], summary["draft_vocab_size"]) == ("eagle2", len(DRAFTED))
    written = load_tensors(tmp_path / "draft")
    assert all(torch.equal(written[name], table) for name, table in tables.items())
    head = read_config(tmp_path / "draft").head
    assert (head.kind, head.draft_vocab_size) == ("eagle2", len(DRAFTED))


def test_hot_tokens_of_an_eagle2_head_become_its_tables(target: Path, tmp_path: Path) -> None:
    write_eagle(tmp_path / "eagle", eagle_tensors(target))
    # FR-Spec's lists are in the order of frequency
    hot_tokens = DRAFTED[torch.randperm(len(DRAFTED))].tolist()
    torch.save(hot_tokens, tmp_path / "eagle" / "hot_token_ids.pt")
    summary = import_head(tmp_path / "eagle", target, tmp_path / "draft")
    assert summary["draft_vocab_size"] == len(DRAFTED)
    token_ids = draft_token_ids(load_tensors(tmp_path / "draft"))
    assert token_ids is not None
    assert torch.equal(token_ids, DRAFTED)


@pytest.mark.parametrize(
    "content", [[1, 2, 2], [], [VOCAB_SIZE], [-1], ["a"], {"ids": torch.ones(2)}, b"no archive"]
)
def test_hot_tokens_that_are_none_are_refused(target: Path, tmp_path: Path, content: Any) -> None:
    write_eagle(tmp_path / "eagle", eagle_tensors(target))
    path = tmp_path / "eagle" / "hot_token_ids.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    assert refusal(tmp_path / "eagle", target).startswith(f"malformed draft vocabulary: {path}")
