"""P-EAGLE heads of speculators and SpecForge: read alike, everything else refused in one line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from polybasic.chain.formats.checkpoints.config import head_config, read_config
from polybasic.chain.formats.checkpoints.draft_vocabulary import draft_tables
from polybasic.chain.formats.checkpoints.shapes import check_shapes, expected_shapes
from polybasic.chain.formats.lineage import weights_digest
from polybasic.chain.heads.importing import import_head
from polybasic.chain.model.loading import load_decoder, load_head
from tests.chain.heads.test_importing import EAGLE_CONFIG, refusal
from tests.checkpoints import CONTEXT_TOKENS, VOCAB_SIZE, write_family

FEATURE_LAYERS, MASK = (2, 3, 4), 7
"""EAGLE-3's own of a model of seven layers."""
DRAFTED = torch.arange(3, 99, 2)
LAYER = {key: value for key, value in EAGLE_CONFIG.items() if key != "bias"} | {
    "num_hidden_layers": 2
}
Config, Tensors = dict[str, Any], dict[str, Tensor]


def speculators(**own: Any) -> Config:
    return {
        "architectures": ["PEagleDraftModel"],
        "draft_vocab_size": len(DRAFTED),
        "eagle_aux_hidden_state_layer_ids": list(FEATURE_LAYERS),
        "mask_token_id": MASK,
        "norm_before_residual": False,
        "norm_before_fc": True,
        "speculators_model_type": "peagle",
        "speculators_config": {
            "algorithm": "peagle",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
        },
        "transformer_layer_config": LAYER,
        **own,
    }


def specforge(**own: Any) -> Config:
    """Flat, with the mask under the name that vLLM gives it."""
    section = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "norm_before_fc": True}
    given = {"draft_vocab_size": len(DRAFTED), "pard_token": MASK, "eagle_config": section}
    return {**LAYER, "architectures": ["PEagleDraftModel"], **given, **own}


def random_tensors() -> Tensors:
    section = {"eagle_aux_hidden_state_layer_ids": list(FEATURE_LAYERS)}
    config = specforge(
        mask_token_id=MASK, num_positions=5, norm_before_fc=True, eagle_config=section
    )
    generator = torch.Generator().manual_seed(12)
    return {
        name: torch.randn(size, generator=generator).bfloat16()
        for name, size in expected_shapes("peagle", head_config(config, "here"), None, set())
        if name not in ("d2t", "t2d")
    } | draft_tables(DRAFTED, VOCAB_SIZE)


def write(folder: Path, config: Config, tensors: Tensors) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peagle") / "target"
    write_family(folder, "llama3", dtype=torch.float32, num_hidden_layers=7)
    return folder


@pytest.mark.parametrize(("config", "num_positions"), [(speculators(), 5), (specforge(), 8)])
def test_both_spellings_are_read_alike(
    target: Path, tmp_path: Path, config: Config, num_positions: int
) -> None:
    tensors = random_tensors()
    write(tmp_path / "head", config, tensors)
    summary = import_head(tmp_path / "head", target, tmp_path / "draft")
    assert (summary["kind"], summary["draft_vocab_size"]) == ("peagle", len(DRAFTED))
    written = load_file(tmp_path / "draft" / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())
    file = read_config(tmp_path / "draft")
    head = file.head
    check_shapes("peagle", tmp_path / "draft", head)
    assert (head.feature_layers, head.num_layers, head.mask_token_id) == (FEATURE_LAYERS, 2, MASK)
    assert (head.num_positions, head.feature_norms, head.norms_residual) == (
        num_positions,
        1,
        False,
    )
    assert file.content["polybasic"]["target_sha256"] == weights_digest(target)
    import_head(tmp_path / "draft", target, tmp_path / "again")
    assert read_config(tmp_path / "again").head == head
    decoder = load_decoder(read_config(target), torch.float32, torch.device("cpu"), CONTEXT_TOKENS)
    loaded = load_head(file, decoder, CONTEXT_TOKENS)
    assert (loaded.name, loaded.max_levels) == (decoder.name, num_positions)
    embedding = tensors["embed_tokens.weight"].float()
    assert torch.equal(loaded.weights.embedding, embedding)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (speculators(mask_token_id=None), "head config lacks a key: HERE mask_token_id"),
        (speculators(mask_token_id=VOCAB_SIZE), "malformed head config: HERE mask_token_id"),
        (specforge(num_positions=1), "malformed head config: HERE num_positions 1, wanted 2 to 32"),
        (specforge(vocab_size=400), "head does not fit its target: vocab_size 400"),
        (specforge(rope_theta=None), "head config lacks a key: HERE rope_theta"),
        (specforge(num_hidden_layers=3), "missing tensor: layers.2.input_layernorm.weight"),
        (specforge(num_hidden_layers=1), "unknown tensor in the head: layers.1."),
        (specforge(fc_norm=True), "malformed head config: HERE fc_norm and norm_before_fc"),
        (
            specforge(eagle_aux_hidden_state_layer_ids=[1, 3, 7]),
            "head does not fit its target: HERE reads layers 1, 3, 7 of 7",
        ),
    ],
)
def test_other_heads_are_refused(
    target: Path, tmp_path: Path, config: Config, message: str
) -> None:
    write(tmp_path / "head", config, random_tensors())
    found = refusal(tmp_path / "head", target)
    assert found.startswith(message.replace("HERE", f"{tmp_path / 'head' / 'config.json'}"))


@pytest.mark.parametrize(
    "name", ["mask_hidden", "embed_tokens.weight", "layers.1.mlp.up_proj.weight"]
)
def test_a_missing_tensor_is_named(target: Path, tmp_path: Path, name: str) -> None:
    tensors = random_tensors()
    del tensors[name]
    write(tmp_path / "head", specforge(), tensors)
    message = refusal(tmp_path / "head", target)
    assert message == f"missing tensor: {name} in {tmp_path / 'head'}; download the head again"
