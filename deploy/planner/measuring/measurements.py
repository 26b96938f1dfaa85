"""Measurements on one machine: seconds of passes, and how well models agree on the target's text.

Data only, with a JSON form, so that measurements can be stored and planned from again. Written by
`traces` beside it, read by `polybasic.deploy.planner.simulation`. No torch in here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polybasic.chain.formats.plan import Rule, Window
from polybasic.chain.kernels.drafts import Counts
from polybasic.deploy.runtime.remote.link import Link

Values = NDArray[np.float64]


@dataclass(frozen=True)
class PassCosts:
    """Seconds of a member's passes, logits and the choice of tokens included.

    Attributes:
        rows: measured row counts, increasing.
        seconds: mean seconds of a pass over each.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.rows) == len(self.seconds) > 0
        assert all(fewer < more for fewer, more in zip(self.rows, self.rows[1:], strict=False))

    def at(self, rows: float) -> float:
        """Seconds of a pass over `rows`.

        Linear between measured points; beyond the last one with the slope of the last two, if it
        is positive; constant before the first.
        """
        if rows > self.rows[-1] and len(self.rows) > 1:
            run = self.rows[-1] - self.rows[-2]
            slope = max((self.seconds[-1] - self.seconds[-2]) / run, 0.0)
            return self.seconds[-1] + slope * (rows - self.rows[-1])
        return float(np.interp(rows, self.rows, self.seconds))

    def to_json(self) -> dict[str, Any]:
        return {"rows": list(self.rows), "seconds": list(self.seconds)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "PassCosts":
        return cls(tuple(content["rows"]), tuple(content["seconds"]))


@dataclass(frozen=True)
class DraftCosts:
    """Seconds of a drafter's tree.

    Attributes:
        by_top_k: seconds of the first level and of each further one.
    """

    by_top_k: dict[int, tuple[float, float]]

    def at(self, depth: int, top_k: int) -> float:
        """Seconds of drafting `depth` levels; 0 for none."""
        if depth == 0:
            return 0.0
        first, further = self.by_top_k[top_k]
        return first + (depth - 1) * further

    def to_json(self) -> dict[str, Any]:
        return {str(top_k): list(seconds) for top_k, seconds in self.by_top_k.items()}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "DraftCosts":
        return cls({int(top_k): (seconds[0], seconds[1]) for top_k, seconds in content.items()})


@dataclass(frozen=True, eq=False)
class AcceptanceTrace:
    """One answer y of the target, N tokens, and how every model rates it.

    At position t the tokens before y_t are given, and y_t is the next to be drawn.

    Attributes:
        task: of the prompt.
        probability: of each verifying member, [N]: warped probability of y_t; where nothing but y
            decides what is kept (`Measurements.is_random`), 1.0 if y_t is its own draw, else 0.0.
        confidence: of each verifying member, [N]: the value of `Sampler.probabilities` if the
            member draws y_t.
        own_confidence: of each verifying member, [N]: the same for the member's own draw at t,
            which the block contains where the member leaves y; equal to `confidence` if that is
            y_t.
        ranks: of each drafter with each verifying member, by top_k, [N, D, D]: element
            [t, d - 1, l - 1] is the 1-based rank of y's token at level l (y_(t+l-1) after
            y_t..y_(t+l-2)) among all candidates of levels 1..d, `ABSENT` if it is not among them.
            A tree of depth d and r rows accepts consecutive l = 1..d as long as their rank is at
            most r - 1.
        ngram: by min_match, [N]: how many tokens of y the copy proposed at t gets right, -1 if
            none is proposed (then the drafter drafts); None if not measured.
        own_ranks: of drafters with an intermediate, as `ranks`, for the tokens that the
            intermediate itself draws from position t on; they equal y's until it leaves y.
        likely: of the same drafts as `ranks`, [N, D, P]: element [t, d - 1, i] is how many
            candidates of levels 1..d have the probability `Measurements.least_probabilities[i]` or
            more: those of the ranks up to there.
        best_ranks: of the same drafts, as `ranks`, for the tokens of the most probable path.
        best_matches: of the same paths, [N]: how many leading tokens are y's.
        max_tokens: most tokens that the answer could have had. If it has fewer, its last token is
            a stop token, which no drafter can foresee. None: as many as it has.
        num_prompt_tokens: before the answer.
    """

    task: str
    probability: dict[str, Values]
    confidence: dict[str, Values]
    own_confidence: dict[str, Values]
    ranks: dict[tuple[str, str], dict[int, Counts]]
    ngram: dict[int, Counts] | None
    own_ranks: dict[tuple[str, str], dict[int, Counts]] = field(default_factory=dict)
    likely: dict[tuple[str, str], dict[int, Counts]] = field(default_factory=dict)
    best_ranks: dict[tuple[str, str], dict[int, Counts]] = field(default_factory=dict)
    best_matches: dict[tuple[str, str], dict[int, Counts]] = field(default_factory=dict)
    max_tokens: int | None = None
    num_prompt_tokens: int = 0

    def __len__(self) -> int:
        return len(next(iter(self.probability.values())))

    def to_json(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "probability": _lists(self.probability),
            "confidence": _lists(self.confidence),
            "own_confidence": _lists(self.own_confidence),
            "ranks": _listed(self.ranks),
            "own_ranks": _listed(self.own_ranks),
            "likely": _listed(self.likely),
            "best_ranks": _listed(self.best_ranks),
            "best_matches": _listed(self.best_matches),
            "ngram": None if self.ngram is None else _lists(self.ngram),
            "max_tokens": self.max_tokens,
            "num_prompt_tokens": self.num_prompt_tokens,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "AcceptanceTrace":
        return cls(
            task=content["task"],
            probability=_values(content["probability"]),
            confidence=_values(content["confidence"]),
            own_confidence=_values(content["own_confidence"]),
            ranks=_unlisted(content["ranks"]),
            own_ranks=_unlisted(content["own_ranks"]),
            likely=_unlisted(content["likely"]),
            best_ranks=_unlisted(content["best_ranks"]),
            best_matches=_unlisted(content["best_matches"]),
            ngram=None if content["ngram"] is None else _counts(content["ngram"]),
            max_tokens=content["max_tokens"],
            num_prompt_tokens=content["num_prompt_tokens"],
        )


@dataclass(frozen=True, eq=False)
class Measurements:
    """Everything that a plan is chosen from, on one machine at one temperature, for plans of one
    rule, or of several that draw alike.

    Attributes:
        hardware: as `polybasic.deploy.runtime.hardware.hardware_name` gives it.
        dtype: of the passes.
        verifying: names, from the target down.
        drafters: name -> verifying members that it drafts for.
        passes: of each verifying member.
        drafts: of each drafter.
        shares_cache: verifying member -> the first member whose cache it uses, or itself.
        block_overhead_seconds: of each verifying member, what a round that verifies a block costs
            beyond its pass.
        ngram_seconds: of looking up a copy, once a round.
        traces: calibration answers.
        windows: of the members that ran with one; all numbers are for these windows.
        rules: of the plans that all numbers are for, the one that keeps the most tokens first.
        link: that each pass of the target goes over; None where it runs beside the others.
        message_seconds: of a block that goes over it, beside the link and the pass.
        least_probabilities: of candidates, that `AcceptanceTrace.likely` counts.
        is_optimistic: whether those below go on while its answer is under way.
        captures_rounds: whether rounds stay on the device, where trees are read by themselves.
    """

    hardware: str
    dtype: str
    temperature: float
    verifying: tuple[str, ...]
    drafters: dict[str, tuple[str, ...]]
    passes: dict[str, PassCosts]
    drafts: dict[str, DraftCosts]
    shares_cache: dict[str, str]
    block_overhead_seconds: dict[str, float]
    ngram_seconds: float
    traces: list[AcceptanceTrace]
    windows: dict[str, Window] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ("coupled",)
    link: Link | None = None
    message_seconds: float = 0.0
    least_probabilities: tuple[float, ...] = ()
    is_optimistic: bool = False
    captures_rounds: bool = False

    @property
    def is_random(self) -> bool:
        """Whether chance decides how much of a block is kept, given the answer."""
        return self.temperature > 0 and "coupled" not in self.rules

    @property
    def target(self) -> str:
        return self.verifying[0]

    @property
    def num_tokens(self) -> int:
        """Of all traces."""
        return sum(len(trace) for trace in self.traces)

    @property
    def longest_text_tokens(self) -> int:
        """Of a prompt with its answer."""
        return max((trace.num_prompt_tokens + len(trace) for trace in self.traces), default=0)

    def along(self, what: str, name: str) -> Values:
        """`probability`, `confidence` or `own_confidence` of a member, all traces concatenated."""
        return np.concatenate([getattr(trace, what)[name] for trace in self.traces])

    def measured_depths(self, drafter: str, verifying: str) -> dict[int, int]:
        """top_k -> depth of the drafts that were measured, both in acceptance and in seconds."""
        by_top_k = self.traces[0].ranks.get((drafter, verifying), {})
        timed = self.drafts[drafter].by_top_k if drafter in self.drafts else {}
        return {top_k: ranks.shape[1] for top_k, ranks in by_top_k.items() if top_k in timed}

    def to_json(self) -> dict[str, Any]:
        """Plain dictionaries, lists, strings and numbers."""
        return {
            "hardware": self.hardware,
            "dtype": self.dtype,
            "temperature": self.temperature,
            "verifying": list(self.verifying),
            "drafters": {name: list(members) for name, members in self.drafters.items()},
            "passes": {name: costs.to_json() for name, costs in self.passes.items()},
            "drafts": {name: costs.to_json() for name, costs in self.drafts.items()},
            "shares_cache": dict(self.shares_cache),
            "block_overhead_seconds": dict(self.block_overhead_seconds),
            "ngram_seconds": self.ngram_seconds,
            "traces": [trace.to_json() for trace in self.traces],
            "windows": {name: window.model_dump() for name, window in self.windows.items()},
            "rules": list(self.rules),
            "link": None if self.link is None else str(self.link),
            "message_seconds": self.message_seconds,
            "least_probabilities": list(self.least_probabilities),
            "is_optimistic": self.is_optimistic,
            "captures_rounds": self.captures_rounds,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Measurements":
        """The measurements that `to_json` returned."""
        return cls(
            hardware=content["hardware"],
            dtype=content["dtype"],
            temperature=content["temperature"],
            verifying=tuple(content["verifying"]),
            drafters={name: tuple(members) for name, members in content["drafters"].items()},
            passes={name: PassCosts.from_json(costs) for name, costs in content["passes"].items()},
            drafts={name: DraftCosts.from_json(costs) for name, costs in content["drafts"].items()},
            shares_cache=dict(content["shares_cache"]),
            block_overhead_seconds=dict(content["block_overhead_seconds"]),
            ngram_seconds=content["ngram_seconds"],
            traces=[AcceptanceTrace.from_json(trace) for trace in content["traces"]],
            windows={name: Window(**window) for name, window in content["windows"].items()},
            rules=tuple(content["rules"]),
            link=None if content["link"] is None else Link.of(content["link"]),
            message_seconds=content["message_seconds"],
            least_probabilities=tuple(content["least_probabilities"]),
            is_optimistic=content["is_optimistic"],
            captures_rounds=content["captures_rounds"],
        )


def num_candidates(depth: int, top_k: int) -> int:
    """Candidates that a drafter of this shape computes before it keeps the best."""
    return top_k + (depth - 1) * top_k * top_k if depth else 0


def _listed(ranks: Mapping[tuple[str, str], dict[int, Counts]]) -> list[dict[str, Any]]:
    return [
        {"drafter": drafter, "verifying": verifying, "by_top_k": _lists(by_top_k)}
        for (drafter, verifying), by_top_k in ranks.items()
    ]


def _unlisted(content: list[dict[str, Any]]) -> dict[tuple[str, str], dict[int, Counts]]:
    return {(entry["drafter"], entry["verifying"]): _counts(entry["by_top_k"]) for entry in content}


def _lists(arrays: Mapping[Any, NDArray[Any]]) -> dict[str, list[Any]]:
    return {str(key): array.tolist() for key, array in arrays.items()}


def _values(content: Mapping[str, list[Any]]) -> dict[str, Values]:
    return {key: np.array(numbers, dtype=np.float64) for key, numbers in content.items()}


def _counts(content: Mapping[str, list[Any]]) -> dict[int, Counts]:
    return {int(key): np.array(numbers, dtype=np.int64) for key, numbers in content.items()}
