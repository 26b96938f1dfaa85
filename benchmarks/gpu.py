"""All figures of one GPU, from one small chain folder, within nine minutes.

    python benchmarks/gpu.py CHAIN --record FILE [--prompts FILE ...] [--minutes 9]
        [--only PART ...] [--commit NAME] [--rehearse]

Grows the small chain to Llama-2-7B's and Llama-3-8B's shapes and measures with the functions of the
other scripts: bandwidth; passes and drafts against the bound of their bytes; answers of fixed
lengths by the target alone, two models, three models and transformers' own loop, after about 100,
2,048 and 8,192 tokens of the prompts' text, greedy and at temperature 1; a round's timeline, whose
trace is kept beside the record; products and attention by kernel. What the figures are to be stands
first in the record, and is printed last.

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
from pathlib import Path
from typing import Any

import torch
from command import head_of, markdown, options, run, shown_head

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.files import whole_file, write_json

MINUTES = 9.0
RESERVE_SECONDS = 8.0
"""At the end, for what is ended, written and printed."""
GRACE_SECONDS = 20.0
"""That a part may take beyond its time before its process is ended."""
LEAST_SECONDS = 45.0
"""Below which no other process is begun in the place of an ended one."""
SHIPPED = Path("shipped")
State = dict[str, Any]
"""`head` as Markdown, and `parts` by name: `status`, `seconds`, `begun`, `until`, `text`, `figures`
and `left_out`; what a process leaves for the next one and for the record."""


def supervise(arguments: argparse.Namespace) -> int:
    """Run the parts in processes of their own until all are done or time is over."""
    over = time.time() + 60 * arguments.minutes - RESERVE_SECONDS
    with tempfile.TemporaryDirectory(prefix="polybasic-gpu-") as work:
        path = Path(work) / "state.json"
        while True:
            before = path.read_text() if path.exists() else ""
            code = _one_process(arguments, path, over)
            # what fails before its next part fails again
            begun = path.exists() and path.read_text() != before
            if code == 0 or not begun or over - time.time() < LEAST_SECONDS:
                break
        if not path.exists():
            print("error: no part was run; the reason is above", file=sys.stderr)
            return code if code > 0 else 1
        state = json.loads(path.read_text())
    write_record(arguments.record, state)
    print(shown_targets(state))
    print(f"wrote {arguments.record}", file=sys.stderr)
    return 0


def _one_process(arguments: argparse.Namespace, path: Path, over: float) -> int:
    """Its exit code; of one that was ended, that of the signal."""
    words = [sys.executable, __file__, *sys.argv[1:], "--state", str(path), "--over", str(over)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if arguments.rehearse:
        environment |= {"POLYBASIC_KERNELS": "device", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(words, env=environment, start_new_session=True)
    try:
        while process.poll() is None and not _is_late(path, over):
            time.sleep(0.2)
        if process.poll() is None:
            # it says where it is; nobody waits for what cannot be ended
            process.send_signal(signal.SIGUSR1)
            time.sleep(1)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    if code != 0 and path.exists():
        state = json.loads(path.read_text())
        for part in state["parts"].values():
            if part["status"] == "running":
                part |= {"status": "ended", "seconds": time.time() - part["begun"]}
                part["left_out"].append(f"its process ended with code {code}")
        write_json(path, state)
    return code


def _is_late(path: Path, over: float) -> bool:
    parts = json.loads(path.read_text())["parts"].values() if path.exists() else ()
    running = [part["until"] for part in parts if part["status"] == "running"]
    return time.time() > min([over, *(until + GRACE_SECONDS for until in running)])


def work(arguments: argparse.Namespace) -> None:
    """Be the working process: run the parts that the state does not have."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if not arguments.rehearse and not torch.cuda.is_available():
        raise UserError("no GPU", "torch finds none", "add --rehearse to run on the CPU")
    from gpu_parts import parts_of, run_parts
    from gpu_session import GpuSession

    session = GpuSession(
        arguments.chain,
        [None if path == SHIPPED else path for path in arguments.prompts],
        arguments.record,
        arguments.state.parent,
        torch.device("cpu" if arguments.rehearse else "cuda"),
    )
    # what the process is given by the other one is no part of the command
    sys.argv = sys.argv[: sys.argv.index("--state")]
    head = head_of(__file__, arguments, session.device)
    head["commit"] = arguments.commit or head["commit"]
    state: State = {"head": shown_head("All figures of one GPU", head), "parts": {}}
    if arguments.state.exists():
        state = json.loads(arguments.state.read_text())
    session.parts = state["parts"]

    def save() -> None:
        write_json(arguments.state, state)
        write_record(arguments.record, state)

    chosen = [
        part
        for part in parts_of(session)
        if not arguments.only or any(part.name.startswith(name) for name in arguments.only)
    ]
    run_parts(chosen, session, arguments.over, save)


