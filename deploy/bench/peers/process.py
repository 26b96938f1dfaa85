"""A worker in another environment, asked by lines of JSON, as a system of a benchmark."""

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from polybasic.chain.base.errors import UserError
from polybasic.deploy.bench.peers.catalogue import clean_environment
from polybasic.deploy.bench.systems.system import System, TimedAnswer
from polybasic.deploy.runtime.rounds.sampling import Sampling

FOLDER = Path(__file__).parent
"""Where `python -m workers.NAME` finds them."""
LOAD_SECONDS, ANSWER_SECONDS, END_SECONDS = 1800.0, 900.0, 10.0
_PENALTIES: dict[str, tuple[object, ...]] = {
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "logit_bias": ({},),
    "min_tokens": (0,),
}
_FILTERS: dict[str, tuple[object, ...]] = {
    "top_k": (None, 0),
    "top_p": (None, 1.0),
    "min_p": (None, 0.0),
}
"""Settings and the values that leave distributions as they are."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


_Kind = TypeVar("_Kind", bound=_Part)


class _Hello(_Part):
    version: str
    dtype: str


class _Reply(_Part):
    token_ids: list[int] = Field(min_length=1)
    seconds: float = Field(gt=0)
    num_first: int = Field(ge=1)
    first_seconds: float = Field(gt=0)


class PeerSystem(System):
    """One engine in one mode, in a process of its own, which is idle while others answer.

    Args:
        command: of a worker; see `workers/lines.py` for what it says and is asked.
        threads: that OpenMP may use there.
        stop_tokens: ids that end an answer.

    Raises:
        UserError: it does not start.
    """

    def __init__(
        self,
        name: str,
        runtime: str,
        description: str,
        command: Sequence[object],
        threads: int,
        stop_tokens: frozenset[int],
    ) -> None:
        self.name, self.runtime, self.description = name, runtime, description
        self._stop = stop_tokens
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        # a session of its own: Ctrl-C is for this process, which ends the others
        self._process = subprocess.Popen(
            [*map(str, command)],
            cwd=FOLDER,
            env=worker_environment(threads),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            start_new_session=True,
        )
        try:
            hello = self._reply(_Hello, LOAD_SECONDS)
        except BaseException:
            self.close()
            raise
        self.version, self.dtype = hello.version, hello.dtype

    def answer(self, prompt: list[int], max_new_tokens: int, sampling: Sampling) -> TimedAnswer:
        """See `System`."""
        self._check(sampling)
        question = {
            "prompt": prompt,
            "max_new_tokens": max_new_tokens,
            "stop": sorted(self._stop),
            "temperature": float(sampling.temperature),
            "seed": sampling.seed,
        }
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None
        reply = self._reply(_Reply, ANSWER_SECONDS)
        answer = TimedAnswer(reply.token_ids, reply.seconds, reply.num_first, reply.first_seconds)
        return answer.until_stop(self._stop, max_new_tokens)

    def close(self) -> None:
        """End the process and those that it started."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # it ended before it read what was asked
                pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self._kill()
        self._said.close()

    def _kill(self) -> None:
        """End the process and those that it started, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _check(self, sampling: Sampling) -> None:
        """See that all peers mean the same by the settings."""
        for name, neutral in (_PENALTIES | ({} if sampling.is_greedy else _FILTERS)).items():
            if (value := getattr(sampling, name)) not in neutral:
                raise UserError(
                    "setting that peers are not given",
                    f"{name}={value}",
                    "compare without it, or without --peers",
                )

    def _reply(self, kind: type[_Kind], seconds: float) -> _Kind:
        """One line. A process that says none in time, or another, is ended."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        if not ready:
            self._kill()
            raise self._error(f"no reply in {seconds:g} seconds")
        if not (line := self._process.stdout.readline()):
            raise self._failure()
        try:
            return kind.model_validate_json(line)
        except ValidationError:
            self._kill()
            raise self._error(f"its reply was {line[:80].decode(errors='replace')!r}") from None

    def _failure(self) -> UserError:
        """Of a process that ended, with the last that it said."""
        code = self._process.wait()
        self._said.seek(0)
        return self._error(f"exit code {code}: {last_line(self._said.read())}")

    def _error(self, why: str) -> UserError:
        return UserError(
            "peer failed", f"{self.name} ({why})", "leave it out of --peers, or see why"
        )


def worker_environment(threads: int) -> dict[str, str]:
    """What workers see of this process' environment: nothing of its Python, and no network."""
    return {
        **clean_environment(),
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def run_worker(command: Sequence[object], threads: int) -> str:
    """What a worker prints that ends by itself.

    Raises:
        UserError: it fails; with the last that it said.
    """
    done = subprocess.run(
        [*map(str, command)],
        cwd=FOLDER,
        env=worker_environment(threads),
        capture_output=True,
        check=False,
    )
    if done.returncode:
        raise UserError(
            "peer cannot read the target", last_line(done.stderr), "leave it out of --peers"
        )
    return done.stdout.decode(errors="replace")


def last_line(said: bytes) -> str:
    """Of what a process said."""
    lines = said.decode(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "it said nothing"
