"""Who answers prompts: this process, transformers' own loop, or the code of another checkout."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import worker

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.plan import Plan
from polybasic.deploy import Chain
from polybasic.deploy.bench.systems.generate_loops import GenerateLoop, load_for_generate
from polybasic.deploy.runtime.rounds.sampling import Sampling


@dataclass(frozen=True)
class MeasuredAnswer:
    """One answer.

    Attributes:
        seconds: until the last token, prefill included.
        first_seconds: until the first tokens: the prefill, and a round where that gives none.
        first_tokens: how many these are.
        target_passes: of the target that gave tokens.
    """

    token_ids: list[int]
    seconds: float
    first_seconds: float
    first_tokens: int
    target_passes: int


class Answering(Protocol):
    """Answers prompts, one at a time."""

    def answer(
        self, token_ids: list[int], plan: Plan, max_new_tokens: int, sampling: Sampling
    ) -> MeasuredAnswer:
        """Answer by a plan of the chain."""


class Here:
    """Answers in this process."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain

    def answer(
        self, token_ids: list[int], plan: Plan, max_new_tokens: int, sampling: Sampling
    ) -> MeasuredAnswer:
        """See `Answering`."""
        return MeasuredAnswer(
            **worker.answer(self.chain, token_ids, max_new_tokens, sampling, plan)
        )


class HfGenerate:
    """Answers by transformers' own loop over the target, whatever the plan."""

    def __init__(self, loop: GenerateLoop) -> None:
        self._loop = loop

    @classmethod
    def of(cls, chain: Chain) -> "HfGenerate":
        """Over the target of a chain, in its own dtype."""
        target = chain.engine.models.target
        model = load_for_generate(chain.target_folder, target.dtype, target.device)
        return cls(GenerateLoop("hf_generate", "transformers", model, chain.stop_tokens))

    def answer(
        self, token_ids: list[int], plan: Plan, max_new_tokens: int, sampling: Sampling
    ) -> MeasuredAnswer:
        """See `Answering`."""
        found = self._loop.answer(token_ids, max_new_tokens, sampling)
        return MeasuredAnswer(
            found.token_ids,
            found.seconds,
            found.first_seconds,
            found.num_first,
            len(found.token_ids),
        )


class Elsewhere:
    """Answers in a process that runs the code of a checkout; made by `checkout`."""

    def __init__(self, process: "subprocess.Popen[str]", code: Path) -> None:
        self._process, self._code = process, code

    def wait_until_loaded(self) -> None:
        """Once, before anything is asked.

        Raises:
            UserError: its code cannot load the chain.
        """
        self._reply()

    def answer(
        self, token_ids: list[int], plan: Plan, max_new_tokens: int, sampling: Sampling
    ) -> MeasuredAnswer:
        """See `Answering`."""
        asked = {
            "token_ids": token_ids,
            # another checkout knows only the settings that it has
            "plan": plan.model_dump(mode="json", exclude_defaults=True),
            "max_new_tokens": max_new_tokens,
            "sampling": {"temperature": sampling.temperature, "seed": sampling.seed},
        }
        assert self._process.stdin is not None
        try:
            print(json.dumps(asked), file=self._process.stdin, flush=True)
        except BrokenPipeError as error:
            raise self._ended() from error
        return MeasuredAnswer(**self._reply())

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _ended(self) -> UserError:
        return UserError(
            "the code of a checkout cannot answer",
            f"{self._code} (exit code {self._process.wait()}; its message is above)",
            "see whether it runs this chain: polybasic generate",
        )


@contextmanager
def checkout(
    code: Path, chain: Path, dtype: str, device: str, threads: int | None = None
) -> Iterator[Elsewhere]:
    """A process that runs the code of a checkout, and begins to load the chain.

    Args:
        code: the folder of the checkout.
        chain: folder of the chain.
        threads: torch's; default: its own choice.

    Raises:
        UserError: no checkout.
    """
    if not (code / "chain" / "__init__.py").is_file():
        raise UserError("no checkout", f"{code}", "name a folder with this project's code")
    words = [str(chain.resolve()), "--dtype", dtype, "--device", device]
    words += ["--code", str(code.resolve())]
    words += [] if threads is None else ["--threads", str(threads)]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "polybasic").symlink_to(code.resolve())
        process = subprocess.Popen(
            [sys.executable, str(Path(worker.__file__).resolve()), *words],
            env={**os.environ, "PYTHONPATH": folder},
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            yield Elsewhere(process, code)
        finally:
            process.communicate()  # the end of its input ends it


def commit_of(code: Path) -> str:
    """The commit of a checkout, "-dirty" if it was changed."""
    command = ["git", "-C", str(code), "describe", "--always", "--dirty", "--abbrev=40"]
    found = subprocess.run([*command, "--exclude=*"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
