"""Reports that tests show: figures that hang together, made up from a speed for each system."""

import math
from random import Random
from typing import Any

from polybasic.deploy.bench.schema import (
    Agreement,
    Answers,
    InsertionReport,
    LawCheck,
    Lengths,
    MemberCost,
    NoiseReport,
    PromptReport,
    Quantiles,
    Ratio,
    Report,
    SystemReport,
    Totals,
)

HOSTILE = '$x^2$<script>alert(1)</script> & "quoted" | <img src=x onerror=alert(2)>'
REMEDY = "about 34 prompts a task instead of 4"
TASKS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
GROUPS = ("known topics", "new topics")
TOKENS = 96
SPEEDS = {
    "target": 1.0,
    "hf_generate": 0.1,
    "hf_prompt_lookup": 0.14,
    "ngram": 1.06,
    "eagle2": 2.14,
    "polybasic_full": 1.55,
    "polybasic": 2.38,
    "llama.cpp_bfloat16": 0.93,
    "llama.cpp_q4_0_lookup": 1.35,
    "openvino_bfloat16": 0.71,
}
PLANS = {
    "target": ("target",),
    "ngram": ("target", "ngram"),
    "eagle2": ("target", "draft"),
    "polybasic_full": ("target", "intermediate", "draft"),
    "polybasic": ("target", "draft"),
}
LENGTHS = {"target": 1.0, "ngram": 1.4, "eagle2": 4.04, "polybasic_full": 11.8, "polybasic": 4.4}
DESCRIPTIONS = {
    "target": "this runtime, the target alone",
    "hf_generate": "transformers' generate with the target, in the dtype that is fastest here",
    "ngram": "the target with drafts copied from prompt and output",
    "eagle2": "two models: target and draft head",
    "polybasic_full": "all 3 models",
    "polybasic": "the chain's plan: target, draft",
}
SHARES = {"ngram": 0.5, "eagle2": 0.82, "polybasic_full": 0.9, "polybasic": 0.86}
BASE_RATE = 640.0


def example(
    systems: tuple[str, ...] = tuple(SPEEDS),
    tasks: tuple[str, ...] = TASKS,
    grouped: bool = True,
    sampled: bool = False,
    complete: bool = True,
    grown: str | None = None,
    **changes: Any,
) -> Report:
    """A report of these systems.

    Args:
        grouped: whether prompts have groups.
        changes: of fields of the report.
    """
    groups = GROUPS if grouped else ("",)
    prompts = [
        PromptReport(
            question_id=str(number),
            task=task,
            turn=1,
            group=groups[number % len(groups)],
            num_tokens=40 + number,
            sha256=f"{number:016x}",
        )
        for number, task in enumerate(task for task in tasks for _ in range(4))
    ]
    return Report(
        complete=complete,
        answered=2 * len(prompts) if complete else len(prompts) + 3,
        planned=2 * len(prompts),
        made="2026-11-23T04:00:00+00:00",
        command="polybasic bench runs/smollm2-135m/chain --peers llama.cpp,openvino",
        chain="tiny",
        chain_digest="0123456789abcdef" * 4,
        grown=grown,
        settings={
            "prompts": "shipped",
            "prompts_sha256": "fedcba9876543210" * 4,
            "num_prompts": len(prompts),
            "num_questions_left_out_as_too_long": 1,
            "repeats": 2,
            "max_new_tokens": TOKENS,
            "temperature": 1.0 if sampled else 0.0,
            "dtype": "bfloat16",
        },
        hardware={
            "device": "cpu",
            "processor": "AMD EPYC",
            "cores": 2,
            "threads": 2,
            "memory_bytes": 25 * 2**30,
        },
        versions={"python": "3.11.7", "polybasic": "0.1.0", "torch": "2.13.0"},
        prompts=prompts,
        systems={name: _system(name, prompts, sampled, complete) for name in systems},
        insertions=_insertions() if "polybasic_full" in systems else [],
        noise=NoiseReport(repeat_tokens_per_second=[642.0, 638.5], spread=0.0055),
        plan={
            "shown": "target → draft; tree of depth 5, top 2, 6 rows",
            "predicted_seconds_per_token": 0.00062,
            "measured_seconds_per_token": 0.00066,
            "explanation": {"decision": "run target -> draft at 0.62 ms a token"},
        },
        rounding=_rounding(systems),
        memory=_memory(),
        adaptations=[
            {
                "member": "draft",
                "measure": "tokens a round, simulated",
                "before": 2.5,
                "after": 3.25,
                "is_kept": True,
            }
        ],
        draft_vocabulary=[
            {
                "member": "draft",
                "num_tokens": 8000,
                "vocab_size": 32000,
                "coverage": 0.875,
                "part": {"accepted_length": 3.5, "seconds_per_pass": 0.0004},
                "whole": {"accepted_length": None, "seconds_per_pass": None},
            }
        ],
    ).model_copy(update=changes)


