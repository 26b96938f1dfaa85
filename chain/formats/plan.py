"""Plans: which members of a chain run, with which trees, flushes and windows. No torch in here."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from polybasic.chain.base.settings import Count, Factor, Settings, Share, Temperature, Weight, Whole

Rule = Literal["coupled", "block", "token"]
RuleSetting = Literal["auto", "coupled", "block", "token"]
"""A rule, or the choice of one."""
Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$", max_length=100)]
"""Of a member."""

MAX_TREE_ROWS = 256
"""Of a verification pass, and of a draft over all of its levels; caches hold so many more."""
MAX_TOP_K = 64
"""Children of a row of a draft tree, and beams of a level: kernels keep that many best tokens."""
TopK = Annotated[Count, Field(le=MAX_TOP_K)]
NUM_PROBABILITY_BINS = 8
"""Bins of the adaptive flush: the proposing model's probability of a token, by its square."""


BETWEEN_REASONS = "; "
"""In the decision of an explanation."""
READ_AT_ONCE = 64
"""Tokens that most answers get: what pays within them is not put off."""


class Tree(Settings):
    """Shape of the draft tree."""

    depth: Count = Field(description="draft passes a round")
    top_k: TopK = Field(description="beams kept and children a beam, at each depth")
    rows: Count = Field(
        ge=2, le=MAX_TREE_ROWS, description="rows of the verification pass, root included"
    )
    least_probability: Share = Field(
        default=0.0,
        lt=1,
        description="of a candidate with all before it, by the drafter: less probable ones are not "
        "verified, and nothing is drafted after a level of them; depth and rows are then the most",
    )

    @property
    def least_score(self) -> float:
        """Least cumulative log-probability of a candidate."""
        return math.log(self.least_probability) if self.least_probability else -math.inf

    @model_validator(mode="after")
    def _drafts_fit_the_cache(self) -> "Tree":
        if self.depth * self.top_k > MAX_TREE_ROWS:
            raise ValueError(f"depth * top_k must be at most {MAX_TREE_ROWS}")
        return self


class AdaptiveFlush(Settings):
    """Lets a stage hand its block up before the block length, as deploy/runtime/rounds/flushing."""

    break_even: Factor = Field(
        lt=1, description="probability of the whole block below which no round is added"
    )
    acceptance: tuple[Share, ...] = Field(
        min_length=NUM_PROBABILITY_BINS,
        max_length=NUM_PROBABILITY_BINS,
        description="share of tokens kept, by bin of the proposing model's probability of them",
    )


class Flush(Settings):
    """When and how a verifying member is asked about the block that is collected below it."""

    length: Count = Field(description="tokens collected before the member is asked")
    adaptive: AdaptiveFlush | None = Field(
        default=None, description="stops earlier where one more round would not pay"
    )


class Ngram(Settings):
    """Drafts copied from prompt and output: see `polybasic.deploy.runtime.drafters.ngram`."""

    min_match: Count = Field(default=2, description="tokens that must repeat before a copy")
    num_tokens: Count = Field(default=8, description="tokens of a copy at most")
    extends: bool = Field(
        default=False,
        description="where nothing is copied, copies go on from the most probable path of the "
        "drafter's draft: the horizontal cascade of Chen et al., 2024",
    )
    capacity: Count = Field(default=65536, description="entries kept, the latest used ones")


class Window(Settings):
    """What a member sees of a long context: its first tokens, and the latest ones.

    Of the middle it reads nothing, so that its passes stop growing with the context (StreamingLLM,
    Xiao et al., 2024). The target sees everything, hence what others see decides the speed alone.
    """

    sinks: Whole = Field(default=4, description="first tokens of the context, always seen")
    tokens: Count = Field(description="latest tokens that a token sees, itself included")


class BigLittle(Settings):
    """Keeps what is near enough to the target's own token, which is not lossless.

    Big Little Decoder (Kim et al., 2023): see `polybasic.deploy.runtime.rounds.tolerance`.
    """

    fallback_threshold: Share = Field(
        description="probability of a token, by the member that proposes it, under which the "
        "target draws it"
    )
    rollback_threshold: Weight = Field(
        description="-log p of a token, by the target, beyond which it is taken back; with 0 only "
        "the target's own are kept"
    )


class Judge(Settings):
    """Keeps tokens that are not the target's own where a classifier finds that they matter little.

    AutoJudge (Garipov et al., 2025): see `polybasic.deploy.runtime.rounds.judging`.
    """

    file: str = Field(
        min_length=1,
        description="safetensors file of the classifier; where a plan is read from a file, "
        "relative to that",
    )
    threshold: Share = Field(
        description="probability that a token matters, from which on the target's own replaces it"
    )


