"""The parts of the GPU benchmark, the most important first, and the process that runs them."""

import gc
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from gpu_answers import measure_answers, search_plans
from gpu_attention import measure_attention
from gpu_budget import DONE, FAILED, LEFT_OUT, PARTLY, Allowance
from gpu_chains import serving
from gpu_names import THREE, answers_part
from gpu_passes import device_model_of, measure_drafts, measure_passes
from gpu_products import choices, measure_products
from gpu_session import Session, Settings
from gpu_timeline import host_gaps_without_profiler, read_trace, timeline, trace_rounds
from timing import measure_bandwidth

GREEDY, SAMPLED = 0.0, 1.0
TRACED_TOKENS = 96
"""Of the answer whose trace is kept: a trace of more is large."""
BROKEN_DEVICE = 3
"""Exit code of a process whose device answers no more."""

Run = Callable[[Session, dict[str, Any], Allowance], None]
"""Fills what a part found."""


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        seconds: that it may take.
        least: below which it is not begun.
    """

    name: str
    seconds: float
    run: Run
    least: float = 5.0


def parts_of(settings: Settings, num_sources: int = 1) -> list[Part]:
    """All parts in the order in which they run.

    Args:
        num_sources: question files, of which all but the first are asked behind the shortest
            context alone, greedily.
    """
    short, *longer = settings.contexts
    first, *others = settings.shapes
    parts = [
        Part("machine", 20, _machine),
        Part(f"{first} load", 90, partial(_load, first), 20),
        Part(f"{first} passes", 100, partial(_passes, first), 10),
        Part(f"{first} plans", 80, partial(_plans, first), 10),
        _answers(first, short, GREEDY, 60),
        Part(f"{first} timeline", 30, partial(_timeline, first)),
    ]
    parts += [_answers(first, short, GREEDY, 40, source) for source in range(1, num_sources)]
    for shape in others:
        parts += [
            Part(f"{shape} load", 60, partial(_load, shape), 20),
            Part(f"{shape} plans", 80, partial(_plans, shape), 10),
            _answers(shape, short, GREEDY, 50),
        ]
    parts += [_answers(first, context, GREEDY, 30) for context in longer]
    parts.append(_answers(first, short, SAMPLED, 40))
    parts += [
        Part("products", 50, partial(_products, settings.shapes), 10),
        Part("attention", 50, partial(_attention, settings.shapes), 10),
        *(Part(f"{shape} passes", 40, partial(_passes, shape), 10) for shape in others),
    ]
    parts += [_answers(first, context, SAMPLED, 30) for context in longer]
    for shape in others:
        parts += [_answers(shape, context, GREEDY, 30) for context in longer]
        parts += [_answers(shape, context, SAMPLED, 30) for context in settings.contexts]
    return parts


def run_parts(
    parts: Sequence[Part], session: Session, until: float, announce: Callable[[str, float], None]
) -> None:
    """Run what the record does not have yet, each part within its time.

    A part that fails is noted and the next one runs, unless the device answers no more: then the
    process ends, and another one may go on.

    Args:
        until: when all is over, in seconds of `time.time`.
        announce: is told each part that begins, and how many seconds it may take.
    """
    record, begun = session.record, time.time()
    with ExitStack() as stack:
        stack.enter_context(serving(session.serve))
        for part in parts:
            if part.name in record.parts:
                continue
            seconds = min(part.seconds, until - time.time())
            if seconds < part.least:
                record.parts[part.name] = {"status": LEFT_OUT, "error": "no time was left"}
                record.save()
                continue
            announce(part.name, seconds)
            _run_one(part, session, Allowance(time.time() + seconds, record.save))
            entry = record.parts[part.name]
            say(f"[{time.time() - begun:5.0f} s] {part.name}: {entry['status']}"
                f" in {entry['seconds']:.1f} s {entry.get('error', '')}")  # fmt: skip
            _leave_if_broken(session.device)


def _run_one(part: Part, session: Session, allowance: Allowance) -> None:
    found: dict[str, Any] = {}
    entry: dict[str, Any] = {"status": PARTLY, "found": found, "left_out": allowance.left_out}
    # a process that ends inside leaves what it found, and is told from one that did not begin
    session.record.parts[part.name] = entry
    begin = time.perf_counter()
    try:
        part.run(session, found, allowance)
        entry["status"] = PARTLY if allowance.left_out else DONE
    except Exception as error:  # whatever it is, the next part may be whole
        entry["status"], entry["error"] = FAILED, f"{type(error).__name__}: {error}"
        entry["traceback"] = traceback.format_exc().splitlines()[-12:]
        traceback.print_exc()
    entry["seconds"] = time.perf_counter() - begin
    session.record.save()
    gc.collect()


def _leave_if_broken(device: torch.device) -> None:
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except RuntimeError as error:
        say(f"the device answers no more: {error}")
        sys.exit(BROKEN_DEVICE)


def say(line: str) -> None:
    """A line of progress."""
    print(line, file=sys.stderr, flush=True)


def _machine(session: Session, found: dict[str, Any], allowance: Allowance) -> None:
    bandwidth = measure_bandwidth(session.device, session.settings.bandwidth_bytes)
    found["bandwidth"] = bandwidth.to_json()
    say(bandwidth.shown())


def _load(shape: str, session: Session, found: dict[str, Any], allowance: Allowance) -> None:
    grown = session.grown(shape)
    found["seconds"], found["said"] = grown.seconds, grown.said
    found["plan"] = grown.chain.plan.model_dump(mode="json")
    found["graphs"] = vars(grown.chain.engine.graphs.counts)
    if session.device.type == "cuda":
        found["device_bytes"] = torch.cuda.memory_allocated(session.device)


def _passes(shape: str, session: Session, found: dict[str, Any], allowance: Allowance) -> None:
    chain, settings = session.grown(shape).chain, session.settings.passes
    bandwidth = session.bandwidth()
    drafts, passes = found.setdefault("drafts", {}), found.setdefault("passes", {})
    measure_passes(chain, settings, bandwidth, passes, allowance)
    measure_drafts(chain, session.settings.drafts, settings, bandwidth, drafts, allowance)


def _plans(shape: str, session: Session, found: dict[str, Any], allowance: Allowance) -> None:
    chain, settings = session.grown(shape).chain, session.settings
    # the last ones; the first ones are measured
    num = settings.num_prompts + settings.num_plan_prompts
    prompts = session.prompts(shape, settings.contexts[0], num)
    chosen = search_plans(
        chain,
        session.plans(shape),
        prompts[-settings.num_plan_prompts :],
        settings.drafts,
        settings.flush_lengths,
        settings.answers.max_new_tokens,
        found.setdefault("milliseconds_per_token", {}),
        allowance,
    )
    found["chosen"] = {name: plan.model_dump(mode="json") for name, plan in chosen.items()}
    found["graphs"] = vars(chain.engine.graphs.counts)


def _answers(shape: str, context: int, temperature: float, seconds: float, source: int = 0) -> Part:
    def run(session: Session, found: dict[str, Any], allowance: Allowance) -> None:
        grown, settings = session.grown(shape), session.settings
        is_short = context == settings.contexts[0]
        num = settings.num_prompts if is_short else settings.num_long_prompts
        prompts = session.prompts(shape, context, num, source)
        found["prompts"] = session.source_name(source)
        found["prompt_tokens"] = [len(prompt) for prompt in prompts]
        measure_answers(
            grown.chain,
            session.baseline(shape),
            session.plans(shape),
            prompts,
            temperature,
            settings.answers if is_short else settings.long_answers,
            found,
            allowance,
        )

    return Part(answers_part(shape, context, temperature, source), seconds, run)


def _timeline(shape: str, session: Session, found: dict[str, Any], allowance: Allowance) -> None:
    chain, settings = session.grown(shape).chain, session.settings
    prompt = session.prompts(shape, settings.contexts[0], settings.num_prompts)[0]
    plan = session.plans(shape)[THREE]
    path = session.places.record.with_suffix(f".{shape}.trace.json.gz")
    tokens = min(settings.answers.max_new_tokens, TRACED_TOKENS)
    trace_rounds(chain, prompt, plan, tokens, path)
    found["trace"] = path.name
    found |= timeline(read_trace(path))
    found |= host_gaps_without_profiler(chain, prompt, plan, tokens, found)


def _products(
    shapes: Sequence[str], session: Session, found: dict[str, Any], allowance: Allowance
) -> None:
    # what was compared on the way is there in any case
    found["choices"] = dict(choices(session.device))
    for shape in shapes:
        for name, verifier in session.grown(shape).chain.engine.verifiers.items():
            measure_products(
                device_model_of(verifier.decoder, name),
                session.settings.products,
                session.bandwidth(),
                found.setdefault(shape, {}).setdefault(name, {}),
                allowance,
            )
    found["choices"] = dict(choices(session.device))


def _attention(
    shapes: Sequence[str], session: Session, found: dict[str, Any], allowance: Allowance
) -> None:
    for shape in shapes:
        name, verifier = next(iter(session.grown(shape).chain.engine.verifiers.items()))
        measure_attention(
            device_model_of(verifier.decoder, name),
            verifier.cache,
            session.settings.attention,
            session.bandwidth(),
            found.setdefault(shape, {}),
            allowance,
        )
