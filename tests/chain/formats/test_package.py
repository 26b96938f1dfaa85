"""A chain folder is written whole, holds what belongs, and is refused where parts do not fit."""

import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaTokenizer

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.card import record_plan, record_results
from polybasic.chain.formats.checkpoints.models import resolve_model
from polybasic.chain.formats.files import sha256_of_file
from polybasic.chain.formats.lineage import weights_digest
from polybasic.chain.formats.manifest import read_manifest
from polybasic.chain.formats.places import command_without_places
from polybasic.chain.formats.plan import (
    NUM_PROBABILITY_BINS,
    AdaptiveFlush,
    Flush,
    MeasuredPlan,
    Ngram,
    Plan,
    Tree,
)
from polybasic.chain.formats.tokenizer import prepare_tokenizer
from polybasic.chain.formats.verify import check_chain
from tests.conftest import PROVENANCE

RESULTS = {
    "schema": "polybasic.report/2",
    "hardware": {"device": "cpu", "num_threads": 2},
    "settings": {"temperature": 0.0, "max_new_tokens": 64},
    "systems": {
        "target": {"tokens_per_second": 100.0, "speedup_vs_target": 1.0},
        "polybasic": {
            "tokens_per_second": 213.4,
            "speedup_vs_target": 2.134,
            "mean_accepted_length": 9.25,
        },
    },
}


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def names_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_chain_with_a_copy_of_its_target(tiny_chain_parts: Any, tmp_path: Path) -> None:
    parts, out = tiny_chain_parts, tmp_path / "chain"
    (parts.draft / "metrics.jsonl").write_text("{}")
    (parts.draft / "checkpoint").mkdir()
    (parts.intermediate / "stage.json").write_text("{}")
    manifest = parts.package(out)
    assert names_in(out) == [
        "README.md",
        "chain.json",
        "draft/config.json",
        "draft/model.safetensors",
        "intermediate/config.json",
        "intermediate/model.safetensors",
        "target/chat_template.jinja",
        "target/config.json",
        "target/generation_config.json",
        "target/model.safetensors",
        "target/tokenizer.json",
        "target/tokenizer_config.json",
        "tokenizer/chat_template.jinja",
        "tokenizer/config.json",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
    ]
    assert read_manifest(out) == manifest
    assert check_chain(out).members == {
        name: out / name for name in ("target", "intermediate", "draft")
    }
    for member in manifest.members:
        for name, digest in member.files.items():
            assert digest == sha256_of_file(out / member.name / name)
    assert not [path for path in tmp_path.iterdir() if "partial" in path.name]


def test_sizes_are_those_of_the_models(tiny_chain_parts: Any, tmp_path: Path) -> None:
    manifest = tiny_chain_parts.package(tmp_path / "chain")
    target, intermediate, draft = manifest.members
    tensors = load_file(tiny_chain_parts.target / "model.safetensors")
    assert target.num_parameters == sum(tensor.numel() for tensor in tensors.values())
    assert intermediate.num_parameters == target.num_parameters
    head = load_file(tiny_chain_parts.draft / "model.safetensors")
    assert draft.num_parameters == sum(tensor.numel() for tensor in head.values())
    assert [member.dtype for member in manifest.members] == ["bfloat16", "int4", "bfloat16"]
    for member in manifest.members:
        weights = tmp_path / "chain" / member.name / "model.safetensors"
        assert member.num_bytes == weights.stat().st_size