class Plan(Settings):
    """Which members run and how."""

    members: tuple[Name, ...] = Field(
        min_length=1, description="names from the target down; at most one drafter, at the end"
    )
    tree: Tree
    flush: dict[Name, Flush] = Field(
        default={}, description="of each verifying member but the innermost, by name"
    )
    ngram: Ngram | None = Field(
        default=None, description="drafts by n-grams, alone or beside the drafter"
    )
    windows: dict[Name, Window] = Field(
        default={}, description="of members that see only a part of a long context, by name"
    )
    rule: Rule = Field(
        default="coupled",
        description="how sampled tokens are drawn and verified: with noise that all members share, "
        "so that a seed means a text; or independently, by block or token verification",
    )
    lossy: BigLittle | Judge | None = Field(
        default=None, description="what is kept beside the target's own tokens; None: nothing"
    )

    @property
    def is_lossless(self) -> bool:
        """Whether answers follow the target's distribution."""
        return self.lossy is None

    @model_validator(mode="after")
    def _one_rule_ends_a_block(self) -> "Plan":
        falls_back = isinstance(self.lossy, BigLittle)
        if falls_back and any(flush.adaptive for flush in self.flush.values()):
            raise ValueError("a lossy plan's blocks end by fallback_threshold, not by adaptive")
        return self


def _lossless(plan: Plan) -> Plan:
    if not plan.is_lossless:
        raise ValueError("a chain carries lossless plans; give this one to --plan")
    return plan


LosslessPlan = Annotated[Plan, AfterValidator(_lossless)]
"""As a chain carries them: what is lossy is asked for, each time."""


class PredictedPlan(Settings):
    """A plan and what it is expected to cost."""

    plan: LosslessPlan
    seconds_per_token: Factor = Field(description="decode only")


class _RepeatablePlan(Settings):
    """A plan for some of the time, by which the text of a seed is what it is by the others."""

    plan: LosslessPlan

    @model_validator(mode="after")
    def _a_text_depends_on_the_seed_alone(self) -> Self:
        if self.plan.rule != "coupled":
            raise ValueError(f"a plan for some of the time must be coupled, not {self.plan.rule}")
        return self


class LoadPlan(_RepeatablePlan):
    """The fastest plan while several sequences are active."""

    sequences: Count = Field(description="that are active at a time")
    seconds_per_token: Factor = Field(
        description="of the machine, for a token of any sequence; decode only"
    )


class ContextPlan(_RepeatablePlan):
    """The fastest plan behind a context."""

    tokens: Count = Field(description="of prompt and answer so far")
    seconds_per_token: Factor = Field(description="decode only")


class EarlyPlan(_RepeatablePlan):
    """What runs until it pays that the other members of a plan read the prompt.

    How long an answer gets is not known, and a short one behind a long prompt saves less than that
    costs. So they read it as soon as they would have saved as much as reading costs: together both
    are then at most twice what the better choice would have been (ski rental; Karlin et al., 1988).
    """

    seconds_per_token: Factor = Field(description="decode only")
    reading_seconds: Factor = Field(
        description="of the members that do not run, for a token of a prompt"
    )

    def tokens_read(self, seconds_per_token: float) -> float:
        """Tokens of a prompt whose reading costs what a plan of so many seconds a token saves in
        one token of an answer."""
        return (self.seconds_per_token - seconds_per_token) / self.reading_seconds

    def most_at_once(self, seconds_per_token: float) -> int:
        """Tokens of a prompt up to which all members of such a plan read it at once."""
        return int(READ_AT_ONCE * self.tokens_read(seconds_per_token))


@dataclass(frozen=True)
class Situation:
    """What a round is about to run in.

    Attributes:
        active: sequences at a time.
        num_tokens: of prompt and answer so far, at least one.
        num_answered: of the answer.
        num_left: that the answer may get still.
        temperature: of the request.
        num_unread: of some members, how many tokens the one has to read that has read the fewest.
    """

    active: int
    num_tokens: int
    num_answered: int
    num_left: int
    temperature: float
    num_unread: Callable[[Collection[str]], int]


