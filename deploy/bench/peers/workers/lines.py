"""The interface of a worker: a line of JSON for each question on stdin, and for each reply.

The first line of a worker says what it is: {"version": ..., "dtype": ...}. A question is

    {"prompt": [ids], "max_new_tokens": n, "stop": [ids], "temperature": t, "seed": s or null}

and its reply {"token_ids": [ids], "seconds": ..., "num_first": n, "first_seconds": ...}. The end of
its input ends a worker.
"""

import json
import os
import sys
from dataclasses import asdict, dataclass
from typing import Protocol


@dataclass(frozen=True)
class PeerQuestion:
    """A prompt, and how it is continued.

    Attributes:
        prompt: token ids.
        stop: ids that end an answer.
        temperature: 0 for greedy; nothing else changes the distribution.
        seed: of the random numbers; None for any.
    """

    prompt: list[int]
    max_new_tokens: int
    stop: list[int]
    temperature: float = 0.0
    seed: int | None = None


@dataclass(frozen=True)
class PeerReply:
    """New tokens and when they came.

    Attributes:
        token_ids: new ones; what follows a stop token does not count.
        seconds: from the prompt to the last of them.
        num_first: tokens that came first, together.
        first_seconds: until they were there.
    """

    token_ids: list[int]
    seconds: float
    num_first: int
    first_seconds: float


class PeerEngine(Protocol):
    """An engine with a model.

    Attributes:
        version: what it calls itself.
        dtype: of its arithmetic.
    """

    version: str
    dtype: str

    def answer(self, question: PeerQuestion) -> PeerReply:
        """Continue a prompt; nothing of an earlier one is reused."""


class Lines:
    """Stdin and stdout, the latter kept from what engines print."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def serve(self, engine: PeerEngine) -> None:
        """Answer until the input ends."""
        self._say({"version": engine.version, "dtype": engine.dtype})
        for line in sys.stdin:
            self._say(asdict(engine.answer(PeerQuestion(**json.loads(line)))))

    def _say(self, content: dict[str, object]) -> None:
        print(json.dumps(content), file=self._out, flush=True)
