"""Medusa's and Hydra's heads in the layouts of others: read, refused, computed as there."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.checkpoint import resolve_head
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.lineage import weights_digest
from polybasic.chain.formats.plan import Tree
from polybasic.chain.heads.importing import import_head
from polybasic.chain.model.loading import load_decoder
from polybasic.chain.model.medusa import load_medusa
from polybasic.deploy.runtime.drafters.head import EagleDrafter
from polybasic.deploy.runtime.rounds.cache import KeyValueCache
from polybasic.deploy.runtime.rounds.verifier import Verifier
from polybasic.recipes.estimates.sizes import has_weights
from tests.conftest import HIDDEN_SIZE as H
from tests.conftest import VOCAB_SIZE as V

Tensors = dict[str, Tensor]
HEADS, BLOCKS = 3, 2
MEDUSA_CONFIG = {
    "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
    "medusa_num_heads": 2,  # fewer than there are
    "medusa_num_layers": BLOCKS,
    "transformers_version": "4.31.0",
}
HYDRA_CONFIG = {
    "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
    "hydra_num_heads": HEADS,
    "hydra_num_layers": BLOCKS,
    "hydra_head_arch": "mlp",
    "grounded_heads": True,
    "hidden_state_offset": 0,
}
VLLM_CONFIG = {
    "architectures": ["MedusaModel"],
    "model_type": "medusa",
    "hidden_size": H,
    "vocab_size": V,
    "num_heads": HEADS,
    "num_hidden_layers": BLOCKS,
}


def random_of(shapes: dict[str, tuple[int, ...]]) -> Tensors:
    generator = torch.Generator().manual_seed(6)
    return {
        name: (torch.randn(shape, generator=generator) / H**0.5).half()
        for name, shape in shapes.items()
    }


def medusa_tensors() -> Tensors:
    """Under the names of Medusa's own code."""
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(HEADS):
        for block in range(BLOCKS):
            shapes[f"{head}.{block}.linear.weight"] = (H, H)
            shapes[f"{head}.{block}.linear.bias"] = (H,)
        shapes[f"{head}.{BLOCKS}.weight"] = (V, H)
    return random_of(shapes)


def vllm_tensors(num_outputs: int = V) -> Tensors:
    """Under vLLM's names, without biases."""
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(HEADS):
        for block in range(BLOCKS):
            shapes[f"blocks.{head}.layers.{block}.weight"] = (H, H)
        shapes[f"lm_heads.{head}.weight"] = (num_outputs, H)
    return random_of(shapes)


def hydra_tensors() -> Tensors:
    """Under the names of Hydra's own code."""
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(HEADS):
        for block in range(BLOCKS):
            shapes[f"hydra_mlp.{head}.{block}.linear.weight"] = (H, H)
            shapes[f"hydra_mlp.{head}.{block}.linear.bias"] = (H,)
        for name in ("linear", "res_connection"):
            shapes[f"hydra_mlp.{head}.0.{name}.weight"] = (H, (head + 2) * H)
            shapes[f"hydra_mlp.{head}.0.{name}.bias"] = (H,)
        shapes[f"hydra_lm_head.{head}.weight"] = (V, H)
        shapes[f"hydra_lm_head.{head}.bias"] = (V,)
    return random_of(shapes)