def with_system(report: Report, name: str, **changes: Any) -> Report:
    """The same with fields of one system changed."""
    system = report.systems[name].model_copy(update=changes)
    return report.model_copy(update={"systems": report.systems | {name: system}})


def with_totals(report: Report, name: str, **changes: Any) -> Report:
    """The same with fields of one system's totals changed."""
    totals = report.systems[name].totals.model_copy(update=changes)
    return with_system(report, name, totals=totals)


def of_first_turn(report: Report) -> Report:
    """What is left of it where it was interrupted after its first turn."""
    for name, system in report.systems.items():
        task, totals = next(iter(system.tasks.items()))
        totals = totals.model_copy(update={"num_answers": 1, "tokens": TOKENS})
        columns = {field: rows and [rows[0][:1]] for field, rows in system.answers}
        report = with_system(
            report,
            name,
            totals=totals,
            tasks={task: totals},
            groups={},
            answers=Answers.model_validate(columns),
        )
    noise = NoiseReport(repeat_tokens_per_second=[], spread=0.0)
    return report.model_copy(update={"complete": False, "answered": 1, "noise": noise})


def ratio(value: float, spread: float = 0.04, remedy: str | None = None) -> Ratio:
    """With an interval of so much of the value to both sides."""
    return Ratio(value=value, low=value * (1 - spread), high=value * (1 + spread), remedy=remedy)


def _system(name: str, prompts: list[PromptReport], sampled: bool, complete: bool) -> SystemReport:
    runtime = _runtime(name)
    num_second = len(prompts) if complete else 3
    counts = [len(prompts), num_second]
    seconds = TOKENS / (BASE_RATE * SPEEDS[name])
    per_prompt = [[seconds] * count for count in counts]
    is_ours = name in PLANS
    members = _members(name, len(prompts)) if is_ours else {}
    return SystemReport(
        runtime=runtime,
        version=None if runtime == "polybasic" else "5.23.0",
        description=DESCRIPTIONS.get(name, f"{runtime} with the target's weights, as {name}"),
        dtype="Q4_0" if "q4_0" in name else "bfloat16",
        plan={"members": list(PLANS[name])} if is_ours else None,
        shown_plan=" → ".join(PLANS[name]) if is_ours else None,
        predicted_seconds_per_token=0.93 * 0.9 * seconds / TOKENS if is_ours else None,
        measured_seconds_per_token=0.9 * seconds / TOKENS if is_ours else None,
        totals=_totals(name, sum(counts)),
        tasks={
            task: _totals(
                name, 8, 1 + 0.35 * Random(f"{name} {task}").uniform(-1, 1), task == "rag"
            )
            for task in dict.fromkeys(prompt.task for prompt in prompts)
        },
        groups={
            group: _totals(name, 24, 1.1 if group == GROUPS[0] else 0.78)
            for group in dict.fromkeys(prompt.group for prompt in prompts)
            if group
        },
        answers=Answers(
            num_tokens=[[TOKENS] * count for count in counts],
            seconds=per_prompt,
            num_first=[[1] * count for count in counts],
            first_seconds=[[0.1 * seconds] * count for count in counts],
            passes=[[TOKENS / LENGTHS[name]] * count for count in counts] if is_ours else None,
        ),
        members=members,
        prefill_seconds=0.1 * seconds * len(prompts) if is_ours else None,
        agreement=None if sampled and not is_ours else _agreement(name, sum(counts)),
        law=LawCheck(tokens=4608, cells=16, chi_square=14.2, p_value=0.51)
        if sampled and is_ours
        else None,
        notes=["Its answers are cut by token ids."] if not is_ours else [],
    )


def _runtime(name: str) -> str:
    if name in PLANS:
        return "polybasic"
    return "transformers" if name.startswith("hf_") else name.split("_")[0]


