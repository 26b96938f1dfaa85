"""chain.json survives a round trip; everything else in it is refused with its JSON location."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pydantic import ValidationError

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.manifest import Manifest, read_manifest, write_manifest
from polybasic.chain.formats.plan import MAX_TOP_K, Plan

Content = dict[str, Any]


@pytest.fixture
def content(tiny_chain: Path) -> Content:
    result: Content = json.loads((tiny_chain / "chain.json").read_text())
    del result["sha256"]
    return result


def read_changed(folder: Path, content: Any) -> Manifest:
    folder.mkdir(exist_ok=True)
    (folder / "chain.json").write_text(json.dumps(content))
    return read_manifest(folder)


def test_what_was_written_is_read(tiny_chain: Path, tmp_path: Path) -> None:
    manifest = read_manifest(tiny_chain)
    (tmp_path / "again").mkdir()
    write_manifest(tmp_path / "again", manifest)
    assert read_manifest(tmp_path / "again") == manifest
    first, second = (folder / "chain.json" for folder in (tiny_chain, tmp_path / "again"))
    assert first.read_bytes() == second.read_bytes()
    assert manifest.plan == Plan.model_validate(
        {
            "members": ["target", "intermediate", "draft"],
            "tree": {"depth": 3, "top_k": 2, "rows": 6},
            "flush": {"target": {"length": 5, "adaptive": None}},
            "rule": "coupled",
            "ngram": None,
        }
    )


def test_a_change_of_any_bit_of_a_value_is_found(tiny_chain: Path) -> None:
    path = tiny_chain / "chain.json"
    text, manifest = path.read_bytes(), read_manifest(tiny_chain)
    random = Random(1)
    for _ in range(200):
        changed = bytearray(text)
        changed[random.randrange(len(text))] ^= 1 << random.randrange(8)
        path.write_bytes(changed)
        with suppress(UserError):
            assert read_manifest(tiny_chain) == manifest, "white space alone may change"
    path.write_bytes(text)
    content = json.loads(text)
    content["plan"]["tree"]["depth"] += 1
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"manifest is not what was written: \S+ \(content "):
        read_manifest(tiny_chain)
    del content["sha256"]
    path.write_text(json.dumps(content))
    assert read_manifest(tiny_chain).plan.tree.depth == manifest.plan.tree.depth + 1


def test_a_manifest_is_frozen(tiny_chain: Path) -> None:
    manifest = read_manifest(tiny_chain)
    with pytest.raises(ValidationError, match=r"frozen"):
        manifest.results = {}


def test_a_folder_without_manifest_is_no_chain(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^not a chain: .* \(no chain.json in it\); name a folder"):
        read_manifest(tmp_path)
    with pytest.raises(UserError, match=r"^not a chain: .*/absent \(no such folder\)"):
        read_manifest(tmp_path / "absent")


def test_broken_json_is_located(tmp_path: Path) -> None:
    (tmp_path / "chain.json").write_text('{"schema": "polybasic.chain/3",\n "members": [}')
    with pytest.raises(UserError, match=r"manifest is not JSON: .* line 2 column 14"):
        read_manifest(tmp_path)


def test_versions(content: Content, tmp_path: Path) -> None:
    read_changed(tmp_path / "control", content)
    for schema in ("polybasic.chain/0", "polybasic.chain/x", "another/4", 4):
        with pytest.raises(UserError, match=rf"unknown manifest version: schema = '?{schema}"):
            read_changed(tmp_path / "unknown", content | {"schema": schema})
    with pytest.raises(UserError, match=r"older version: .*; run `polybasic migrate \S+older`"):
        read_changed(tmp_path / "older", content | {"schema": "polybasic.chain/2"})
    del content["schema"]
    with pytest.raises(UserError, match=r"manifest without version: no schema in"):
        read_changed(tmp_path / "without", content)
    with pytest.raises(UserError, match=r"holds no JSON object"):
        read_changed(tmp_path / "list", [content])


def test_a_newer_manifest_names_the_version_that_it_needs(content: Content, tmp_path: Path) -> None:
    content |= {"schema": "polybasic.chain/4", "what_came_later": {}}
    for version, needed in (("12.3.0", "12.3.0 or newer"), (None, "of a later version")):
        content["provenance"]["package_versions"]["polybasic"] = version
        told = f"install polybasic {needed}, which reads polybasic.chain/4: this one reads"
        line = rf"newer version: schema = 'polybasic.chain/4' in .*; {told} polybasic.chain/3$"
        with pytest.raises(UserError, match=line):
            read_changed(tmp_path / "newer", content)
    for damaged in ({}, [], {"package_versions": []}):
        with pytest.raises(UserError, match=r"install polybasic of a later version"):
            read_changed(tmp_path / "newer", content | {"provenance": damaged})


def _drop(content: Content) -> None:
    del content["members"][1]["dtype"]


def _rename(content: Content) -> None:
    content["members"][2]["dtypes"] = "bfloat16"


def _digest(content: Content) -> None:
    content["members"][2]["files"]["config.json"] = "abc"


def _role(content: Content) -> None:
    content["members"][2]["role"] = "prophet"


def _kind(content: Content) -> None:
    content["members"][1]["kind"] = "eagle2"


def _nowhere(content: Content) -> None:
    content["members"][0]["reference"] = {}


def _order(content: Content) -> None:
    content["members"].reverse()


def _names(content: Content) -> None:
    content["members"][1]["name"] = "target"


def _planned_stranger(content: Content) -> None:
    content["plan"]["members"] = ["target", "oracle"]


def _drafts_for_nobody(content: Content) -> None:
    content["members"][2]["drafts_for"] = []


def _drafting_target(content: Content) -> None:
    content["members"][0]["drafts_for"] = ["target"]


def _drafts_for_stranger(content: Content) -> None:
    content["members"][2]["drafts_for"] = ["target", "oracle"]


def _drafts_for_another(content: Content) -> None:
    content["members"][2]["drafts_for"] = ["target"]


def _planned_without_target(content: Content) -> None:
    content["plan"]["members"] = ["intermediate", "draft"]


def _planned_backwards(content: Content) -> None:
    content["plan"]["members"] = ["draft", "target"]


def _flush(content: Content) -> None:
    content["plan"]["flush"]["target"]["length"] = 0


def _no_flush(content: Content) -> None:
    content["plan"]["flush"] = {}


def _flush_of_a_drafter(content: Content) -> None:
    content["plan"]["flush"]["draft"] = {"length": 3}


def _too_wide(content: Content) -> None:
    content["plan"]["tree"] |= {"depth": 1, "top_k": MAX_TOP_K + 1}


def _deep_and_wide(content: Content) -> None:
    content["plan"]["tree"] |= {"depth": 33, "top_k": 8}


def _adaptive(content: Content) -> None:
    content["plan"]["flush"]["target"]["adaptive"] = {"break_even": 0.5, "acceptance": [0.5] * 7}


def _broken_measured_plan(content: Content) -> None:
    plan = content["plan"] | {"members": ["target", "oracle"]}
    content["plans"] = [
        {
            "hardware": "a",
            "dtype": "bfloat16",
            "temperature": 0.0,
            "plan": plan,
            "seconds_per_token": 1.0,
            "explanation": {},
        }
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop, "missing key: members[1].dtype in"),
        (_rename, "unknown key: members[2].dtypes in"),
        (_digest, "malformed manifest: members[2].files.config.json = 'abc' in"),
        (_role, "malformed manifest: members[2].role = 'prophet' in"),
        (_kind, "(kind of the intermediate must be awq or decoder)"),
        (
            _drafts_for_nobody,
            "(drafts_for names verifying members for a drafter, and for no other)",
        ),
        (_drafting_target, "(drafts_for names verifying members for a drafter, and for no other)"),
        (_drafts_for_stranger, "(draft drafts for oracle, which is no member)"),
        (_drafts_for_another, "(draft drafts for target, not for intermediate)"),
        (_nowhere, "members[0].reference = {} in"),
        (_order, "not drafter, intermediate, target)"),
        (_names, "(member names repeat: target, target, draft)"),
        (_planned_stranger, "(plan.members target, oracle must be among target, intermediate, d"),
        (_planned_without_target, "(plan.members must begin with target)"),
        (_planned_backwards, "(plan.members draft, target must be among"),
        (_flush, "malformed manifest: plan.flush.target.length = 0 in"),
        (_flush_of_a_drafter, "(plan.flush names draft, which verifies nothing)"),
        (_too_wide, "plan.tree.top_k = 65"),
        (_deep_and_wide, "(depth * top_k must be at most 256)"),
        (_no_flush, "(plan.flush lacks target, above intermediate)"),
        (_adaptive, "malformed manifest: plan.flush.target.adaptive.acceptance = "),
        (
            _broken_measured_plan,
            "(plan.members target, oracle must be among target, intermediate, d",
        ),
    ],
)
def test_malformed_manifests_are_located(
    content: Content, tmp_path: Path, change: Callable[[Content], None], message: str
) -> None:
    read_changed(tmp_path / "control", content)
    change(content)
    with pytest.raises(UserError) as refusal:
        read_changed(tmp_path / "changed", content)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "members",
    [
        ["target"],
        ["target", "draft"],
        ["target", "intermediate"],
        ["target", "intermediate", "draft"],
    ],
)
def test_plans_may_leave_members_out(content: Content, tmp_path: Path, members: list[str]) -> None:
    content["plan"]["members"] = members
    assert list(read_changed(tmp_path / "plan", content).plan.members) == members
