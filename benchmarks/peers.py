"""A chain beside llama.cpp, OpenVINO GenAI and transformers: one checkpoint, one machine, in turns.

    python3 -m venv /tmp/peers && /tmp/peers/bin/pip install -r benchmarks/peers-requirements.txt
    python benchmarks/peers.py CHAIN --python /tmp/peers/bin/python [--record FILE]

The other engines live in an environment of their own, each in a process that waits while others
answer. They read the chain's target as GGUF, which benchmarks/peers_gguf.py writes: llama.cpp in
bfloat16 (4 bits as its draft model), OpenVINO GenAI in float16, computing in several precisions
and with both of its ways of attention. Prompts and answers are token ids and greedy; the clock runs
from prompt to last token. All use the same number of threads. llama.cpp is driven by its C
interface, and its prompt lookup is that of its Python package; no engine keeps what it computed for
a prompt.

`identical` counts answers that equal the target's of this project. Others round elsewhere: where
theirs equal each other's and float32's, the difference is a near tie and no fault.

`--llama-libraries FOLDER` takes llama.cpp from a build of one's own, for another instruction set.
Neither engine takes an EAGLE-2 head.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from command import PROMPT_OPTIONS, Report, begin, load, options, run
from measuring import all_of, measure_bandwidth, progress, rotated
from passes import PassSettings, pass_cases
from systems import prompts_of, prompts_of_length, system_plans

from polybasic.chain.errors import UserError
from polybasic.chain.formats.plan import Plan
from polybasic.deploy import Chain
from polybasic.deploy.bench.baselines import TransformersBaseline
from polybasic.deploy.rounds.sampling import Sampling

HERE = Path(__file__).parent
ROWS, CONTEXT = (1, 4, 12, 24), 256
PROMPT_LENGTHS = (512, 2040)
"""A model of 2,048 positions answers the longer one, too."""
LLAMA, OPENVINO = "llama.cpp", "OpenVINO"
LLAMA_DRAFTS = {
    "": "none",
    ", lookup 2": "lookup 2",
    ", lookup 10": "lookup 10",
    ", draft Q4_0 x4": "model {Q4_0} 4",
    ", draft Q4_0 x8": "model {Q4_0} 8",
}
OPENVINO_DRAFTS = {
    "": "none",
    " SDPA": "SDPA",
    ", lookup 4": "lookup 4",
    ", draft Q4_0 x4": "model {Q4_0} 4",
}
Ask = Callable[[list[int], int], tuple[list[int], float]]
"""Prompt and most new tokens -> the answer and its seconds."""


class Peer:
    """A process with another engine."""

    def __init__(self, name: str, process: "subprocess.Popen[str]", stop: frozenset[int]) -> None:
        self.version = ""
        self.name, self._process, self._stop = name, process, sorted(stop)

    def wait_until_loaded(self) -> None:
        """Once, before anything is asked.

        Raises:
            UserError: the engine cannot run the model; its message stands above.
        """
        self.version = self._reply()["version"]

    def answer(self, prompt: list[int], num_tokens: int) -> tuple[list[int], float]:
        """See `Ask`."""
        reply = self._asked({"prompt": prompt, "num_tokens": num_tokens, "stop": self._stop})
        return reply["token_ids"], reply["seconds"]

    def pass_seconds(self, rows: int, repeats: int) -> float:
        """Median seconds of a pass over so many tokens after `CONTEXT` others."""
        seconds: float = self._asked({"context": CONTEXT, "rows": rows, "repeats": repeats})[
            "seconds"
        ]
        return seconds

    def _asked(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return self._reply()

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise UserError(
                "another engine failed",
                f"{self.name} (exit code {self._process.wait()}; its message is above)",
                "see whether --python has benchmarks/peers-requirements.txt",
            )
        reply: dict[str, Any] = json.loads(line)
        return reply


@dataclass
class Peers:
    """Engines that run, and those that do not.

    Attributes:
        running: by the names of table rows.
        failed: names of those that cannot run this checkpoint.
    """

    running: dict[str, Peer] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)


@contextmanager
def peers(chain: Chain, arguments: Namespace, threads: int) -> Iterator[Peers]:
    """All engines in all of their modes, loaded.

    Raises:
        UserError: no engine runs, or the checkpoint cannot be written as GGUF.
    """
    found = Peers()
    environment = dict(os.environ)
    if arguments.llama_libraries is not None:
        environment["LLAMA_CPP_LIB_PATH"] = str(arguments.llama_libraries)
        environment["LD_LIBRARY_PATH"] = str(arguments.llama_libraries)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        files = written_gguf(chain, folder, ("BF16", "F16", "Q4_0"), arguments.python)
        modes = {
            f"{LLAMA}{name}": ["llama.cpp", str(files["BF16"]), "--draft", draft]
            for name, draft in LLAMA_DRAFTS.items()
        }
        modes[f"{LLAMA} Q4_0"] = ["llama.cpp", str(files["Q4_0"])]
        for precision in arguments.precisions:
            modes |= {
                f"{OPENVINO} {precision}{name}": [
                    *("openvino", str(files["F16"]), "--precision", precision, "--draft", draft)
                ]
                for name, draft in OPENVINO_DRAFTS.items()
            }
        for name, words in modes.items():
            words = [word.format(**files) for word in words]
            command = [arguments.python, HERE / "peers_worker.py", *words]
            process = subprocess.Popen(
                [*map(str, command), "--threads", str(threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                text=True,
            )
            stack.callback(process.communicate)  # the end of its input ends it
            peer = Peer(name, process, chain.stop_tokens)
            try:
                peer.wait_until_loaded()
                peer.answer([1, 2, 3], 4)
            except UserError as error:
                print(f"{error}", file=sys.stderr)
                found.failed.append(name)
            else:
                found.running[name] = peer
        if not found.running:
            raise UserError("no other engine runs", str(arguments.python), "see the messages above")
        yield found


def written_gguf(chain: Chain, folder: Path, kinds: Sequence[str], python: Path) -> dict[str, Path]:
    """The target as GGUF: a file of each kind, in a folder of its own below `folder`.

    Raises:
        UserError: `python` cannot write it.
    """
    files = {kind: folder / kind / "model.gguf" for kind in kinds}
    for kind, path in files.items():
        path.parent.mkdir()
        words = [HERE / "peers_gguf.py", chain.target_folder, path, "--type", kind]
        try:
            code = subprocess.run(list(map(str, [python, *words])), check=False).returncode
        except OSError as error:
            raise UserError(
                "no interpreter", f"--python {python}", "name an environment's"
            ) from error
        if code:
            raise UserError(
                "checkpoint cannot be written as GGUF",
                f"{chain.target_folder} (exit code {code}; its message is above)",
                "name the chain of a Llama, and a --python with benchmarks/peers-requirements.txt",
            )
    return files


def our_answers(chain: Chain) -> dict[str, Ask]:
    """The systems of the chain; the last one is its plan."""

    def answer(plan: Plan, prompt: list[int], num_tokens: int) -> tuple[list[int], float]:
        stream = chain.stream_ids(prompt, num_tokens, Sampling(), plan)
        tokens = [token for batch in stream for token in batch]
        return tokens, stream.statistics.seconds

    plans = system_plans(chain)
    plans["polybasic"] = chain.plan
    return {name: partial(answer, plan) for name, plan in plans.items()}


def transformers_answers(chain: Chain) -> Ask:
    """Transformers' own loop over the target."""
    dtype, device = chain.engine.models.target.dtype, torch.device("cpu")
    baseline = TransformersBaseline(chain.target_folder, dtype, device, chain.stop_tokens)
    return lambda prompt, num_tokens: baseline.generate(prompt, num_tokens, Sampling())


