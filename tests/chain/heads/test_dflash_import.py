"""DFlash heads of others: five spellings read alike, everything else refused in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from polybasic.chain.formats.checkpoints.checkpoint import load_tensors
from polybasic.chain.formats.checkpoints.config import head_config, read_config
from polybasic.chain.formats.checkpoints.draft_vocabulary import draft_tables
from polybasic.chain.formats.checkpoints.shapes import check_shapes, expected_shapes
from polybasic.chain.formats.head_kinds.dflash import DFlashBlock, Domino, Markov, block_of
from polybasic.chain.formats.lineage import weights_digest
from polybasic.chain.heads.importing import import_head
from tests.chain.heads.test_importing import refusal
from tests.checkpoints import CONTEXT_TOKENS, VOCAB_SIZE, write_family
from tests.head_kinds import DFLASH_SECTIONS

H, I, SIZE, MASK = 128, 192, 4, 319  # noqa: E741
INPUTS = (1, 2, 4)
"""Layers of a target of five whose inputs are read: the outputs of 0, 1 and 3."""
LAYER = {
    "hidden_size": H,
    "intermediate_size": I,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "vocab_size": VOCAB_SIZE,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "model_type": "qwen3",
    "layer_types": ["full_attention", "full_attention"],
}
OUTPUTS = [layer - 1 for layer in INPUTS]
CONFIDENCE = {"enable_confidence_head": True, "confidence_head_with_markov": True}
GATED = {**DFLASH_SECTIONS["dspark gated"], **CONFIDENCE}
Tensors = dict[str, Tensor]
Config = dict[str, Any]


def published(section: Config, **layer: Any) -> Config:
    """As z-lab and SpecForge write it."""
    own = {"mask_token_id": MASK, "target_layer_ids": OUTPUTS}
    code = {"architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.Draft"}}
    return {**LAYER, **code, "block_size": SIZE, "dflash_config": own | section, **layer}


def random_tensors(section: Config, num_drafted: int | None = None) -> Tensors:
    """Of a head with such a section, by the names of its kind."""
    content = published({"shift_label": False} | section)
    content |= {} if num_drafted is None else {"draft_vocab_size": num_drafted}
    head = head_config(content, "here")
    generator = torch.Generator().manual_seed(8)
    return {
        name: torch.randn(size, generator=generator).bfloat16()
        for name, size in expected_shapes("dflash", head, None, set())
        if name not in ("d2t", "t2d")
    }


def write(folder: Path, config: Config, tensors: Tensors) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def speculators(kind: str, **own: Any) -> Config:
    """With the layer's config nested, and layers named by their inputs."""
    return {
        "speculators_model_type": kind,
        "architectures": ["DFlashDraftModel"],
        "speculators_config": {"algorithm": kind},
        "transformer_layer_config": LAYER,
        "draft_vocab_size": VOCAB_SIZE,
        "block_size": SIZE,
        "aux_hidden_state_layer_ids": list(INPUTS),
        "mask_token_id": MASK,
        "sliding_window_non_causal": False,
        **own,
    }


def deepspec(**own: Any) -> Config:
    """Flat, with copies of the target's matrices."""
    given = {"block_size": SIZE, "mask_token_id": MASK, "target_layer_ids": OUTPUTS}
    return {**LAYER, "architectures": ["Qwen3DSparkModel"], "num_anchors": 512, **given, **own}


def modelopt(name: str) -> str:
    """Where NVIDIA's code calls a tensor otherwise."""
    name = name.replace("confidence_head.proj", "confidence_proj")
    return name.removeprefix("markov_head.")


def same(name: str) -> str:
    return name


