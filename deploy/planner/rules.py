"""Rules by which sampled tokens are drawn and verified: which are compared, and what is said.

`block` and `token` draw alike, so that one measurement serves both. At temperature 0 there is
nothing to draw, and all rules are one.
"""

from typing import Any

from polybasic.chain.formats.plan import Rule
from polybasic.deploy.planner.search import MIN_GAIN, PlanChoice
from polybasic.deploy.planner.settings import PlanSettings


def rules_to_compare(settings: PlanSettings) -> tuple[tuple[Rule, ...], ...]:
    """The rules of a plan's settings, those that draw alike together, the preferred ones first."""
    if settings.link is not None:
        return (("coupled",),)  # tokens alone are sent, no distributions
    if settings.temperature == 0:
        return ((settings.packed_rule,),)
    return (("coupled",), ("block", "token")) if settings.rule == "auto" else ((settings.rule,),)


def rules_compared(choice: PlanChoice) -> list[dict[str, Any]]:
    """The best plan of each rule, the fastest first, as plain JSON; none if there is only one."""
    best = [choice.best, *choice.other_rules] if choice.other_rules else []
    return [
        {
            "rule": candidate.plan.rule,
            "members": str(candidate.members),
            "seconds_per_token": candidate.seconds_per_token,
            "tokens_per_target_pass": candidate.predicted.tokens_per_pass[candidate.names[0]],
        }
        for candidate in sorted(best, key=lambda candidate: candidate.seconds_per_token)
    ]


def rule_verdict(choice: PlanChoice) -> str | None:
    """Why tokens are drawn by a rule; None where none is drawn."""
    best = choice.best
    if best.measurements.temperature == 0:
        return None
    means = ", so that a seed means a text" if choice.rule == "coupled" else ""
    if not choice.other_rules:
        return f"rule {choice.rule}{means}: no other was to be compared"
    first, *more = choice.other_rules
    compared = [f"with {first.plan.rule} the best plan needs {first.milliseconds}"]
    compared += [f"with {candidate.plan.rule} {candidate.milliseconds}" for candidate in more]
    verdict = f"rule {choice.rule}{means}: {', '.join(compared)}"
    if first.seconds_per_token < best.seconds_per_token:
        return f"{verdict}, which saves less than {MIN_GAIN:.0%} of the time"
    return verdict
