"""The tunable fields of running and measuring a chain."""

from collections.abc import Sequence
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from polybasic.chain.base.settings import Count, Factor, Seed, Settings, Share, Temperature
from polybasic.chain.formats.plan import Rule, RuleSetting, TopK, Tree
from polybasic.deploy.runtime.remote.link import Link

TASKS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
"""Spec-Bench's six task groups, in the order in which reports list them."""

SystemName = Literal[
    "target",
    "hf_generate",
    "hf_static",
    "hf_prompt_lookup",
    "hf_assisted",
    "ngram",
    "draft_model",
    "eagle2",
    "peagle",
    "eagle3",
    "block",
    "dflash",
    "medusa",
    "hydra",
    "early_exit",
    "steering",
    "polybasic_full",
    "polybasic",
    "auto",
    "all",
]
USUAL_SYSTEMS = (
    "target",
    "hf_generate",
    "eagle2",
    "polybasic_full",
    "polybasic",
)
"""What `auto` is of a chain of three: the head's kind stands for its own, and systems that the
chain has no members for are left out."""
PeerName = Literal["llama.cpp", "openvino", "transformers"]

Dtype = Literal["auto", "bfloat16", "float16", "float32"]


_DTYPE = (
    "of passes; auto: as the target is stored, or float32 where neither kernels nor PyTorch are "
    "fast in that"
)
_TENSOR_PARALLEL = "processes that target and intermediate are divided among, a GPU each"
_GRAPHS = "on a GPU, capture CUDA graphs of passes and rounds; the outputs are the same"


class PlanGrid(Settings):
    """What a planner chooses among, beside the sets of members."""

    depths: tuple[Count, ...] = Field((2, 3, 4, 5, 6, 7, 8, 10, 16), min_length=1)
    top_ks: tuple[TopK, ...] = Field((2, 4), min_length=1)
    rows: tuple[Count, ...] = Field((4, 6, 8, 12, 16, 24, 32), min_length=1)
    least_probabilities: tuple[Share, ...] = Field(
        (0.02, 0.05, 0.1, 0.2),
        description="of candidates of a draft tree, by the drafter; empty: trees have one size",
    )
    flush_lengths: tuple[Count, ...] = Field((2, 4, 6, 8, 10, 12, 16, 20, 24, 32), min_length=1)
    ngram_matches: tuple[Count, ...] = Field(
        (2, 4), description="shortest match of an n-gram draft; empty: no n-gram drafts"
    )
    ngram_tokens: Count = Field(8, description="tokens of an n-gram draft at most")
    windows: tuple[Count, ...] = Field(
        (512, 2048),
        description="latest tokens that members below the target may be left to see; tried where "
        "a planning prompt with its answer is longer; empty: none",
    )

    @property
    def over_link(self) -> "PlanGrid":
        """With block lengths that a slow link wants, too."""
        lengths = tuple(sorted({*self.flush_lengths, 48, 64, 96, 128}))
        return self.model_copy(update={"flush_lengths": lengths})

    @model_validator(mode="after")
    def _trees_can_run(self) -> "PlanGrid":
        for rows in self.rows:
            Tree(depth=max(self.depths), top_k=max(self.top_ks), rows=rows)
        return self


def _as_links_are_written(text: str) -> str:
    try:
        return str(Link.of(text))
    except ValueError as error:
        raise PydanticCustomError("link", "{how}", {"how": str(error)}) from error


LinkText = Annotated[str, AfterValidator(_as_links_are_written)]
"""A round trip with or without bits a second, as `Link.of` reads it."""