def write_record(path: Path, state: State) -> None:
    """Head, targets, and what each part found."""
    sections = [state["head"], shown_targets(state)]
    for name, part in state["parts"].items():
        section = f"## {name}\n\n{part['status']}, {part['seconds']:.1f} s"
        section += "".join(f"\n- left out: {what}" for what in part["left_out"])
        sections.append(f"{section}\n\n{part['text']}".rstrip())
    with whole_file(path) as partial:
        partial.write_text("\n\n".join(sections) + "\n", "utf-8")


WANTED = {
    "gpu-7b: bf16 pass of 1 row, times its bound": "<= 1.15",
    "gpu-7b: 4-bit pass of 24 rows over it": "<= 0.40",
    "gpu-7b: a level of a draft over it": "<= 0.06",
    "gpu-7b: host gaps of a round": "<= 0.05",
    "gpu-7b: three models over target": ">= 4.43",
    "gpu-7b: three models over eagle2": ">= 1.15",
    "gpu-8b: three models over target": ">= 3.87",
}
"""What figures are to be, by how they begin: those of other prompts name these at their end."""


def shown_targets(state: State) -> str:
    """What figures are to be, beside what they are, as a table; then what is not whole."""
    found: dict[str, float] = {}
    for part in state["parts"].values():
        found |= part["figures"]
    rows = []
    for name in dict.fromkeys([*WANTED, *found]):
        wanted = next((bound for known, bound in WANTED.items() if name.startswith(known)), "")
        value = found.get(name)
        met = "" if value is None or not wanted else "yes" if is_met(value, wanted) else "no"
        rows.append([name, wanted, "not measured" if value is None else f"{value:.3f}", met])
    table = markdown(["figure", "wanted", "measured", "met"], rows)
    lines = [
        f"{name}: {part['status']} ({'; '.join(part['left_out'])[:160]})"
        for name, part in state["parts"].items()
        if part["status"] != "done"
    ]
    return "\n\n".join([table, *lines])


def is_met(value: float, wanted: str) -> bool:
    """Whether a figure is as it is to be, "<= 1.15" or ">= 4.43"."""
    sign, bound = wanted.split()
    return value <= float(bound) if sign == "<=" else value >= float(bound)


def main() -> int:
    parser = options(__doc__, "chain")
    parser.add_argument(
        "--prompts",
        type=Path,
        nargs="+",
        default=(SHIPPED,),
        metavar="FILE",
        help="question files; `shipped` for shipped prompts that were held out",
    )
    parser.add_argument("--minutes", type=float, default=MINUTES, help="in which all must end")
    parser.add_argument("--only", nargs="+", default=(), metavar="PART", help="by their beginnings")
    parser.add_argument("--commit", help="of this code, where it lies outside of its repository")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, over small shapes")
    parser.add_argument("--state", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--over", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.record is None:
        parser.error("--record is needed")
    if arguments.state is None:
        return supervise(arguments)
    work(arguments)
    return 0


if __name__ == "__main__":
    run(main)
