"""Systems side by side on the same prompts: what a chain gains over its source target."""

import hashlib
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from polybasic.chain.errors import UserError
from polybasic.chain.formats.card import record_results, shown_flush, shown_members, shown_tree
from polybasic.chain.formats.files import write_json
from polybasic.chain.formats.head_kinds.table import HEAD_KINDS
from polybasic.chain.formats.manifest import MODEL_KINDS, Member
from polybasic.chain.formats.plan import Ngram, Plan
from polybasic.chain.kernels.product_times import name_of
from polybasic.chain.progress import ProgressReport
from polybasic.deploy.bench.baselines import (
    TimedAnswer,
    TransformersBaseline,
    candidate_dtypes,
    fastest_baseline,
)
from polybasic.deploy.bench.exactness import Agreement
from polybasic.deploy.bench.members import adaptations, answers_of_target, draft_vocabularies
from polybasic.deploy.bench.report import write_markdown
from polybasic.deploy.bench.rereading import read_patterns_of
from polybasic.deploy.bench.rounding import NUM_POSITIONS, Rounding, measure_rounding
from polybasic.deploy.chain import Chain
from polybasic.deploy.hardware import Usage, describe_hardware, forget_peak, usage
from polybasic.deploy.load import device_named, load_chain
from polybasic.deploy.memory import Memory
from polybasic.deploy.prompts import Question, choose_fitting, read_questions
from polybasic.deploy.request import Statistics
from polybasic.deploy.rounds.sampling import Sampling
from polybasic.deploy.settings import BenchSettings, SystemName

SCHEMA = "polybasic.report/1"


@dataclass(frozen=True)
class Prompt:
    """One turn to answer: token ids up to where the answer begins."""

    task: str
    token_ids: list[int]


@dataclass
class Run:
    """One answer of one system, with this runtime's statistics where it made it."""

    token_ids: list[int]
    seconds: float
    statistics: Statistics | None = None


@dataclass
class System:
    """One way of answering, with all of its answers so far: task -> runs.

    Attributes:
        plan: that the chain runs; None is transformers' own loop.
    """

    name: str
    description: str
    plan: Plan | None
    runs: list[tuple[str, Run]] = field(default_factory=list)