class PlanSettings(Settings):
    """Which tree and block length the chain is packed with, and how `polybasic plan` measures."""

    tree: Tree = Tree(depth=7, top_k=4, rows=12)
    flush_length: Count = Field(
        10, description="tokens the intermediate collects before the target is asked"
    )
    rule: RuleSetting = Field(
        "auto",
        description="how sampled tokens are drawn: coupled, where a seed means a text; block, "
        "token: independent draws, by the verification of blocks; auto: coupled until a plan is "
        "measured, and then the fastest",
    )
    prompts: str = Field(
        "auto",
        description="to measure on, others than the bench's: 'heldout' (in a recipe: first turns "
        "of held-out conversations), 'shipped' (of those that come with polybasic), a file of "
        "prompts or its URL; 'auto': heldout; of a chain that no recipe made: shipped",
    )
    num_prompts_per_task: Count = 6
    max_new_tokens: Count = Field(96, ge=2)
    max_seconds: Factor = Field(
        120, description="of measuring; what does not fit is left out, and the plan says so"
    )
    temperature: Temperature = Field(0.0, description="that the plan is chosen for")
    loads: tuple[Count, ...] = Field(
        (1, 2, 4, 8, 16),
        description="numbers of sequences at a time, each of which gets a plan; empty: none",
    )
    contexts: tuple[Count, ...] = Field(
        (1024, 2048, 4096, 8192),
        description="tokens of prompt and answer so far, behind each of which one sequence gets a "
        "plan; empty: none",
    )
    link: LinkText | None = Field(
        None,
        description="to a target on another host: round trip and bits a second, as in 20ms,100Mbit",
    )
    optimistic: bool = Field(
        True, description="over a link, the other members go on while an answer is under way"
    )
    seed: Seed = 0
    dtype: Dtype = Field("auto", description=_DTYPE)
    graphs: bool = Field(True, description=_GRAPHS)
    tensor_parallel: Annotated[Count, Field(le=64)] = Field(1, description=_TENSOR_PARALLEL)
    grid: PlanGrid = PlanGrid()

    @model_validator(mode="after")
    def _links_carry_the_rule(self) -> "PlanSettings":
        if self.link is not None and self.packed_rule != "coupled":
            raise ValueError(f"a link carries the rule coupled alone, not {self.rule}")
        return self

    @property
    def packed_rule(self) -> Rule:
        """Of a chain's plan until one is measured."""
        return "coupled" if self.rule == "auto" else self.rule


class BenchSettings(Settings):
    """What `polybasic bench` runs."""

    prompts: str = Field(
        "auto",
        description="as of a plan: 'auto', 'heldout', 'shipped', a file of prompts (JSON lines) or "
        "its URL",
    )
    num_prompts_per_task: Count = 6
    max_new_tokens: Count = 96
    temperature: Temperature = 0.0
    rule: RuleSetting = Field(
        "auto",
        description="how sampled tokens are drawn by every system but the target alone, as in "
        "section plan; auto: as the plan says",
    )
    seed: Seed = 0
    repeats: Count = Field(2, description="the systems take turns this many times")
    dtype: Dtype = Field("auto", description=_DTYPE)
    graphs: bool = Field(True, description=_GRAPHS)
    tensor_parallel: Annotated[Count, Field(le=64)] = Field(1, description=_TENSOR_PARALLEL)
    systems: tuple[SystemName, ...] = Field(
        ("auto",),
        description="auto: target, hf_generate, its draft head, all models, the plan; all: "
        "whatever the chain has members for",
    )
    peers: tuple[PeerName, ...] = Field(
        (), description="other engines to compare with, each as its users run it"
    )
    peers_python: str = Field(
        ".venv-peers/bin/python", description="of the environment that the peers are installed in"
    )

    @property
    def expected_systems(self) -> tuple[str, ...]:
        """What is likely to run, before a chain is there."""
        return self.named_systems(USUAL_SYSTEMS, get_args(SystemName)[:-2])

    def named_systems(self, usual: Sequence[str], every: Sequence[str]) -> tuple[str, ...]:
        """Names, each once.

        Args:
            usual: what auto stands for.
            every: what all stands for.
        """
        meant = {"auto": usual, "all": every}
        found = (name for system in self.systems for name in meant.get(system, (system,)))
        return tuple(dict.fromkeys(found))
