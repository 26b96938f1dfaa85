"""The parts of the GPU benchmark, the most important first, and the process that runs them."""

import gc
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from answering import Answering, Here, HfGenerate
from attention import attention_cases, report_attention
from command import Report
from end_to_end import (
    HERE,
    HF_GENERATE,
    Times,
    measure_end_to_end,
    report_end_to_end,
    shown_plans,
    speedup,
)
from many_sequences import report_sequences, sequence_cases
from measuring import Bandwidth, Case, T, measure_bandwidth
from passes import PassSettings, draft_cases, pass_cases, report_drafts, report_passes
from products import KERNELS, SHAPES, product_cases, report_choices, report_products
from systems import prompts_of_length, shown_plan, system_plans
from timeline import measure_timeline

from polybasic.chain.errors import UserError
from polybasic.chain.formats.config import read_config
from polybasic.chain.formats.plan import Flush, Plan, Tree
from polybasic.chain.formats.verify import check_chain
from polybasic.deploy import Chain, load_chain
from polybasic.deploy.rounds.sampling import Sampling
from polybasic.recipes.growth.chain import grow_chain
from polybasic.recipes.growth.shapes import SHAPES as GROWN_SHAPES
from polybasic.recipes.growth.shapes import GrownShape

TARGET, EAGLE2, THREE = "target", "eagle2", "polybasic_full"
GREEDY, SAMPLED = 0.0, 1.0
FIRST, SECOND = "gpu-7b", "gpu-8b"
ROOM_TOKENS = 64
"""Of a context after an answer, for rounds that gain more than they must."""
TRACED_TOKENS = 96
"""Of the answer whose trace is kept: a trace of more is large."""
BROKEN_DEVICE = 3
"""Exit code of a process whose device answers no more."""


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        contexts: tokens before an answer, the shortest first.
        sequences: numbers of them that are answered at a time.
        num_prompts, num_plan_prompts: asked after the shortest context, and for plans.
        num_long_prompts: asked after each longer context, with half as many new tokens.
        trees: depth, top k and rows of drafts that are tried and timed.
        bandwidth_bytes, product_bytes: of a buffer, and of the weights that a kernel multiplies
            with; None for the defaults.
    """

    contexts: tuple[int, ...] = (100, 2048, 8192)
    num_prompts: int = 8
    num_plan_prompts: int = 3
    num_long_prompts: int = 4
    num_hf_prompts: int = 2
    max_new_tokens: int = 256
    turns: int = 3
    sequences: tuple[int, ...] = (1, 2, 4, 8)
    trees: tuple[tuple[int, int, int], ...] = (
        (10, 2, 24), (8, 4, 32), (6, 8, 48), (7, 10, 60), (5, 4, 16), (6, 2, 12),
    )  # fmt: skip
    flush_lengths: tuple[int, ...] = (8, 12, 16, 24, 32)
    passes: PassSettings = field(
        default_factory=lambda: PassSettings(
            contexts=(256, 8192), rows=(1, 24, 8, 16, 2, 4, 32, 48, 64), repeats=5, turns=3
        )
    )
    product_shapes: tuple[str, ...] = SHAPES["cuda"]
    product_rows: tuple[int, ...] = (1, 24, 8, 16, 32, 64)
    attention_rows: tuple[int, ...] = (1, 8, 24, 40)
    bandwidth_bytes: int | None = None
    product_bytes: int | None = None
    dtype: str = "bfloat16"


REHEARSAL = Settings(
    contexts=(20, 120),
    num_prompts=1,
    num_plan_prompts=1,
    num_long_prompts=1,
    num_hf_prompts=1,
    max_new_tokens=8,
    turns=1,
    sequences=(2,),
    trees=((2, 2, 4),),
    flush_lengths=(4,),
    passes=PassSettings(contexts=(16,), rows=(1, 24), repeats=2, turns=1),
    product_shapes=("128x256",),
    product_rows=(1, 3),
    attention_rows=(1, 4),
    bandwidth_bytes=1 << 22,
    product_bytes=1 << 16,
)
"""Everything once, over shapes little larger than the small chain's."""


