"""Systems side by side on the same prompts: what a chain gains over its source target."""

import hashlib
import platform
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from polybasic.chain.card import record_results
from polybasic.chain.errors import UserError
from polybasic.chain.files import write_json
from polybasic.deploy.baselines import TransformersBaseline
from polybasic.deploy.exactness import Agreement, OtherWay
from polybasic.deploy.hardware import describe_hardware
from polybasic.deploy.prompts import Question, choose_questions, read_questions
from polybasic.deploy.report import write_markdown
from polybasic.deploy.runtime import Chain, load_chain
from polybasic.deploy.sampling import Sampling
from polybasic.deploy.settings import BenchSettings

SCHEMA = "polybasic.report/1"
MIN_PROMPTS_TO_CHOOSE = 6


@dataclass(frozen=True)
class Prompt:
    """One turn to answer: token ids up to where the answer begins."""

    task: str
    token_ids: list[int]


@dataclass
class Run:
    """One answer of one system."""

    token_ids: list[int]
    seconds: float
    forward_passes: dict[str, int] = field(default_factory=dict)
    seconds_by_member: dict[str, float] = field(default_factory=dict)
    accepted_lengths: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class System:
    """One way of answering, with all of its answers so far: task -> runs.

    Attributes:
        members: of the chain, that run; None is transformers' own loop.
    """

    name: str
    description: str
    members: tuple[str, ...] | None
    runs: list[tuple[str, Run]] = field(default_factory=list)


def bench_chain(folder: Path, settings: BenchSettings) -> dict[str, Any]:
    """Run the systems of `settings` in turns and write `folder`/report/report.{json,md}.

    The faster of eagle2 and polybasic_full becomes the chain's plan, and the results are entered
    into its manifest and card.

    Args:
        folder: a chain.
        settings: `prompts` names a Spec-Bench question file.

    Returns:
        The content of report.json (polybasic.report/1).

    Raises:
        UserError: whatever loading refuses, prompts that are malformed or all too long, or
            systems without the target, over which speedups are counted.
    """
    if "target" not in settings.systems:
        raise UserError(
            "no baseline",
            f"bench.systems={','.join(settings.systems)}",
            "add target, over which speedups are counted",
        )
    questions = read_questions(Path(settings.prompts))
    chain = load_chain(folder, dtype=settings.dtype)
    chosen, num_too_long = _fitting(chain, questions, settings)
    prompts = _prompts(chain, chosen, settings)
    plan_members = _faster_plan(chain, prompts, settings)
    systems = _systems(chain, settings, plan_members)
    baseline = _baseline(chain, settings)
    _run_in_turns(chain, baseline, systems, prompts, settings)
    report = {
        "schema": SCHEMA,
        "hardware": describe_hardware(chain.engine.models.target.device),
        "versions": _versions(),
        "settings": {
            **settings.model_dump(mode="json", exclude={"prompts", "systems"}),
            "num_prompts": len(prompts),
            "num_questions_left_out_as_too_long": num_too_long,
            "prompts_sha256": hashlib.sha256(Path(settings.prompts).read_bytes()).hexdigest(),
        },
        "systems": _summaries(chain, baseline, systems, prompts, settings),
        "plan": _plan_summary(chain, plan_members, systems),
    }
    write_json(folder / "report" / "report.json", report)
    write_markdown(folder / "report" / "report.md", report)
    record_results(folder, report)
    return report


def _fitting(
    chain: Chain, questions: list[Question], settings: BenchSettings
) -> tuple[list[Question], int]:
    """Questions chosen from those that fit the context, and how many do not."""
    room = chain.engine.context_tokens - settings.max_new_tokens

    def num_tokens(question: Question) -> int:
        messages = [{"role": "user", "content": "\n".join(question.turns)}]
        answers = (len(question.turns) - 1) * (settings.max_new_tokens + 16)
        return len(chain.encode(messages)) + answers

    fitting = [one for one in questions if num_tokens(one) <= room]
    if not fitting:
        raise UserError(
            "no prompt fits the context",
            f"{settings.prompts} ({len(questions)} questions, room for {room} tokens)",
            "use shorter prompts or a smaller bench.max_new_tokens",
        )
    return choose_questions(fitting, settings.num_prompts_per_task), len(questions) - len(fitting)


