"""AutoJudge: tokens judged, a judge trained of them, and a threshold chosen and shown."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.terminal import say
from polybasic.recipes.cli.shared.lossy import (
    greedy_chain,
    print_thresholds,
    show_lossy,
    write_lossy,
)

if TYPE_CHECKING:
    from rich.console import Console

    from polybasic.deploy.bench.judging.mining import Mined
    from polybasic.deploy.bench.judging.tuning import JudgeTuning
    from polybasic.deploy.planner.settings import PlanSettings
    from polybasic.train.judge import Judging

RECALLS = (0.95, 0.9, 0.8, 0.6)
"""Shares of the tokens that matter which are to be replaced, each of which gives a threshold."""
MINING_SHARE, CHOOSING_SHARE = 0.5, 0.8
"""Of the time, until tokens are judged, and until a threshold is chosen."""
MIN_QUESTIONS = 8
CHANCE = 0.5
"""Of telling a token that matters from one that does not."""


@dataclass(frozen=True)
class AutoJudgeResult:
    """What was done.

    Attributes:
        file: of the judge.
    """

    file: Path
    mined: "Mined"
    judging: "Judging"
    tuning: "JudgeTuning"
    left_out: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        matters = self.mined.matters
        return self.tuning.to_json() | {
            "judge": {
                "file": str(self.file),
                "questions": self.mined.num_asked,
                "questions_searched": self.mined.num_searched,
                "tokens": len(matters),
                "tokens_that_matter": sum(matters),
                "area": self.judging.area,
                "penalty": self.judging.penalty,
            },
            "left_out": self.left_out,
        }


def plan_judge(
    folder: Path,
    settings: "PlanSettings",
    prompts: str | None,
    runs_code: bool,
    target: str | None,
    quality: float,
    out: Path,
    as_json: bool,
) -> None:
    """What `polybasic plan --rule autojudge` does; arguments are those of `judged`."""
    found = judged(folder, settings, prompts, runs_code, target, quality, out)
    write_lossy(out, found.tuning.plan)
    show_lossy(found, quality, print_judged, as_json)
    say(f"wrote {out} and {found.file}; next: polybasic generate {folder} --plan {out}")


def judged(
    folder: Path,
    settings: "PlanSettings",
    prompts: str | None,
    runs_code: bool,
    target: str | None,
    quality: float,
    out: Path,
) -> AutoJudgeResult:
    """Train a judge for a chain, and choose its threshold.

    Half of the questions are to judge tokens of, a quarter to choose a threshold by, and a quarter
    to measure it on.

    Args:
        prompts: file of questions; None: word problems that are made up.
        runs_code: whether programs of answers may be run.
        target: as `load_chain`.
        quality: least score over the lossless plan's.
        out: file of the plan, beside which the judge is written.

    Raises:
        UserError: too few questions, or as `read_checked`, `fit_judge` and `JudgeTuner.tune`.
    """
    from polybasic.deploy.bench.judging.mining import Miner
    from polybasic.deploy.bench.judging.questions import made_questions, read_checked
    from polybasic.deploy.bench.judging.tuning import JudgeTuner
    from polybasic.deploy.bench.lossy import proposing_plan
    from polybasic.deploy.planner.measuring.budget import Budget
    from polybasic.train.judge import fit_judge, write_judge

    num = settings.num_prompts_per_task
    if prompts is None:
        questions = made_questions(num)
    else:
        questions = read_checked(Path(prompts), runs_code)[:num]
    file = out.with_suffix(".safetensors")
    with greedy_chain(folder, settings, target, say) as chain:
        room = chain.engine.context_tokens - settings.max_new_tokens
        encoded = [(each, chain.encode(each.messages)) for each in questions]
        asked = [(question, prompt) for question, prompt in encoded if len(prompt) <= room]
        if len(asked) < MIN_QUESTIONS:
            raise UserError(
                "too few questions that fit the context",
                f"{len(asked)} in {room} tokens",
                f"give {MIN_QUESTIONS} at least, or fewer --max-new-tokens",
            )
        base, budget = proposing_plan(chain, chain.plan_at(0.0)), Budget(settings.max_seconds)
        to_mine = asked[::2]
        say(f"autojudge: {len(asked)} questions; judges tokens of {len(to_mine)} at most")
        mined = Miner(chain, base, settings.max_new_tokens).mine(to_mine, budget, MINING_SHARE)
        say(
            f"autojudge: {len(mined.matters)} tokens of answers to {mined.num_searched} of "
            f"{mined.num_asked} questions; {sum(mined.matters)} matter"
        )
        judging = fit_judge(*mined.arrays)
        write_judge(file, judging)
        say(f"wrote the judge into {file}; chooses a threshold on other questions")
        thresholds = sorted({judging.threshold(recall) for recall in RECALLS})
        tuner = JudgeTuner(chain, base, str(file.resolve()), settings.max_new_tokens)
        others = asked[1::4], asked[3::4]
        tuning = tuner.tune(thresholds, quality, others, budget, CHOOSING_SHARE, say)
    return AutoJudgeResult(file, mined, judging, tuning, tuple(budget.left_out))


def print_judged(found: AutoJudgeResult, quality: float, console: "Console") -> None:
    """Print what a judge gains and loses, and the thresholds that were tried."""
    from polybasic.chain.base.readable import counted
    from polybasic.chain.base.tables import Table

    point, judging = found.tuning.measured, found.judging
    low, high = point.speedup_bounds
    ours, lossless = point.score
    lines = [
        f"Lossy: {point.speedup:.2f}x of the lossless plan ({low:.2f}-{high:.2f}); of "
        f"{counted(point.num_questions, 'question')} {ours} are answered rightly, by the lossless "
        f"plan {lossless}; {point.own:.1%} of tokens the target's own",
        f"The judge: trained on {counted(len(judging.matters), 'token')}, of which "
        f"{int(judging.matters.sum())} matter; of other questions it tells such a token from "
        f"another {judging.area:.0%} of the time (50% by chance).",
    ]
    if judging.area <= CHANCE:
        lines.append(
            "That is no better than chance: what it keeps is kept at random. Give more questions "
            "and time."
        )
    if point.quality < quality:
        lines.append(
            f"There it is below the {quality:.0%} of the lossless plan's score that were asked "
            "for: ask for more, or give more questions and time."
        )
    rows = [
        [
            f"{each.threshold:.3f}",
            f"{judging.spared(each.threshold):.2f}",
            f"{each.speedup:.2f}",
            f"{each.score[0]} of {each.score[1]}",
            f"{each.own:.3f}",
            f"{each.identical:.2f}",
        ]
        for each in found.tuning.curve
    ]
    header = ["threshold", "harmless kept", "speedup", "right", "own", "identical"]
    num = counted(found.tuning.curve[0].num_questions, "question")
    table = Table(f"Thresholds, on {num} to choose by", header, rows)
    print_thresholds(lines, found.left_out, table, console)
