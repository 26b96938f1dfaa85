"""Chains of any number of members: who drafts for whom, what is refused, and what is warned of."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors.torch import load_file, save_file

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.card import shown_plan
from polybasic.chain.formats.describe import describe_chain, print_chain
from polybasic.chain.formats.lineage import weights_digest
from polybasic.chain.formats.manifest import Manifest, read_manifest
from polybasic.chain.formats.package import Part
from polybasic.chain.formats.plan import Flush, Plan, Tree
from polybasic.chain.formats.verify import check_chain

TREE = Tree(depth=2, top_k=2, rows=4)
ALONE = Plan(members=("target",), tree=TREE)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 2
    save_file(tensors, path, {"format": "pt"})


def drafts_for(manifest: Manifest) -> dict[str, tuple[str, ...]]:
    return {member.name: member.drafts_for for member in manifest.drafters}


def refusal(models: Any, out: Path, **changes: Any) -> str:
    with pytest.raises(UserError) as refused:
        models.package(out, **changes)
    assert not out.exists()
    message = str(refused.value)
    assert "\n" not in message
    return message


def test_four_members_of_two_shapes(tiny_four_chain: Path) -> None:
    checked = check_chain(tiny_four_chain)
    members = {member.name: member for member in checked.manifest.members}
    assert list(members) == ["target", "intermediate", "small", "draft", "small_draft"]
    shapes = {}
    for name, folder in checked.members.items():
        config = json.loads((folder / "config.json").read_text())
        shapes[name] = (config["num_hidden_layers"], config["hidden_size"])
    assert shapes["target"] == shapes["intermediate"] == (2, 256)
    assert shapes["small"] == (1, 128)
    assert drafts_for(checked.manifest) == {
        "draft": ("target", "intermediate"),
        "small_draft": ("small",),
    }
    assert checked.warnings == ()
    assert not (tiny_four_chain / "small_target").exists()


def test_a_head_drafts_for_copies_of_its_model_and_for_no_others(
    tiny_chain_parts: Any, tmp_path: Path
) -> None:
    assert drafts_for(tiny_chain_parts.package(tmp_path / "control"))["draft"] == (
        "target",
        "intermediate",
    )
    plan = Plan(members=("target", "draft"), tree=TREE)
    for number, origin in enumerate([None, {}, {"quantized_from_sha256": "e" * 64}]):
        edit_config(tiny_chain_parts.intermediate, polybasic=origin)
        manifest = tiny_chain_parts.package(tmp_path / f"chain{number}", plan=plan)
        assert drafts_for(manifest) == {"draft": ("target",)}
        check_chain(tmp_path / f"chain{number}")
    assert refusal(tiny_chain_parts, tmp_path / "chain") == (
        "members and plan do not fit: target, intermediate, draft (draft drafts for target, not "
        "for intermediate); change the parts or the plan"
    )


def test_a_head_whose_model_is_not_in_the_chain_is_refused(
    tiny_four_chain_parts: Any, tmp_path: Path
) -> None:
    parts = tiny_four_chain_parts
    others = [part for part in parts.parts if part.name != "small"]
    message = refusal(parts, tmp_path / "chain", parts=others, plan=ALONE)
    trained_for, target = weights_digest(parts.small_target), weights_digest(parts.target)
    assert message == (
        f"head without its model: small_draft in {parts.small_draft / 'config.json'} was trained "
        f"for weights {trained_for[:8]}…, the chain has target {target[:8]}…, intermediate "
        f"{weights_digest(parts.intermediate)[:8]}… (made from {target[:8]}…); train a head for "
        "one of them, or add the model that it was trained for"
    )
    without_head = [part for part in others if part.name != "small_draft"]
    parts.package(tmp_path / "control", parts=without_head, plan=ALONE)


def test_a_head_of_a_changed_target_is_refused(tiny_chain_parts: Any, tmp_path: Path) -> None:
    parts = tiny_chain_parts
    parts.package(tmp_path / "control")
    edit_config(parts.intermediate, polybasic=None)
    change_weights(parts.target)
    message = refusal(parts, tmp_path / "chain")
    assert "head without its model: draft in" in message
    edit_config(parts.draft, polybasic=None)
    assert "head without target: no polybasic.target_sha256 in" in refusal(
        parts, tmp_path / "chain"
    )


def test_a_head_of_another_width_than_its_model(tiny_four_chain_parts: Any, tmp_path: Path) -> None:
    edit_config(tiny_four_chain_parts.small_draft, hidden_size=256)
    assert (
        "hidden_size differs: 256 in the config of small_draft, 128 in that of small, which it was "
        "trained for"
    ) in refusal(tiny_four_chain_parts, tmp_path / "chain")


def test_a_manifest_that_lies_about_drafts_is_refused(tiny_four_chain: Path) -> None:
    check_chain(tiny_four_chain)
    path = tiny_four_chain / "chain.json"
    content = json.loads(path.read_text())
    del content["sha256"]
    content["members"][3]["drafts_for"].append("small")
    path.write_text(json.dumps(content))
    with pytest.raises(UserError) as refused:
        check_chain(tiny_four_chain)
    assert str(refused.value) == (
        "manifest and configs disagree: drafts_for of draft is target, intermediate, small, by the "
        "digests in the configs target, intermediate; package the chain again"
    )


def test_an_independent_model_drafts_for_all(tiny_four_chain_parts: Any, tmp_path: Path) -> None:
    parts = tiny_four_chain_parts
    intermediate, _, draft, _ = parts.parts
    for kind, folder in (("decoder", parts.small_target), ("awq", parts.small)):
        drafter = Part("small", "drafter", kind, folder)
        plan = Plan(members=("target", "small"), tree=TREE)
        manifest = parts.package(tmp_path / kind, parts=[intermediate, draft, drafter], plan=plan)
        assert drafts_for(manifest)["small"] == ("target", "intermediate")
        assert check_chain(tmp_path / kind).manifest == manifest
        assert "small model" in (tmp_path / kind / "README.md").read_text()
    mislabelled = Part("small", "drafter", "decoder", parts.small)
    assert "small is quantized: quantization_config in" in refusal(
        parts, tmp_path / "chain", parts=[intermediate, mislabelled], plan=ALONE
    )


def test_an_intermediate_that_is_not_quantized(tiny_four_chain_parts: Any, tmp_path: Path) -> None:
    parts = tiny_four_chain_parts
    intermediate, _, draft, small_draft = parts.parts
    small = Part("small", "intermediate", "decoder", parts.small_target)
    manifest = parts.package(tmp_path / "chain", parts=[intermediate, small, draft, small_draft])
    assert drafts_for(manifest)["small_draft"] == ("small",)
    assert "smaller model: verifies drafts" in (tmp_path / "chain" / "README.md").read_text()
    check_chain(tmp_path / "chain")


def test_a_model_larger_than_the_one_above_it_is_warned_of(
    tiny_four_chain_parts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = tiny_four_chain_parts
    parts.package(tmp_path / "control")
    assert capsys.readouterr().err == ""
    assert check_chain(tmp_path / "control").warnings == ()
    intermediate, small, draft, small_draft = parts.parts
    swapped = [small, intermediate, draft, small_draft]
    parts.package(tmp_path / "chain", parts=swapped, plan=ALONE)
    warning = (
        "intermediate is larger than small above it: a pass of intermediate reads 481.7 kB, one of "
        "small 112.8 kB; leave intermediate out of the plan, or use a smaller model"
    )
    assert capsys.readouterr().err == f"warning: {warning}\n"
    assert check_chain(tmp_path / "chain").warnings == (warning,)


def test_another_tokenizer_is_refused(tiny_four_chain_parts: Any, tmp_path: Path) -> None:
    parts = tiny_four_chain_parts
    path, own = parts.small / "tokenizer.json", parts.target / "tokenizer.json"
    shutil.copy(own, path)
    content = json.loads(own.read_text())
    # another file of the same vocabulary passes
    path.write_text(json.dumps(content | {"pre_tokenizer": None}))
    parts.package(tmp_path / "control")
    vocabulary = content["model"]["vocab"]
    vocabulary["w3"], vocabulary["w5"] = vocabulary["w5"], vocabulary["w3"]
    path.write_text(json.dumps(content))
    assert refusal(parts, tmp_path / "chain") == (
        f"another tokenizer than the target's: {path} of small gives 'w5' id 3, {own} id 5 (2 "
        "tokens differ); use a model that was trained with the target's tokenizer"
    )
    del vocabulary["w3"], vocabulary["w5"]
    path.write_text(json.dumps(content))
    assert "of small gives 'w3' no id" in refusal(parts, tmp_path / "chain")


def test_another_vocabulary_is_refused(tiny_four_chain_parts: Any, tmp_path: Path) -> None:
    edit_config(tiny_four_chain_parts.small, vocab_size=128)
    assert (
        "vocab_size differs: 128 in the config of small, 64 in that of target; all members of a "
        "chain share the target's vocabulary"
    ) in refusal(tiny_four_chain_parts, tmp_path / "chain")


@pytest.mark.parametrize("name", ["tokenizer", "report", "target"])
def test_names_of_the_chains_own_folders_are_taken(
    tiny_chain_parts: Any, tmp_path: Path, name: str
) -> None:
    _, draft = tiny_chain_parts.parts
    renamed = Part(name, "intermediate", "awq", tiny_chain_parts.intermediate)
    assert f"member name is taken: {name} (" in refusal(
        tiny_chain_parts, tmp_path / "chain", parts=[renamed, draft], plan=ALONE
    )


def test_parts_out_of_order_are_refused(tiny_chain_parts: Any, tmp_path: Path) -> None:
    backwards = list(reversed(tiny_chain_parts.parts))
    assert "(members must be one target, then intermediates, then drafters, not target, dr" in (
        refusal(tiny_chain_parts, tmp_path / "chain", parts=backwards, plan=ALONE)
    )


def test_four_members_are_described(tiny_four_chain: Path) -> None:
    description = describe_chain(tiny_four_chain)
    assert json.loads(json.dumps(description)) == description
    assert [member["drafts_for"] for member in description["members"]] == [
        list(member.drafts_for) for member in read_manifest(tiny_four_chain).members
    ]
    console = Console(file=io.StringIO(), width=200)
    print_chain(description, console)
    assert isinstance(console.file, io.StringIO)
    printed = " ".join(console.file.getvalue().split())
    for shown in (
        "target or intermediate",
        "plan: target → intermediate → small → small_draft; tree of depth 3, top 2, 6 rows; "
        "verification: target after 6 tokens; intermediate after 3 tokens; rule: coupled",
    ):
        assert shown in printed
    verifying = ["target", "intermediate", "small"]
    assert shown_plan(ALONE, verifying) == "target alone, no drafting"
    plan = Plan(members=("target", "small"), tree=TREE, flush={"target": Flush(length=1)})
    shown = "target → small; verification: target after 1 token; rule: coupled"
    assert shown_plan(plan, verifying) == shown