def _prompts(chain: Chain, questions: list[Question], settings: BenchSettings) -> list[Prompt]:
    """One prompt a turn; earlier turns are answered by the target, for all systems alike."""
    prompts: list[Prompt] = []
    target = chain.plan.members[:1]
    for question in questions:
        messages: list[dict[str, str]] = []
        for index, turn in enumerate(question.turns, 1):
            messages.append({"role": "user", "content": turn})
            prompts.append(Prompt(question.task, chain.encode(messages)))
            if index < len(question.turns):
                answer = chain.generate(
                    messages, max_new_tokens=settings.max_new_tokens, members=target
                )
                messages.append({"role": "assistant", "content": answer.text})
    return prompts


def _member_sets(chain: Chain) -> dict[str, tuple[str, ...]]:
    names = tuple(member.name for member in chain.manifest.members)
    return {"target": names[:1], "eagle2": (names[0], names[-1]), "polybasic_full": names}


def _faster_plan(chain: Chain, prompts: list[Prompt], settings: BenchSettings) -> tuple[str, ...]:
    """Members of the faster of eagle2 and polybasic_full, over a sample of the prompts."""
    candidates = {name: _member_sets(chain)[name] for name in ("eagle2", "polybasic_full")}
    step = max(len(prompts) // MIN_PROMPTS_TO_CHOOSE, 1)
    seconds_per_token = {}
    for name in (*candidates, *candidates):  # the first turn warms up
        runs = [_answer(chain, candidates[name], one, settings) for one in prompts[::step]]
        total = sum(run.seconds for run in runs)
        seconds_per_token[name] = total / sum(len(run.token_ids) for run in runs)
    return candidates[min(seconds_per_token, key=seconds_per_token.__getitem__)]


def _systems(chain: Chain, settings: BenchSettings, plan_members: tuple[str, ...]) -> list[System]:
    sets = _member_sets(chain) | {"polybasic": plan_members}
    described = {
        "target": "this runtime, the target alone",
        "hf_generate": "transformers generate() on the source target",
        "eagle2": "two models: target and draft head",
        "polybasic_full": f"all {len(sets['polybasic_full'])} models",
        "polybasic": f"the faster plan, by measurement: {', '.join(plan_members)}",
    }
    return [System(name, described[name], sets.get(name)) for name in settings.systems]


def _baseline(chain: Chain, settings: BenchSettings) -> TransformersBaseline | None:
    if "hf_generate" not in settings.systems:
        return None
    target = chain.engine.models.target
    return TransformersBaseline(chain.target_folder, target.dtype, target.device, chain.stop_tokens)


def _run_in_turns(
    chain: Chain,
    baseline: TransformersBaseline | None,
    systems: list[System],
    prompts: list[Prompt],
    settings: BenchSettings,
) -> None:
    """Every system answers a prompt before the next prompt comes, so that drift hits all alike."""
    with Progress(console=Console(stderr=True)) as progress:
        total = settings.repeats * len(prompts) * len(systems)
        bar = progress.add_task("bench", total=total)
        for system in systems:
            _answer_with(chain, baseline, system, prompts[0], settings)  # warm-up, not counted
        for repeat in range(settings.repeats):
            for prompt in prompts:
                # The order changes with the repeat: nobody always runs behind the same system.
                first = repeat % len(systems)
                for system in systems[first:] + systems[:first]:
                    run = _answer_with(chain, baseline, system, prompt, settings)
                    system.runs.append((prompt.task, run))
                    progress.advance(bar)


def _answer_with(
    chain: Chain,
    baseline: TransformersBaseline | None,
    system: System,
    prompt: Prompt,
    settings: BenchSettings,
) -> Run:
    if system.members is not None:
        return _answer(chain, system.members, prompt, settings)
    assert baseline is not None
    sampling = Sampling(settings.temperature, seed=settings.seed)
    token_ids, seconds = baseline.generate(prompt.token_ids, settings.max_new_tokens, sampling)
    return Run(token_ids, seconds)


def _answer(chain: Chain, members: tuple[str, ...], prompt: Prompt, settings: BenchSettings) -> Run:
    sampling = Sampling(settings.temperature, seed=settings.seed)
    token_ids: list[int] = []
    for new in chain.stream_ids(prompt.token_ids, settings.max_new_tokens, sampling, members):
        token_ids += new
    statistics = chain.last_statistics
    assert statistics is not None
    return Run(
        token_ids,
        statistics.seconds,
        statistics.forward_passes,
        statistics.seconds_by_member,
        statistics.accepted_lengths,
    )


def _summaries(
    chain: Chain,
    baseline: TransformersBaseline | None,
    systems: list[System],
    prompts: list[Prompt],
    settings: BenchSettings,
) -> dict[str, Any]:
    target = next(system for system in systems if system.name == "target")
    tasks = list(dict.fromkeys(prompt.task for prompt in prompts))
    summaries = {}
    for system in systems:
        summary: dict[str, Any] = {"description": system.description}
        summary |= _totals(system.runs, target.runs)
        summary["forward_passes"] = _sum_by_name(
            [run.forward_passes for _, run in system.runs], settings.repeats
        )
        summary["seconds_by_member"] = _sum_by_name(
            [run.seconds_by_member for _, run in system.runs], settings.repeats
        )
        if settings.temperature == 0:
            other_way = baseline.logits if baseline and system.members is None else None
            summary["identical_to_target"] = _agreement(chain, target, system, prompts, other_way)
        summary["tasks"] = {
            task: _totals(
                [one for one in system.runs if one[0] == task],
                [one for one in target.runs if one[0] == task],
            )
            for task in tasks
        }
        summaries[system.name] = summary
    return summaries


def _totals(runs: list[tuple[str, Run]], target: list[tuple[str, Run]]) -> dict[str, Any]:
    """Total tokens over total time, and what the passes of each verifying member gained."""
    tokens, seconds = _tokens_and_seconds(runs)
    target_tokens, target_seconds = _tokens_and_seconds(target)
    lengths: dict[str, list[int]] = {}
    for _, run in runs:
        for member, gained in run.accepted_lengths.items():
            lengths.setdefault(member, []).extend(gained)
    means = {member: sum(gained) / len(gained) for member, gained in lengths.items() if gained}
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "speedup_vs_target": (tokens / seconds) / (target_tokens / target_seconds),
        "mean_accepted_length": next(iter(means.values()), 1.0),
        "mean_accepted_length_by_member": means,
    }


