"""What a pass costs on cores that other processes keep busy.

    python benchmarks/sharing.py CHAIN [--busy 1 2] [--context 256] [--rows 1 8]
        [--only NAME ...] [--record FILE]

Passes as benchmarks/passes.py measures them, on a CPU, beside so many processes that compute
without an end, in turns with passes beside none. What counts is the time of many in a row: the
scheduler delays few passes, but those by much, which a median would hide.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from command import ScriptReport, begin, load, options, positive, run
from measuring import progress
from passes import PassSettings, check, pass_of

from polybasic.deploy import Chain

PASSES_IN_A_ROW = 400
"""Of a turn: a second or more."""
SETTLING_SECONDS = 0.6
"""Of passes before a turn, so that it is not about what ran beside the turn before."""
BUSY = "print(flush=True)\nwhile True: pass"
"""What a busy process runs; its line says that it has started."""


@dataclass(frozen=True)
class Shared:
    """A pass beside other processes.

    Attributes:
        num_busy: processes that keep a core busy.
        seconds: of a pass, the mean of many, turn by turn.
    """

    member: str
    num_rows: int
    num_busy: int
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Of the turns."""
        return statistics.median(self.seconds)


@torch.inference_mode()
def measure(chain: Chain, settings: PassSettings, counts: Sequence[int]) -> Iterator[list[Shared]]:
    """For each member and number of rows: beside no process, then beside each number of them.

    Raises:
        UserError: a context, a number of rows or a member that there is not.
    """
    check(chain, settings)
    for name in settings.only or chain.engine.verifiers:
        for rows in settings.rows:
            run_pass = pass_of(chain, name, settings.contexts[0], rows)
            seconds: dict[int, list[float]] = {count: [] for count in (0, *counts)}
            for _ in progress(f"{name}, {rows} rows", settings.turns):
                for count, of_count in seconds.items():
                    with busy(count):
                        settled = time.perf_counter() + SETTLING_SECONDS
                        while time.perf_counter() < settled:
                            run_pass()
                        begun = time.perf_counter()
                        for _ in range(PASSES_IN_A_ROW):
                            run_pass()
                        of_count.append((time.perf_counter() - begun) / PASSES_IN_A_ROW)
            yield [Shared(name, rows, count, tuple(found)) for count, found in seconds.items()]


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes of one thread that compute without an end."""
    with ExitStack() as stack:
        for _ in range(count):
            command = [sys.executable, "-c", BUSY]
            process = subprocess.Popen(command, stdout=subprocess.PIPE)
            stack.callback(process.wait)
            stack.callback(process.kill)
            assert process.stdout is not None
            stack.enter_context(process.stdout).readline()
        yield


def report_shared(report: ScriptReport, found: Sequence[Shared]) -> None:
    """A row for each number of processes; of each member and number of rows, none comes first."""
    quiet = {
        (timing.member, timing.num_rows): timing.median for timing in found if timing.num_busy == 0
    }
    rows = []
    for timing in found:
        spread = min(timing.seconds), timing.median, max(timing.seconds)
        cells = [f"{1e3 * seconds:.3f}" for seconds in spread]
        times_quiet = timing.median / quiet[timing.member, timing.num_rows]
        rows.append(
            [
                timing.member,
                str(timing.num_rows),
                str(timing.num_busy),
                *cells,
                f"{times_quiet:.2f}",
            ]
        )
    columns = ["member", "rows", "busy processes", "min", "median", "max", "times quiet"]
    report.table(f"Milliseconds a pass, {PASSES_IN_A_ROW} in a row", columns, rows)


def main() -> None:
    parser = options(__doc__, "chain", "--dtype", "--turns")
    parser.add_argument("--busy", type=positive, nargs="+", default=(1, 2), metavar="PROCESSES")
    parser.add_argument("--context", type=positive, default=256, metavar="TOKENS")
    parser.add_argument("--rows", type=positive, nargs="+", default=(1, 8))
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="these members")
    arguments = parser.parse_args()
    report = begin(__file__, __doc__, arguments)
    chain = load(arguments)
    settings = PassSettings(
        (arguments.context,),
        tuple(arguments.rows),
        turns=arguments.turns,
        only=tuple(arguments.only),
    )
    found = [timing for case in measure(chain, settings, arguments.busy) for timing in case]
    report_shared(report, found)
    report.write(arguments.record)


if __name__ == "__main__":
    run(main)