@dataclass(frozen=True)
class Speed:
    """Of one system.

    Attributes:
        tokens_per_second: of each turn.
        num_identical: answers that equal the target's.
    """

    tokens_per_second: tuple[float, ...]
    num_identical: int

    @property
    def median(self) -> float:
        return statistics.median(self.tokens_per_second)


def speeds(
    asked: Mapping[str, Ask], prompts: Sequence[list[int]], num_tokens: int, turns: int
) -> dict[str, Speed]:
    """Total tokens over total seconds of all prompts; all systems answer one before the next.

    The first of `asked` is the one whose answers the others' are compared with.
    """
    names = list(asked)
    expected = [asked[names[0]](prompt, num_tokens)[0] for prompt in prompts]
    identical = dict.fromkeys(names, 0)
    rates: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        asked[name](prompts[0], num_tokens)
    for turn in progress("answers", turns):
        tokens, seconds = dict.fromkeys(names, 0), dict.fromkeys(names, 0.0)
        for place, prompt in enumerate(prompts):
            for name in rotated(names, turn + place):
                answer, taken = asked[name](prompt, num_tokens)
                tokens[name] += len(answer)
                seconds[name] += taken
                identical[name] += turn == 0 and answer == expected[place]
        for name in names:
            rates[name].append(tokens[name] / seconds[name])
    return {name: Speed(tuple(rates[name]), identical[name]) for name in names}


