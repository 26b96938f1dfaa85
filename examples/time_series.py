"""Speculative forecasts of time series: a small model drafts, a large one verifies.

    python examples/time_series.py [--csv FILE --column NAME] [--minutes 2] [--picture FILE.svg]

A series is cut into patches of a few values. Both models give the next patch as Gaussians, one for
each value, and forecast patch by patch. The draft proposes several, and the target rates them in
one pass. As in STRIDE (Subbaraman et al., 2025) a patch x is accepted with probability
min(1, p(x) / q(x)), by the densities p of the target and q of the draft. In place of the first one
that is rejected one is drawn from the residual, max(0, p - q) made a density: x is drawn from p and
kept with probability max(0, 1 - q(x) / p(x)), as often as it takes. So the target's law is kept.

A tolerance above 1 accepts with probability min(1, tolerance * p(x) / q(x)) and draws rejected
patches from p. That is lossy: faster, and no longer the target's law.
"""

import argparse
import csv
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal, kl_divergence

PATCH, CONTEXT, HORIZON = 4, 32, 24
"""Values of a patch; patches of the past that a forecast sees, and patches of a forecast."""
LEARNED = CONTEXT + HORIZON
"""Patches of a training example."""
TARGET_SIZE, DRAFT_SIZE = (128, 6), (64, 2)
"""Width and layers."""
NUM_DRAFTED, TOLERANCE, NUM_FORECASTS = 4, 2.0, 300
LEAST_SCALE = 0.05
"""Of every Gaussian, in units of the past's standard deviation."""


class Forecaster(nn.Module):
    """A causal transformer over patches."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width, max(width // 32, 1), 4 * width, 0.0, batch_first=True, norm_first=True
        )
        self.read = nn.Linear(PATCH, width)
        self.places = nn.Parameter(0.02 * torch.randn(LEARNED + NUM_DRAFTED, width))
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.write = nn.Linear(width, 2 * PATCH)

    def forward(self, patches: Tensor) -> Independent:
        """The law of the patch that follows each of `patches` [B, N, PATCH]."""
        num = patches.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(num)
        states = self.layers(self.read(patches) + self.places[:num], mask, is_causal=True)
        change, scale = self.write(states).chunk(2, dim=-1)
        mean = patches[..., -1:] + change
        return Independent(Normal(mean, LEAST_SCALE + nn.functional.softplus(scale)), 1)


def law_at(law: Independent, place: int) -> Independent:
    """The law behind the patch `place` of the only example of a batch."""
    return Independent(Normal(law.base_dist.loc[0, place], law.base_dist.scale[0, place]), 1)


@dataclass
class Counts:
    """Of a forecast, or several."""

    target_passes: int = 0
    drafted: int = 0
    accepted: int = 0


@torch.no_grad()
def forecast(
    target: Callable[[Tensor], Independent],
    draft: Callable[[Tensor], Independent] | None,
    past: Tensor,
    counts: Counts,
    tolerance: float | None = None,
) -> Tensor:
    """HORIZON patches that follow `past` [N, PATCH].

    Args:
        draft: None to draw each patch from the target.
        tolerance: None for the target's law.
    """
    patches = past[None]
    while patches.shape[1] < len(past) + HORIZON:
        num_before = patches.shape[1]
        drafted: list[Independent] = []
        for _ in range(NUM_DRAFTED if draft is not None else 0):
            drafted.append(law_at(draft(patches), -1))
            patches = torch.cat([patches, drafted[-1].sample()[None, None]], dim=1)
        laws = target(patches)
        counts.target_passes += 1
        counts.drafted += len(drafted)
        for place, q in enumerate(drafted, start=num_before):
            p, patch = law_at(laws, place - 1), patches[0, place]
            ratio = (p.log_prob(patch) - q.log_prob(patch)).exp() * (tolerance or 1.0)
            if torch.rand(()) < ratio:
                counts.accepted += 1
                continue
            own = residual(p, q) if tolerance is None else p.sample()
            patches = torch.cat([patches[:, :place], own[None, None]], dim=1)
            break
        else:
            patches = torch.cat([patches, law_at(laws, -1).sample()[None, None]], dim=1)
    return patches[0, len(past) : len(past) + HORIZON]


def residual(p: Independent, q: Independent) -> Tensor:
    """A draw from max(0, p - q), made a density."""
    while True:
        patch = p.sample()
        if torch.rand(()) < 1 - (q.log_prob(patch) - p.log_prob(patch)).exp():
            return patch


def train(
    model: Forecaster, examples: Callable[[int], Tensor], seconds: float, teacher: Forecaster | None
) -> int:
    """Learn the next patch, or a teacher's law of it, for some seconds; returns the steps."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    began, num_steps, share = time.monotonic(), 0, 0.0
    while share < 1:
        patches = examples(32)
        law = model(patches[:, :-1])
        loss = -law.log_prob(patches[:, 1:]).mean()
        if teacher is not None:
            with torch.no_grad():
                taught = teacher(patches[:, :-1])
            loss = kl_divergence(taught, law).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        num_steps += 1
        share = (time.monotonic() - began) / seconds
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(num_steps / 50, max(1 - share, 0.02))
    return num_steps


