"""A chain is described as it is packed and measured."""

import io
import json
from pathlib import Path

from rich.console import Console

from polybasic.chain.formats.card import record_results
from polybasic.chain.formats.describe import describe_chain, print_chain


def test_a_chain_is_described(tiny_chain: Path) -> None:
    description = describe_chain(tiny_chain)
    assert json.loads(json.dumps(description)) == description
    assert [member["where"] for member in description["members"]] == [
        "target/",
        "intermediate/",
        "draft/",
    ]
    assert description["plan"]["tree"] == {
        "depth": 3,
        "top_k": 2,
        "rows": 6,
        "least_probability": 0.0,
    }
    assert description["num_bytes"] == sum(
        (tiny_chain / name / "model.safetensors").stat().st_size
        for name in ("target", "intermediate", "draft")
    )
    assert description["results"] is None
    assert "not measured yet: polybasic bench" in _printed(tiny_chain)


def test_measured_chains_show_their_results(tiny_chain: Path) -> None:
    measured = {"tokens_per_second": 12.5, "speedup_vs_target": 2.25, "mean_accepted_length": 9.0}
    record_results(tiny_chain, {"systems": {"polybasic": measured | {"tokens": 5}}})
    assert describe_chain(tiny_chain)["results"] == {"polybasic": measured}
    printed = _printed(tiny_chain)
    assert "not measured" not in printed
    for shown in (
        "eagle2",
        "12.50",
        "2.25",
        "9.00",
        "plan: target → intermediate → draft; tree of depth 3, top 2, 6 rows; verification: "
        "target after 5 tokens; rule: coupled",
        "quality of intermediate: mean_kl 0.01235",
        "training of draft: simulated_accepted_length 3.5, steps 10",
    ):
        assert shown in printed


def _printed(chain: Path) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_chain(describe_chain(chain), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