def test_the_same_parts_give_the_same_bytes(tiny_chain_parts: Any, tmp_path: Path) -> None:
    for name in ("first", "second"):
        tiny_chain_parts.package(tmp_path / name)
    for name in ("chain.json", "README.md"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def test_a_target_beside_the_chain_is_kept_by_its_relative_path(
    tiny_chain_parts: Any, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    target = Path(shutil.move(tiny_chain_parts.target, run / "target"))
    manifest = tiny_chain_parts.package(
        run / "chain", target=target, target_reference=str(target), copy_target=False
    )
    assert manifest.members[0].reference.source == "../target"
    assert not (run / "chain" / "target").exists()
    moved = run.rename(tmp_path / "moved")
    assert check_chain(moved / "chain").members["target"] == moved / "target"


def test_a_target_elsewhere_is_kept_by_its_absolute_path(
    tiny_chain_parts: Any, tmp_path: Path
) -> None:
    manifest = tiny_chain_parts.package(tmp_path / "run" / "chain", copy_target=False)
    assert manifest.members[0].reference.source == str(tiny_chain_parts.target.resolve())
    assert manifest.members[0].files.keys() == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    checked = check_chain(tmp_path / "run" / "chain")
    assert checked.members["target"] == tiny_chain_parts.target.resolve()


def test_a_chain_by_default_has_its_target_inside_and_can_be_copied_anywhere(
    tiny_chain_parts: Any, tmp_path: Path
) -> None:
    weights = tiny_chain_parts.target / "model.safetensors"
    weights.chmod(0o664)
    model = f"target.model={tiny_chain_parts.target}"
    made = PROVENANCE.model_copy(
        update={
            "recipe": {"target": {"model": str(tiny_chain_parts.target)}},
            "command": f"polybasic run own-model {model} --out {tmp_path}",
        }
    )
    tiny_chain_parts.package(
        tmp_path / "chain",
        copy_target="auto",
        provenance=made,
        training={"draft": {"imported_from": "~someone/head"}},
    )
    inside = tmp_path / "chain" / "target"
    assert (inside / "model.safetensors").samefile(weights)
    assert stat.S_IMODE(weights.stat().st_mode) == 0o664
    assert not (inside / "config.json").samefile(weights.with_name("config.json"))
    elsewhere = Path(shutil.copytree(tmp_path / "chain", tmp_path / "elsewhere" / "chain"))
    shutil.rmtree(tiny_chain_parts.target)
    assert check_chain(elsewhere).manifest.members[0].reference.source is None
    for name in ("chain.json", "README.md"):
        written = (tmp_path / "chain" / name).read_text("utf-8")
        assert str(tmp_path) not in written
        assert "someone" not in written


def test_a_target_that_is_shut_to_others_is_copied_for_those_who_may_read_the_chain(
    tiny_chain_parts: Any, tmp_path: Path
) -> None:
    weights = tiny_chain_parts.target / "model.safetensors"
    weights.chmod(0o600)
    tiny_chain_parts.package(tmp_path / "chain", copy_target="auto")
    inside = tmp_path / "chain" / "target"
    assert not (inside / "model.safetensors").samefile(weights)
    assert stat.S_IMODE(weights.stat().st_mode) == 0o600
    modes = {stat.S_IMODE(path.stat().st_mode) for path in inside.iterdir()}
    assert modes == {stat.S_IMODE((tmp_path / "chain" / "chain.json").stat().st_mode)}


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["polybasic", "bench", "/home/ann/runs/x y/chain"], "polybasic bench chain"),
        (["target.model=~/m", "--out=../../ann/out"], "target.model=m --out=out"),
        (["package.heads={a: /h/ann/a, b: org/b}"], "'package.heads={a: a, b: org/b}'"),
        (
            ["bench.prompts=http://host:8000/v1/q.jsonl"],
            "bench.prompts=http://host:8000/v1/q.jsonl",
        ),
        (["recipes/own-model.yaml", "data.limit=3"], "recipes/own-model.yaml data.limit=3"),
    ],
)
def test_commands_are_kept_without_folders_from_elsewhere(words: list[str], shown: str) -> None:
    assert command_without_places(words) == shown


@pytest.mark.parametrize("copy_target", [False, "auto"])
def test_a_target_of_the_hub_is_pinned_to_its_commit(
    tiny_chain_parts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copy_target: Any
) -> None:
    commit = "c" * 40
    snapshot = tmp_path / "models--org--name" / "snapshots" / commit
    shutil.copytree(tiny_chain_parts.target, snapshot)
    asked = []

    def download(repository: str, revision: str | None, **settings: Any) -> str:
        asked.append((repository, revision))
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    manifest = tiny_chain_parts.package(
        tmp_path / "chain",
        target=resolve_model("org/name@main"),
        target_reference="org/name@main",
        copy_target=copy_target,
    )
    reference = manifest.members[0].reference
    assert (reference.source, reference.revision) == ("org/name", commit)
    assert check_chain(tmp_path / "chain").members["target"] == snapshot
    assert asked == [("org/name", "main"), ("org/name", commit)]
    assert "base_model: org/name" in (tmp_path / "chain" / "README.md").read_text()


