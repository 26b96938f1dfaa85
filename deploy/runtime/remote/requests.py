"""What a request may ask of a target that runs elsewhere, and how it runs."""

import math
from collections.abc import Sequence

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.manifest import Manifest
from polybasic.chain.formats.plan import Flush, Plan
from polybasic.deploy.runtime.drafters.interface import Drafter
from polybasic.deploy.runtime.models import Models
from polybasic.deploy.runtime.remote.link import Link
from polybasic.deploy.runtime.remote.session import Session
from polybasic.deploy.runtime.remote.stage import Below, DraftedBlocks, RemoteStage
from polybasic.deploy.runtime.remote.target import RemoteTarget
from polybasic.deploy.runtime.request import Request
from polybasic.deploy.runtime.rounds.stages import Stage


def remote_stage(
    session: Session, request: Request, stages: Sequence[Stage], drafter: Drafter
) -> RemoteStage:
    """The stage of the target over those that run here.

    Args:
        stages: from the top down; may be none.
        drafter: of the plan.
    """
    plan, stop = request.plan, request.stop_tokens
    below: Below | None = None
    if stages:
        below = stages[0]
    elif plan.ngram is not None or len(plan.members) > 1:
        below = DraftedBlocks(drafter, stop)
    length = plan.tree.depth if plan.ngram is None else plan.ngram.num_tokens
    flush = plan.flush.get(session.name, Flush(length=length))
    return RemoteStage(
        session,
        below,
        flush,
        request.sampling,
        len(request.token_ids),
        stop,
        session.target.optimistic,
    )


def check_remote(request: Request, models: Models) -> None:
    """Check what a request asks of a target that runs elsewhere.

    Raises:
        UserError: draws for which more than token ids would have to travel, a lossy plan, a
            grammar, log-probabilities of the prompt, or a plan whose draft head reads the target's
            states.
    """
    if not request.sampling.is_greedy and request.plan.rule != "coupled":
        raise UserError(
            "rule that a remote target does not know",
            request.plan.rule,
            "leave it out: only token ids travel, which the rule coupled needs",
        )
    if not request.plan.is_lossless:
        raise UserError(
            "lossy plan of a remote target",
            request.plan.members[0],
            "run it where the target's weights are",
        )
    if request.constraint is not None:
        raise UserError(
            "no grammars", "a remote target", "ask for one where the target's weights are"
        )
    if request.prompt_logprobs is not None:
        raise UserError(
            "no log-probabilities of prompts",
            "a remote target",
            "ask for those of the answer, or where the target's weights are",
        )
    if not _runs_here(request.plan, models):
        raise UserError(
            "plan cannot run",
            f"{', '.join(request.plan.members)}: the head reads states of the target, which is "
            "remote",
            "put the intermediate between them, or use n-grams",
        )


def plan_over_link(
    manifest: Manifest,
    hardware: str,
    usual: Sequence[Plan],
    remote: RemoteTarget,
    models: Models,
    temperature: float = 0.0,
) -> Plan:
    """The plan that runs with a remote target, by the rule coupled.

    It is the one that was made here for a link most like this one. Without any it is the first of
    the usual ones that can run, though not with the target alone, or else that of all verifying
    members with a drafter of the last one.

    Args:
        hardware: of the members that run here.
        usual: plans for all members on one machine, the best first.
        temperature: among plans for equal links, that of the nearest is taken.
    """
    made = [
        measured
        for measured in manifest.plans
        if measured.link is not None and measured.hardware == hardware
    ]
    made.sort(
        key=lambda measured: (
            _distance(Link.of(str(measured.link)), remote.link),
            abs(measured.temperature - temperature),
        )
    )
    can_run = [measured.plan for measured in made if _runs_here(measured.plan, models)]
    if not can_run:
        known = (*usual, manifest.plan, _everyone(manifest, models))
        can_run = [plan for plan in known if _runs_here(plan, models)]
        can_run.sort(key=lambda plan: len(plan.members) == 1 and plan.ngram is None)
    return can_run[0].model_copy(update={"rule": "coupled"})


def _distance(planned: Link, actual: Link) -> float:
    """Between round trips: that of 5 and 10 ms is that of 40 and 80 ms."""
    shortest = 1e-4
    planned_seconds, actual_seconds = planned.round_trip_seconds, actual.round_trip_seconds
    return abs(math.log((planned_seconds + shortest) / (actual_seconds + shortest)))


def _everyone(manifest: Manifest, models: Models) -> Plan:
    """All verifying members, with a drafter that reads nothing of a remote target."""
    target, *intermediates = (member.name for member in manifest.verifying)
    last = [target, *intermediates][-1]
    drafters = [
        drafter
        for drafter in models.drafters_of(last)
        if intermediates or _is_whole(drafter, models)
    ]
    usual = Flush(length=manifest.plan.tree.depth)
    flush = dict.fromkeys([target, *intermediates][:-1], usual) | manifest.plan.flush
    members = (target, *intermediates, *drafters[:1])
    return manifest.plan.model_copy(update={"members": members, "flush": flush, "windows": {}})


def _runs_here(plan: Plan, models: Models) -> bool:
    """Whether a plan's drafter needs nothing of the target but the tokens."""
    has_verifier = any(name in models.decoders for name in plan.members)
    return has_verifier or len(plan.members) == 1 or _is_whole(plan.members[-1], models)


def _is_whole(drafter: str, models: Models) -> bool:
    """Whether a drafter is a model of its own, which reads tokens alone."""
    return drafter in models.drafters and not models.drafters[drafter].weights.is_head