MARKOV = {key: GATED[key] for key in ("markov_rank", "markov_head_type")} | CONFIDENCE
SPELLINGS: dict[str, tuple[Config, Config, Callable[[str], str]]] = {
    "z-lab": ({}, published({}), same),
    "block size in the section": (
        {},
        published({"block_size": SIZE}, block_size=None),
        same,
    ),
    "speculators": ({}, speculators("dflash", sample_from_anchor=False), same),
    "DeepSpec's DFlash": (
        {"shift_label": True},
        deepspec(markov_rank=0, enable_confidence_head=False),
        same,
    ),
    "Domino": (
        DFLASH_SECTIONS["domino"],
        published(DFLASH_SECTIONS["domino"]),
        lambda name: name.replace("embed_proj.", "logit_head.embed_proj."),
    ),
    "Domino by its architecture": (
        DFLASH_SECTIONS["domino"],
        published(
            {
                key: value
                for key, value in DFLASH_SECTIONS["domino"].items()
                if key != "projector_type"
            },
            architectures=["DominoDraftModel"],
        ),
        same,
    ),
    "SpecForge's DSpark": (
        GATED,
        published({key: value for key, value in GATED.items() if key != "shift_label"}),
        same,
    ),
    "NVIDIA's DSpark": (
        GATED,
        published({**DFLASH_SECTIONS["dspark gated"], "use_confidence_head": True}),
        modelopt,
    ),
    "DeepSpec's DSpark": (GATED, deepspec(**MARKOV), same),
    "speculators' DSpark": (GATED, speculators("dspark", **MARKOV), same),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dflash") / "target"
    write_family(folder, "llama3", dtype=torch.float32, num_hidden_layers=5)
    return folder


@pytest.mark.parametrize(("section", "config", "spelled"), SPELLINGS.values(), ids=SPELLINGS)
def test_each_spelling_is_read_alike(
    target: Path, tmp_path: Path, section: Config, config: Config, spelled: Callable[[str], str]
) -> None:
    tensors = random_tensors(section)
    copies = {}
    if "num_anchors" in config:
        of_target = load_tensors(target)
        copies = {
            "embed_tokens.weight": of_target["model.embed_tokens.weight"].bfloat16(),
            "lm_head.weight": of_target["lm_head.weight"].bfloat16(),
        }
    stored = {spelled(name): tensor for name, tensor in tensors.items()}
    write(tmp_path / "head", config, stored | copies)
    summary = import_head(tmp_path / "head", target, tmp_path / "draft")
    written = load_file(tmp_path / "draft" / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())
    assert (summary["kind"], summary["dtype"]) == ("dflash", "bfloat16")
    assert summary["parameters"] == sum(tensor.numel() for tensor in tensors.values())
    file = read_config(tmp_path / "draft")
    head = file.head
    check_shapes("dflash", tmp_path / "draft", head)
    assert (head.feature_layers, head.num_layers, head.has_head_norms) == (INPUTS, 2, True)
    assert (head.rope["rope_theta"], head.context_tokens) == (1000000.0, CONTEXT_TOKENS)
    correction: Domino | Markov | None = None
    if section.get("projector_type") == "domino":
        correction = Domino(48, 32, 1)
    elif section.get("projector_type") == "dspark":
        correction = Markov(16, "gated", H + 16)
    is_shifted = bool(section.get("shift_label"))
    assert block_of(head) == DFlashBlock(SIZE, MASK, is_shifted, None, correction)
    assert head.num_positions == (SIZE if is_shifted else SIZE - 1)
    assert file.content["polybasic"]["target_sha256"] == weights_digest(target)
    import_head(tmp_path / "draft", target, tmp_path / "again")
    assert read_config(tmp_path / "again").head == head


def test_a_draft_vocabulary_is_kept_and_rows_of_the_targets_projection_are_not(
    target: Path, tmp_path: Path
) -> None:
    drafted = torch.arange(3, 99, 2)
    tensors = random_tensors(GATED, len(drafted)) | draft_tables(drafted, VOCAB_SIZE)
    rows = load_tensors(target)["lm_head.weight"][drafted].bfloat16()
    config = speculators("dspark", **MARKOV, sample_from_anchor=True, draft_vocab_size=len(drafted))
    write(tmp_path / "head", config, tensors | {"lm_head.weight": rows})
    assert import_head(tmp_path / "head", target, tmp_path / "draft")["draft_vocab_size"] == 48
    assert load_file(tmp_path / "draft" / "model.safetensors").keys() == tensors.keys()
    assert read_config(tmp_path / "draft").head.num_draft_tokens == 48
    write(tmp_path / "other", config, tensors | {"lm_head.weight": rows.flip(0)})
    message = refusal(tmp_path / "other", target)
    assert message.startswith("head of another model: lm_head.weight in")


WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24}
NESTED = {"transformer_layer_config": LAYER | WINDOW}


