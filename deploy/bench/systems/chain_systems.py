"""The ways in which this runtime answers with a chain: which members run, and by which plan."""

import time
from dataclasses import replace

from torch import Tensor

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.card import shown_members, shown_rule
from polybasic.chain.formats.checkpoints.block_types import BLOCK_TYPES
from polybasic.chain.formats.checkpoints.kinds import MODEL_KINDS
from polybasic.chain.formats.head_kinds.table import HEAD_KINDS
from polybasic.chain.formats.manifest import Member
from polybasic.chain.formats.plan import Ngram, Plan, RuleSetting
from polybasic.chain.kernels.product_times import name_of
from polybasic.deploy.bench.systems.system import System, TimedAnswer
from polybasic.deploy.runtime.chain import Chain
from polybasic.deploy.runtime.rounds.sampling import Sampling

_DRAFTERS = {"draft_model": MODEL_KINDS, **{kind: (kind,) for kind in HEAD_KINDS}}
"""Systems of two models: the kinds of member that may draft."""
NAMES = ("target", "ngram", *_DRAFTERS, "polybasic_full", "polybasic")
"""In the order of reports. Each runs the best known plan of its members."""


class ChainSystem(System):
    """This runtime, with some members of a chain.

    Attributes:
        plan: that they run by.
    """

    runtime = "polybasic"
    follows_plans = False

    @property
    def plans(self) -> tuple[Plan, ...]:
        """All that answers may run by."""
        return (self.plan,)

    def __init__(self, name: str, description: str, chain: Chain, plan: Plan) -> None:
        self.name, self.description, self.chain, self.plan = name, description, chain, plan
        self.dtype = weight_type(chain)

    def answer(self, prompt: list[int], max_new_tokens: int, sampling: Sampling) -> TimedAnswer:
        begin = time.perf_counter()
        parts = self.chain.stream_ids(
            prompt, max_new_tokens, sampling, self.plan, follows_plans=self.follows_plans
        )
        token_ids = list(next(parts))
        num_first, first_seconds = len(token_ids), time.perf_counter() - begin
        for part in parts:
            token_ids += part
        seconds = time.perf_counter() - begin
        return TimedAnswer(token_ids, seconds, num_first, first_seconds, parts.statistics)


class PlannedSystem(ChainSystem):
    """The chain's plan, and those of context and length that were measured with it."""

    follows_plans = True

    @property
    def plans(self) -> tuple[Plan, ...]:
        measured = self.chain.measured_plan
        return (self.plan, *(() if measured is None else measured.plans_of_one))


class LossySystem(ChainSystem):
    """The same by a plan that is lossy, and draws nothing that a seed could repeat."""

    def __init__(self, chain: Chain, plan: Plan) -> None:
        super().__init__("lossy", shown_rule(plan), chain, plan)

    def answer(self, prompt: list[int], max_new_tokens: int, sampling: Sampling) -> TimedAnswer:
        return super().answer(prompt, max_new_tokens, replace(sampling, seed=None))


def weight_type(chain: Chain) -> str:
    """The dtype of the target's passes, or how it is stored where that is multiplied: the type of
    its blocks, or "int4"."""
    target, member = chain.engine.models.target, chain.manifest.members[0]
    stored = member.dtype
    if member.kind == "awq":
        return stored
    keeps_blocks = not isinstance(target.weights.embedding, Tensor) and stored in BLOCK_TYPES
    return stored if keeps_blocks else name_of(target.dtype)


def ruled(plan: Plan, rule: RuleSetting) -> Plan:
    """The plan with a rule; with its own one for "auto"."""
    return plan if rule == "auto" else plan.model_copy(update={"rule": rule})


def chain_system(name: str, chain: Chain, rule: RuleSetting = "auto") -> ChainSystem:
    """One of `NAMES`.

    Args:
        rule: of all but the target alone, which always gives the text of the seed.

    Raises:
        UserError: the chain has none of the members that it takes.
    """
    verifying = [member.name for member in chain.manifest.verifying]
    target = verifying[0]
    if name == "target":
        alone = chain.plan_of([target]).model_copy(update={"rule": "coupled"})
        return ChainSystem(name, "this runtime, the target alone", chain, alone)
    if name == "polybasic":
        shown, plan = shown_members(chain.plan, verifying), ruled(chain.plan, rule)
        return PlannedSystem(name, f"the chain's plan: {shown}", chain, plan)
    if name == "ngram":
        plan = chain.plan_of([target]).model_copy(update={"ngram": Ngram()})
        described = "the target with drafts copied from prompt and answer"
        return ChainSystem(name, described, chain, ruled(plan, rule))
    if name == "polybasic_full":
        members = [
            *verifying,
            *(drafter.name for drafter in _drafters_of(verifying[-1], chain)[:1]),
        ]
        described = f"all {len(members)} models: {', '.join(members)}"
        return ChainSystem(name, described, chain, ruled(chain.plan_of(members), rule))
    kinds = {
        "draft_model": "independent draft model",
        "early_exit": "early exit",
        "steering": "steered draft model",
    }
    what = kinds.get(name, f"{name} head")
    drafters = [
        drafter for drafter in _drafters_of(target, chain) if drafter.kind in _DRAFTERS[name]
    ]
    if not drafters:
        raise UserError(
            "system without members",
            f"{name} in bench.systems; {chain.folder} has no {what} for {target}",
            "leave it out",
        )
    plan = chain.plan_of([target, drafters[0].name])
    return ChainSystem(name, f"two models: target and {what}", chain, ruled(plan, rule))


def usual_systems(chain: Chain) -> list[str]:
    """What is compared unless other systems are asked for: those that the chain has members for."""
    target = chain.manifest.members[0].name
    kinds = {member.kind for member in _drafters_of(target, chain)}
    heads = [kind for kind in HEAD_KINDS if kind in kinds]
    if not heads and kinds & set(MODEL_KINDS):
        heads = ["draft_model"]
    full = ["polybasic_full"] if len(chain.manifest.members) > 2 else []
    return ["target", "hf_generate", *heads, *full, "polybasic"]


def all_systems(chain: Chain) -> list[str]:
    """Every system of this runtime that the chain has members for."""
    target = chain.manifest.members[0].name
    kinds = {member.kind for member in _drafters_of(target, chain)}
    lacking = {name for name, needed in _DRAFTERS.items() if not kinds & set(needed)}
    return [name for name in NAMES if name not in lacking]


def _drafters_of(verifying: str, chain: Chain) -> list[Member]:
    """Heads first, in the manifest's order."""
    drafters = [drafter for drafter in chain.manifest.drafters if verifying in drafter.drafts_for]
    return sorted(drafters, key=lambda member: member.kind in MODEL_KINDS)
