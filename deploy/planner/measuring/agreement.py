"""How well models agree, computed from the traces of a measurement."""

from typing import Any

import numpy as np

from polybasic.chain.formats.plan import NUM_PROBABILITY_BINS
from polybasic.chain.kernels.drafts import ABSENT
from polybasic.deploy.planner.measuring.measurements import Measurements, Values
from polybasic.deploy.runtime.rounds.flushing import probability_bin


def acceptance_by_bin(measurements: Measurements, above: str, below: str) -> tuple[float, ...]:
    """Share of the tokens drawn by `below` that `above` keeps, by bin of their probability.

    The share kept is E_x~q min(1, p/q) = E_y~p1 min(q, p)/p1, for x and y in a bin, with p1 the
    target's probabilities; the share drawn is that of the model's own draws. Each bin also counts
    the overall share once, so that an empty bin has an estimate.
    """
    kept, stands = _kept(measurements, above, below)
    confidence = measurements.along("confidence", below)[stands]
    own_confidence = measurements.along("own_confidence", below)[stands]
    overall = min(float(kept[stands].mean()), 1.0) if stands.any() else 0.0
    num_kept = np.full(NUM_PROBABILITY_BINS, overall)
    num_drawn = np.ones(NUM_PROBABILITY_BINS)
    np.add.at(
        num_kept,
        [probability_bin(probability) for probability in confidence.tolist()],
        kept[stands],
    )
    np.add.at(
        num_drawn, [probability_bin(probability) for probability in own_confidence.tolist()], 1.0
    )
    return tuple(np.minimum(num_kept / num_drawn, 1.0).tolist())


def acceptance_between(measurements: Measurements, above: str, below: str) -> float:
    """Probability that `above` keeps a token drawn by `below`, given that it kept all before it."""
    kept, stands = _kept(measurements, above, below)
    return min(float(kept[stands].mean()), 1.0) if stands.any() else 0.0


def _kept(measurements: Measurements, above: str, below: str) -> tuple[Values, Any]:
    """min(q, p)/p1 at each position, and whether `above` follows the target's text there."""
    names = (measurements.target, above, below)
    target, p, q = (measurements.along("probability", name) for name in names)
    return np.minimum(p, q) / target, p > 0


def candidates_by_depth(
    measurements: Measurements, drafter: str, verifying: str, top_k: int
) -> list[float]:
    """For d = 1, 2, ...: share of positions whose next d tokens were among the candidates."""
    shares: list[float] = []
    ranks = [trace.ranks[drafter, verifying][top_k] for trace in measurements.traces]
    for depth in range(1, ranks[0].shape[1] + 1):
        # Positions with at least `depth` tokens of the answer left.
        whole = [table[: max(len(table) - depth + 1, 0), depth - 1, :depth] for table in ranks]
        found = np.concatenate(whole) < ABSENT
        if len(found):
            shares.append(float(found.all(1).mean()))
    return shares
