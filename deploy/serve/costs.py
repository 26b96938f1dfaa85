"""What answers cost, as a reply says it."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from polybasic.deploy.request import Statistics


def costs(answers: Sequence[Statistics]) -> dict[str, Any]:
    """What answers cost: `timings` as llama.cpp has them, and what members did.

    Args:
        answers: at least one; of several, numbers are sums.
    """
    cached = sum(one.num_cached_tokens for one in answers)
    prompt_n = sum(one.num_prompt_tokens for one in answers) - cached
    predicted_n = sum(one.num_tokens for one in answers)
    prompt = sum(one.prefill_seconds for one in answers)
    predicted = sum(one.seconds for one in answers) - prompt
    passes, drafted, accepted = Counter[str](), Counter[str](), Counter[str]()
    for one in answers:
        passes.update(one.forward_passes)
        drafted.update(one.drafted)
        accepted.update(one.accepted)
    plan, num_later = list(answers[0].forward_passes), sum(one.num_later for one in answers)
    num_passes = passes[plan[0]]
    return {
        "timings": {
            "cache_n": cached,
            "prompt_n": prompt_n,
            "prompt_ms": 1000 * prompt,
            "prompt_per_second": prompt_n / prompt if prompt else 0.0,
            "predicted_n": predicted_n,
            "predicted_ms": 1000 * predicted,
            "predicted_per_second": predicted_n / predicted if predicted else 0.0,
            "draft_n": sum(drafted.values()),
            "draft_n_accepted": sum(accepted.values()),
        },
        "polybasic": {
            "passes": dict(passes),
            "drafted": dict(drafted),
            "accepted": dict(accepted),
            "accepted_length": num_later / num_passes if num_passes else 0.0,
            "seed": answers[0].seed,
            "cached_tokens": cached,
            "plan": plan,
        },
    }
