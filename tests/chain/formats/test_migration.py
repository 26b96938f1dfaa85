"""Chains as older versions packed them are brought to the present schema, or are left alone."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.files import read_json, sha256_of_file, write_json
from polybasic.chain.formats.manifest import read_manifest
from polybasic.chain.formats.migration import migrate_chain
from polybasic.chain.formats.plan import Plan
from polybasic.chain.formats.verify import check_chain
from polybasic.deploy import load_chain
from polybasic.recipes.schema.loading import validated
from tests.recipes.command_line import call, refusal

Content = dict[str, Any]
WRITTEN_BY_DF41238 = Path(__file__).with_name("written_by_df41238")


def as_schema_2(chain: Path) -> Content:
    """What chain.json said before the rule belonged to the plan."""
    content: Content = json.loads((chain / "chain.json").read_text("utf-8"))
    for key in ("sha256", "results", "plans"):
        content.pop(key)
    plan = content["plan"]
    plan["flush"]["target"]["rule"] = "token"
    del plan["rule"]
    seconds = {"hardware": "a", "dtype": "float32", "temperature": 0, "seconds_per_token": 1}
    return content | {"schema": "polybasic.chain/2", "plans": [seconds | {"plan": plan}]}


def as_schema_1(chain: Path) -> Content:
    """What it said when a chain was a target, its 4-bit copies and one head.

    The copy's config did not say what it was a copy of.
    """
    content = as_schema_2(chain)
    copy = content["members"][1]
    config = json.loads((chain / "intermediate" / "config.json").read_text("utf-8"))
    del config["polybasic"]["quantized_from_sha256"]
    write_json(chain / "intermediate" / "config.json", config)
    copy["files"]["config.json"] = sha256_of_file(chain / "intermediate" / "config.json")
    for member in content["members"]:
        del member["drafts_for"]
    for key in ("plans", "grown"):
        del content[key]
    plan = content["plan"]
    content["plan"] = {
        "members": plan["members"],
        "tree": {key: plan["tree"][key] for key in ("depth", "top_k", "rows")},
        "flush_length": 5,
        "rule": "token",
    }
    flat = {"quality": {"perplexity": 2.5}, "training": {"loss": 1.5}}
    return content | flat | {"schema": "polybasic.chain/1", "results": {"systems": {}}}


@pytest.mark.parametrize("older", [as_schema_1, as_schema_2])
def test_an_older_chain_is_migrated_and_then_whole(tiny_chain: Path, older) -> None:
    before, content = read_manifest(tiny_chain), older(tiny_chain)
    write_json(tiny_chain / "chain.json", content)
    written = (tiny_chain / "chain.json").read_bytes()
    line = refusal("inspect", tiny_chain)
    assert line.startswith("error: manifest of an older version: schema = 'polybasic.chain/")
    assert line.endswith(f"; run `polybasic migrate {tiny_chain}` once")

    code, out, err = call("migrate", tiny_chain)
    assert (code, out) == (0, "")
    left_out = "results" if older is as_schema_1 else "plans"
    assert f"left out: {left_out}, which were measured by older kernels" in err
    number = content["schema"][-1]
    assert (tiny_chain / f"chain.{number}.json").read_bytes() == written
    found = check_chain(tiny_chain).manifest
    assert found.plan == before.plan.model_copy(update={"rule": "token"})
    assert [member.drafts_for for member in found.members] == [
        member.drafts_for for member in before.members
    ]
    assert (found.plans, found.results) == ((), None)
    if older is as_schema_1:
        assert found.quality == {"intermediate": {"perplexity": 2.5}}
        assert found.training == {"draft": {"loss": 1.5}}
    assert call("migrate", tiny_chain)[2].endswith("already; nothing was changed\n")


def test_an_interrupted_migration_is_done_again(tiny_chain: Path, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    older = as_schema_1(tiny_chain)
    write_json(tiny_chain / "chain.json", older)
    with monkeypatch.context() as patched:
        patched.setattr("polybasic.chain.formats.migration.write_manifest", fail)
        with pytest.raises(KeyboardInterrupt):
            migrate_chain(tiny_chain)
    assert json.loads((tiny_chain / "chain.json").read_text("utf-8")) == older
    migrate_chain(tiny_chain)
    check_chain(tiny_chain)


def _without_plan(content: Content) -> None:
    del content["plan"]


def _outside(content: Content) -> None:
    content["members"][1]["reference"]["path"] = "../elsewhere"


def _changed_config(content: Content) -> None:
    content["members"][1]["files"]["config.json"] = "0" * 64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without_plan, "malformed manifest: .*polybasic.chain/1; KeyError: 'plan'"),
        (_outside, "member path leaves the chain: reference.path of intermediate = "),
        (_changed_config, "digest mismatch: .*intermediate/config.json"),
    ],
)
def test_a_damaged_older_chain_is_left_as_it_is(tiny_chain: Path, change, message) -> None:
    older = as_schema_1(tiny_chain)
    change(older)
    write_json(tiny_chain / "chain.json", older)
    with pytest.raises(UserError, match=message):
        migrate_chain(tiny_chain)
    assert json.loads((tiny_chain / "chain.json").read_text("utf-8")) == older


def test_a_chain_and_a_plan_that_an_older_commit_wrote_are_read_and_run(tmp_path: Path) -> None:
    """Commit df41238 wrote this folder, and measured its plan, in the present schema."""
    chain = Path(shutil.copytree(WRITTEN_BY_DF41238, tmp_path / "chain"))
    manifest = check_chain(chain).manifest
    [measured] = manifest.plans
    assert manifest.lacks(measured.hardware, measured.dtype, measured.temperature) is None
    assert measured.others
    assert measured.by_load
    assert migrate_chain(chain) is None
    plan = tmp_path / "plan.json"
    write_json(plan, json.loads((chain / "chain.json").read_text("utf-8"))["plans"][0]["plan"])
    read = validated(Plan, read_json(plan, "plan"), {}, str(plan))
    assert read == measured.plan != manifest.plan
    passes, texts = [], []
    for chosen in (manifest.plan, read, Plan(members=("target",), tree=read.tree)):
        loaded = load_chain(chain, dtype="float32", plan=chosen)
        answer = loaded.generate("w1 w2 w3", max_new_tokens=8, temperature=0)
        passes.append(set(answer.statistics.forward_passes))
        texts.append(answer.text)
    assert passes == [{"target", "draft"}, {"target"}, {"target"}]
    assert texts[0] == texts[1] == texts[2] != ""
    content = json.loads((chain / "chain.json").read_text("utf-8"))
    write_json(chain / "chain.json", content | {"schema": "polybasic.chain/4"})
    line = "install polybasic 0.1.0 or newer, which reads polybasic.chain/4"
    assert line in refusal("generate", chain, "-p", "w1")