@pytest.mark.parametrize(
    ("config", "windows", "is_causal"),
    [
        (published({}, **WINDOW), (24, None), None),
        (published({"causal": False}, **WINDOW), (24, None), False),
        (published({"use_swa": True, "swa_window_size": 16}), (16, 16), False),
        (published({"causal": True, "use_swa": True, "swa_window_size": 16}), (16, 16), True),
        (speculators("dflash", **NESTED), (24, None), None),
        (speculators("dflash", sliding_window_non_causal=True, **NESTED), (24, None), False),
    ],
)
def test_windows_are_read(
    target: Path,
    tmp_path: Path,
    config: Config,
    windows: tuple[int | None, ...],
    is_causal: bool | None,
) -> None:
    write(tmp_path / "head", config, random_tensors({}))
    import_head(tmp_path / "head", target, tmp_path / "draft")
    head = read_config(tmp_path / "draft").head
    kinds = [head.kinds[head.kind_of(layer)] for layer in range(2)]
    assert tuple(kind.window for kind in kinds) == windows
    assert block_of(head).is_causal is is_causal


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (published({}, block_size=1), "malformed head config: HERE block_size 1, wanted 2 to 64"),
        (published({}, block_size=None), "malformed head config: HERE block_size None"),
        (published({"mask_token_id": 320}), "malformed head config: HERE dflash_config.mask_tok"),
        (published({"target_layer_ids": []}), "malformed head config: HERE dflash_config.target_l"),
        (published({"target_layer_ids": ["1"]}), "malformed head config: HERE dflash_config.targe"),
        (published({"target_layer_ids": [0, 1, 4]}), "head does not fit its target: HERE reads la"),
        (published({"projector_type": "xpress"}), "malformed head config: HERE dflash_config.proj"),
        (published({"projector_type": "domino"}), "malformed head config: HERE dflash_config.emb_"),
        (published(GATED | {"markov_head_type": "deep"}), "malformed head config: HERE dflash_con"),
        (published({"attention_sink_bias": True}), "unsupported variant of DFlash: HERE attention"),
        (published({}) | {"dflash_config": None}, "malformed head config: HERE dflash_config"),
        (published({}, hidden_size=None), "head config lacks a key: HERE hidden_size"),
        (published({}, rope_theta=None), "head config lacks a key: HERE rope_theta"),
        (published({}, hidden_size=64), "head does not fit its target: hidden_size 64 in HERE"),
        (published({}, vocab_size=400), "head does not fit its target: vocab_size 400 in HERE"),
        (published({}, num_hidden_layers=3), "missing tensor: layers.2."),
        (published({}, num_hidden_layers=1), "unknown tensor in the head: layers.1."),
        (published({}, intermediate_size=64), "tensor shape mismatch: layers.0.mlp."),
        (published(GATED), "missing tensor: markov_head.markov_w1.weight"),
        (published({}, **WINDOW | {"sliding_window": None}), "malformed model config: HERE slid"),
        (speculators("dflash2"), "unsupported head: HERE speculators_model_type 'dflash2'"),
    ],
)
def test_other_heads_are_refused(
    target: Path, tmp_path: Path, config: Config, message: str
) -> None:
    write(tmp_path / "head", config, random_tensors({}))
    found = refusal(tmp_path / "head", target)
    assert found.startswith(message.replace("HERE", f"{tmp_path / 'head' / 'config.json'}"))


@pytest.mark.parametrize("name", random_tensors(GATED))
def test_every_missing_tensor_is_named(target: Path, tmp_path: Path, name: str) -> None:
    tensors = random_tensors(GATED)
    del tensors[name]
    write(tmp_path / "head", published(GATED), tensors)
    message = refusal(tmp_path / "head", target)
    assert message == f"missing tensor: {name} in {tmp_path / 'head'}; download the head again"
