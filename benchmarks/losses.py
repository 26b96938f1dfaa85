"""What a head's token losses cost: all logits and autograd against the chunked form.

    python benchmarks/losses.py [--device cpu] [--sizes 1024x256x4096] [--losses NAME ...]
        [--draft-vocab-size N] [--num-steps 3] [--record FILE]

A size is tokens x hidden size x vocabulary. A pass is the unrolled loss of so many tokens and its
gradient in the head's outputs; with a draft vocabulary also in a projection of the head's own, as
EAGLE-3 has it. Printed are median milliseconds (the two forms take turns), the peak of memory in a
pass over what was held before (of a CPU resident memory, each form in a fresh process), and how
far the two lie apart: the loss as a share of it, the gradients of their largest entry.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from command import begin, device_of, in_a_process, options, positive, run
from measuring import in_turns
from torch import Tensor

from polybasic.chain.base.errors import UserError
from polybasic.deploy.runtime.hardware import forget_peak, usage
from polybasic.train.features.lm_head import LmHead
from polybasic.train.features.states import Features
from polybasic.train.head.losses import TOKEN_LOSSES, unrolled_loss
from polybasic.train.settings import HeadSettings

SIZES = ("1024x256x4096", "256x2048x32000")
FORMS = ("eager", "chunked")


@dataclass(frozen=True)
class Case:
    """One token loss on random states of one size: tokens, hidden size, vocabulary."""

    size: tuple[int, int, int]
    token_loss: str
    num_steps: int
    draft_vocab_size: int | None
    dtype: torch.dtype
    device: torch.device

    def passes(self) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
        """Each form as a call that gives the loss and its gradients."""
        num_tokens, hidden_size, vocab_size = self.size
        random = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random).to(self.device, self.dtype)

        teacher = LmHead(normal(vocab_size, hidden_size) / hidden_size**0.5)
        states = normal(1, num_tokens, hidden_size)
        outputs = [
            (states + normal(1, num_tokens, hidden_size)).requires_grad_()
            for _ in range(self.num_steps)
        ]
        student, drafted, learned = teacher, None, outputs
        if self.draft_vocab_size is not None:
            drafted = torch.randperm(vocab_size, generator=random)[: self.draft_vocab_size]
            drafted = drafted.sort().values.to(self.device)
            student = LmHead(teacher.weight[drafted].requires_grad_())
            learned = [*outputs, student.weight]
        is_label = torch.ones(1, num_tokens, dtype=torch.bool, device=self.device)
        settings = HeadSettings(
            token_loss=self.token_loss, token_loss_weight=1.0, feature_loss_weight=0.0
        )

        def run_pass(eager: bool) -> tuple[Tensor, ...]:
            arguments = outputs, Features(states), teacher, student, is_label, settings, drafted
            loss = unrolled_loss(*arguments, eager=eager).total
            return loss.detach(), *torch.autograd.grad(loss, learned)

        return {"eager": lambda: run_pass(True), "chunked": lambda: run_pass(False)}

    def peak_bytes(self, form: str) -> int:
        """Of one pass; to be called once, in a fresh process."""
        run_pass = self.passes()[form]
        # what a first product and a first gradient take is not the loss's
        replace(self, size=(8, 16, 32), num_steps=1, draft_vocab_size=None).passes()[form]()
        forget_peak(self.device)
        held = usage(self.device)
        run_pass()
        found = usage(self.device)
        assert held is not None
        assert found is not None, "only where the system tells"
        return found.peak - held.now

    def differences(self) -> tuple[float, float]:
        """Of the loss and of the gradients."""
        passes = self.passes()
        (expected, *others), (loss, *gradients) = (passes[form]() for form in FORMS)
        furthest = max(
            ((gradient - other).abs().max() / other.abs().max()).item()
            for gradient, other in zip(gradients, others, strict=True)
        )
        return abs((loss / expected).item() - 1), furthest


def size_of(word: str) -> tuple[int, int, int]:
    """Tokens, hidden size and vocabulary.

    Raises:
        UserError: it is no size.
    """
    try:
        num_tokens, hidden_size, vocab_size = map(int, word.split("x"))
    except ValueError as error:
        raise UserError("no size", f"--sizes {word}", "write 1024x256x4096") from error
    return num_tokens, hidden_size, vocab_size


def row_of(word: str, case: Case, turns: int) -> list[str]:
    """A line of the table."""
    taken = in_turns(case.passes(), turns, 1, case.device, warm_up=1)
    words = [*sys.argv[1:], "--sizes", word, "--losses", case.token_loss, "--measure"]
    peaks = [in_a_process(__file__, [*words, form]) for form in FORMS]
    return [
        f"{word} {case.token_loss}",
        *(f"{1e3 * taken[form].median:.1f}" for form in FORMS),
        *(f"{peak / 1e6:.1f}" for peak in peaks),
        *(f"{apart:.0e}" for apart in case.differences()),
    ]


def main() -> None:
    parser = options(__doc__, "--device", "--dtype", "--turns")
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="NxHxV")
    parser.add_argument("--losses", nargs="+", default=list(TOKEN_LOSSES), choices=TOKEN_LOSSES)
    parser.add_argument("--draft-vocab-size", type=positive, help="train a projection of its own")
    parser.add_argument("--num-steps", type=positive, default=3)
    parser.add_argument("--measure", choices=FORMS, help="for the script itself")
    arguments = parser.parse_args()
    shared = arguments.num_steps, arguments.draft_vocab_size, getattr(torch, arguments.dtype)
    device = device_of(arguments)
    cases = [
        (word, Case(size_of(word), name, *shared, device))
        for word in arguments.sizes
        for name in arguments.losses
    ]
    if arguments.measure:
        print(json.dumps(cases[0][1].peak_bytes(arguments.measure)))
        return
    report = begin(__file__, __doc__, arguments)
    columns = ["tokens x hidden x vocabulary, loss", "eager, ms", "chunked, ms"]
    columns += ["eager, MB", "chunked, MB", "apart: loss", "gradient"]
    rows = [row_of(word, case, arguments.turns) for word, case in cases]
    report.table("Unrolled losses with their gradients", columns, rows)
    report.write(arguments.record)


if __name__ == "__main__":
    run(main)
