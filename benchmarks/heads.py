"""Which objective, whose features and how many unrolled steps make the best head: a table.

    python benchmarks/heads.py TARGET INTERMEDIATE CONVERSATIONS --work DIR [--recipe smollm2-135m]
        [--set section.key=value ...] [--objectives ...] [--features-from ...]
        [--unroll-steps ...] [--also LINE ...] [--only LINE ...] [--offline-features]
        [--record FILE]

A line of the table is a head, and is written as the settings of `train` in which it differs from
the recipe: every combination of the three axes, and those that `--also` names one by one. All have
the recipe's other settings, as many steps, one seed and one held-out split. `--only LINE`, beside
the other options of a table, trains and judges that line alone.

Each head is judged twice along greedy answers to the held-out prompts: verified by the target, and
by the 4-bit intermediate, whose own answers and states these are then. A finished head, and what
was found of it, stays in the work folder; the command goes on where it was stopped. Features on
disk, which all lines of a verifier share, save most of the time where a line is short.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from command import ScriptReport, begin, options, positive, run

from polybasic.chain.base.processes.interruption import Interrupted
from polybasic.chain.base.processes.launching import in_processes
from polybasic.chain.formats.files import read_json, sha256_of_object, write_json
from polybasic.chain.formats.lineage import weights_digest
from polybasic.chain.kernels.product_times import DTYPES
from polybasic.recipes.schema.loading import load_recipe
from polybasic.recipes.schema.recipe import Recipe
from polybasic.train.data.conversations import (
    data_digest,
    fit_to_template,
    load_conversations,
    split_conversations,
)
from polybasic.train.dtypes import settled
from polybasic.train.features.head_shape import FeatureLayers
from polybasic.train.features.target import Target, load_intermediate, load_target
from polybasic.train.head.acceptance import HeldoutBatch, TreeShape, heldout_batches, simulate
from polybasic.train.head.start import new_head
from polybasic.train.run.training import train_head
from polybasic.train.settings import HeadSettings

OBJECTIVES = {
    "eagle2": "token_loss=cross_entropy",
    "forward_kl": "token_loss=forward_kl,feature_loss_weight=0",
    "reverse_kl": "token_loss=reverse_kl,feature_loss_weight=0",
    "total_variation": "token_loss=total_variation,feature_loss_weight=0",
}
"""EAGLE-2's is smooth-L1 between states with cross-entropy, both weighted as the recipe says."""
JUDGES = ("target", "intermediate")
NUM_TURNS = 2
"""Times that rounds are played; a draft's cost is that of the faster one, with its reading."""
ALSO = (
    "pack=true",
    "draft_vocab_size=1024",
    "kind=eagle3,feature_loss_weight=0",
    "kind=block,step_decay=0.85",
    "kind=medusa,feature_loss_weight=0,num_positions=5,step_decay=0.8",
    "kind=hydra,feature_loss_weight=0,num_positions=5,step_decay=0.8",
)


@dataclass(frozen=True)
class Study:
    """What all lines have in common.

    Attributes:
        recipe: a shipped one or a file; its `train`, `data.num_heldout`, `data.max_tokens`,
            `data.limit` and `seed` are used.
        overrides: "section.key=value" of it.
        work: a folder for heads and results.
        offline_features: write a verifier's features into the work folder, once for all lines.
    """

    target: Path
    intermediate: Path
    conversations: str
    recipe: str
    overrides: tuple[str, ...]
    tree: TreeShape
    work: Path
    offline_features: bool

    def recipe_of(self, line: str) -> Recipe:
        """The recipe with a line's settings.

        Raises:
            UserError: a setting that does not exist or is out of range.
        """
        tree = {f"train.eval_tree_{name}={size}" for name, size in asdict(self.tree).items()}
        own = [f"train.{setting}" for setting in line.split(",") if setting]
        return load_recipe(self.recipe, [*self.overrides, *sorted(tree), *own])

    def training_of(self, line: str) -> HeadSettings:
        """The settings of a line's training."""
        settings = self.recipe_of(line).train
        if not self.offline_features:
            return settings
        folder = self.work / "features" / f"{settings.features_from}-{settings.kind}"
        where = {"features": "offline", "features_folder": str(folder)}
        return settings.model_copy(update=where)

    @cached_property
    def digests(self) -> dict[str, str]:
        """Of what the heads are made from."""
        return {
            "target": weights_digest(self.target),
            "intermediate": weights_digest(self.intermediate),
            "conversations": data_digest(self.conversations),
        }


class Judges:
    """The models that verify heads, with their answers to the held-out prompts; made when asked."""

    def __init__(self, study: Study) -> None:
        self._study = study
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model, self._answered = cache(self._load), cache(self._answer)

    def judge(self, name: str, folder: Path, settings: HeadSettings) -> dict[str, Any]:
        """What a head gains on the held-out prompts when this model verifies it."""
        target = self._model("target")
        settings = settled(settings)
        head = new_head(target.head_shape(settings), target.embedding, settings, 0, folder, None)
        head = head.to(device=self._device, dtype=DTYPES[settings.dtype])
        batches = self._answered(name, head.shape.feature_layers)
        seconds = []
        for _ in range(NUM_TURNS):
            began = time.perf_counter()
            found = simulate(head, self._model(name).lm_head, batches, self._study.tree)
            seconds.append((time.perf_counter() - began) / found.num_rounds)
        return asdict(found) | {"draft_seconds": min(seconds)}

    def _load(self, name: str) -> Target:
        target, intermediate = self._study.target, self._study.intermediate
        if name == "target":
            return load_target(target, self._device)
        dtype = self._model("target").lm_head.weight.dtype
        return load_intermediate(intermediate, target, self._device, dtype)

    def _answer(self, name: str, layers: FeatureLayers | None) -> list[HeldoutBatch]:
        recipe, model = self._study.recipe_of(""), self._model(name)
        data, tokens = recipe.data, recipe.train.eval_answer_tokens
        rows = load_conversations(self._study.conversations, data.limit)
        _, heldout_rows = split_conversations(rows, data.num_heldout)
        heldout_rows = fit_to_template(heldout_rows, model.tokenizer)
        return heldout_batches(model, heldout_rows, data.max_tokens, tokens, layers)


