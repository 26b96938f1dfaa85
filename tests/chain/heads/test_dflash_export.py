"""DFlash heads for vLLM and SGLang: what they read comes back, what they lack is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.checkpoint import load_tensors
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.package import Part
from polybasic.chain.formats.plan import Plan, Tree
from polybasic.chain.heads.export import ENGINES, Engine, export_head, launch_command
from polybasic.chain.heads.importing import import_head
from tests.chain.heads.exported import loaded
from tests.chain.heads.test_dflash_import import (
    INPUTS,
    MASK,
    OUTPUTS,
    SIZE,
    WINDOW,
    H,
    I,
    published,
    random_tensors,
    write,
)
from tests.checkpoints import write_family
from tests.conftest import package_around
from tests.head_kinds import DFLASH_SECTIONS

PLAN = Plan(members=("target", "draft"), tree=Tree(depth=2, top_k=2, rows=6))
# What vLLM builds (DFlashQwen3Model of vllm/model_executor/models/qwen3_dflash.py) and SGLang
# (DFlashDraftModel of sglang/srt/models/dflash.py), once q, k, v and gate, up are stacked.
LAYER = {
    "input_layernorm.weight": (H,),
    "post_attention_layernorm.weight": (H,),
    "self_attn.qkv_proj.weight": (H + H, H),
    "self_attn.o_proj.weight": (H, H),
    "self_attn.q_norm.weight": (32,),
    "self_attn.k_norm.weight": (32,),
    "mlp.gate_up_proj.weight": (2 * I, H),
    "mlp.down_proj.weight": (H, I),
}
PARAMETERS = {
    "model.fc.weight": (H, len(INPUTS) * H),
    "model.hidden_norm.weight": (H,),
    "model.norm.weight": (H,),
    **{
        f"model.layers.{number}.{name}": shape for number in (0, 1) for name, shape in LAYER.items()
    },
}


@pytest.fixture
def packed(tmp_path: Path) -> Callable[..., Path]:
    """A chain whose draft head has such a section and such layers."""

    def pack(section: dict[str, Any], **layer: Any) -> Path:
        target = tmp_path / "target"
        write_family(target, "llama3", dtype=torch.float32, num_hidden_layers=5)
        write(tmp_path / "head", published(section, **layer), random_tensors(section))
        import_head(tmp_path / "head", target, tmp_path / "draft")
        part = Part("draft", "drafter", "dflash", tmp_path / "draft")
        package_around(tmp_path / "chain", target, [part], PLAN)
        return tmp_path / "chain"

    return pack


def test_both_engines_find_all_parameters(packed: Callable[..., Path], tmp_path: Path) -> None:
    chain = packed({}, **WINDOW)
    for to in ("vllm", "sglang"):
        exported = export_head(chain, to, None, tmp_path / to)
        assert loaded(exported.folder) == PARAMETERS
        config = json.loads((exported.folder / "config.json").read_text())
        assert (config["architectures"], config["model_type"]) == (["DFlashDraftModel"], "qwen3")
        assert (config["block_size"], config["num_target_layers"]) == (SIZE, 5)
        assert config["dflash_config"] == {"mask_token_id": MASK, "target_layer_ids": OUTPUTS}
        assert config.items() >= WINDOW.items()
        import_head(exported.folder, tmp_path / "target", tmp_path / f"{to} again")
        again, before = tmp_path / f"{to} again", tmp_path / "draft"
        assert read_config(again).head == read_config(before).head
        stored = load_tensors(again)
        assert all(
            torch.equal(stored[name], tensor) for name, tensor in load_tensors(before).items()
        )
    command = launch_command("sglang", exported)
    assert "--speculative-algorithm DFLASH" in command
    assert f"--speculative-num-draft-tokens {SIZE}" in command
    assert "--speculative-num-steps" not in command
    command = launch_command("vllm", exported)
    assert f'"method": "dflash", "model": "{exported.folder}"' in command
    assert f'"num_speculative_tokens": {SIZE - 1}' in command


@pytest.mark.parametrize(
    ("section", "engines", "lacking"),
    [
        ({}, ["eagle"], "is a DFlash head"),
        (DFLASH_SECTIONS["domino"], ENGINES[1:], "has a correction"),
        ({"shift_label": True}, ENGINES[1:], "drafts after the anchor's row"),
        ({"causal": True}, ["sglang"], "says what rows of its block see"),
    ],
)
def test_what_an_engine_lacks_is_refused(
    packed: Callable[..., Path],
    tmp_path: Path,
    section: dict[str, Any],
    engines: list[Engine],
    lacking: str,
) -> None:
    chain = packed(section)
    for to in engines:
        with pytest.raises(UserError, match=f"does not compute this head: draft {lacking}"):
            export_head(chain, to, None, tmp_path / "out")
    if "causal" in section:
        folder = export_head(chain, "vllm", None, tmp_path / "out").folder
        assert json.loads((folder / "config.json").read_text())["dflash_config"]["causal"]