@dataclass
class Session:
    """What the parts of one process share.

    Attributes:
        small: folder of the small chain.
        prompts: question files, the more important first; None is the embedded prompts.
        record: that is written, beside which a trace stays.
        work: a folder for what is made on the way.
        parts: by name, as the record has them; see benchmarks/gpu.py.
    """

    small: Path
    prompts: list[Path | None]
    record: Path
    work: Path
    device: torch.device
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    chains: dict[str, Chain] = field(default_factory=dict)

    @property
    def settings(self) -> Settings:
        return REHEARSAL if self.device.type == "cpu" else Settings()

    def chain(self, name: str) -> Chain:
        """The small chain in a shape; grown and loaded when it is first asked for.

        Raises:
            UserError: other members than a target, its 4-bit copy and an EAGLE-2 head.
        """
        if name not in self.chains:
            members = check_chain(self.small).manifest.members
            if [member.kind for member in members] != ["decoder", "awq", "eagle2"]:
                raise UserError(
                    "chain of other members",
                    f"{self.small}: {', '.join(member.kind for member in members)}",
                    "name a chain of a target, its 4-bit copy and an EAGLE-2 head",
                )
            out = self.work / name
            grow_chain(self.small, self._shape(name), name, out, device=self.device)
            self.chains[name] = self._loaded(name, self.settings.contexts[-1], 1)
        return self.chains[name]

    def _loaded(self, name: str, context: int, sequences: int) -> Chain:
        settings = self.settings
        room = context + settings.max_new_tokens + ROOM_TOKENS
        chain = load_chain(
            self.work / name, device=str(self.device), dtype=settings.dtype, context_tokens=room,
            digests=False, beyond_declared=True, sequences=sequences,
        )  # fmt: skip
        # text after the end means little, and answers are as long as those of large models
        chain.stop_tokens = frozenset()
        return chain

    def chain_of_many(self, name: str) -> Chain:
        """The same, which `chain` has grown, for several sequences after the shortest context."""
        self.chain(name)
        return self._loaded(name, self.settings.contexts[0], max(self.settings.sequences))

    def _shape(self, name: str) -> GrownShape:
        shape = GROWN_SHAPES[name]
        if self.device.type == "cuda":
            return shape
        small = read_config(check_chain(self.small).target).decoder
        is_grouped = shape.num_kv_heads < shape.num_heads
        return GrownShape(
            num_layers=small.num_layers,
            hidden_size=small.hidden_size + 128,
            intermediate_size=small.intermediate_size + 128,
            num_heads=2 * small.num_heads,
            num_kv_heads=(1 if is_grouped else 2) * small.num_heads,
            head_dim=small.head_dim,
            vocab_size=small.vocab_size + 32,
        )

    def plans(self, name: str) -> dict[str, Plan]:
        """What runs in each system: found for the shape, else for the first one, or the chain's."""
        plans = system_plans(self.chain(name))
        plans = {system: plans[system] for system in (TARGET, EAGLE2, THREE)}
        for shape in dict.fromkeys((FIRST, name)):
            chosen = self.parts.get(f"{shape} plans", {}).get("plans", {})
            plans |= {system: Plan.model_validate(plan) for system, plan in chosen.items()}
        return plans

    def bandwidth(self) -> Bandwidth:
        return measure_bandwidth(self.device, self.settings.bandwidth_bytes)

    def prompts_of(self, name: str, context: int, num: int, source: int = 0) -> list[list[int]]:
        """So many prompts of about `context` tokens, of one of the question files."""
        tokens, path = self.settings.max_new_tokens, self.prompts[source]
        return prompts_of_length(self.chain(name), path, context, num, tokens)


