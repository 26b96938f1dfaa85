"""The figure of docs/theory.md: what inserting a model is predicted to gain.

    python benchmarks/theory_figure.py [--out docs/speedup_of_insertion.svg]

Nothing is measured: `polybasic.deploy.planner.theory.predicted_speedup` at every point.
"""

import argparse
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("svg")
from matplotlib import pyplot

from polybasic.chain.formats.files import whole_file
from polybasic.deploy.planner.theory import predicted_speedup

TOKENS_PER_ROUND, DRAFTS_PER_ROUND, DRAFT_RATIO = 4, 6, 0.054
"""Fixed: an EAGLE-2 head at depth 6, whose pass reads 5.4 % of Vicuna-7B's weights."""
COST_RATIOS = np.linspace(0.1, 0.9, 81)
ACCEPTANCES = np.linspace(0.86, 0.99, 105)
LOSSES = (0.8, 0.9)
LEVELS = (1.0, 1.1, 1.2, 1.4, 1.6, 1.8, 2.0)
# Light to dark, so that the order survives a printer without colour; below break-even stays white.
COLOURS = ("#ffffff", "#e3eef8", "#cbdff1", "#b0d0e8", "#8dbde0", "#69a8d5", "#4a91c8", "#2f78b8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/speedup_of_insertion.svg"))
    arguments = parser.parse_args()
    speedups = np.array(
        [
            [
                predicted_speedup(
                    float(cost_ratio),
                    float(acceptance),
                    tokens_per_round=TOKENS_PER_ROUND,
                    draft_ratio=DRAFT_RATIO,
                    drafts_per_round=DRAFTS_PER_ROUND,
                ).speedup
                for cost_ratio in COST_RATIOS
            ]
            for acceptance in ACCEPTANCES
        ]
    )
    # Equal input gives equal bytes.
    pyplot.rcParams |= {"svg.hashsalt": "polybasic", "font.size": 11}
    figure, axes = pyplot.subplots(figsize=(7, 4.4), layout="constrained")
    grid = (COST_RATIOS, ACCEPTANCES, speedups)
    axes.contourf(*grid, levels=(0, *LEVELS, 9), colors=COLOURS)
    lines = axes.contour(
        *grid, levels=LEVELS, colors="black", linewidths=[2.5] + [0.7] * (len(LEVELS) - 1)
    )
    losses = axes.contour(
        *grid, levels=LOSSES, colors="dimgrey", linewidths=0.7, linestyles="dashed"
    )
    axes.clabel(losses, fmt=lambda level: f"{level:.1f}x", colors="dimgrey")
    axes.clabel(lines, fmt=lambda level: "break-even" if level == 1 else f"{level:.1f}x")
    axes.text(0.72, 0.89, "two models are faster", ha="center", style="italic")
    axes.set_xlabel("pass of the inserted model / pass of the target  ($T_{new}/T_i$)")
    axes.set_ylabel("acceptance of its tokens by the target")
    axes.set_title("Predicted speedup of three models over two", fontsize=12)
    with whole_file(arguments.out) as partial:
        figure.savefig(partial, format="svg", metadata={"Date": None})
    print(f"{arguments.out}: {speedups.min():.2f}x to {speedups.max():.2f}x")


if __name__ == "__main__":
    main()
