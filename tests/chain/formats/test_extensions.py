"""A family and a kind of heads of another package: found, checked, and refused without it."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.checkpoints.kinds import MODEL_KINDS
from polybasic.chain.formats.extensions import offered, resolve
from polybasic.chain.formats.families.table import FAMILIES
from polybasic.chain.formats.head_kinds.table import HEAD_KINDS
from polybasic.chain.formats.manifest import Manifest, read_manifest
from polybasic.chain.formats.verify import check_chain
from polybasic.chain.heads.export import export_head
from polybasic.chain.heads.importing import import_head
from polybasic.deploy.runtime.memory import Layout, Memory, state_memory
from tests.extensions import FAMILY, HEAD, installed, write_toy_head, write_toy_model

OWN = "llama, mistral, qwen2, qwen3, phi3, gemma2, gemma3_text, t5"
OWN_KINDS = ", ".join(kind.name for kind in HEAD_KINDS.own)


def refusal_of(call: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as refusal:
        call()
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


@pytest.fixture
def toy_chain(tiny_chain_parts: Any, tmp_path: Path) -> Iterator[Path]:
    """A chain with a head of the kind, which is installed."""
    with installed(tmp_path / "site", HEAD):
        write_toy_head(tiny_chain_parts.draft, tiny_chain_parts.target)
        package(tiny_chain_parts, tmp_path / "chain")
        yield tmp_path / "chain"


def package(parts: Any, out: Path) -> Path:
    intermediate, draft = parts.parts
    parts.package(out, parts=[intermediate, replace(draft, kind="toy")])
    return out


def test_a_family_is_read_where_its_package_is_installed(tmp_path: Path) -> None:
    config = tmp_path / "model" / "config.json"
    with installed(tmp_path / "site", FAMILY):
        write_toy_model(config.parent)
        decoder = read_config(config.parent).decoder
        assert (decoder.embedding_scale, decoder.num_layers, decoder.head_dim) == (3.0, 2, 32)
        assert [*FAMILIES][-2:] == ["t5", "toy"]
        others = json.loads(config.read_text()) | {"model_type": "mamba"}
        config.write_text(json.dumps(others))
        message = refusal_of(lambda: read_config(config.parent).decoder)
        assert message.endswith(f"model_type 'mamba'; supported: {OWN}, toy")
        config.write_text(json.dumps(others | {"model_type": "toy"}))
    message = refusal_of(lambda: read_config(config.parent).decoder)
    assert message == f"unsupported architecture: {config} model_type 'toy'; supported: {OWN}"


def test_other_packages_are_looked_up_for_unknown_names_alone(tiny_chain: Path) -> None:
    offered.cache_clear()
    checked = check_chain(tiny_chain)
    state_memory(checked, Layout("cpu", "float32", "eager"), 64)
    assert offered.cache_info().currsize == 0
    assert "toy" not in FAMILIES
    assert offered.cache_info().currsize == 1


@pytest.mark.parametrize(
    ("entry_points", "message"),
    [
        (
            [FAMILY, FAMILY.replace("FAMILY", "OTHER")],
            "several packages add one name: entry point toy of polybasic.families is "
            "toy.family:FAMILY and toy.family:OTHER; uninstall one",
        ),
        (
            [FAMILY.replace("toy.family", "toy.absent")],
            "cannot import what an extension names: entry point toy of polybasic.families is "
            "toy.absent:FAMILY (ModuleNotFoundError: No module named 'toy.absent'); mend or",
        ),
        (
            [FAMILY.replace("FAMILY", "ABSENT")],
            "toy.family:ABSENT (AttributeError: module 'toy.family' has no attribute 'ABSENT')",
        ),
        (
            [FAMILY.replace("FAMILY", "SCALE")],
            "entry point names something else: entry point toy of polybasic.families is "
            "toy.family:SCALE, no Family with model_type 'toy'; mend or uninstall the package",
        ),
        (
            [FAMILY.replace("toy =", "game =")],
            "toy.family:FAMILY, no Family with model_type 'game'",
        ),
    ],
)
def test_what_is_no_family_is_refused(
    tmp_path: Path, entry_points: list[str], message: str
) -> None:
    model_type = "game" if "game" in entry_points[0] else "toy"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with installed(tmp_path / "site", *entry_points):
        assert message in refusal_of(lambda: read_config(tmp_path))


def test_a_family_of_this_project_cannot_be_replaced(tmp_path: Path) -> None:
    with installed(tmp_path, FAMILY.replace("toy =", "llama =")):
        assert FAMILIES["llama"].autoawq == "llama"
        assert [*FAMILIES] == OWN.split(", ")


def test_a_chain_with_a_head_of_another_package(toy_chain: Path, tmp_path: Path) -> None:
    checked = check_chain(toy_chain)
    member = checked.manifest.member("draft")
    assert (member.kind, member.drafts_for) == ("toy", ("target", "intermediate"))
    assert checked.configs["draft"].head.kind == "toy"
    assert "Toy head: drafts trees from the features of target" in (
        (toy_chain / "README.md").read_text()
    )
    message = refusal_of(lambda: export_head(toy_chain, "vllm", None, tmp_path / "out"))
    assert "vLLM does not compute this head: draft is of kind toy;" in message
    draft, target = (toy_chain / name for name in ("draft", "target"))
    message = refusal_of(lambda: import_head(draft, target, tmp_path / "out"))
    assert message.startswith(f"unsupported head: {draft / 'config.json'} polybasic.kind toy; name")


def test_memory_of_a_head_of_another_package(toy_chain: Path) -> None:
    checked = check_chain(toy_chain)
    tensors = load_file(toy_chain / "draft" / "model.safetensors")
    num = sum(tensor.numel() for name, tensor in tensors.items() if name != "embed_tokens.weight")
    stated: Memory = state_memory(checked, Layout("cpu", "float32", "eager"), 64)
    assert stated.members["draft"]["weights"] == 4 * num
    # rows of the verifier's lm_head would come on top where heads are rounded
    rounded = state_memory(checked, Layout("cpu", "bfloat16", "native"), 64)
    matrices = sum(
        prod(tensor.shape)
        for name, tensor in tensors.items()
        if tensor.dim() == 2 and name != "embed_tokens.weight"
    )
    norms = num - matrices
    assert rounded.members["draft"]["weights"] == round(matrices * (0.5 + 3 / 64)) + 2 * norms


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ("join.weight", "missing tensor: join.weight in"),
        ("lm_head.weight", "missing tensor: lm_head.weight in"),
        ("block.norm_before.weight", "missing tensor: block.norm_before.weight in"),
        ("block.self_attn.q_proj.weight", "missing tensor: block.self_attn.q_proj.weight in"),
    ],
)
def test_its_tensors_are_those_that_it_names(
    toy_chain: Path, tiny_chain_parts: Any, tmp_path: Path, tensor: str, message: str
) -> None:
    path = tiny_chain_parts.draft / "model.safetensors"
    tensors = load_file(path)
    del tensors[tensor]
    save_file(tensors, path, {"format": "pt"})
    assert message in refusal_of(lambda: package(tiny_chain_parts, tmp_path / "less"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"toy_layers": [0, 5]}, "draft/config.json reads layers 0, 5 of 2; train a head for this"),
        ({"polybasic": {}}, "head of another kind: draft is toy, by "),
        (
            {"polybasic": {"kind": "game"}},
            f"polybasic.kind 'game', known: {OWN_KINDS}, toy; install the package",
        ),
    ],
)
def test_what_its_config_says_is_checked(
    toy_chain: Path,
    tiny_chain_parts: Any,
    tmp_path: Path,
    changes: dict[str, Any],
    message: str,
) -> None:
    path = tiny_chain_parts.draft / "config.json"
    config = json.loads(path.read_text())
    if "polybasic" in changes:
        digest = config["polybasic"]["target_sha256"]
        changes = {"polybasic": {"target_sha256": digest, **changes["polybasic"]}}
    path.write_text(json.dumps(config | changes))
    assert message in refusal_of(lambda: package(tiny_chain_parts, tmp_path / "changed"))


def test_the_chain_is_refused_without_the_package(tiny_chain_parts: Any, tmp_path: Path) -> None:
    chain = tmp_path / "chain"
    with installed(tmp_path / "site", HEAD):
        write_toy_head(tiny_chain_parts.draft, tiny_chain_parts.target)
        package(tiny_chain_parts, chain)
        assert read_manifest(chain).member("draft").kind == "toy"
    known = ", ".join((*MODEL_KINDS, *HEAD_KINDS))
    assert refusal_of(lambda: read_manifest(chain)) == (
        f"malformed manifest: members[2].kind = 'toy' in {chain / 'chain.json'} (known kinds: "
        f"{known}; others come with the package that adds them); package the chain again"
    )
    with installed(tmp_path / "broken", HEAD.replace("KIND", "ABSENT")):
        message = refusal_of(lambda: read_manifest(chain))
    assert "cannot import what an extension names: entry point toy of polybasic.drafters" in message


def test_what_loads_and_drafts_can_be_imported() -> None:
    for kind in HEAD_KINDS.values():
        for reference in (kind.load, kind.drafter):
            assert callable(resolve(reference, kind.name))
    assert "no attribute 'absent'" in refusal_of(lambda: resolve(f"{__name__}:absent", "here"))


def test_the_manifest_has_a_json_schema() -> None:
    kind = Manifest.model_json_schema()["$defs"]["Member"]["properties"]["kind"]
    assert kind["type"] == "string"
