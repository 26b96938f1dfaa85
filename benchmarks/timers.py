"""Timers around what the stages of an answer call."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from polybasic.deploy.runtime.drafters.interface import Drafter
from polybasic.deploy.runtime.rounds import stages as stages_module
from polybasic.deploy.runtime.rounds.stages import Stage

_SAMPLER_OPERATIONS = {
    "distributions": "*: choice of tokens",
    "draw": "*: choice of tokens",
    "verify": "*: verification of blocks",
}
"""All other verbs hand rows of distributions up: "blocks"."""


class Timers:
    """Seconds of operations, each without the operations that it calls.

    Args:
        now: seconds.

    Attributes:
        member: whose logits were made last.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.now, self.member = now, ""
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def around(
        self, function: Callable[..., Any], name: str, member: str | None = None
    ) -> Callable[..., Any]:
        """`function`, timed.

        Args:
            name: of the operation; a "*" in it stands for the member whose logits were made last.
            member: makes its logits with this function.
        """

        def run(*arguments: Any, **options: Any) -> Any:
            if member is not None:
                self.member = member
            begin = self.now()
            self._inner.append(0.0)
            try:
                return function(*arguments, **options)
            finally:
                inner = self._inner.pop()
                operation = name.replace("*", self.member)
                seconds = self.now() - begin
                self._inner[-1] += seconds
                self.seconds[operation] += seconds - inner

        return run


@contextmanager
def timed(stages: Sequence[Stage], drafter: Drafter, timers: Timers) -> Iterator[None]:
    """Put timers around what stages call, and take them off again."""
    put: list[tuple[Any, str]] = []

    def put_around(thing: Any, method: str, name: str, member: str | None = None) -> None:
        # members may share a cache
        if not any(thing is other and method == known for other, known in put):
            setattr(thing, method, timers.around(getattr(thing, method), name, member))
            put.append((thing, method))

    innermost: Any = stages[-1]
    for stage in stages:
        verifier = stage.verifier
        for method in ("read", "read_tree"):
            put_around(verifier, method, f"{verifier.name}: states")
        put_around(verifier, "logits", f"{verifier.name}: logits", verifier.name)
        for method in ("keep", "truncate"):
            put_around(verifier.cache, method, "cache moves")
    for method in ("draft", "copied"):
        if hasattr(drafter, method):
            put_around(drafter, method, "draft")
    for method in ("observe", "rewind"):
        put_around(drafter, method, "observe")
    sampler = innermost.sampler
    for method in (name for name in dir(sampler) if not name.startswith("_")):
        if callable(getattr(sampler, method)):
            put_around(sampler, method, _SAMPLER_OPERATIONS.get(method, "blocks"))
    walk = stages_module.walk
    stages_module.walk = timers.around(walk, "walk")
    try:
        yield
    finally:
        stages_module.walk = walk
        for thing, method in put:
            delattr(thing, method)
