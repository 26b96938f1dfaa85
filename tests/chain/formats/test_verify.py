"""An untouched chain passes; every way to touch it is refused in one line that names the place."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.files import sha256_of_file
from polybasic.chain.formats.plan import Plan, Tree
from polybasic.chain.formats.verify import check_chain


def refusal_of(chain: Path, digests: bool = True) -> str:
    with pytest.raises(UserError) as refusal:
        check_chain(chain, digests)
    message = str(refusal.value)
    assert "\n" not in message
    return message


def edit_manifest(chain: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = chain / "chain.json"
    content = json.loads(path.read_text())
    content.pop("sha256", None)
    edit(content)
    path.write_text(json.dumps(content))


def sign(chain: Path, folder: str, name: str) -> None:
    """Make the manifest agree with a file again, as one who repacks by hand would."""

    def edit(content: dict[str, Any]) -> None:
        entries = {member["name"]: member for member in content["members"]}
        entry = content["tokenizer"] if folder == "tokenizer" else entries[folder]
        entry["files"][name] = sha256_of_file(chain / folder / name)

    edit_manifest(chain, edit)


def edit_config(chain: Path, member: str, **changes: Any) -> None:
    path = chain / member / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    sign(chain, member, "config.json")


def edit_tensors(chain: Path, member: str, **changes: torch.Tensor | None) -> None:
    """Replace tensors, or drop them for None."""
    path = chain / member / "model.safetensors"
    tensors = load_file(path) | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path, {"format": "pt"})
    sign(chain, member, "model.safetensors")


def test_an_untouched_chain_passes(tiny_chain: Path) -> None:
    checked = check_chain(tiny_chain)
    assert checked.folder == tiny_chain
    assert checked.tokenizer == tiny_chain / "tokenizer"
    assert list(checked.members) == ["target", "intermediate", "draft"]
    assert check_chain(tiny_chain, digests=False) == checked


def test_files_that_nothing_reads_are_left_alone(tiny_chain: Path) -> None:
    (tiny_chain / "report").mkdir()
    (tiny_chain / "report" / "report.json").write_text("{}")
    (tiny_chain / "draft" / ".DS_Store").write_bytes(b"x")
    (tiny_chain / "stage.json").write_text("{}")
    check_chain(tiny_chain)


@pytest.mark.parametrize(
    "name",
    [
        "target/model.safetensors",
        "intermediate/model.safetensors",
        "draft/model.safetensors",
        "draft/config.json",
        "tokenizer/tokenizer.json",
        "tokenizer/chat_template.jinja",
    ],
)
def test_one_flipped_bit_is_found(tiny_chain: Path, name: str) -> None:
    expected = sha256_of_file(tiny_chain / name)
    content = bytearray((tiny_chain / name).read_bytes())
    content[len(content) // 2] ^= 1
    (tiny_chain / name).write_bytes(content)
    found = sha256_of_file(tiny_chain / name)
    assert refusal_of(tiny_chain) == (
        f"digest mismatch: {tiny_chain / name} has sha256 {found[:8]}…, manifest says "
        f"{expected[:8]}…; package the chain again or fetch the file anew"
    )


def test_truncated_weights_are_found_without_digests(tiny_chain: Path) -> None:
    path = tiny_chain / "draft" / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    assert f"damaged weight file: {path} ({len(content) - 1} bytes, its header says" in refusal_of(
        tiny_chain, digests=False
    )
    path.write_bytes(b"\xff" * 64)
    assert f"damaged weight file: {path} (no safetensors header)" in refusal_of(tiny_chain, False)
    path.write_bytes((8).to_bytes(8, "little") + b"[1, 2, 3")
    assert f"safetensors header is not JSON: {path} line 1" in refusal_of(tiny_chain, False)


def test_missing_files_and_folders(tiny_chain: Path) -> None:
    (tiny_chain / "draft" / "config.json").unlink()
    assert f"missing file: {tiny_chain / 'draft' / 'config.json'};" in refusal_of(tiny_chain)
    shutil.rmtree(tiny_chain / "draft")
    assert "member folder not found: members[2].reference.path = 'draft'" in refusal_of(tiny_chain)


@pytest.mark.parametrize("path", ["../draft", "/etc", "draft/../../draft", "", "."])
def test_paths_that_leave_the_chain(tiny_chain: Path, path: str) -> None:
    shutil.copytree(tiny_chain / "draft", tiny_chain.parent / "draft")
    edit_manifest(tiny_chain, lambda content: content["members"][2]["reference"].update(path=path))
    expected = f"member path leaves the chain: members[2].reference.path = {path!r} in {tiny_chain}"
    assert expected in refusal_of(tiny_chain)


def test_a_tokenizer_outside_is_refused(tiny_chain: Path) -> None:
    edit_manifest(tiny_chain, lambda content: content["tokenizer"].update(path="../models/target"))
    assert "member path leaves the chain: tokenizer.path = '../models" in refusal_of(tiny_chain)


@pytest.mark.parametrize("name", ["../chain.json", "/etc/hostname", "..", "sub/config.json"])
def test_file_names_that_leave_their_member(tiny_chain: Path, name: str) -> None:
    edit_manifest(
        tiny_chain, lambda content: content["members"][2]["files"].update({name: "0" * 64})
    )
    assert f"file name leaves its member: {name!r} of draft;" in refusal_of(tiny_chain)


def test_links_that_leave_the_chain(tiny_chain: Path, tmp_path: Path) -> None:
    weights, outside = tiny_chain / "draft" / "model.safetensors", tmp_path / "outside.safetensors"
    shutil.move(weights, outside)
    weights.symlink_to(outside)
    expected = f"link leaves the chain: {weights} points to {outside.resolve()}; replace the link"
    assert expected in refusal_of(tiny_chain)
    weights.unlink()
    shutil.move(outside, weights)
    check_chain(tiny_chain)
    shutil.move(tiny_chain / "draft", tmp_path / "elsewhere")
    (tiny_chain / "draft").symlink_to(tmp_path / "elsewhere")
    assert f"link leaves the chain: {tiny_chain / 'draft'} points to" in refusal_of(tiny_chain)


def test_a_manifest_outside_is_refused(tiny_chain: Path, tmp_path: Path) -> None:
    manifest, outside = tiny_chain / "chain.json", tmp_path / "outside.json"
    shutil.move(manifest, outside)
    manifest.symlink_to(outside)
    assert f"link leaves the chain: {manifest} points to {outside}" in refusal_of(tiny_chain)


def test_links_in_a_circle_are_one_line(tiny_chain: Path) -> None:
    shutil.rmtree(tiny_chain / "draft")
    (tiny_chain / "draft").symlink_to("other")
    (tiny_chain / "other").symlink_to("draft")
    assert f"link leads nowhere: {tiny_chain / 'draft'}" in refusal_of(tiny_chain)


@pytest.mark.parametrize("name", ["chain", "a" * 40], ids=["name", "commit"])
def test_a_folder_called_snapshots_widens_nothing(
    tiny_chain: Path, tmp_path: Path, name: str
) -> None:
    chain, secret = tmp_path / "home" / "snapshots" / name, tmp_path / "home" / "secret"
    shutil.copytree(tiny_chain, chain)
    check_chain(chain)
    weights = chain / "draft" / "model.safetensors"
    shutil.move(weights, secret)
    weights.symlink_to(secret)
    assert f"link leaves the chain: {weights} points to {secret};" in refusal_of(chain)


@pytest.mark.parametrize(
    "name",
    [
        *("modeling.PY", "modeling.Py", "modeling.py ", "modeling.py.", "x.Pt", "x.PICKLE"),
        *("lib.so.1", "modeling.py.bak", "x.dll", "x.npy"),
    ],
)
def test_code_is_refused_however_it_is_spelled(tiny_chain: Path, name: str) -> None:
    path = tiny_chain / "draft" / name
    path.write_bytes(b"")
    assert f"file not in the manifest: {path};" in refusal_of(tiny_chain)
    sign(tiny_chain, "draft", name)
    assert f"code or pickle in the chain: {path};" in refusal_of(tiny_chain)


def test_links_inside_and_in_the_cache_of_the_hub_pass(tiny_chain: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--org--chain"
    snapshot = repository / "snapshots" / ("a" * 40)
    shutil.copytree(tiny_chain, snapshot)
    (repository / "blobs").mkdir()
    weights = snapshot / "draft" / "model.safetensors"
    shutil.move(weights, repository / "blobs" / "b")
    weights.symlink_to(os.path.relpath(repository / "blobs" / "b", weights.parent))
    check_chain(snapshot)
    weights = tiny_chain / "draft" / "model.safetensors"
    shutil.move(weights, tiny_chain / "weights")
    weights.symlink_to("../weights")
    check_chain(tiny_chain)


@pytest.mark.parametrize(
    "name",
    [
        "draft/pytorch_model.bin",
        "draft/optimizer.pt",
        "intermediate/state.pkl",
        "intermediate/modeling.py",
        "target/deep/inside/hook.py",
        "target/other.safetensors",
        "tokenizer/special_tokens_map.json",
        "tokenizer/tokenization.py",
    ],
)
def test_unlisted_files_are_refused(tiny_chain: Path, name: str) -> None:
    path = tiny_chain / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")
    assert f"file not in the manifest: {path};" in refusal_of(tiny_chain)
    path.unlink()
    check_chain(tiny_chain)


@pytest.mark.parametrize("name", ["hook.py", "state.pkl", "weights.pt"])
def test_code_is_refused_though_it_is_listed(tiny_chain: Path, name: str) -> None:
    (tiny_chain / "draft" / name).write_bytes(b"")
    sign(tiny_chain, "draft", name)
    assert f"code or pickle in the chain: {tiny_chain / 'draft' / name};" in refusal_of(tiny_chain)


def test_listed_pickles_pass_for_the_target_only(tiny_chain_parts: Any, tmp_path: Path) -> None:
    chain = tmp_path / "chain"
    tiny_chain_parts.package(chain)
    for member in ("draft", "intermediate"):
        broken = Path(shutil.copytree(chain, tmp_path / f"broken_{member}"))
        weights = broken / member / "model.safetensors"
        torch.save(load_file(weights), broken / member / "pytorch_model.bin")
        weights.unlink()
        sign(broken, member, "pytorch_model.bin")
        edit_manifest(
            broken,
            lambda content: [
                entry["files"].pop("model.safetensors", None)
                for entry in content["members"]
                if "pytorch_model.bin" in entry["files"]
            ],
        )
        assert f"pickle refused: {broken / member / 'pytorch_model.bin'};" in refusal_of(broken)


@pytest.fixture
def referring_chain(tiny_chain_parts: Any, tmp_path: Path) -> Path:
    """A chain that refers to a target outside, at tmp_path/models/target."""
    tiny_chain_parts.package(tmp_path / "chain", copy_target=False)
    return tmp_path / "chain"


def test_a_target_outside_is_checked(referring_chain: Path, tiny_chain_parts: Any) -> None:
    target = tiny_chain_parts.target
    (target / "notes.txt").write_text("files beside it are the owner's own")
    (target / "convert.py").write_text("")
    assert check_chain(referring_chain).members["target"].samefile(target)
    weights = target / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert f"digest mismatch: {weights.resolve()} has sha256" in refusal_of(referring_chain)
    weights.write_bytes(content)
    moved = Path(shutil.move(target, target.with_name("gone")))
    line = refusal_of(referring_chain)
    assert line.startswith(f"target is not there: {target}, which ")
    assert "name where it lies with --target PATH" in line
    assert check_chain(referring_chain, target=moved).target == moved
    (moved / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"digest mismatch: .* made for with --target PATH$"):
        check_chain(referring_chain, target=moved)


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_what_is_read_of_a_target_outside_has_a_digest(
    referring_chain: Path, tiny_chain_parts: Any, name: str
) -> None:
    path = tiny_chain_parts.target / name
    if path.is_file():
        # of an older chain: no digest, nothing says that the file is what it was
        edit_manifest(referring_chain, lambda content: content["members"][0]["files"].pop(name))
    else:
        check_chain(referring_chain)
        path.write_text('{"temperature": 2.0, "do_sample": true}')
    assert f"file not in the manifest: {path.resolve()};" in refusal_of(referring_chain)


def test_weights_that_would_shadow_the_listed_ones(tiny_chain_parts: Any, tmp_path: Path) -> None:
    from polybasic.chain.formats.lineage import weights_digest

    target, draft = tiny_chain_parts.target, tiny_chain_parts.draft
    shadow = target / "model.safetensors"
    torch.save(load_file(shadow), target / "pytorch_model.bin")
    content = shadow.read_bytes()
    shadow.unlink()
    config = json.loads((draft / "config.json").read_text())
    config["polybasic"]["target_sha256"] = weights_digest(target)
    (draft / "config.json").write_text(json.dumps(config))
    plan = Plan(members=("target", "draft"), tree=Tree(depth=3, top_k=2, rows=6))
    tiny_chain_parts.package(tmp_path / "chain", copy_target=False, plan=plan)
    check_chain(tmp_path / "chain")
    shadow.write_bytes(content)
    assert f"file not in the manifest: {shadow};" in refusal_of(tmp_path / "chain")


@pytest.mark.parametrize(
    ("member", "changes", "message"),
    [
        ("intermediate", {"vocab_size": 60}, "vocab_size differs: 60 in the config of inter"),
        ("draft", {"vocab_size": 60}, "vocab_size differs: 60 in the config of draft, 64 in that"),
        ("draft", {"vocab_size": None}, "vocab_size differs: None in the config of draft"),
        ("draft", {"hidden_size": 256}, "hidden_size differs: 256 in the config of draft, 128"),
        ("draft", {"hidden_size": "128"}, "malformed config: hidden_size = '128' in"),
        ("draft", {"polybasic": {}}, "head without target: no polybasic.target_sha256 in"),
        (
            "draft",
            {"polybasic": {"target_sha256": "f" * 64}},
            "config.json was trained for weights ffffffff…, the chain has target ",
        ),
        (
            "target",
            {"auto_map": {"AutoModel": "x.Y"}, "model_type": "x"},
            "remote code refused: auto_map in",
        ),
        ("intermediate", {"auto_map": {}, "model_type": None}, "remote code refused: auto_map in"),
        ("target", {"model_type": "mamba"}, "unsupported architecture: "),
        ("target", {"quantization_config": {"bits": 8}}, "target is quantized: quantization_con"),
        ("draft", {"quantization_config": {"bits": 8}}, "draft is quantized: quantization_con"),
        ("intermediate", {"quantization_config": None}, "not a 4-bit checkpoint: "),
        (
            "intermediate",
            {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}},
            "unsupported quantization: quantization_config.quant_method 'gptq' in",
        ),
        (
            "target",
            {"num_key_value_heads": 4},
            "tensor shape mismatch: model.layers.0.self_attn.k_proj.weight in",
        ),
        (
            "target",
            {"num_hidden_layers": 3},
            "missing tensor: model.layers.2.input_layernorm.weight in",
        ),
        (
            "intermediate",
            {"intermediate_size": 512},
            "tensor shape mismatch: model.layers.0.mlp.gate_proj.qweight in",
        ),
    ],
)
def test_configs_that_do_not_agree(
    tiny_chain: Path, member: str, changes: dict[str, Any], message: str
) -> None:
    check_chain(tiny_chain)
    edit_config(tiny_chain, member, **changes)
    assert message in refusal_of(tiny_chain)


@pytest.mark.parametrize(
    ("member", "tensor", "shape", "expected"),
    [
        ("draft", "fc.weight", (128, 384), [128, 256]),
        ("draft", "fc.bias", (256,), [128]),
        ("draft", "embed_tokens.weight", (63, 128), [64, 128]),
        ("draft", "layers.0.mlp.down_proj.weight", (256, 128), [128, 256]),
        ("intermediate", "model.layers.1.self_attn.v_proj.qweight", (64, 16), [128, 8]),
        ("intermediate", "model.layers.1.mlp.down_proj.scales", (1, 128), [2, 128]),
        ("target", "lm_head.weight", (64, 64), [64, 128]),
    ],
)
def test_tensors_of_another_shape(
    tiny_chain: Path, member: str, tensor: str, shape: tuple[int, ...], expected: list[int]
) -> None:
    edit_tensors(tiny_chain, member, **{tensor: torch.zeros(shape)})
    if member == "target":
        sign_head_for_target(tiny_chain)
    assert (
        f"tensor shape mismatch: {tensor} in {tiny_chain / member} is {list(shape)}, "
        f"by its config.json {expected};"
    ) in refusal_of(tiny_chain)


@pytest.mark.parametrize("tensor", ["fc.weight", "layers.0.post_attention_layernorm.weight"])
def test_missing_tensors(tiny_chain: Path, tensor: str) -> None:
    edit_tensors(tiny_chain, "draft", **{tensor: None})
    assert f"missing tensor: {tensor} in {tiny_chain / 'draft'};" in refusal_of(tiny_chain)


def test_a_head_may_lack_its_bias(tiny_chain: Path) -> None:
    edit_tensors(tiny_chain, "draft", **{"fc.bias": None})
    check_chain(tiny_chain)


def test_another_target_of_the_same_shape(tiny_chain: Path) -> None:
    norm = load_file(tiny_chain / "target" / "model.safetensors")["model.norm.weight"]
    edit_tensors(tiny_chain, "target", **{"model.norm.weight": norm * 2})
    # the 4-bit copy is still one of the weights that the head was trained for
    assert (
        "manifest and configs disagree: drafts_for of draft is target, intermediate, by the "
        in (refusal_of(tiny_chain))
    )
    sign_head_for_target(tiny_chain)
    check_chain(tiny_chain)


def sign_head_for_target(chain: Path) -> None:
    from polybasic.chain.formats.lineage import weights_digest

    digest = weights_digest(chain / "target")
    edit_config(chain, "draft", polybasic={"target_sha256": digest})
    edit_config(chain, "intermediate", polybasic={"quantized_from_sha256": digest})


def test_tokenizers(tiny_chain: Path) -> None:
    path = tiny_chain / "tokenizer" / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["one_more"] = 64
    path.write_text(json.dumps(content))
    sign(tiny_chain, "tokenizer", "tokenizer.json")
    expected = (
        f"tokenizer larger than the vocabulary: 65 ids in {path}, vocab_size 64 in the target"
    )
    assert expected in refusal_of(tiny_chain)
    path.write_text("{}")
    sign(tiny_chain, "tokenizer", "tokenizer.json")
    assert f"malformed tokenizer: {path} (" in refusal_of(tiny_chain)
    edit_manifest(tiny_chain, lambda made: made["tokenizer"]["files"].pop("tokenizer.json"))
    path.unlink()
    assert f"no tokenizer: {path} is missing" in refusal_of(tiny_chain)


def test_a_tokenizer_with_remote_code(tiny_chain: Path) -> None:
    path = tiny_chain / "tokenizer" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": {}}))
    sign(tiny_chain, "tokenizer", "tokenizer_config.json")
    assert f"remote code refused: auto_map in {path};" in refusal_of(tiny_chain)


def test_code_beside_a_model_that_needs_none_is_left_alone(tiny_chain: Path) -> None:
    edit_config(tiny_chain, "target", auto_map={"AutoModelForCausalLM": "modeling.Mine"})
    check_chain(tiny_chain)
