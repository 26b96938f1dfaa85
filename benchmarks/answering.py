"""Answers whole prompts with a chain: in this process, or in one of another checkout's code.

    python benchmarks/answering.py CHAIN --dtype bfloat16 --code FOLDER

is such a process: it loads the chain, and answers one prompt for each line of stdin. Of the code
that it runs only what every checkout has is used.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch
from pydantic import ValidationError

from polybasic.chain import errors
from polybasic.chain.formats.plan import Plan
from polybasic.deploy import Chain, load_chain
from polybasic.deploy.rounds.sampling import Sampling
from polybasic.recipes.pipeline.provenance import git_commit


@dataclass(frozen=True)
class Answer:
    """One answer.

    Attributes:
        seconds: prefill included.
        target_passes: of the target, behind the prefill.
    """

    token_ids: list[int]
    seconds: float
    prefill_seconds: float
    target_passes: int


class Answering(Protocol):
    """Answers prompts, one at a time."""

    def answer(self, token_ids: list[int], plan: Plan | None, max_new_tokens: int) -> Answer:
        """Answer greedily; without a plan as what answers does without one."""


class Here:
    """Answers in this process."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain

    def answer(self, token_ids: list[int], plan: Plan | None, max_new_tokens: int) -> Answer:
        """See `Answering`."""
        sampling = Sampling(temperature=0.0, seed=0)
        batches = list(self.chain.stream_ids(token_ids, max_new_tokens, sampling, plan))
        statistics = self.chain.last_statistics
        assert statistics is not None
        return Answer(
            [token for batch in batches for token in batch],
            statistics.seconds,
            statistics.prefill_seconds,
            next(iter(statistics.forward_passes.values())),
        )


class Elsewhere:
    """Answers in a process that runs the code of a checkout; made by `worker`."""

    def __init__(self, process: "subprocess.Popen[str]", code: Path) -> None:
        self._process, self._code = process, code

    def wait_until_loaded(self) -> str | None:
        """Once, before anything is asked; the checkout's commit.

        Raises:
            UserError: its code cannot load the chain.
        """
        commit: str | None = self._reply()["commit"]
        return commit

    def answer(self, token_ids: list[int], plan: Plan | None, max_new_tokens: int) -> Answer:
        """See `Answering`."""
        assert plan is not None, "another process has no system but the chain's"
        asked = {
            "token_ids": token_ids,
            # another checkout knows only the settings that it has
            "plan": plan.model_dump(mode="json", exclude_defaults=True),
            "max_new_tokens": max_new_tokens,
        }
        assert self._process.stdin is not None
        try:
            print(json.dumps(asked), file=self._process.stdin, flush=True)
        except BrokenPipeError as error:
            raise self._ended() from error
        return Answer(**self._reply())

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _ended(self) -> errors.UserError:
        return errors.UserError(
            "the code of a checkout cannot answer",
            f"{self._code} (exit code {self._process.wait()}; its message is above)",
            "see whether it runs this chain: polybasic generate",
        )


@contextmanager
def worker(code: Path, chain: Path, dtype: str, threads: int | None = None) -> Iterator[Elsewhere]:
    """A process that runs the code of a checkout, and begins to load the chain.

    Args:
        code: the folder of the checkout.
        chain: folder of the chain.
        threads: torch's; default: its own choice.

    Raises:
        UserError: no checkout.
    """
    if not (code / "chain" / "__init__.py").is_file():
        raise errors.UserError("no checkout", f"{code}", "name a folder with this project's code")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "polybasic").symlink_to(code.resolve())
        environment = {**os.environ, "PYTHONPATH": folder}
        words = [str(chain.resolve()), "--dtype", dtype, "--code", str(code.resolve())]
        words += [] if threads is None else ["--threads", str(threads)]
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), *words],
            env=environment,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            yield Elsewhere(process, code)
        finally:
            process.communicate()  # the end of its input ends it


def serve(chain: Chain, questions: TextIO, replies: TextIO) -> None:
    """Answer each line of `questions` with a line of `replies`.

    Raises:
        UserError: a plan that this checkout's code does not know.
    """
    answering = Here(chain)
    for line in questions:
        asked = json.loads(line)
        try:
            plan = Plan.model_validate(asked["plan"])
        except ValidationError as error:
            raise errors.UserError(
                "unknown plan", json.dumps(asked["plan"]), "compare with plans that both know"
            ) from error
        answer = answering.answer(asked["token_ids"], plan, asked["max_new_tokens"])
        print(json.dumps(vars(answer)), file=replies, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("chain", type=Path)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--code", type=Path, required=True, help="the checkout that must run")
    parser.add_argument("--threads", type=int)
    parsed = parser.parse_args(arguments)
    running = Path(errors.__file__).resolve().parents[1]
    assert running == parsed.code, f"runs {running}, not {parsed.code}"
    # what anybody else prints must not be taken for a reply
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if parsed.threads is not None:
        torch.set_num_threads(parsed.threads)
    chain = load_chain(parsed.chain, dtype=parsed.dtype)
    print(json.dumps({"commit": git_commit()}), file=replies, flush=True)
    serve(chain, sys.stdin, replies)


if __name__ == "__main__":
    try:
        main()
    except errors.UserError as error:
        sys.exit(f"error: {error}")