def bench_chain(
    folder: Path, settings: BenchSettings, say: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Run the systems of `settings` in turns and write `folder`/report/report.{json,md}.

    Each system runs the plan that was measured as the best of its members on this machine, where
    there is one, else the chain's own tree and flush length with these members. The results are
    recorded in the chain's manifest and card.

    Args:
        folder: a chain.
        settings: `prompts` names a Spec-Bench question file.
        say: as for `load_chain`.

    Returns:
        The content of report.json (polybasic.report/1).

    Raises:
        UserError: the chain cannot be loaded, prompts that are malformed or all too long, systems
            without the target, over which speedups are counted, or one that the chain has no
            members for.
    """
    if "target" not in settings.systems:
        raise UserError(
            "no baseline",
            f"bench.systems={','.join(settings.systems)}",
            "add target, over which speedups are counted",
        )
    questions = read_questions(Path(settings.prompts))
    device = device_named()
    forget_peak(device)
    before = usage(device)
    chain = load_chain(folder, dtype=settings.dtype, graphs=settings.graphs, say=say)
    loaded = usage(device)
    chosen, num_too_long = _fitting(chain, questions, settings)
    systems = _systems(chain, settings)
    settings = settings.model_copy(update={"dtype": name_of(chain.engine.models.target.dtype)})
    prompts = _prompts(chain, chosen, settings)
    _warm_up(chain, systems, prompts, settings)
    memory = _memory_report(chain.memory, before, loaded, usage(device))
    found = _baseline(chain, prompts, settings)
    baseline = None if found is None else found[0]
    _run_in_turns(chain, baseline, systems, prompts, settings)
    rounding = _rounding(chain, baseline, systems, prompts, settings)
    summaries = _summaries(chain, systems, prompts, settings, rounding)
    if found is not None:
        summaries["hf_generate"]["dtype"] = name_of(found[0].dtype)
        summaries["hf_generate"]["answer"] = asdict(found[1])
    report = {
        "schema": SCHEMA,
        "grown": chain.manifest.grown,
        "target": answers_of_target(chain.manifest),
        "adaptations": adaptations(chain.manifest),
        "draft_vocabulary": draft_vocabularies(chain, [prompt.token_ids for prompt in prompts]),
        "memory": memory,
        "hardware": describe_hardware(chain.engine.models.target.device),
        "versions": _versions(),
        "settings": {
            **settings.model_dump(mode="json", exclude={"prompts", "systems"}),
            "num_prompts": len(prompts),
            "num_questions_left_out_as_too_long": num_too_long,
            "prompts_sha256": hashlib.sha256(Path(settings.prompts).read_bytes()).hexdigest(),
        },
        "systems": summaries,
        "rounding": rounding.to_json(),
        "plan": _plan_summary(chain, summaries),
    }
    write_json(folder / "report" / "report.json", report)
    write_markdown(folder / "report" / "report.md", report)
    record_results(folder, report)
    return report


def _fitting(
    chain: Chain, questions: list[Question], settings: BenchSettings
) -> tuple[list[Question], int]:
    """Questions chosen from those that fit the context, and how many do not."""

    def num_tokens(question: Question) -> int:
        messages = [{"role": "user", "content": "\n".join(question.turns)}]
        answers = (len(question.turns) - 1) * (settings.max_new_tokens + 16)
        return len(chain.encode(messages)) + answers

    return choose_fitting(questions, num_tokens, chain.engine.context_tokens, settings, "bench")


def _prompts(chain: Chain, questions: list[Question], settings: BenchSettings) -> list[Prompt]:
    """One prompt a turn; earlier turns are answered by the target, for all systems alike."""
    prompts: list[Prompt] = []
    target = [chain.manifest.members[0].name]
    for question in questions:
        messages: list[dict[str, str]] = []
        for index, turn in enumerate(question.turns, 1):
            messages.append({"role": "user", "content": turn})
            prompts.append(Prompt(question.task, chain.encode(messages)))
            if index < len(question.turns):
                answer = chain.generate(
                    messages,
                    max_new_tokens=settings.max_new_tokens,
                    temperature=0.0,
                    members=target,
                )
                messages.append({"role": "assistant", "content": answer.text})
    return prompts


def _systems(chain: Chain, settings: BenchSettings) -> list[System]:
    return [
        System("hf_generate", "transformers generate() on the source target", None)
        if name == "hf_generate"
        else _system(name, chain)
        for name in settings.systems
    ]


def _system(name: SystemName, chain: Chain) -> System:
    """A way of running the chain's own members; a draft head's is named by the head's kind.

    Raises:
        UserError: the chain has none of the members that it takes.
    """
    verifying = [member.name for member in chain.manifest.verifying]
    target = verifying[0]
    if name == "target":
        alone = chain.plan_of([target]).model_copy(update={"rule": "coupled"})
        return System(name, "this runtime, the target alone", alone)
    if name == "polybasic":
        described = f"the chain's plan: {', '.join(chain.plan.members)}"
        return System(name, described, chain.plan)
    if name == "ngram":
        plan = chain.plan_of([target]).model_copy(update={"ngram": Ngram()})
        return System(name, "the target with drafts copied from prompt and output", plan)
    if name == "polybasic_full":
        drafters = _drafters_of(verifying[-1], chain, (*HEAD_KINDS, *MODEL_KINDS))
        members = [*verifying, *(member.name for member in drafters[:1])]
        return System(name, f"all {len(members)} models", chain.plan_of(members))
    kinds = {"eagle2": tuple(HEAD_KINDS), "draft_model": MODEL_KINDS}
    what = {"eagle2": "draft head", "draft_model": "independent draft model"}[name]
    drafters = _drafters_of(target, chain, kinds[name])
    if not drafters:
        raise UserError(
            "system without members",
            f"{name} in bench.systems; {chain.folder} has no {what} for {target}",
            "leave it out",
        )
    drafter = drafters[0]
    shown = drafter.kind if name == "eagle2" else name
    described = f"two models: target and {what}"
    return System(shown, described, chain.plan_of([target, drafter.name]))


def _drafters_of(verifying: str, chain: Chain, kinds: tuple[str, ...]) -> list[Member]:
    return [
        member
        for kind in kinds
        for member in chain.manifest.drafters
        if member.kind == kind and verifying in member.drafts_for
    ]


def _warm_up(
    chain: Chain, systems: list[System], prompts: list[Prompt], settings: BenchSettings
) -> None:
    """Let each system of this runtime answer the longest prompt, which is not counted."""
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    for system in systems:
        if system.plan is not None:
            _answer(chain, system.plan, longest, settings)


def _memory_report(
    stated: Memory, before: Usage | None, loaded: Usage | None, answered: Usage | None
) -> dict[str, Any]:
    """Bytes as stated, as measured if the system reports them, and the ratio of those that stay."""
    report: dict[str, Any] = {"stated": stated.to_json(), "measured": None, "ratio": None}
    if before is not None and loaded is not None and answered is not None:
        staying, peak = loaded.now - before.now, answered.peak - before.now
        report["measured"] = {"staying_bytes": staying, "peak_bytes": peak}
        report["ratio"] = staying / stated.staying_bytes
    return report


def _baseline(
    chain: Chain, prompts: list[Prompt], settings: BenchSettings
) -> tuple[TransformersBaseline, TimedAnswer] | None:
    """transformers over the target in the dtype in which it answers fastest, and what it takes."""
    if "hf_generate" not in settings.systems:
        return None
    target = chain.engine.models.target

    def load(dtype: torch.dtype) -> TransformersBaseline:
        return TransformersBaseline(chain.target_folder, dtype, target.device, chain.stop_tokens)

    num_parameters = chain.manifest.members[0].num_parameters
    dtypes, left_out = candidate_dtypes(target.dtype, target.device, num_parameters)
    by_length = sorted((prompt.token_ids for prompt in prompts), key=len)
    usual = by_length[len(by_length) // 2]
    baseline, answer = fastest_baseline(load, dtypes, usual, settings.max_new_tokens)
    return baseline, replace(answer, left_out=left_out)


def _run_in_turns(
    chain: Chain,
    baseline: TransformersBaseline | None,
    systems: list[System],
    prompts: list[Prompt],
    settings: BenchSettings,
) -> None:
    """Every system answers a prompt before the next one, so that drift affects all alike."""
    with ProgressReport("bench", settings.repeats * len(prompts) * len(systems)) as progress:
        for system in systems:
            if system.plan is None:
                _answer_with(chain, baseline, system, prompts[0], settings)  # not counted
        for repeat in range(settings.repeats):
            for prompt in prompts:
                # The order changes with the repeat: no system always runs after the same one.
                first = repeat % len(systems)
                for system in systems[first:] + systems[:first]:
                    run = _answer_with(chain, baseline, system, prompt, settings)
                    system.runs.append((prompt.task, run))
                    progress.step()


def _answer_with(
    chain: Chain,
    baseline: TransformersBaseline | None,
    system: System,
    prompt: Prompt,
    settings: BenchSettings,
) -> Run:
    if system.plan is not None:
        return _answer(chain, system.plan, prompt, settings)
    assert baseline is not None
    sampling = Sampling(settings.temperature, seed=settings.seed)
    token_ids, seconds = baseline.generate(prompt.token_ids, settings.max_new_tokens, sampling)
    return Run(token_ids, seconds)


def _answer(chain: Chain, plan: Plan, prompt: Prompt, settings: BenchSettings) -> Run:
    sampling = Sampling(settings.temperature, seed=settings.seed)
    answer = chain.stream_ids(prompt.token_ids, settings.max_new_tokens, sampling, plan)
    token_ids = [token for new in answer for token in new]
    return Run(token_ids, answer.statistics.seconds, answer.statistics)


def _rounding(
    chain: Chain,
    baseline: TransformersBaseline | None,
    systems: list[System],
    prompts: list[Prompt],
    settings: BenchSettings,
) -> Rounding:
    """How close two tokens must be for the systems' read patterns to swap them."""
    answers = [
        (prompt.token_ids, run.token_ids)
        for prompt, (_, run) in zip(prompts, _target_of(systems).runs, strict=False)
    ]
    verifying = list(chain.engine.verifiers)
    plans = [system.plan for system in systems if system.plan is not None]
    return measure_rounding(
        chain.engine.verifiers[verifying[0]],
        answers,
        read_patterns_of(plans, verifying, NUM_POSITIONS),
        # samples of transformers are drawn with numbers of its own
        {"hf_generate": baseline.logits} if baseline and settings.temperature == 0 else {},
    )


def _target_of(systems: list[System]) -> System:
    return next(system for system in systems if system.name == "target")


def _summaries(
    chain: Chain,
    systems: list[System],
    prompts: list[Prompt],
    settings: BenchSettings,
    rounding: Rounding,
) -> dict[str, Any]:
    target = _target_of(systems)
    tasks = list(dict.fromkeys(prompt.task for prompt in prompts))
    summaries = {}
    for system in systems:
        summary: dict[str, Any] = {"description": system.description}
        if system.plan is not None:
            summary["plan"] = system.plan.model_dump(mode="json")
            summary["shown_plan"] = _shown(system.plan, chain)
            summary["seconds_per_token"] = _seconds_per_token(chain, system, settings)
        summary |= _totals(system.runs, target.runs)
        found = _statistics(system.runs)
        for name in ("forward_passes", "seconds_by_member"):
            summary[name] = _sum_by_name([getattr(one, name) for one in found], settings.repeats)
        if _repeats_target(system, settings):
            tolerance = rounding.tolerance_of(system.name)
            summary["identical_to_target"] = _agreement(
                chain, target, system, prompts, settings, tolerance
            )
        summary["tasks"] = {
            task: _totals(
                [one for one in system.runs if one[0] == task],
                [one for one in target.runs if one[0] == task],
            )
            for task in tasks
        }
        summaries[system.name] = summary
    return summaries


def _repeats_target(system: System, settings: BenchSettings) -> bool:
    """Whether its answers are to be the target's, token for token."""
    is_coupled = system.plan is not None and system.plan.rule == "coupled"
    return is_coupled or settings.temperature == 0


def _totals(runs: list[tuple[str, Run]], target: list[tuple[str, Run]]) -> dict[str, Any]:
    """Total tokens over total time, and what the passes of each verifying member gained."""
    tokens, seconds = _tokens_and_seconds(runs)
    target_tokens, target_seconds = _tokens_and_seconds(target)
    lengths: dict[str, list[int]] = {}
    for one in _statistics(runs):
        for member, gained in one.accepted_lengths.items():
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


def _statistics(runs: list[tuple[str, Run]]) -> list[Statistics]:
    return [run.statistics for _, run in runs if run.statistics is not None]


def _sum_by_name(parts: list[dict[str, Any]], repeats: int) -> dict[str, Any]:
    """Sums over the prompts, of one repeat."""
    names = list(dict.fromkeys(name for part in parts for name in part))
    return {name: sum(part.get(name, 0) for part in parts) / repeats for name in names}


def _agreement(
    chain: Chain,
    target: System,
    system: System,
    prompts: list[Prompt],
    settings: BenchSettings,
    tolerance: float,
) -> dict[str, float]:
    agreement = Agreement(tolerance)
    verifier = next(iter(chain.engine.verifiers.values()))
    sampling = Sampling(settings.temperature, seed=settings.seed)
    pairs = zip(prompts, target.runs, system.runs, strict=False)
    for prompt, (_, expected), (_, found) in pairs:
        sampler = chain.engine.repeatable_sampler(prompt.token_ids, sampling)
        agreement.count(verifier, sampler, prompt.token_ids, expected.token_ids, found.token_ids)
    return agreement.to_json()


def _seconds_per_token(
    chain: Chain, system: System, settings: BenchSettings
) -> dict[str, float | None]:
    """Predicted and measured seconds a token, decode only.

    There is no prediction at another temperature or in another dtype than the plan was made for.
    """
    tokens, seconds = _tokens_and_seconds(system.runs)
    seconds -= sum(one.prefill_seconds for one in _statistics(system.runs))
    measured, predicted = chain.measured_plan, None
    if (
        system.plan is not None
        and measured is not None
        and (measured.temperature, measured.dtype) == (settings.temperature, settings.dtype)
    ):
        predicted = chain.predicted_seconds_per_token(system.plan)
    return {"predicted": predicted, "measured": seconds / tokens}


def _plan_summary(chain: Chain, summaries: dict[str, Any]) -> dict[str, Any]:
    """The chain's plan, what it was expected to cost, and why it was chosen."""
    seconds = summaries.get("polybasic", {}).get("seconds_per_token", {})
    measured = chain.measured_plan
    return {
        **chain.plan.model_dump(mode="json"),
        "shown": _shown(chain.plan, chain),
        "predicted_seconds_per_token": seconds.get("predicted"),
        "measured_seconds_per_token": seconds.get("measured"),
        "explanation": measured and measured.explanation,
    }


def _shown(plan: Plan, chain: Chain) -> str:
    """A plan in a few words."""
    verifying = [member.name for member in chain.manifest.verifying]
    parts = [shown_members(plan, verifying)]
    if plan.members[-1] not in verifying or plan.ngram is not None:
        parts.append(f"tree of {shown_tree(plan.tree)}")
    if sum(name in verifying for name in plan.members) > 1:
        parts.append(f"flush {shown_flush(plan, verifying)}")
    return "; ".join(parts)


def _versions() -> dict[str, str]:
    names = ("polybasic", "torch", "transformers", "tokenizers", "safetensors")
    return {"python": platform.python_version()} | {name: version(name) for name in names}