@dataclass
class Found:
    """What a part finds, within its time.

    Attributes:
        until: when its time is over, in seconds of `time.time`, which all processes share.
        figures: numbers that are compared with what they are to be.
        left_out: what there was no time for, or what failed, with the reason.
    """

    until: float
    report: Report = field(default_factory=lambda: Report(prints=False))
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
        return [one for what, measure in cases for one in self.attempt(what, measure) or ()]


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        seconds: that it may take.
        measure: reports what it found.
        least: seconds below which it is not begun.
    """

    name: str
    seconds: float
    measure: Callable[[Session, Found], None]
    least: float = 5.0


def parts_of(session: Session) -> list[Part]:
    """All parts in the order in which they run.

    Question files but the first are asked after the shortest context alone, greedily.
    """
    short, *longer = session.settings.contexts
    parts = [
        Part("machine", 20, _machine),
        Part(f"{FIRST} load", 150, partial(_load, FIRST), 20),
        Part(f"{FIRST} passes", 100, partial(_passes, FIRST), 10),
        Part(f"{FIRST} plans", 80, partial(_plans, FIRST), 10),
        _answers(FIRST, short, GREEDY, 60),
        Part(f"{FIRST} timeline", 30, _timeline),
        Part(f"{FIRST} sequences", 60, partial(_sequences, FIRST), 15),
        Part(f"{FIRST} {HF_GENERATE}", 40, partial(_hf_generate, FIRST)),
    ]
    parts += [_answers(FIRST, short, GREEDY, 40, n) for n in range(1, len(session.prompts))]
    parts += [
        Part(f"{SECOND} load", 80, partial(_load, SECOND), 20),
        Part(f"{SECOND} plans", 60, partial(_plans, SECOND), 10),
        _answers(SECOND, short, GREEDY, 50),
        Part(f"{SECOND} {HF_GENERATE}", 40, partial(_hf_generate, SECOND)),
    ]
    parts += [_answers(FIRST, context, GREEDY, 30) for context in longer]
    parts += [
        _answers(FIRST, short, SAMPLED, 40),
        Part("products", 60, _products, 10),
        Part("attention", 50, _attention, 10),
        Part(f"{SECOND} passes", 40, partial(_passes, SECOND), 10),
    ]
    parts += [_answers(FIRST, context, SAMPLED, 30) for context in longer]
    parts += [_answers(SECOND, context, GREEDY, 30) for context in longer]
    return [*parts, *(_answers(SECOND, each, SAMPLED, 30) for each in session.settings.contexts)]


def run_parts(
    parts: Sequence[Part], session: Session, over: float, save: Callable[[], None]
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


def _machine(session: Session, found: Found) -> None:
    found.report.say(session.bandwidth().shown())


def _load(shape: str, session: Session, found: Found) -> None:
    chain = session.chain(shape)
    counts, plan = chain.engine.graphs.counts, shown_plan(chain.plan, chain)
    found.report.say(f"{counts.captures} graphs in {counts.seconds:.1f} s; plan: {plan}.")


def _passes(shape: str, session: Session, found: Found) -> None:
    chain, settings = session.chain(shape), session.settings
    shapes = tuple(f"{depth}x{top_k}" for depth, top_k, _ in settings.trees)
    chosen, bandwidth = replace(settings.passes, shapes=shapes), session.bandwidth()
    drafts = found.all_of(draft_cases(chain, chosen, bandwidth))
    passes = found.all_of(pass_cases(chain, chosen, bandwidth))
    report_passes(found.report, passes)
    report_drafts(found.report, drafts)
    context = settings.passes.contexts[0]
    by_rows = {(one.member, one.what): one for one in passes if one.context == context}
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


def _plans(shape: str, session: Session, found: Found) -> None:
    """The plans that answer fastest here: the best tree, then the best flush length with it."""
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
    rows = [[shown, f"{one:.3f}"] for shown, one in taken.items()]
    found.report.table("Milliseconds a token", ["plan", "measured"], rows)


def with_flush(plan: Plan, length: int) -> Plan:
    """The plan with blocks of so many tokens, never cut short."""
    flush = {name: Flush(length=length) for name in plan.flush}
    return plan.model_copy(update={"flush": flush})


def _answers(shape: str, context: int, temperature: float, seconds: float, source: int = 0) -> Part:
    how = "greedy" if temperature == GREEDY else f"temperature {temperature:g}"
    name = f"{shape} answers after {context}, {how}{f', prompts {source + 1}' if source else ''}"

    def measure(session: Session, found: Found) -> None:
        chain, settings, plans = session.chain(shape), session.settings, session.plans(shape)
        is_short = context == settings.contexts[0]
        num = settings.num_prompts if is_short else settings.num_long_prompts
        prompts = session.prompts_of(shape, context, num, source)
        path = session.prompts[source]
        named = "embedded" if path is None else path.stem
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

    return Part(name, seconds, measure)


def _sequences(shape: str, session: Session, found: Found) -> None:
    settings, plans = session.settings, session.plans(shape)
    prompts = session.prompts_of(shape, settings.contexts[0], max(settings.sequences))
    chain = session.chain_of_many(shape)
    cases = sequence_cases(
        chain, plans, prompts, settings.sequences, settings.max_new_tokens // 2, settings.turns
    )
    rates = found.all_of(cases)
    report_sequences(found.report, rates, chain)
    by_case = {(one.system, one.sequences): one.tokens_a_second for one in rates}
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
    kept = {name: one[HERE][name] for name, one in alone.items() if one}
    return {HERE: kept} if kept else {}


def _hf_generate(shape: str, session: Session, found: Found) -> None:
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


def _timeline(session: Session, found: Found) -> None:
    chain, settings = session.chain(FIRST), session.settings
    prompt = session.prompts_of(FIRST, settings.contexts[0], settings.num_prompts)[0]
    plans = {THREE: session.plans(FIRST)[THREE]}
    path = session.record.with_suffix(".trace.json.gz")
    tokens = min(settings.max_new_tokens, TRACED_TOKENS)
    one = measure_timeline(found.report, chain, plans, prompt, tokens, path)[THREE]
    if one.host_gaps is not None:
        found.figures[f"{FIRST}: host gaps of a round"] = one.host_gaps


def _products(session: Session, found: Found) -> None:
    settings, device = session.settings, session.device
    cases = product_cases(
        settings.product_shapes, settings.product_rows, KERNELS[device.type], settings.turns,
        session.bandwidth(), device, settings.product_bytes,
    )  # fmt: skip
    report_products(found.report, found.all_of(cases))
    report_choices(found.report, device)


def _attention(session: Session, found: Found) -> None:
    settings, chosen = session.settings, session.settings.passes
    contexts = sorted({*chosen.contexts, *settings.contexts[1:]})
    cases = attention_cases(
        session.chain(FIRST), contexts, settings.attention_rows, chosen.turns, chosen.repeats,
        session.bandwidth(),
    )  # fmt: skip
    report_attention(found.report, found.all_of(cases))