def report_speeds(report: Report, found: Mapping[str, Speed], num_prompts: int) -> None:
    """A row for each system, and what each engine's best one is beaten by."""
    plan, alone = found["polybasic"].median, found["target"].median
    rows = [
        [
            name,
            f"{one.median:.0f}",
            f"{min(one.tokens_per_second):.0f}-{max(one.tokens_per_second):.0f}",
            f"{alone / one.median:.2f}x",
            f"{plan / one.median:.2f}x",
            f"{one.num_identical}/{num_prompts}",
        ]
        for name, one in found.items()
    ]
    columns = ["system", "tokens/s", "turns", "target over it", "plan over it", "identical"]
    report.table("Answers, prefill included", columns, rows)


def report_prompts(
    report: Report, asked: Mapping[str, Ask], chain: Chain, arguments: Namespace
) -> None:
    """Milliseconds until the first token of long prompts."""
    room = [n for n in PROMPT_LENGTHS if n < chain.engine.context_tokens]
    columns, cells = ["system"], {name: [name] for name in asked}
    for length in room:
        (prompt,) = prompts_of_length(chain, arguments.prompts, length, 1, 1)
        taken: dict[str, list[float]] = {name: [] for name in asked}
        for turn in progress(f"prompts of {len(prompt)} tokens", arguments.turns + 1):
            for name in rotated(list(asked), turn):
                taken[name].append(asked[name](prompt, 1)[1])
        columns += [f"{len(prompt):,} tokens", "target over it"]
        medians = {name: statistics.median(one[1:]) for name, one in taken.items()}
        for name, seconds in medians.items():
            cells[name] += [f"{1e3 * seconds:.1f}", f"{seconds / medians['target']:.2f}x"]
    report.table("Milliseconds from a prompt to its first token", columns, list(cells.values()))


def report_passes(report: Report, chain: Chain, found: Peers, turns: int, repeats: int) -> None:
    """Milliseconds of a pass by rows: this project's members and llama.cpp's two files."""
    bandwidth = measure_bandwidth(torch.device("cpu"))
    theirs = {name: found.running[name] for name in (LLAMA, f"{LLAMA} Q4_0")
              if name in found.running}  # fmt: skip
    cells: dict[str, list[str]] = {}
    for rows in ROWS:
        taken: dict[str, list[float]] = {}
        for _ in progress(f"passes of {rows} rows", turns):
            settings = PassSettings(
                contexts=(CONTEXT,), rows=(rows,), shapes=(), repeats=repeats, turns=1
            )
            for cost in all_of(pass_cases(chain, settings, bandwidth)):
                taken.setdefault(cost.member, []).append(cost.seconds.median)
                taken.setdefault(f"{cost.member}, bound by bytes", []).append(cost.bound_seconds)
            for name, peer in theirs.items():
                taken.setdefault(name, []).append(peer.pass_seconds(rows, repeats))
        for name, one in taken.items():
            cells.setdefault(name, [name]).append(f"{1e3 * statistics.median(one):.2f}")
    report.say(bandwidth.shown())
    columns = ["pass", *(f"{rows} rows" for rows in ROWS)]
    report.table(f"Milliseconds a pass after {CONTEXT} tokens", columns, list(cells.values()))


def main() -> None:
    parser = options(
        __doc__, "chain", "--dtype", "--turns", "--repeats", *PROMPT_OPTIONS, turns=3, repeats=12
    )
    parser.add_argument("--python", type=Path, required=True, help="of the other engines")
    parser.add_argument("--llama-libraries", type=Path, help="folder of a build of one's own")
    precisions = ("f32", "bf16", "f16")
    parser.add_argument(
        "--precisions", nargs="+", default=precisions[:2], choices=precisions, help="of OpenVINO"
    )
    arguments = parser.parse_args()
    report = begin(__file__, __doc__, arguments)
    chain = load(arguments)
    threads = torch.get_num_threads()
    prompts, num_tokens = prompts_of(arguments, chain), arguments.max_new_tokens
    with peers(chain, arguments, threads) as found:
        theirs: dict[str, Ask] = {"transformers": transformers_answers(chain)}
        theirs |= {name: peer.answer for name, peer in found.running.items()}
        report.say(f"{len(prompts)} prompts, at most {num_tokens} new tokens, {threads} threads.")
        versions = dict.fromkeys(peer.version for peer in found.running.values())
        report.say(f"Other engines: {'; '.join(versions)}.")
        asked = {**our_answers(chain), **theirs}
        report_speeds(report, speeds(asked, prompts, num_tokens, arguments.turns), len(prompts))
        alone = {name: one for name, one in asked.items() if "," not in name}
        report_prompts(report, alone, chain, arguments)
        report_passes(report, chain, found, arguments.turns, arguments.repeats)
        if found.failed:
            report.say(f"Could not run this checkpoint: {'; '.join(found.failed)}.")
    report.write(arguments.record)


if __name__ == "__main__":
    run(main)