def _totals(name: str, num: int, factor: float = 1.0, wide: bool = False) -> Totals:
    speed = SPEEDS[name] * (1 if name == "target" else factor)
    rate = BASE_RATE * speed
    is_target = name == "target"
    is_wide = wide and not is_target
    return Totals(
        num_answers=num,
        tokens=num * TOKENS,
        seconds=num * TOKENS / rate,
        tokens_per_second=rate,
        decode_tokens_per_second=1.1 * rate,
        first_token_seconds=Quantiles(median=0.1 * TOKENS / rate, p95=0.2 * TOKENS / rate),
        seconds_per_token=Quantiles(median=0.9 / rate, p95=1.3 / rate),
        speedup=ratio(
            speed, 0.0 if is_target else 0.3 if is_wide else 0.05, REMEDY if is_wide else None
        ),
        decode_speedup=ratio(1.05 * speed if not is_target else 1.0, 0.0 if is_target else 0.05),
        over_hf=ratio(speed / SPEEDS["hf_generate"], 0.0 if name == "hf_generate" else 0.05),
        accepted_length=lengths(LENGTHS[name] * factor) if name in PLANS else None,
        joules_per_token=0.05 / speed,
    )


def lengths(mean: float) -> Lengths:
    """About this mean, over some 400 passes."""
    if mean == 1:
        return Lengths(counts=[0, 400], mean=1.0, low=1.0, high=1.0, variance=0.0)
    widths = range(1, math.ceil(2 * mean) + 1)
    counts = [
        0,
        *(round(700 / mean * math.exp(-(((n - mean) / (0.55 * mean)) ** 2))) for n in widths),
    ]
    found = sum(n * count for n, count in enumerate(counts)) / sum(counts)
    variance = sum((n - found) ** 2 * count for n, count in enumerate(counts)) / sum(counts)
    return Lengths(
        counts=counts, mean=found, low=0.96 * found, high=1.04 * found, variance=variance
    )


def _members(name: str, num_prompts: int) -> dict[str, MemberCost]:
    """Those of a plan: each has a share of the time after the prefill."""
    time = 0.9 * num_prompts * TOKENS / (BASE_RATE * SPEEDS[name])
    passes = num_prompts * TOKENS / LENGTHS[name]
    shares = {"target": 0.6, "intermediate": 0.2, "draft": 0.12, "ngram": 0.01}
    members = {}
    for member in PLANS[name]:
        is_verifying = member in ("target", "intermediate")
        proposes = member != "target"
        places = 8 if is_verifying else 5
        members[member] = MemberCost(
            passes=passes if member == "target" else 4 * passes,
            seconds=shares[member] * time,
            accepted_length=lengths(LENGTHS[name] if member == "target" else 4.1)
            if is_verifying
            else None,
            rows_per_token=1.5 if is_verifying else None,
            acceptance=[SHARES[name] * 0.85**place for place in range(places)] if proposes else [],
        )
    return members


def _agreement(name: str, num: int) -> Agreement:
    parted = 0 if name in PLANS else 5
    ties = parted if name.startswith("hf_") else 0
    return Agreement(
        answers=num,
        identical=num - parted,
        near_ties=ties,
        widest_near_tie=0.125 if ties else 0.0,
        tolerance=0.0 if name in PLANS else 0.375,
        tokens_before_parting=41.0 if parted else None,
    )


def _insertions() -> list[InsertionReport]:
    return [
        InsertionReport(
            member="intermediate",
            without="eagle2",
            within="polybasic_full",
            above_seconds=0.00297,
            new_seconds=0.00228,
            accepted=4.33,
            accepted_above_new=11.16,
            accepted_new=4.16,
            left=0.768,
            right=0.589,
            speedup=ratio(0.72),
        )
    ]


def _rounding(systems: tuple[str, ...]) -> dict[str, Any]:
    same = {"from_one_row": 0.0, "from_reference": 0.0, "is_sound": True}
    other = {"from_one_row": 0.375, "from_reference": 0.375, "is_sound": True}
    return {
        "dtype": "bfloat16",
        "num_positions": 273,
        "usual": 0.161,
        "ways": {"1 row": same, "trees of 6 rows, 5 deep": same},
        "others": {"hf_generate": other} if "hf_generate" in systems else {},
        "close_share": 0.012,
        "tolerance": 0.0,
    }


def _memory() -> dict[str, Any]:
    return {
        "stated": {
            "device": "cpu",
            "dtype": "bfloat16",
            "kernels": "native",
            "context_tokens": 2048,
            "members": {"target": {"weights": 40_919_552, "cache": 28_901_376}},
            "staying_bytes": 87_101_440,
            "peak_bytes": 410_184_038,
            "bytes_per_1000_tokens": 13_824_000,
        },
        "measured": {"staying_bytes": 110_895_104, "peak_bytes": 115_834_880},
        "ratio": 1.273,
    }