def _tokens_and_seconds(runs: list[tuple[str, Run]]) -> tuple[int, float]:
    return sum(len(run.token_ids) for _, run in runs), sum(run.seconds for _, run in runs)


def _sum_by_name(parts: list[dict[str, Any]], repeats: int) -> dict[str, Any]:
    """Sums over the prompts, of one repeat."""
    names = list(dict.fromkeys(name for part in parts for name in part))
    return {name: sum(part.get(name, 0) for part in parts) / repeats for name in names}


def _agreement(
    chain: Chain,
    target: System,
    system: System,
    prompts: list[Prompt],
    other_way: OtherWay | None,
) -> dict[str, int]:
    agreement = Agreement()
    verifier = chain.engine.verifiers[chain.plan.members[0]]
    pairs = zip(prompts, target.runs, system.runs, strict=False)
    for prompt, (_, expected), (_, found) in pairs:
        agreement.count(verifier, prompt.token_ids, expected.token_ids, found.token_ids, other_way)
    return vars(agreement)


def _plan_summary(chain: Chain, members: tuple[str, ...], systems: list[System]) -> dict[str, Any]:
    measured = {system.name: _tokens_and_seconds(system.runs) for system in systems}
    tokens, seconds = measured.get("polybasic", (0, 0.0))
    return {
        "members": list(members),
        "tree": chain.plan.tree.model_dump(),
        "flush_length": chain.plan.flush_length,
        "rule": chain.plan.rule,
        "measured_seconds_per_token": seconds / tokens if tokens else None,
    }


def _versions() -> dict[str, str]:
    names = ("polybasic", "torch", "transformers", "tokenizers", "safetensors")
    return {"python": platform.python_version()} | {name: version(name) for name in names}