def write(folder: Path, config: dict[str, Any], tensors: Any, name: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if name.endswith(".safetensors"):
        save_file(tensors, folder / name)
    else:
        torch.save(tensors, folder / name)
    return folder


def plain_logits(tensors: Tensors, place: int, state: Tensor, path: Tensor) -> Tensor:
    """Logits [V'] as the code that trained the heads computes them.

    Args:
        state: [H], of the token before the root.
        path: [place + 1, H], embeddings from the root on.
    """
    weights = {name: tensor.float() for name, tensor in tensors.items()}

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    x = state
    if "hydra_lm_head.0.weight" in tensors:
        x = torch.cat([state, path.flatten()])
        first = f"hydra_mlp.{place}.0"
        x = linear(f"{first}.res_connection", x) + F.silu(linear(f"{first}.linear", x))
        x = x + F.silu(linear(f"hydra_mlp.{place}.1.linear", x))
        return linear(f"hydra_lm_head.{place}", x)
    is_vllms = "lm_heads.0.weight" in tensors
    for block in range(BLOCKS):
        name = f"blocks.{place}.layers.{block}" if is_vllms else f"{place}.{block}.linear"
        x = x + F.silu(linear(name, x))
    return linear(f"lm_heads.{place}" if is_vllms else f"{place}.{BLOCKS}", x)


CASES: dict[str, tuple[dict[str, Any], Any, str]] = {
    "medusa": (MEDUSA_CONFIG, medusa_tensors, "medusa_lm_head.pt"),
    "medusa in safetensors": (MEDUSA_CONFIG, medusa_tensors, "medusa_lm_head.safetensors"),
    "vllm": (VLLM_CONFIG, vllm_tensors, "model.safetensors"),
    "hydra": (HYDRA_CONFIG, hydra_tensors, "hydra_lm_head.pt"),
}


@torch.inference_mode()
@pytest.mark.parametrize("case", CASES)
def test_imported_heads_draft_what_their_own_code_computes(
    case: str, tiny_chain_parts: Any, tmp_path: Path
) -> None:
    config, make, name = CASES[case]
    tensors, target_folder = make(), tiny_chain_parts.target
    source = write(tmp_path / "published", config, tensors, name)
    assert resolve_head(f"{source}") == source
    assert has_weights(f"{source}"), "or a dry run would count a download"
    found = import_head(source, target_folder, tmp_path / "head")
    kind = "hydra" if case == "hydra" else "medusa"
    assert found["imported_from"] == source.name
    assert (found["kind"], found["dtype"], found["draft_vocab_size"]) == (kind, "float16", None)
    stored = load_file(tmp_path / "head" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float16}
    assert found["parameters"] == sum(tensor.numel() for tensor in stored.values())
    written = read_config(tmp_path / "head")
    assert written.content["polybasic"]["target_sha256"] == weights_digest(target_folder)
    assert (written.head.num_positions, written.head.num_blocks) == (HEADS, BLOCKS)
    target = load_decoder(read_config(target_folder), torch.float32, torch.device("cpu"), 64)
    tokens = [3, 9, 27, 50]
    cache = KeyValueCache.of(target, 64)
    states = Verifier("target", target, cache).read(tokens[:-1])
    heads = load_medusa(written, target, 64)
    drafter = EagleDrafter(heads, Tree(depth=HEADS, top_k=1, rows=HEADS + 1), 64)
    drafter.observe(states)
    candidates = drafter.candidates(tokens, HEADS)
    path, score = tokens[-1:], 0.0
    for place in range(HEADS):
        embedded = target.weights.embedding[path]
        best = plain_logits(tensors, place, states[-1], embedded).log_softmax(-1).max(-1)
        path.append(int(best.indices))
        score += float(best.values)
        assert candidates.scores[place].item() == pytest.approx(score, rel=1e-4)
    assert candidates.tokens.tolist() == path[1:]
    assert set(path[1:]) != {path[1]}, "places are told apart"


@pytest.mark.parametrize("num_outputs", [V, 20], ids=["whole rows", "trimmed rows"])
def test_vllms_token_map_becomes_a_draft_vocabulary(
    num_outputs: int, tiny_chain_parts: Any, tmp_path: Path
) -> None:
    token_ids = torch.randperm(V, generator=torch.Generator().manual_seed(1))[:20]
    tensors = vllm_tensors(num_outputs) | {"token_map": token_ids}
    config = VLLM_CONFIG | {"truncated_vocab_size": 20}
    source = write(tmp_path / "published", config, tensors, "model.safetensors")
    found = import_head(source, tiny_chain_parts.target, tmp_path / "head")
    assert found["draft_vocab_size"] == 20
    stored = load_file(tmp_path / "head" / "model.safetensors")
    drafted = torch.arange(20) + stored["d2t"]
    assert drafted.tolist() == sorted(token_ids.tolist())
    rows = drafted.tolist()
    if num_outputs == 20:
        rows = [token_ids.tolist().index(token) for token in rows]
    assert torch.equal(stored["lm_heads.2.weight"], tensors["lm_heads.2.weight"][rows])


class Code:
    """Runs something where it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("true",)


def changed(**changes: Any) -> Any:
    """Medusa's tensors, changed by names with _ for a dot; None takes one out."""
    tensors: dict[str, Any] = dict(medusa_tensors())
    for name, value in changes.items():
        tensors[name.removeprefix("at").replace("_", ".")] = value
    return {name: value for name, value in tensors.items() if value is not None}


REFUSED = {
    "another width": (
        {},
        {name: tensor[..., :64] for name, tensor in medusa_tensors().items()}
        | {"0.0.linear.weight": torch.ones(64, 64)},
        r"heads do not fit their target: hidden_size 64 in .*, 128 of .*target; name the model "
        r"that they were trained for, by base_model_name_or_path lmsys/vicuna-7b-v1\.3$",
    ),
    "another vocabulary": (
        {},
        changed(at0_2_weight=torch.ones(V + 1, H)),
        rf"heads do not fit their target: outputs {V + 1} in .*, {V} of .*target; ",
    ),
    "one of another shape": (
        {},
        changed(at1_0_linear_weight=torch.ones(H, H + 1)),
        r"tensor shape mismatch: blocks\.1\.layers\.0\.weight in .* is \[128, 129\], .*128\]",
    ),
    "no base": ({}, {}, r"missing tensor: no matrix blocks\.0\.layers\.0\.weight in "),
    "no matrix": (
        {},
        changed(at0_2_weight=torch.tensor(1.0)),
        r"missing tensor: no matrix lm_heads\.0\.weight in ",
    ),
    "one missing": (
        {},
        changed(at1_0_linear_weight=None),
        r"missing tensor: blocks\.1\.layers\.0\.weight in ",
    ),
    "one more": (
        {},
        changed(atmodel_norm_weight=torch.ones(H)),
        r"unknown tensor in the heads: model\.norm\.weight in ",
    ),
    "integers": (
        {},
        {name: tensor.to(torch.int8) for name, tensor in medusa_tensors().items()},
        r"unsupported dtype: blocks\.0\.layers\.0\.weight in .* is torch\.int8",
    ),
    "code": ({}, {"0.0.linear.weight": Code()}, r"pickle refused: .*medusa_lm_head\.pt holds"),
    "a prefix layer": (
        {"hydra_head_arch": "prefix-mlp"},
        medusa_tensors(),
        r"unsupported heads: .*config\.json hydra_head_arch 'prefix-mlp'; supported: Medusa's",
    ),
    "a map of too many": (
        {},
        changed(attoken_map=None) | {"token_map": torch.tensor([3, 3])},
        r"malformed draft vocabulary: token_map in .* is no list of tokens below 64, each once",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_drafted_with_is_one_line(
    case: str, tiny_chain_parts: Any, tmp_path: Path
) -> None:
    config, tensors, message = REFUSED[case]
    source = write(tmp_path / "bad", MEDUSA_CONFIG | config, tensors, "medusa_lm_head.pt")
    with pytest.raises(UserError, match=message) as refused:
        import_head(source, tiny_chain_parts.target, tmp_path / "head")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "head").exists()


def test_a_folder_as_it_was_published_is_no_member(tiny_chain_parts: Any, tmp_path: Path) -> None:
    """It says neither for what weights it was trained nor how large they are."""
    source = write(tmp_path / "raw", MEDUSA_CONFIG, medusa_tensors(), "medusa_lm_head.pt")
    with pytest.raises(UserError, match=r"num_heads None, wanted 1 to 32; import"):
        _ = read_config(source).head
