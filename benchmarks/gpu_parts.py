"""The parts of the GPU benchmark, the most important first, and the process that runs them."""

import gc
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from answering import Answering, Here, HfGenerate
from attention import attention_cases, report_attention
from command import ScriptReport
from end_to_end import (
    HERE,
    HF_GENERATE,
    Times,
    measure_end_to_end,
    report_end_to_end,
    shown_plans,
    speedup,
)
from gpu_session import EAGLE2, FIRST, SECOND, TARGET, THREE, GpuSession
from many_sequences import report_sequences, sequence_cases
from measuring import Case, T
from passes import draft_cases, pass_cases, report_drafts, report_passes
from products import KERNELS, product_cases, report_choices, report_products
from systems import shown_plan
from timeline import measure_timeline

from polybasic.chain.formats.plan import Flush, Plan, Tree
from polybasic.deploy.runtime.rounds.sampling import Sampling

GREEDY, SAMPLED = 0.0, 1.0
TRACED_TOKENS = 96
"""Of the answer whose trace is kept: a trace of more is large."""
BROKEN_DEVICE = 3
"""Exit code of a process whose device answers no more."""


@dataclass
class Found:
    """What a part finds, within its time.

    Attributes:
        until: when its time is over, in seconds of `time.time`, which all processes share.
        figures: numbers that are compared with what they are to be.
        left_out: what there was no time for, or what failed, with the reason.
    """

    until: float
    report: ScriptReport = field(default_factory=lambda: ScriptReport(prints=False))
    figures: dict[str, float] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    plans: dict[str, Any] = field(default_factory=dict)

    def is_over(self) -> bool:
        return time.time() > self.until

    def attempt(self, what: str, measure: Callable[[], T]) -> T | None:
        """What is measured; None where there is no time for it or it fails, which is noted."""
        if self.is_over():
            self.left_out.append(f"{what}: no time was left")
            return None
        try:
            return measure()
        except Exception as error:  # whatever it is, what comes next may be whole
            traceback.print_exc()
            reason = (str(error).strip().splitlines() or [""])[0]
            self.left_out.append(f"{what}: {type(error).__name__}: {reason}")
            return None

    def all_of(self, cases: Iterable[Case[T]]) -> list[T]:
        """What the cases find that can be measured."""
        return [result for what, measure in cases for result in self.attempt(what, measure) or ()]


@dataclass(frozen=True)
class GpuPart:
    """One part.

    Attributes:
        seconds: that it may take.
        measure: reports what it found.
        least: seconds below which it is not begun.
    """

    name: str
    seconds: float
    measure: Callable[[GpuSession, Found], None]
    least: float = 5.0


def parts_of(session: GpuSession) -> list[GpuPart]:
    """All parts in the order in which they run.

    Question files but the first are asked after the shortest context alone, greedily.
    """
    short, *longer = session.settings.contexts
    parts = [
        GpuPart("machine", 20, _machine),
        GpuPart(f"{FIRST} load", 150, partial(_load, FIRST), 20),
        GpuPart(f"{FIRST} passes", 100, partial(_passes, FIRST), 10),
        GpuPart(f"{FIRST} plans", 80, partial(_plans, FIRST), 10),
        _answers(FIRST, short, GREEDY, 60),
        GpuPart(f"{FIRST} timeline", 30, _timeline),
        GpuPart(f"{FIRST} sequences", 60, partial(_sequences, FIRST), 15),
        GpuPart(f"{FIRST} {HF_GENERATE}", 40, partial(_hf_generate, FIRST)),
    ]
    parts += [_answers(FIRST, short, GREEDY, 40, n) for n in range(1, len(session.prompts))]
    parts += [
        GpuPart(f"{SECOND} load", 80, partial(_load, SECOND), 20),
        GpuPart(f"{SECOND} plans", 60, partial(_plans, SECOND), 10),
        _answers(SECOND, short, GREEDY, 50),
        GpuPart(f"{SECOND} {HF_GENERATE}", 40, partial(_hf_generate, SECOND)),
    ]
    parts += [_answers(FIRST, context, GREEDY, 30) for context in longer]
    parts += [
        _answers(FIRST, short, SAMPLED, 40),
        GpuPart("products", 60, _products, 10),
        GpuPart("attention", 50, _attention, 10),
        GpuPart(f"{SECOND} passes", 40, partial(_passes, SECOND), 10),
    ]
    parts += [_answers(FIRST, context, SAMPLED, 30) for context in longer]
    parts += [_answers(SECOND, context, GREEDY, 30) for context in longer]
    return [*parts, *(_answers(SECOND, each, SAMPLED, 30) for each in session.settings.contexts)]


