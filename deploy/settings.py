"""The tunable fields of running and measuring a chain."""

from typing import Literal

from pydantic import Field

from polybasic.chain.manifest import Rule, Tree
from polybasic.chain.settings import Settings

TASKS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
"""Spec-Bench's six task groups, in the order in which reports list them."""

SystemName = Literal["target", "hf_generate", "eagle2", "polybasic_full", "polybasic"]


class PlanSettings(Settings):
    """Which tree and flush length the chain is packed with."""

    tree: Tree = Tree(depth=7, top_k=4, rows=12)
    flush_length: int = Field(
        10, ge=1, description="tokens the intermediate collects before the target is asked"
    )
    rule: Rule = Field("block", description="verification of a block")


class BenchSettings(Settings):
    """What `polybasic bench` runs."""

    prompts: str = Field(
        "embedded", description="'embedded' (held out, generated) or a Spec-Bench question file"
    )
    num_prompts_per_task: int = Field(4, ge=1)
    max_new_tokens: int = Field(96, ge=1)
    temperature: float = Field(0.0, ge=0)
    seed: int = 0
    repeats: int = Field(2, ge=1, description="the systems take turns this many times")
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    systems: tuple[SystemName, ...] = (
        "target",
        "hf_generate",
        "eagle2",
        "polybasic_full",
        "polybasic",
    )
