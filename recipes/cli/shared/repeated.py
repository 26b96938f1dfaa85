"""An answer of a chain beside the target's own for the same seed: `polybasic generate --verify`."""

from typing import TYPE_CHECKING, Any, get_args

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.plan import Rule

if TYPE_CHECKING:
    from polybasic.deploy import Chain, Sampling
    from polybasic.deploy.runtime.chain import Prompt


def checked_rule(rule: str | None, is_compared: bool) -> str | None:
    """The rule that `generate` is given; "coupled" where its answer is to be compared.

    Raises:
        UserError: an unknown rule, or one under which the target's own answer is another.
    """
    rules = get_args(Rule)
    if rule is not None and rule not in rules:
        raise UserError("unknown rule", f"--rule {rule}", f"use one of {', '.join(rules)}")
    if not is_compared:
        return rule
    if rule not in (None, "coupled"):
        raise UserError(
            "answers that cannot be compared",
            f"--verify with --rule {rule}",
            "leave --rule out: a seed means a text under the rule coupled alone",
        )
    return "coupled"


def compare_with_target(
    chain: "Chain",
    prompt: "Prompt",
    options: dict[str, Any],
    sampling: "Sampling",
    found: list[int],
) -> tuple[str, bool]:
    """A line that says whether the target alone gives the same answer, and whether all is well.

    Args:
        options: that the answer was asked for with.
        sampling: of the answer, with the seed that was drawn.
    """
    target = chain.manifest.members[0].name
    alone = chain.generate(prompt, **{**options, "members": [target], "seed": sampling.seed})
    seed = "greedy" if sampling.is_greedy else f"seed {sampling.seed}"
    rate = alone.statistics.tokens_per_second
    if found == alone.token_ids:
        line = f"verified: identical to the target alone ({seed}), which gives {rate:.1f} tokens/s"
        return line, True
    from polybasic.deploy.bench.exactness.outputs import agreement_on, parting

    if chain.engine.models.remote is not None:
        place = parting(alone.token_ids, found) + 1
        where = "whether by rounding can be said only where its weights are"
        return f"the answer parts from the target's own ({seed}) at token {place}; {where}", False
    members = options["members"]
    plan = chain.plan_at(sampling.temperature)
    if members is not None:
        plan = chain.plan_of(members, sampling.temperature)
    agreement = agreement_on(chain, plan, chain.encode(prompt), sampling, alone.token_ids, found)
    place = parting(alone.token_ids, found)
    parts = f"the answer parts from the target's own ({seed}) at token {place + 1}"
    if agreement.near_ties:
        changes = f"rounding changes such differences by up to {agreement.tolerance:.3g}"
        gap = f"two logits differ by {agreement.widest_near_tie:.3g}"
        return f"{parts}, where {gap} and {changes}: a near tie", True
    return f"{parts}, and rounding does not explain it: report it with chain and command", False