def run_parts(
    parts: Sequence[GpuPart], session: GpuSession, over: float, save: Callable[[], None]
) -> None:
    """Run what the record does not have yet, each part within its time.

    A part that fails is noted and the next one runs, unless the device answers no more: then the
    process ends, and another one may go on.

    Args:
        over: when all is over, in seconds of `time.time`.
        save: writes `session.parts`.
    """
    for part in parts:
        if part.name in session.parts:
            continue
        begun = time.time()
        found = Found(begun + min(part.seconds, over - begun))
        entry = session.parts[part.name] = {
            "status": "running", "seconds": 0.0, "begun": begun, "until": found.until,
            "text": "", "figures": found.figures, "left_out": found.left_out, "plans": found.plans,
        }  # fmt: skip
        if found.until - begun < part.least:
            entry["status"] = "left out"
            found.left_out.append("no time was left")
            save()
            continue
        save()
        found.attempt(part.name, partial(part.measure, session, found))
        entry["status"] = "partly" if found.left_out else "done"
        entry["text"], entry["seconds"] = found.report.text, time.time() - begun
        save()
        say(f"{part.name}: {entry['status']} in {entry['seconds']:.1f} s")
        _leave_if_broken(session.device)


def _leave_if_broken(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
        except RuntimeError as error:
            say(f"the device answers no more: {error}")
            sys.exit(BROKEN_DEVICE)


def say(line: str) -> None:
    """A line of progress."""
    print(line, file=sys.stderr, flush=True)


def _machine(session: GpuSession, found: Found) -> None:
    found.report.say(session.bandwidth().shown())


def _load(shape: str, session: GpuSession, found: Found) -> None:
    chain = session.chain(shape)
    counts, plan = chain.engine.graphs.counts, shown_plan(chain.plan, chain)
    found.report.say(f"{counts.captures} graphs in {counts.seconds:.1f} s; plan: {plan}.")


def _passes(shape: str, session: GpuSession, found: Found) -> None:
    chain, settings = session.chain(shape), session.settings
    shapes = tuple(f"{depth}x{top_k}" for depth, top_k, _ in settings.trees)
    chosen, bandwidth = replace(settings.passes, shapes=shapes), session.bandwidth()
    drafts = found.all_of(draft_cases(chain, chosen, bandwidth))
    passes = found.all_of(pass_cases(chain, chosen, bandwidth))
    report_passes(found.report, passes)
    report_drafts(found.report, drafts)
    context = settings.passes.contexts[0]
    by_rows = {(cost.member, cost.what): cost for cost in passes if cost.context == context}
    target, copy = list(chain.engine.verifiers)[:2]
    dense, int4 = by_rows.get((target, "1 rows")), by_rows.get((copy, "24 rows"))
    if dense is not None:
        one_row = dense.seconds.median
        found.figures[f"{shape}: bf16 pass of 1 row, times its bound"] = dense.times_bound
        if int4 is not None:
            ratio = int4.seconds.median / one_row
            found.figures[f"{shape}: 4-bit pass of 24 rows over it"] = ratio
        if drafts:
            level = drafts[0].seconds.median / settings.trees[0][0]
            found.figures[f"{shape}: a level of a draft over it"] = level / one_row


def _plans(shape: str, session: GpuSession, found: Found) -> None:
    """The plans that answer fastest here: the best tree, then the best block length with it."""
    chain, settings = session.chain(shape), session.settings
    # the last ones; the first ones are measured
    num = settings.num_prompts + settings.num_plan_prompts
    prompts = session.prompts_of(shape, settings.contexts[0], num)[-settings.num_plan_prompts :]
    here, taken = Here(chain), dict[str, float]()

    def milliseconds(plan: Plan) -> float:
        times = measure_end_to_end(
            {HERE: {THREE: here}}, {THREE: plan}, prompts, settings.max_new_tokens, 1
        )
        return times[HERE][THREE].per_token.median

    def fastest(candidates: Sequence[Plan]) -> Plan:
        for plan in candidates:
            shown = shown_plan(plan, chain)
            if shown not in taken:
                taken[shown] = found.attempt(shown, partial(milliseconds, plan)) or float("inf")
        return min(candidates, key=lambda plan: taken[shown_plan(plan, chain)])

    for name in (THREE, EAGLE2):
        own = session.plans(shape)[name]
        trees = [Tree(depth=depth, top_k=k, rows=num) for depth, k, num in settings.trees]
        plan = fastest([own, *(own.model_copy(update={"tree": tree}) for tree in trees)])
        if name == THREE:
            lengths = settings.flush_lengths
            plan = fastest([plan, *(with_flush(plan, length) for length in lengths)])
        found.plans[name] = plan.model_dump(mode="json")
    rows = [[shown, f"{duration:.3f}"] for shown, duration in taken.items()]
    found.report.table("Milliseconds a token", ["plan", "measured"], rows)


def with_flush(plan: Plan, length: int) -> Plan:
    """The plan with blocks of so many tokens, never cut short."""
    flush = {name: Flush(length=length) for name in plan.flush}
    return plan.model_copy(update={"flush": flush})


def _answers(
    shape: str, context: int, temperature: float, seconds: float, source: int = 0
) -> GpuPart:
    how = "greedy" if temperature == GREEDY else f"temperature {temperature:g}"
    name = f"{shape} answers after {context}, {how}{f', prompts {source + 1}' if source else ''}"

    def measure(session: GpuSession, found: Found) -> None:
        chain, settings, plans = session.chain(shape), session.settings, session.plans(shape)
        is_short = context == settings.contexts[0]
        num = settings.num_prompts if is_short else settings.num_long_prompts
        prompts = session.prompts_of(shape, context, num, source)
        path = session.prompts[source]
        named = "shipped" if path is None else path.stem
        lengths = ", ".join(str(len(prompt)) for prompt in prompts)
        found.report.say(f"Prompts of {named}: {lengths} tokens.")
        works = _that_answer(Here(chain), plans, prompts[0], temperature, found)
        tokens = settings.max_new_tokens if is_short else settings.max_new_tokens // 2
        answering = dict.fromkeys(works, Here(chain))
        times = _times(found, answering, works, prompts, tokens, settings.turns, temperature)
        if not times:
            found.left_out.append("answers: no time was left")
            return
        measured = {name: works[name] for name in times[HERE]}
        report_end_to_end(found.report, times, shown_plans(measured, chain))
        if is_short and temperature == GREEDY and THREE in measured:
            for other in (TARGET, EAGLE2):
                if other in measured:
                    of = f" ({named})" if source else ""
                    gained = speedup(times[HERE][other].per_token, times[HERE][THREE].per_token)
                    found.figures[f"{shape}: three models over {other}{of}"] = gained.median

    return GpuPart(name, seconds, measure)


def _sequences(shape: str, session: GpuSession, found: Found) -> None:
    settings, plans = session.settings, session.plans(shape)
    prompts = session.prompts_of(shape, settings.contexts[0], max(settings.sequences))
    chain = session.chain_of_many(shape)
    cases = sequence_cases(
        chain, plans, prompts, settings.sequences, settings.max_new_tokens // 2, settings.turns
    )
    rates = found.all_of(cases)
    report_sequences(found.report, rates, chain)
    by_case = {(rate.system, rate.sequences): rate.tokens_a_second for rate in rates}
    for num in settings.sequences:
        if (THREE, num) in by_case and (TARGET, num) in by_case:
            figure = f"{shape}, {num} sequences: three models over target"
            found.figures[figure] = by_case[THREE, num] / by_case[TARGET, num]


def _that_answer(
    here: Answering, plans: Mapping[str, Plan], prompt: list[int], temperature: float, found: Found
) -> dict[str, Plan]:
    """The plans that answer at all; the others are noted as left out."""
    sampling = Sampling(temperature=temperature, seed=0)
    return {
        name: plan
        for name, plan in plans.items()
        if found.attempt(name, partial(here.answer, prompt, plan, 2, sampling)) is not None
    }


def _times(
    found: Found,
    answering: Mapping[str, Answering],
    plans: Mapping[str, Plan],
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    turns: int,
    temperature: float = GREEDY,
) -> Times:
    """`measure_end_to_end` of the systems here: in turns, or if one fails each of them alone."""

    def measured(names: Iterable[str]) -> Times:
        return measure_end_to_end(
            {HERE: {name: answering[name] for name in names}},
            {name: plans[name] for name in names},
            prompts, max_new_tokens, turns, temperature, found.is_over,
        )  # fmt: skip

    times = found.attempt("answers in turns", partial(measured, list(answering)))
    if times is not None:
        return times
    alone = {name: found.attempt(name, partial(measured, [name])) for name in answering}
    kept = {name: result[HERE][name] for name, result in alone.items() if result}
    return {HERE: kept} if kept else {}


def _hf_generate(shape: str, session: GpuSession, found: Found) -> None:
    """transformers' own loop beside the target; then the grown files are of no more use."""
    chain, settings = session.chain(shape), session.settings
    prompts = session.prompts_of(shape, settings.contexts[0], settings.num_hf_prompts)
    answering: dict[str, Answering] = {TARGET: Here(chain)}
    try:
        made = found.attempt(HF_GENERATE, partial(HfGenerate.of, chain))
        if made is not None:
            answering[HF_GENERATE] = made
        plans = dict.fromkeys(answering, session.plans(shape)[TARGET])
        times = _times(found, answering, plans, prompts, settings.max_new_tokens, 1)
    finally:
        shutil.rmtree(session.work / shape, ignore_errors=True)
    if times:
        report_end_to_end(
            found.report, times, shown_plans(dict.fromkeys(times[HERE], plans[TARGET]), chain)
        )


def _timeline(session: GpuSession, found: Found) -> None:
    chain, settings = session.chain(FIRST), session.settings
    prompt = session.prompts_of(FIRST, settings.contexts[0], settings.num_prompts)[0]
    plans = {THREE: session.plans(FIRST)[THREE]}
    path = session.record.with_suffix(".trace.json.gz")
    tokens = min(settings.max_new_tokens, TRACED_TOKENS)
    timeline = measure_timeline(found.report, chain, plans, prompt, tokens, path)[THREE]
    if timeline.host_gaps is not None:
        found.figures[f"{FIRST}: host gaps of a round"] = timeline.host_gaps


def _products(session: GpuSession, found: Found) -> None:
    settings, device = session.settings, session.device
    cases = product_cases(
        settings.product_shapes, settings.product_rows, KERNELS[device.type], settings.turns,
        session.bandwidth(), device, settings.product_bytes,
    )  # fmt: skip
    report_products(found.report, found.all_of(cases))
    report_choices(found.report, device)


def _attention(session: GpuSession, found: Found) -> None:
    settings, chosen = session.settings, session.settings.passes
    contexts = sorted({*chosen.contexts, *settings.contexts[1:]})
    cases = attention_cases(
        session.chain(FIRST), contexts, settings.attention_rows, chosen.turns, chosen.repeats,
        session.bandwidth(),
    )  # fmt: skip
    report_attention(found.report, found.all_of(cases))