class MeasuredPlan(PredictedPlan):
    """A plan that was chosen by measurement, and the machine that it holds for."""

    hardware: str = Field(description="as `polybasic.deploy.runtime.hardware` gives it")
    dtype: str
    temperature: Temperature
    prompts: str = Field("", description="that it was measured on: shipped, heldout or a file's")
    link: str | None = Field(
        None, description="to a target on another host that it was made for, as in 20ms,100Mbit"
    )
    others: tuple[PredictedPlan, ...] = Field(
        default=(), description="the best plan of each other set of members, the fastest first"
    )
    by_load: tuple[LoadPlan, ...] = Field(
        default=(), description="plans by the number of active sequences, increasing"
    )
    by_context: tuple[ContextPlan, ...] = Field(
        default=(), description="plans by the tokens before the next one, increasing"
    )
    early: EarlyPlan | None = Field(
        None, description="how an answer begins behind a prompt that not all members read at once"
    )
    explanation: dict[str, Any] = Field(default={}, description="what `polybasic plan` prints")

    @model_validator(mode="after")
    def _numbers_increase(self) -> Self:
        loads = [load.sequences for load in self.by_load]
        if loads != sorted(set(loads)):
            raise ValueError(f"by_load must have increasing numbers of sequences, not {loads}")
        contexts = [context.tokens for context in self.by_context]
        if contexts != sorted(set(contexts)):
            raise ValueError(f"by_context must have increasing numbers of tokens, not {contexts}")
        if self.early is not None and self.early.seconds_per_token <= self.seconds_per_token:
            raise ValueError("early must be slower than the plan that it gives way to")
        return self

    @property
    def conditions(self) -> tuple[str, str | None, str, float]:
        """Machine, link, dtype and temperature: a chain keeps one plan for each."""
        return self.hardware, self.link, self.dtype, self.temperature

    @property
    def is_rough(self) -> bool:
        """Whether so little could be measured that it may well be another one."""
        return bool((self.explanation.get("budget") or {}).get("is_rough", False))

    @property
    def place(self) -> str:
        """The same, for people."""
        over = "" if self.link is None else f" over a link of {self.link}"
        return f"{self.hardware}{over}, {self.dtype}, temperature {self.temperature:g}"

    @property
    def all_plans(self) -> tuple[Plan, ...]:
        """The chosen one, those of other members, those by load and by context, the early one."""
        others = (other.plan for other in self.others)
        by_load = (load.plan for load in self.by_load)
        return (self.plan, *others, *by_load, *self.plans_of_one)

    @property
    def plans_of_one(self) -> tuple[Plan, ...]:
        """Those that one sequence may run by at times: by context, and the early one."""
        by_context = tuple(context.plan for context in self.by_context)
        return by_context if self.early is None else (*by_context, self.early.plan)

    def now(self, active: int, num_tokens: int) -> Plan:
        """The plan to run while so many sequences are active, behind so many tokens.

        That of the context that is nearest by ratio; where several are active, that or the plan of
        the load, whichever has the smaller tree: what a row costs beside a pass grows with both.

        Args:
            active: 0 counts as 1.
            num_tokens: of prompt and answer so far, at least one.
        """
        of_load = self._of_load(active)
        if not self.by_context:
            return of_load
        starts = reversed(self.context_starts)
        of_context = next(plan for first, plan in starts if first <= num_tokens)
        return of_context if active <= 1 else min(of_load, of_context, key=lambda p: p.tree.rows)

    def in_situation(self, situation: Situation) -> Plan:
        """The plan of load and context; the early one as long as the others are not to read yet."""
        plan = self.now(situation.active, situation.num_tokens)
        if self.early is None:
            return plan
        reading = [name for name in plan.members if name not in self.early.plan.members]
        pays_after = situation.num_unread(reading) / self.tokens_read_per_answered
        least = max(situation.num_answered, READ_AT_ONCE)
        return plan if pays_after <= min(least, situation.num_left) else self.early.plan

    @property
    def tokens_read_per_answered(self) -> float:
        """As `EarlyPlan.tokens_read`, of this plan."""
        assert self.early is not None, "no early plan"
        return self.early.tokens_read(self.seconds_per_token)

    @property
    def context_starts(self) -> list[tuple[int, Plan]]:
        """Tokens from which on a context is the nearest by ratio, and its plan, increasing."""
        starts = (
            math.ceil(math.sqrt(shorter.tokens * longer.tokens))
            for shorter, longer in pairwise(self.by_context)
        )
        return [*zip((1, *starts), (context.plan for context in self.by_context), strict=False)]

    def _of_load(self, active: int) -> Plan:
        """The plan to run while so many sequences are active.

        That of the smallest measured load that is not below this number: between two loads that of
        the larger one, whose speculation pays at more sequences still. Beyond the largest load it
        is the largest's. Where no loads were measured, it is `plan`.

        Args:
            active: 0 counts as 1.
        """
        for load in self.by_load:
            if active <= load.sequences:
                return load.plan
        return self.by_load[-1].plan if self.by_load else self.plan


@dataclass(frozen=True)
class PlansByTemperature:
    """Plans that were measured on one machine in one dtype, at several temperatures."""

    plans: tuple[MeasuredPlan, ...] = ()

    def at(self, temperature: float) -> MeasuredPlan | None:
        """That of this temperature, or else of the nearest; None if there is none at all.

        Passes cost the same at any temperature, and acceptance changes with it little by little.
        """
        return min(self.plans, key=lambda plan: abs(plan.temperature - temperature), default=None)

    def now(self, situation: Situation) -> Plan:
        """As `MeasuredPlan.in_situation`; there must be a plan."""
        measured = self.at(situation.temperature)
        assert measured is not None, "a plan"
        return measured.in_situation(situation)


def decision_lines(explanation: Mapping[str, Any]) -> list[str]:
    """What a `MeasuredPlan.explanation` decides, then a reason a line, one for each member."""
    decision: str = explanation["decision"]
    return decision.split(BETWEEN_REASONS)
