"""The servers that benchmarks/serving.py asks: this project's, and llama.cpp's."""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from serving_load import Body, Load, ServerProcess, load_of, server

from polybasic.chain.base.errors import UserError
from polybasic.deploy import Chain
from polybasic.deploy.bench.peers.process import FOLDER
from polybasic.deploy.bench.peers.systems import write_gguf

COMPLETIONS = "/v1/completions"
MODEL = "chain"
OURS = "polybasic"
LLAMA = "llama-server"
LLAMA_PROGRAM = FOLDER / "workers" / "llama_program.py"
LEAST_ANSWERS = 20
"""Of a measured time, for its percentiles."""
LLAMA_DRAFTS = {
    "": "",
    ", draft Q4_0 x4": "--spec-type draft-simple --spec-draft-n-max 4 --spec-draft-model {Q4_0}",
    ", n-grams": "--spec-type ngram-simple --spec-ngram-simple-size-n 3"
    " --spec-ngram-simple-size-m 6",
}


@dataclass(frozen=True)
class ServedSystem:
    """A server and how it is asked.

    Attributes:
        more: of each request's body.
    """

    name: str
    server: ServerProcess
    more: Body

    def load(
        self,
        prompts: Iterator[list[int]],
        num_tokens: int,
        clients: int,
        seconds: float | None = None,
        warm_up: float = 0.0,
    ) -> Load:
        """Greedy requests whose answers are equally long; see `load_of`.

        Raises:
            UserError: a request has no answer, or one of another length.
        """
        shared = {
            "model": MODEL,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.more,
        }
        bodies = ({**shared, "prompt": prompt} for prompt in prompts)
        least = 0 if seconds is None else LEAST_ANSWERS
        found = load_of(self.server.url + COMPLETIONS, bodies, clients, seconds, warm_up, least)
        lengths = (answer.num_tokens for answer in found.received)
        wrong = [why for _, why in found.refused]
        wrong += [f"{length} tokens" for length in lengths if length != num_tokens]
        if wrong:
            raise UserError(
                "requests without their answer", f"{len(wrong)} of {self.name}", wrong[0]
            )
        return found


@contextmanager
def our_server(arguments: argparse.Namespace) -> Iterator[ServerProcess]:
    """The server of this project; earlier answers draft for none, as prompts come again."""
    command = [
        *(sys.executable, "-m", "polybasic.recipes.cli.main", "serve", arguments.chain),
        *("--dtype", arguments.dtype, "--served-model-name", MODEL, "--no-history"),
        *("--max-num-seqs", arguments.slots, "--max-model-len", arguments.context_tokens),
    ]
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    with server(OURS, command, "/ready", threads) as service:
        yield service


def our_systems(chain: Chain, one: ServerProcess) -> list[ServedSystem]:
    """The plans of the load, the plan of one stream whatever the load, and the target alone."""
    fixed, alone = chain.plan.members, chain.manifest.verifying[0].name
    return [
        ServedSystem(f"{OURS}, plans by load", one, {}),
        ServedSystem(f"{OURS}, plan of one stream", one, {"polybasic": {"run": list(fixed)}}),
        ServedSystem(f"{OURS}, target alone", one, {"polybasic": {"run": [alone]}}),
    ]


@contextmanager
def llama_systems(chain: Chain, arguments: argparse.Namespace) -> Iterator[list[ServedSystem]]:
    """llama.cpp's server without and with its own speculation, a process each."""
    python, threads = arguments.peers_python, torch.get_num_threads()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        files = write_gguf(chain, ("BF16", "Q4_0"), folder, has_texts=True)
        found = []
        for name, words in LLAMA_DRAFTS.items():
            command = [
                *(
                    python,
                    LLAMA_PROGRAM,
                    LLAMA,
                    "--model",
                    files["BF16"],
                    "--no-webui",
                    "--cache-ram",
                    0,
                ),
                *("--threads", threads, "--threads-batch", threads),
                *("--parallel", arguments.slots, "--no-kv-unified"),
                *("--ctx-size", arguments.slots * arguments.context_tokens),
                *words.format(**files).split(),
            ]
            service = server(LLAMA + name, command, "/health", {})
            found.append(ServedSystem(LLAMA + name, stack.enter_context(service), {}))
        yield found


def llama_version(python: Path) -> str:
    """What it says of itself.

    Raises:
        UserError: it cannot be run.
    """
    command = [python, LLAMA_PROGRAM, LLAMA, "--version"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(
            "no llama-server", f"--peers-python {python} ({error})", "run make peers"
        ) from error
    return (done.stdout + done.stderr).strip().splitlines()[0].removeprefix("version: ")
