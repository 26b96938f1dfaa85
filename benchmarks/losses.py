"""What a head's token losses cost: all logits and autograd against the chunked form.

    python benchmarks/losses.py [--sizes 1024x256x4096 256x2048x32000] [--losses NAME ...]
        [--draft-vocab-size N] [--num-steps 3] [--dtype bfloat16] [--device cpu] [--json FILE]

A size is tokens x hidden size x vocabulary. A pass is the unrolled loss of so many tokens and its
gradient in the head's outputs; with a draft vocabulary also in a projection of the head's own, as
EAGLE-3 has it. Prints median milliseconds (the two forms take turns), the peak of memory during a
pass over what was held before (of a CPU resident memory, each form in a fresh process, on Linux),
and how far the two lie apart: the loss, and the gradients by their largest entry.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from record import header, print_header, write_record
from timing import resident
from torch import Tensor

from polybasic.train.features.lm_head import LmHead
from polybasic.train.head.losses import TOKEN_LOSSES, unrolled_loss
from polybasic.train.settings import HeadSettings

SIZES = ("1024x256x4096", "256x2048x32000")
FORMS = ("eager", "chunked")
REPEATS = 5


@dataclass(frozen=True)
class Case:
    """One token loss on random states of one size."""

    size: str
    token_loss: str
    num_steps: int
    draft_vocab_size: int | None
    dtype: str
    device: str

    def passes(self) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
        """Each form as a call that gives the loss and its gradients."""
        num_tokens, hidden_size, vocab_size = map(int, self.size.split("x"))
        dtype, device = getattr(torch, self.dtype), torch.device(self.device)
        random = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random).to(device, dtype)

        teacher = LmHead(normal(vocab_size, hidden_size) / hidden_size**0.5)
        states = normal(1, num_tokens, hidden_size)
        outputs = [
            (states + normal(1, num_tokens, hidden_size)).requires_grad_()
            for _ in range(self.num_steps)
        ]
        student, drafted, learned = teacher, None, outputs
        if self.draft_vocab_size is not None:
            drafted = torch.randperm(vocab_size, generator=random)[: self.draft_vocab_size]
            drafted = drafted.sort().values.to(device)
            student = LmHead(teacher.weight[drafted].requires_grad_())
            learned = [*outputs, student.weight]
        is_label = torch.ones(1, num_tokens, dtype=torch.bool, device=device)
        settings = HeadSettings(
            token_loss=self.token_loss, token_loss_weight=1.0, feature_loss_weight=0.0
        )

        def run(eager: bool) -> tuple[Tensor, ...]:
            arguments = outputs, states, teacher, student, is_label, settings, drafted
            loss = unrolled_loss(*arguments, eager=eager).total
            return loss.detach(), *torch.autograd.grad(loss, learned)

        return {"eager": lambda: run(True), "chunked": lambda: run(False)}

    def milliseconds(self) -> dict[str, float]:
        """Medians of both forms in turns; the first turn warms up."""
        taken: dict[str, list[float]] = {form: [] for form in FORMS}
        passes = self.passes()
        for turn in range(REPEATS + 1):
            for form, run in passes.items():
                self._synchronize()
                begin = time.perf_counter()
                run()
                self._synchronize()
                if turn:
                    taken[form].append(1e3 * (time.perf_counter() - begin))
        return {form: statistics.median(values) for form, values in taken.items()}

    def peak_bytes(self, form: str) -> int:
        """Of one pass; to be called once, in a fresh process."""
        run = self.passes()[form]
        if self.device != "cpu":
            held = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            run()
            return torch.cuda.max_memory_allocated() - held
        # what a first product and a first gradient take is not the loss's
        Case("8x16x32", self.token_loss, 1, None, self.dtype, "cpu").passes()[form]()
        held = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten (man 5 proc)
        run()
        return resident("VmHWM") - held

    def differences(self) -> dict[str, float]:
        """Of the loss, as a share of it, and of the gradients, of their largest entry."""
        (loss, *gradients), (expected, *others) = (
            self.passes()[form]() for form in reversed(FORMS)
        )
        furthest = max(
            ((one - other).abs().max() / other.abs().max()).item()
            for one, other in zip(gradients, others, strict=True)
        )
        return {"loss": abs((loss / expected).item() - 1), "gradient": furthest}

    def _synchronize(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()


def measure(case: Case, arguments: list[str]) -> dict[str, Any]:
    """Time and differences here, peaks in processes of their own."""
    peaks = {}
    for form in FORMS:
        command = [sys.executable, __file__, *arguments, "--sizes", case.size]
        command += ["--losses", case.token_loss, "--measure", form]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        peaks[form] = json.loads(done.stdout)
    return {
        "milliseconds": case.milliseconds(),
        "peak_bytes": peaks,
        "differences": case.differences(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="NxHxV")
    parser.add_argument("--losses", nargs="+", default=list(TOKEN_LOSSES), choices=TOKEN_LOSSES)
    parser.add_argument("--draft-vocab-size", type=int, help="train a projection of so many rows")
    parser.add_argument("--num-steps", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", choices=FORMS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    shared = (arguments.num_steps, arguments.draft_vocab_size, arguments.dtype, arguments.device)
    cases = [Case(size, name, *shared) for size in arguments.sizes for name in arguments.losses]
    if arguments.measure:
        print(json.dumps(cases[0].peak_bytes(arguments.measure)))
        return
    head = header("losses", torch.device(arguments.device), {arguments.json: "FILE"})
    print_header(head)
    print(f"{arguments.dtype}, {arguments.num_steps} steps")
    found: dict[str, dict[str, Any]] = {}
    for case in cases:
        measured = found[f"{case.size} {case.token_loss}"] = measure(case, sys.argv[1:])
        milliseconds, peaks = measured["milliseconds"], measured["peak_bytes"]
        cells = "  ".join(
            f"{form} {milliseconds[form]:8.1f} ms {peaks[form] / 1e6:7.0f} MB" for form in FORMS
        )
        apart = measured["differences"]
        print(
            f"{case.size:>16s} {case.token_loss:16s} {cells}  "
            f"apart {apart['loss']:.0e} {apart['gradient']:.0e}"
        )
    names = ("num_steps", "draft_vocab_size", "dtype")
    settings = {name: getattr(arguments, name) for name in names}
    write_record(arguments.json, head, {"settings": settings, "cases": found})


if __name__ == "__main__":
    main()
