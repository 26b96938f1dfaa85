"""What answers cost, as a reply says it."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from polybasic.deploy.runtime.request import Statistics


def costs(answers: Sequence[Statistics]) -> dict[str, Any]:
    """What answers cost: `timings` as llama.cpp has them, and what members did.

    Args:
        answers: at least one; of several, numbers are sums.
    """
    cached = sum(answer.num_cached_tokens for answer in answers)
    prompt_n = sum(answer.num_prompt_tokens for answer in answers) - cached
    predicted_n = sum(answer.num_tokens for answer in answers)
    prompt = sum(answer.prefill_seconds for answer in answers)
    predicted = sum(answer.seconds for answer in answers) - prompt
    passes, drafted, accepted = Counter[str](), Counter[str](), Counter[str]()
    for answer in answers:
        passes.update(answer.forward_passes)
        drafted.update(answer.drafted)
        accepted.update(answer.accepted)
    tolerated = [answer.num_tolerated for answer in answers if answer.num_tolerated is not None]
    plan, num_later = list(answers[0].forward_passes), sum(answer.num_later for answer in answers)
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
            "lossless": not tolerated,
            **({"tolerated": sum(tolerated)} if tolerated else {}),
        },
    }
