"""A chain of a target, an intermediate that shares its cache, and a drafter with one of its own."""

from pathlib import Path
from typing import Any

import pytest

from polybasic.chain.formats.package import Part
from polybasic.chain.formats.plan import Flush, Plan, Tree
from polybasic.deploy import Chain, load_chain

TREE = Tree(depth=3, top_k=2, rows=7)
ALL = Plan(members=("target", "intermediate", "copy"), tree=TREE, flush={"target": Flush(length=4)})


@pytest.fixture
def chain(tiny_chain_parts: Any, tmp_path: Path) -> Chain:
    """Target, its 4-bit copy as intermediate, and the copy as independent drafter."""
    parts = tiny_chain_parts
    parts.package(
        tmp_path / "chain",
        parts=[
            Part("intermediate", "intermediate", "awq", parts.intermediate),
            Part("copy", "drafter", "awq", parts.intermediate),
        ],
        plan=ALL,
    )
    return load_chain(tmp_path / "chain", dtype="float32")
