"""`polybasic plan --devices`: what it says, writes and refuses."""

import json
from pathlib import Path

import pytest

from tests.recipes.command_line import call, refusal

FLEET = """\
servers:
  rack: {speed: 2}
  attic: {sequences: 1}
devices:
  laptop: {links: {rack: 40ms, attic: 5ms}}
  phone:
    speed: 0.5
    links: {rack: "20ms,50Mbit"}
"""
QUICK = ["--max-seconds", "1", "--max-new-tokens", "8", "--num-prompts-per-task", "1"]


def test_who_drafts_for_whom_is_told_and_written(tiny_chain: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "fleet.yaml", tmp_path / "who.json"
    file.write_text(FLEET)
    before = (tiny_chain / "chain.json").read_bytes()
    words = ["plan", tiny_chain, "--devices", file, *QUICK, "--dtype", "float32", "--out", out]
    code, printed, err = call(*words)
    assert code == 0, err
    told = json.loads(out.read_text())
    servers = {name: device["server"] for name, device in told["devices"].items()}
    assert servers == {"laptop": "attic", "phone": "rack"}
    assert set(told["others"]["laptop"]) == {"rack"}
    for word in ("2 devices", "laptop", "attic", "20 ms", "Elsewhere"):
        assert word in printed
    assert (tiny_chain / "chain.json").read_bytes() == before
    assert f"wrote {out}" in err


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("20ms,50Mbit", "20", "devices.phone.links.rack = '20' ({file} line 8)"),
        ("rack: 40ms", "cellar: 40ms", "laptop has a link to cellar; servers are rack, attic"),
        ("speed: 2", "speed: 0", "servers.rack.speed = 0 ({file} line 2)"),
        ("sequences: 1", "seats: 1", "servers.attic.seats ({file} line 3)"),
        ("attic: {sequences: 1}", "rack: {}", "key given twice: servers.rack ({file} line 3"),
    ],
)
def test_mistakes_of_the_file_are_told_by_line(
    old: str, new: str, told: str, tiny_chain: Path, tmp_path: Path
) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(FLEET.replace(old, new))
    assert told.format(file=file) in refusal("plan", tiny_chain, "--devices", file)


def test_one_link_beside_those_of_devices_is_refused(tiny_chain: Path, tmp_path: Path) -> None:
    for option in ("--link=5ms", "--remote=here:1", f"--measurements={tmp_path / 'm'}"):
        line = refusal("plan", tiny_chain, "--devices", tmp_path / "none", option)
        assert line.startswith("error: one link beside those of the devices: --devices --")
    (tmp_path / "fleet.yaml").write_text(FLEET)
    line = refusal("plan", tiny_chain, "--devices", tmp_path / "fleet.yaml", "--rule=block")
    assert "a link carries the rule coupled alone, not block" in line
    assert "file of devices not found" in refusal(
        "plan", tiny_chain, "--devices", tmp_path / "none"
    )