def test_a_chain_is_replaced_and_anything_else_is_not(
    tiny_chain_parts: Any, tmp_path: Path
) -> None:
    out = tmp_path / "chain"
    tiny_chain_parts.package(out, quality={"intermediate": {"mean_kl": 0.5}})
    tiny_chain_parts.package(out, quality={"intermediate": {"mean_kl": 0.25}})
    assert read_manifest(out).quality == {"intermediate": {"mean_kl": 0.25}}
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"would replace something that is no chain: .*/thesis"):
        tiny_chain_parts.package(tmp_path / "thesis")
    assert names_in(tmp_path / "thesis") == ["chapter.tex"]


def test_sources_inside_of_the_output_are_refused(tiny_chain_parts: Any) -> None:
    models = tiny_chain_parts.target.parent
    (models / "chain.json").write_text("{}")
    with pytest.raises(UserError, match=r"target lies in the folder to be written: .*/target in"):
        tiny_chain_parts.package(models)
    assert (tiny_chain_parts.target / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("draft", {"hidden_size": 64}, "hidden_size differs: 64 in the config of draft, 128 in"),
        ("target", {"intermediate_size": 128}, "tensor shape mismatch: model.layers.0.mlp.gate_"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    tiny_chain_parts: Any, tmp_path: Path, part: str, changes: dict[str, Any], message: str
) -> None:
    tiny_chain_parts.package(tmp_path / "control")
    edit_config(getattr(tiny_chain_parts, part), **changes)
    with pytest.raises(UserError) as refusal:
        tiny_chain_parts.package(tmp_path / "chain")
    assert message in str(refusal.value)
    assert not (tmp_path / "chain").exists()


def test_incomplete_parts_are_refused(tiny_chain_parts: Any, tmp_path: Path) -> None:
    parts, out = tiny_chain_parts, tmp_path / "chain"
    weights = parts.intermediate / "model.safetensors"
    tensors = load_file(weights)
    weights.unlink()
    torch.save(tensors, parts.intermediate / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pickle refused: .*; store the intermediate as"):
        parts.package(out)
    save_file(tensors, weights)
    parts.package(tmp_path / "control")
    (parts.target / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"no tokenizer: .* holds no tokenizer.json"):
        parts.package(out)
    (parts.draft / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"incomplete draft head: no model.safetensors in .*/draft"):
        parts.package(out)
    assert not out.exists()


def test_a_tokenizer_of_its_own(tiny_chain_parts: Any, tmp_path: Path) -> None:
    parts, prepared, out = tiny_chain_parts, tmp_path / "prepared", tmp_path / "chain"
    template = "{{ messages[0].content }}"
    prepare_tokenizer(parts.target, template, prepared)
    for name in ("tokenizer.json", "chat_template.jinja"):
        (parts.target / name).unlink()
    (prepared / "notes.txt").write_text("not the tokenizer's")
    manifest = parts.package(out, tokenizer=prepared)
    expected = ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(manifest.tokenizer.files) == names_in(out / "tokenizer") == expected
    assert (out / "tokenizer" / "chat_template.jinja").read_text() == template
    check_chain(out)


def test_a_tokenizer_of_another_vocabulary_is_refused(
    tiny_chain_parts: Any, tmp_path: Path
) -> None:
    prepared = tmp_path / "prepared"
    prepare_tokenizer(tiny_chain_parts.target, None, prepared)
    tiny_chain_parts.package(tmp_path / "control", tokenizer=prepared)
    path = prepared / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["one_more"] = 64
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=rf"tokenizer larger than the vocabulary: 65 ids in {path}"):
        tiny_chain_parts.package(tmp_path / "chain", tokenizer=prepared)


def test_the_tokenizer_is_not_replaced_by_the_chain(tiny_chain_parts: Any, tmp_path: Path) -> None:
    out = tmp_path / "chain"
    tiny_chain_parts.package(out)
    with pytest.raises(UserError, match=r"tokenizer lies in the folder to be written: .*/tokenize"):
        tiny_chain_parts.package(out, tokenizer=out / "tokenizer")
    check_chain(out)


def test_a_tokenizer_keeps_the_class_that_it_has_beside_its_model(
    tiny_chain_parts: Any, tmp_path: Path
) -> None:
    """transformers takes Mistral's tokenizer.json as it is, and builds a Llama's from its words."""
    folder, out, text = tmp_path / "mistral", tmp_path / "chain", "</s>t"
    tokenizer = LlamaTokenizer(vocab={"<unk>": 0, "<s>": 1, "</s>": 2, "▁": 3, "t": 4}, merges=[])
    tokenizer.save_pretrained(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["pre_tokenizer"]["prepend_scheme"] = "always"
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    expected = AutoTokenizer.from_pretrained(folder).encode(text, add_special_tokens=False)
    assert expected == [2, 3, 4]
    tiny_chain_parts.package(out, tokenizer=folder)
    found = AutoTokenizer.from_pretrained(out / "tokenizer")
    assert found.encode(text, add_special_tokens=False) == expected
    (out / "tokenizer" / "config.json").unlink()
    alone = AutoTokenizer.from_pretrained(out / "tokenizer")
    assert alone.encode(text, add_special_tokens=False) == [2, 4]


def test_a_target_of_pickles_is_packed(tiny_chain_parts: Any, tmp_path: Path) -> None:
    parts = tiny_chain_parts
    torch.save(load_file(parts.target / "model.safetensors"), parts.target / "pytorch_model.bin")
    (parts.target / "model.safetensors").unlink()
    digest = weights_digest(parts.target)
    edit_config(parts.draft, polybasic={"target_sha256": digest})
    edit_config(parts.intermediate, polybasic={"quantized_from_sha256": digest})
    manifest = parts.package(tmp_path / "chain")
    assert (manifest.members[0].dtype, manifest.members[0].num_parameters) == (
        "bfloat16",
        manifest.members[1].num_parameters,
    )
    check_chain(tmp_path / "chain")


def test_nothing_is_left_when_the_disk_is_full(
    tiny_chain_parts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "chain"
    tiny_chain_parts.package(out)
    before = (out / "chain.json").read_bytes()
    copy = shutil.copyfile

    def fill(source: Path, destination: Path) -> Any:
        if destination.parent.name == "draft":
            raise OSError(28, os.strerror(28))
        return copy(source, destination)

    monkeypatch.setattr(shutil, "copyfile", fill)
    with pytest.raises(UserError, match=r"disk full: "):
        tiny_chain_parts.package(out, quality={})
    assert (out / "chain.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    check_chain(out)


def test_the_card_tells_what_the_manifest_holds(tiny_chain: Path) -> None:
    card = (tiny_chain / "README.md").read_text()
    _, front_matter, body = card.split("---\n", 2)
    front = yaml.safe_load(front_matter)
    assert front["library_name"] == "polybasic"
    assert "speculative-decoding" in front["tags"]
    assert "base_model" not in front
    for line in (
        "# tiny",
        "target → intermediate → draft; tree of depth 3, top 2, 6 rows; verification: target after "
        "5 tokens; rule: coupled.",
        "EAGLE-2 head: drafts trees from the features of target or intermediate |",
        "## Quality of the intermediates\n\n### intermediate\n",
        "## Training\n\n### draft\n",
        "| mean kl | 0.01235 |",
        "| simulated accepted length | 3.5 |",
        "- Command: `polybasic run recipes/own-model.yaml`",
        'chain = load_chain("CHAIN")',
        "## Limits",
    ):
        assert line in body
    assert "## Results" not in body


def test_results_are_recorded_in_manifest_and_card(tiny_chain: Path) -> None:
    before = read_manifest(tiny_chain)
    manifest = record_results(tiny_chain, RESULTS)
    assert manifest == read_manifest(tiny_chain) == before.model_copy(update={"results": RESULTS})
    card = (tiny_chain / "README.md").read_text()
    assert "| polybasic | 213.40 | 2.13 | 9.25 |" in card
    assert "| target | 100.00 | 1.00 | – |" in card
    assert "Hardware: device cpu, num threads 2." in card
    check_chain(tiny_chain)


def measured_plan(hardware: str, **changes: Any) -> MeasuredPlan:
    content: dict[str, Any] = {
        "hardware": hardware,
        "dtype": "bfloat16",
        "temperature": 0.0,
        "plan": Plan(members=("target", "draft"), tree=Tree(depth=2, top_k=2, rows=4)),
        "seconds_per_token": 0.00512,
        "explanation": {"chosen": "it is faster"},
    }
    return MeasuredPlan(**(content | changes))


def test_measured_plans_are_recorded_by_machine_dtype_and_temperature(tiny_chain: Path) -> None:
    before = read_manifest(tiny_chain)
    results = RESULTS | {"plan": {"members": ["target", "draft"]}}
    assert record_results(tiny_chain, results).plan == before.plan
    record_plan(tiny_chain, measured_plan("Device A"))
    record_plan(tiny_chain, measured_plan("Device B"))
    renewed = measured_plan("Device A", seconds_per_token=0.004)
    manifest = record_plan(tiny_chain, renewed)
    assert manifest == read_manifest(tiny_chain) == check_chain(tiny_chain).manifest
    assert manifest.plans == (measured_plan("Device B"), renewed)
    drawn = measured_plan("Device A", temperature=1.0)
    record_plan(tiny_chain, drawn)
    manifest = record_plan(tiny_chain, measured_plan("Device A", dtype="float32"))
    found = manifest.plans_for("Device A", "bfloat16")
    assert found.plans == (renewed, drawn)
    assert [found.at(temperature) for temperature in (0, 0.4, 0.6, 1, 2)] == [
        *(renewed, renewed, drawn, drawn, drawn)
    ]
    assert manifest.plans_for("Device C", "bfloat16").at(0) is None
    asked = (
        ("Device A", "bfloat16", 1.0),
        ("Device B", "float32", 0.0),
        ("Device B", "bfloat16", 1.0),
    )
    told = "the chain's plans were measured"
    assert [manifest.lacks(*settings) for settings in asked] == [
        None,
        f"{told} in bfloat16, not in float32",
        f"{told} at temperature 0, not at temperature 1",
    ]
    assert (manifest.plan, manifest.results) == (before.plan, results)
    card = (tiny_chain / "README.md").read_text()
    row = (
        "bfloat16, temperature 0 | target → draft; tree of depth 2, top 2, 4 rows; rule: coupled |"
    )
    assert f"| Device A, {row} 4.00 |" in card
    assert f"| Device B, {row} 5.12 |" in card
    assert "Elsewhere: target → intermediate → draft; tree of depth 3" in card


def test_flush_and_ngrams_of_a_plan_are_told(tiny_four_chain: Path) -> None:
    adaptive = AdaptiveFlush(break_even=0.5, acceptance=(0.5,) * NUM_PROBABILITY_BINS)
    tree = Tree(depth=2, top_k=2, rows=4)
    flush = {
        "target": Flush(length=9, adaptive=adaptive),
        "intermediate": Flush(length=4),
    }
    members = ("target", "intermediate", "small")
    plan = Plan(members=members, tree=tree, flush=flush, ngram=Ngram(), rule="token")
    record_plan(tiny_four_chain, measured_plan("A", plan=plan))
    beside = Plan(members=("target", "draft"), tree=tree, flush=flush, ngram=Ngram())
    record_plan(tiny_four_chain, measured_plan("B", plan=beside))
    card = (tiny_four_chain / "README.md").read_text()
    told = "target after 9 tokens at most, adaptive; intermediate after 4 tokens; rule: token |"
    shape = "tree of depth 2, top 2, 4 rows"
    assert f"| target → intermediate → small → n-grams; {shape}; verification: {told}" in card
    assert f"| target → draft + n-grams; {shape}; rule: coupled |" in card


def test_a_plan_for_other_members_is_refused(tiny_chain: Path) -> None:
    before = (tiny_chain / "chain.json").read_bytes()
    plan = Plan(members=("target", "small"), tree=Tree(depth=2, top_k=2, rows=4))
    with pytest.raises(
        UserError, match=r"plan does not fit the chain: .* \(plan.members target, s"
    ):
        record_plan(tiny_chain, measured_plan("Device A", plan=plan))
    assert (tiny_chain / "chain.json").read_bytes() == before