def grid(arguments: argparse.Namespace) -> list[str]:
    """The lines of the table, or the one that is asked for."""
    if arguments.only:
        return list(arguments.only)
    crossed = [
        f"{OBJECTIVES[objective]},features_from={source},unroll_steps={num_steps}"
        for objective, source, num_steps in itertools.product(
            arguments.objectives, arguments.features_from, arguments.unroll_steps
        )
    ]
    return list(dict.fromkeys([*crossed, *arguments.also]))


def finished_line(study: Study, line: str, judges: Judges) -> dict[str, Any]:
    """Train and judge a line's head, as far as the work folder does not know it."""
    recipe = study.recipe_of(line)
    settings, folder = recipe.train, study.work / line
    identity = sha256_of_object(
        {
            **study.digests,
            "train": settings.model_dump(mode="json"),
            "data": recipe.data.model_dump(mode="json", exclude={"conversations"}),
            "seed": recipe.seed,
            "offline_features": study.offline_features,
        }
    )
    kept = folder / "result.json"
    if kept.is_file():
        known = read_json(kept, "result of a line")
        if known["identity"] == identity:
            return known["result"]
    arguments = {
        "target": study.target,
        "conversations": study.conversations,
        "data": recipe.data,
        "settings": study.training_of(line),
        "seed": recipe.seed,
        "out": folder / "head",
        "intermediate": study.intermediate,
        "provenance": {"line": line},
    }
    summary = in_processes(train_head, arguments, settings.num_processes)
    result = {
        "line": line,
        "training": summary,
        "verified_by": {name: judges.judge(name, folder / "head", settings) for name in JUDGES},
    }
    write_json(kept, {"identity": identity, "result": result})
    return result


def report_heads(report: ScriptReport, results: Sequence[Mapping[str, Any]], judge: str) -> None:
    """Tokens a round by task, of heads that one model verifies, and what a draft costs."""
    tasks = list(results[0]["verified_by"][judge]["by_task"])
    columns = ["line", "tokens of training", "seconds", *tasks, "all", "rounds", "ms a draft"]
    rows = []
    for result in results:
        found, training = result["verified_by"][judge], result["training"]
        lengths = [*(found["by_task"][task] for task in tasks), found["accepted_length"]]
        of_training = [f"{training['tokens']:,}", f"{training['seconds']:.0f}"]
        cells = [*of_training, *(f"{length:.2f}" for length in lengths), str(found["num_rounds"])]
        cells.append(f"{1000 * found['draft_seconds']:.2f}")
        rows.append([result["line"], *cells])
    report.table(f"Tokens a round, simulated, verified by the {judge}", columns, rows)


def parsed() -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("intermediate", type=Path, help="the target in 4 bits")
    parser.add_argument("conversations", type=Path, help="as data.conversations")
    parser.add_argument("--work", type=Path, required=True, help="heads and results stay here")
    parser.add_argument("--recipe", default="smollm2-135m", help="settings that all lines share")
    parser.add_argument("--set", nargs="+", default=[], help="section.key=value of the recipe")
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=tuple(OBJECTIVES))
    parser.add_argument("--features-from", nargs="+", choices=JUDGES, default=JUDGES)
    parser.add_argument("--unroll-steps", nargs="+", type=positive, default=(1, 3, 5))
    parser.add_argument("--also", nargs="*", default=ALSO, help="lines beside the combinations")
    parser.add_argument("--only", nargs="+", default=[], help="these lines and no others")
    parser.add_argument(
        "--offline-features", action="store_true", help="written once for all lines of a verifier"
    )
    parser.add_argument("--depth", type=positive, default=8)
    parser.add_argument("--top-k", type=positive, default=4)
    parser.add_argument("--rows", type=positive, default=24)
    return parser.parse_args()


def main() -> None:
    arguments = parsed()
    study = Study(
        arguments.target,
        arguments.intermediate,
        str(arguments.conversations),
        arguments.recipe,
        tuple(arguments.set),
        TreeShape(arguments.depth, arguments.top_k, arguments.rows),
        arguments.work,
        arguments.offline_features,
    )
    lines = grid(arguments)
    for line in lines:
        study.recipe_of(line)  # whatever is wrong with a line is said before hours of training
    report = begin(__file__, __doc__, arguments)
    digests = (f"{name} {digest[:12]}" for name, digest in study.digests.items())
    report.say(f"Made from {', '.join(digests)}.")
    judges, results = Judges(study), []
    for number, line in enumerate(lines, 1):
        print(f"line {number} of {len(lines)}: {line}", file=sys.stderr)
        results.append(finished_line(study, line, judges))
    for judge in JUDGES:
        report_heads(report, results, judge)
    report.write(arguments.record)


def interruptible() -> int | None:
    """`main`, with the exit code of what stopped a training."""
    try:
        return main()
    except Interrupted as stopped:
        print(stopped, file=sys.stderr)
        return stopped.exit_code


if __name__ == "__main__":
    run(interruptible)