def made_series(num: int = 40_000) -> Tensor:
    """Two seasons, one of which changes its height, and noise that remembers."""
    at = torch.arange(num)
    noise = torch.zeros(num)
    for step, shock in enumerate(torch.randn(num).tolist()):
        noise[step] = 0.8 * noise[step - 1] + 0.15 * shock if step else 0.0
    height = 1 + 0.5 * torch.sin(at / 700)
    return height * torch.sin(2 * torch.pi * at / 24) + torch.sin(2 * torch.pi * at / 61) + noise


def read_series(path: Path, column: str) -> Tensor:
    """The numbers of a column."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows or column not in rows[0]:
        known = ", ".join(rows[0]) if rows else "none"
        sys.exit(f"no such column: {column!r} in {path}, whose columns are: {known}")
    try:
        series = torch.tensor([float(row[column]) for row in rows])
    except (TypeError, ValueError) as error:
        sys.exit(f"no number in column {column!r} of {path}: {error}")
    least = 4 * LEARNED * PATCH
    if len(series) < least or not series.isfinite().all():
        sys.exit(f"{path}: {len(series)} rows, at least {least} finite numbers are needed")
    return series


def windows(series: Tensor, starts: Sequence[int]) -> Tensor:
    """Examples [B, LEARNED, PATCH] from these places on, in units of their own past."""
    values = torch.stack([series[start : start + LEARNED * PATCH] for start in starts])
    scale, mean = torch.std_mean(values[:, : CONTEXT * PATCH], dim=1, keepdim=True)
    return ((values - mean) / scale.clamp_min(1e-6)).view(-1, LEARNED, PATCH)


def largest_gap(first: Tensor, second: Tensor) -> float:
    """Kolmogorov and Smirnov's: between the shares below any value, of two samples."""
    at = torch.cat([first, second])
    shares = [(sample[None] <= at[:, None]).float().mean(dim=1) for sample in (first, second)]
    return float((shares[0] - shares[1]).abs().max())


def draw(path: Path, past: Tensor, future: Tensor, forecasts: Tensor) -> None:
    """The past, a forecast, nine tenths of all forecasts, and what came."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(8, 3), layout="constrained")).add_subplot()
    past, future, forecasts = past.flatten(), future.flatten(), forecasts.flatten(1)
    later = range(len(past), len(past) + len(future))
    low, high = torch.quantile(forecasts, torch.tensor([0.05, 0.95]), dim=0)
    axes.plot(past, color="0.3", label="past")
    axes.fill_between(later, low, high, alpha=0.3, label="nine tenths of forecasts")
    axes.plot(later, forecasts[0], label="one forecast")
    axes.plot(later, future, color="0.3", linestyle=":", label="what came")
    axes.legend(ncols=4, fontsize="small")
    figure.savefig(path)


def main() -> None:
    """Train both models, forecast with and without drafts, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path, help="a series of your own, with a line of names")
    parser.add_argument("--column", default="value", help="of the series in the file")
    parser.add_argument("--minutes", type=float, default=2.0, help="of training, both models")
    parser.add_argument("--picture", type=Path, help="draw forecasts into this file")
    asked = parser.parse_args()
    torch.manual_seed(0)
    series = read_series(asked.csv, asked.column) if asked.csv else made_series()
    held_out = len(series) - LEARNED * PATCH  # where what was not learned begins

    def examples(num: int) -> Tensor:
        return windows(series, torch.randint(held_out - LEARNED * PATCH, (num,)).tolist())

    target, draft = Forecaster(*TARGET_SIZE), Forecaster(*DRAFT_SIZE)
    for name, model, teacher in (("target", target, None), ("draft", draft, target)):
        steps = train(model, examples, 30 * asked.minutes, teacher)
        size = sum(weight.numel() for weight in model.parameters())
        print(f"{name}: {size:,} parameters, {steps} steps")
        model.eval()
    past, future = windows(series, [held_out])[0].split([CONTEXT, HORIZON])
    found: dict[str, tuple[Tensor, float]] = {}
    for name, drafting, tolerance in (
        ("target alone", None, None),
        ("lossless", draft, None),
        (f"lossy, tolerance {TOLERANCE:g}", draft, TOLERANCE),
    ):
        counts, began = Counts(), time.monotonic()
        drawn = [forecast(target, drafting, past, counts, tolerance) for _ in range(NUM_FORECASTS)]
        found[name] = torch.stack(drawn), (seconds := (time.monotonic() - began) / NUM_FORECASTS)
        alone, of_alone = found["target alone"]
        gap = largest_gap(found[name][0][:, -1, -1], alone[:, -1, -1])
        print(
            f"{name:<21} {1e3 * seconds:6.1f} ms a forecast, {of_alone / seconds:.2f}x, "
            f"{counts.target_passes / NUM_FORECASTS:5.1f} passes of the target, "
            f"{counts.accepted / max(counts.drafted, 1):4.0%} accepted, gap {gap:.3f}"
        )
    bound = 1.95 * (2 / NUM_FORECASTS) ** 0.5  # passed once in a thousand times
    print(f"gap: in the last value, to the target alone; samples of one law stay below {bound:.3f}")
    if asked.picture:
        draw(asked.picture, past, future, found["lossless"][0])


if __name__ == "__main__":
    main()
