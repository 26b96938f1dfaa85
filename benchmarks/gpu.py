"""All figures of one GPU, from one small chain folder, within nine minutes.

    python benchmarks/gpu.py CHAIN --record FILE [--prompts FILE ...] [--minutes 9]
        [--only PART ...] [--commit NAME] [--rehearse]

Grows the small chain to Llama-2-7B's and Llama-3-8B's shapes in the GPU's memory and measures: copy
bandwidth; passes by rows and drafts against the bound of their bytes; answers of fixed lengths by
the target alone, two models, three models and transformers' own loop, behind about 100, 2,048 and
8,192 tokens of the prompts' text, greedy and at temperature 1; a round's timeline, whose trace is
kept beside the record; and the kernels of products and of attention, each beside others. The last
thing printed is what the figures are to be, and what they are.

Parts run in the order of their importance, each within a time of its own, in a process that is
ended when it takes longer: another one goes on with the next part. The record is written whole
after every part and says what was left out and why.

`--rehearse` runs everything on the CPU, over shapes little larger than the small chain's.

benchmarks/records/README.md has the commands for a bare machine.
"""

import argparse
import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gpu_targets import figures, left_out, table_of
from rich.console import Console

from polybasic.chain.errors import UserError
from polybasic.chain.formats.files import write_json

MINUTES = 9.0
RESERVE_SECONDS = 8.0
"""At the end, for what is ended, written and printed."""
GRACE_SECONDS = 20.0
"""That a part may take beyond its time before its process is ended."""
LEAST_SECONDS = 45.0
"""Below which no other process is begun in the place of an ended one."""
KILLED = -int(signal.SIGKILL)
SCRIPT = "gpu"
EMBEDDED = Path("embedded")
WIDTH = 120
"""Of the table, where stdout is no terminal."""


@dataclass(frozen=True)
class Running:
    """What the working process says it does."""

    part: str
    until: float


def supervise(arguments: argparse.Namespace) -> int:
    """Run the parts in processes of their own until all are done or time is over."""
    until = time.time() + 60 * arguments.minutes - RESERVE_SECONDS
    arguments.record.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="polybasic-gpu-") as work:
        running = Path(work) / "running.json"
        while True:
            running.unlink(missing_ok=True)
            code = _work(arguments, running, until)
            # what fails before its first part fails again
            if code == 0 or not running.exists() or until - time.time() < LEAST_SECONDS:
                break
    return _report(arguments.record, code)


def _work(arguments: argparse.Namespace, running: Path, until: float) -> int:
    """One process; its exit code, or `KILLED` where it was ended."""
    words = [sys.executable, __file__, *sys.argv[1:]]
    words += ["--work", str(running.parent), "--until", str(until)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if arguments.rehearse:
        environment |= {"POLYBASIC_KERNELS": "device", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(words, env=environment, start_new_session=True)
    try:
        code = _watched(process, running, until)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    if code != 0:
        _note_end(arguments.record, _running(running), code)
    return code


def _watched(process: "subprocess.Popen[bytes]", running: Path, until: float) -> int:
    """Wait for a process, and end it when its part takes too long or time is over."""
    while process.poll() is None:
        part = _running(running)
        over = part is not None and time.time() > part.until + GRACE_SECONDS
        if over or time.time() > until:
            # it says where it is; nobody waits for what cannot be ended
            process.send_signal(signal.SIGUSR1)
            time.sleep(1)
            return KILLED
        time.sleep(0.2)
    return process.returncode


def _running(path: Path) -> Running | None:
    try:
        return Running(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None


def _note_end(path: Path, running: Running | None, code: int) -> None:
    """Note in the record what a process was at when it ended."""
    if running is None or not path.exists():
        return
    content = json.loads(path.read_text())
    part = content["parts"].setdefault(running.part, {"found": {}})
    if "seconds" not in part:
        part |= {"status": "ended", "error": f"its process ended with code {code}"}
        part["seconds"] = time.time() - content["begun"][running.part]
    write_json(path, content)


def _report(path: Path, code: int) -> int:
    """Complete the record, and print the table last."""
    if not path.exists():
        print("error: no part was run; the reason is above", file=sys.stderr)
        return code or 1
    content = json.loads(path.read_text())
    found = figures(content["parts"], content["settings"]["contexts"][0])
    content["targets"] = [one.to_json() for one in found]
    write_json(path, content)
    for line in left_out(content["parts"]):
        print(line)
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table_of(found))
    print(f"wrote {path}", file=sys.stderr)
    return 0


def work(arguments: argparse.Namespace) -> None:
    """Be the working process: run the parts that the record does not have."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    import torch
    from gpu_budget import Record
    from gpu_parts import parts_of, run_parts
    from gpu_session import FULL, REHEARSAL, Places, Session
    from record import header, print_header

    settings = REHEARSAL if arguments.rehearse else FULL
    if not arguments.rehearse and not torch.cuda.is_available():
        raise UserError("no GPU", "torch finds none", "add --rehearse to run on the CPU")
    device = torch.device("cpu" if arguments.rehearse else "cuda")
    prompts = tuple(None if path == EMBEDDED else path for path in arguments.prompts)
    places = Places(arguments.chain, prompts, arguments.record, arguments.work)
    words = {arguments.chain: "CHAIN", arguments.record: "FILE"}
    words |= {path: path.name for path in arguments.prompts}
    # what the process is told by the other one is no part of the command
    sys.argv = sys.argv[: sys.argv.index("--work")]
    head = header(SCRIPT, device, words)
    head["commit"] = head["commit"] or arguments.commit
    record = Record(arguments.record, head)
    record.content["settings"] = asdict(settings)
    record.content["begun"] = {}
    if arguments.record.exists():
        record.content |= json.loads(arguments.record.read_text())
    else:
        print_header(head)
        record.save()
    session = Session(settings, places, record, device)

    def announce(part: str, seconds: float) -> None:
        record.content["begun"][part] = time.time()
        record.save()
        running = {"part": part, "until": time.time() + seconds}
        (arguments.work / "running.json.part").write_text(json.dumps(running))
        (arguments.work / "running.json.part").rename(arguments.work / "running.json")

    chosen = [
        part
        for part in parts_of(settings, len(prompts))
        if not arguments.only or any(part.name.startswith(name) for name in arguments.only)
    ]
    run_parts(chosen, session, arguments.until, announce)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chain", type=Path, help="a small chain: target, 4-bit copy, EAGLE-2 head")
    parser.add_argument("--record", type=Path, required=True, help="write the record here")
    parser.add_argument(
        "--prompts",
        type=Path,
        nargs="+",
        default=(EMBEDDED,),
        metavar="FILE",
        help="question files; `embedded` for embedded prompts that were held out",
    )
    parser.add_argument("--minutes", type=float, default=MINUTES, help="in which all must end")
    parser.add_argument("--only", nargs="+", default=(), metavar="PART", help="by their beginnings")
    parser.add_argument("--commit", help="of this code, where it lies outside of its repository")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, over small shapes")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> int:
    arguments = parsed()
    if arguments.work is None:
        return supervise(arguments)
    try:
        work(arguments)
    except UserError as error:
        sys.exit(f"error: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
