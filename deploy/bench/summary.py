"""From answers to a report. Nothing is run here but the target, which reads its answers again."""

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from polybasic.chain.base.progress import tracked
from polybasic.chain.formats.card import shown_plan, weight_notes
from polybasic.chain.formats.manifest import Manifest
from polybasic.deploy.bench.bench import Bench
from polybasic.deploy.bench.exactness.law import check_law
from polybasic.deploy.bench.exactness.outputs import Comparer
from polybasic.deploy.bench.exactness.rereading import read_patterns_of
from polybasic.deploy.bench.exactness.rounding import NUM_POSITIONS, Rounding, measure_rounding
from polybasic.deploy.bench.intervals import ratio, share
from polybasic.deploy.bench.member_costs import insertions, member_costs
from polybasic.deploy.bench.members import adaptations, draft_vocabularies
from polybasic.deploy.bench.noise import noise_of
from polybasic.deploy.bench.schema import (
    SCHEMA,
    Agreement,
    Answers,
    LawCheck,
    Loss,
    Report,
    SystemReport,
    Totals,
)
from polybasic.deploy.bench.systems.chain_systems import ChainSystem, ruled
from polybasic.deploy.bench.systems.generate_loops import GenerateLoop
from polybasic.deploy.bench.systems.system import System
from polybasic.deploy.bench.totals import answers_of, places_by, statistics_of, totals_of
from polybasic.deploy.runtime.hardware import describe_hardware
from polybasic.deploy.runtime.rounds.sampling import Sampling


def report_of(bench: Bench, is_whole: bool = True) -> Report:
    """Everything that a reader sees.

    Args:
        bench: at least one turn was answered.
        is_whole: False leaves out, of systems whose answers are not all the target's, how they
            differ: to measure what rounding explains takes minutes with a large target.
    """
    chain, settings = bench.chain, bench.settings
    differing = [system.name for system in bench.systems.running if _differs(bench, system)]
    rounding = _rounding(bench) if differing and is_whole else None
    answers = {system.name: answers_of(bench, system) for system in bench.systems.running}
    systems = {
        system.name: _system(bench, system, answers, rounding)
        for system in tracked(bench.systems.running, "systems compared")
    }
    planned = settings.repeats * len(bench.prompts)
    made = chain.manifest.provenance
    return Report(
        complete=len(bench.turns) == planned,
        answered=len(bench.turns),
        planned=planned,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        command=bench.command,
        chain=made.recipe.get("name", "chain"),
        chain_digest=chain_digest(chain.manifest),
        grown=chain.manifest.grown,
        settings={
            **settings.model_dump(mode="json", exclude={"prompts", "systems", "peers_python"}),
            "prompts": bench.prompts_named,
            "num_prompts": len(bench.prompts),
            "num_questions_left_out_as_too_long": bench.num_too_long,
            "prompts_sha256": hashlib.sha256(Path(settings.prompts).read_bytes()).hexdigest(),
        },
        hardware={
            **describe_hardware(chain.engine.models.target.device),
            "energy": "; ".join([*bench.meter.counted, *bench.meter.missing]),
        },
        versions=_versions(),
        prompts=bench.described,
        systems=systems,
        insertions=insertions(bench, answers, systems),
        noise=noise_of(answers["target"], bench.quiet.stop()),
        plan=_plan(bench, systems),
        rounding={} if rounding is None else rounding.to_json(),
        memory=bench.memory,
        adaptations=adaptations(chain.manifest),
        draft_vocabulary=draft_vocabularies(chain, [prompt.token_ids for prompt in bench.prompts]),
        repeating=[
            member.name
            for member in chain.manifest.members
            if member.repeats_codes
            and member.gguf == chain.manifest.members[0].gguf
            and member.name in chain.plan.members
        ],
        notes=[
            *weight_notes(chain.manifest),
            *_about_the_plan(bench),
            *bench.systems.notes,
            *([] if is_whole else _left_out(differing)),
        ],
    )


def results_of(report: Report) -> dict[str, Any]:
    """What a chain's manifest and card keep of a report."""
    return {
        "schema": SCHEMA,
        "made": report.made,
        "hardware": {key: value for key, value in report.hardware.items() if key != "energy"},
        "settings": report.settings,
        "systems": {
            name: {
                "tokens_per_second": system.totals.tokens_per_second,
                "speedup_vs_target": system.totals.speedup.value,
                "mean_accepted_length": system.totals.accepted_length
                and system.totals.accepted_length.mean,
            }
            for name, system in report.systems.items()
            if system.loss is None
        },
    }


def chain_digest(manifest: Manifest) -> str:
    """SHA-256 of the files of all members, as the manifest names them."""
    files = {member.name: member.files for member in manifest.members}
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _system(
    bench: Bench, system: System, answers: Mapping[str, Answers], rounding: Rounding | None
) -> SystemReport:
    def of_each(key: str) -> dict[str, Totals]:
        return {
            name: totals_of(bench, system, answers, places)
            for name, places in places_by(bench, key).items()
        }

    groups = of_each("group")
    report = SystemReport(
        runtime=system.runtime,
        version=system.version,
        description=system.description,
        dtype=system.dtype,
        totals=totals_of(bench, system, answers, range(len(bench.prompts))),
        tasks=of_each("task"),
        groups=groups if len(groups) > 1 else {},
        answers=answers[system.name],
        agreement=_agreement(bench, system, rounding),
        law=_law(bench, system),
        notes=list(system.notes),
    )
    if not isinstance(system, ChainSystem):
        return report
    statistics = [statistics_of(taken) for repeat in bench.of(system) for taken in repeat]
    prefill = sum(answer.prefill_seconds for answer in statistics)
    decoding = sum(answer.seconds for answer in statistics) - prefill
    num_later = sum(answer.num_later for answer in statistics)
    verifying = [member.name for member in bench.chain.manifest.verifying]
    return report.model_copy(
        update={
            "plan": system.plan.model_dump(mode="json"),
            "shown_plan": shown_plan(system.plan, verifying),
            "predicted_seconds_per_token": _predicted(bench, system),
            "measured_seconds_per_token": decoding / num_later if num_later else None,
            "members": member_costs(bench, system),
            "prefill_seconds": prefill / bench.num_repeats,
            "loss": None if system.plan.is_lossless else _loss(bench, system, answers),
        }
    )


def _rounding(bench: Bench) -> Rounding:
    """How close two tokens must be for the systems' read patterns to swap them."""
    answers = [
        (prompt.token_ids, taken.answer.token_ids)
        for prompt, taken in zip(bench.prompts, bench.of(bench.target)[0], strict=False)
    ]
    verifying = list(bench.chain.engine.verifiers)
    # samples of transformers are drawn with numbers of its own
    is_greedy = bench.settings.temperature == 0
    loops = [loop for loop in bench.systems.running if isinstance(loop, GenerateLoop)]
    others = {loop.name: loop.logits for loop in loops if is_greedy}
    return measure_rounding(
        bench.chain.engine.verifiers[verifying[0]],
        answers,
        read_patterns_of(
            (plan for system in bench.systems.own for plan in system.plans),
            verifying,
            NUM_POSITIONS,
        ),
        others,
    )


def _left_out(differing: Sequence[str]) -> list[str]:
    if not differing:
        return []
    return [
        f"Not all answers of {', '.join(differing)} are the target's: the whole report says why."
    ]


def _is_comparable(bench: Bench, system: System) -> bool:
    """Whether its answers are to be the target's: not where it draws by numbers of its own, nor by
    a lossy plan."""
    is_greedy = bench.settings.temperature == 0
    if not isinstance(system, ChainSystem):
        return is_greedy
    return system.plan.is_lossless and (is_greedy or system.plan.rule == "coupled")


def _differs(bench: Bench, system: System) -> bool:
    """Whether an answer is not the target's, which it is to be."""
    pairs = zip(bench.of(bench.target), bench.of(system), strict=True)
    return _is_comparable(bench, system) and any(
        wanted.answer.token_ids != given.answer.token_ids
        for expected, found in pairs
        for wanted, given in zip(expected, found, strict=True)
    )


def _agreement(bench: Bench, system: System, rounding: Rounding | None) -> Agreement | None:
    """None where its answers are not to be the target's, or differ and are not compared yet."""
    if not _is_comparable(bench, system) or (rounding is None and _differs(bench, system)):
        return None
    engine = bench.chain.engine
    verifier = next(iter(engine.verifiers.values()))
    tolerance = 0.0
    if rounding is not None:
        tells_logits = isinstance(system, ChainSystem | GenerateLoop)
        tolerance = (
            rounding.tolerance_of(system.name) if tells_logits else rounding.tolerance_elsewhere
        )
    comparer = Comparer(verifier, tolerance)
    answers = zip(bench.of(bench.target), bench.of(system), strict=True)
    for repeat, (expected, found) in enumerate(answers):
        for place, (wanted, given) in enumerate(zip(expected, found, strict=True)):
            prompt = bench.prompts[place].token_ids
            sampler = engine.repeatable_sampler(prompt, bench.sampling(repeat, place))
            comparer.count(sampler, prompt, wanted.answer.token_ids, given.answer.token_ids)
    return comparer.agreement()


def _loss(bench: Bench, system: System, answers: Mapping[str, Answers]) -> Loss:
    found, expected = bench.of(system), bench.of(bench.target)
    pairs = [
        (taken.answer.token_ids, own.answer.token_ids)
        for repeat, owns in zip(found, expected, strict=True)
        for taken, own in zip(repeat, owns, strict=True)
    ]
    kept = [
        [(costs.num_own, costs.num_tokens) for costs in map(statistics_of, repeat)]
        for repeat in found
    ]
    plans = answers.get("polybasic")
    return Loss(
        quality=share(kept, bench.described),
        answers=len(pairs),
        identical=sum(ours == own for ours, own in pairs),
        over_plan=plans and ratio(answers[system.name], plans, bench.described),
    )


def _law(bench: Bench, system: System) -> LawCheck | None:
    """None of greedy answers, and of too few tokens."""
    if bench.settings.temperature == 0:
        return None
    verifier = next(iter(bench.chain.engine.verifiers.values()))
    answers = (
        (bench.prompts[place].token_ids, taken.answer.token_ids)
        for repeat in bench.of(system)
        for place, taken in enumerate(repeat)
    )
    return check_law(verifier, Sampling(bench.settings.temperature), answers)


def _predicted(bench: Bench, system: ChainSystem) -> float | None:
    """None at another temperature or in another dtype than the plan was made for."""
    measured, settings = bench.chain.measured_plan, bench.settings
    if measured is None or (measured.temperature, measured.dtype) != (
        settings.temperature,
        settings.dtype,
    ):
        return None
    # at temperature 0 all rules are one
    rule = system.plan.rule if settings.temperature > 0 else measured.plan.rule
    return bench.chain.predicted_seconds_per_token(ruled(system.plan, rule))


def _about_the_plan(bench: Bench) -> list[str]:
    """What must be known of it, a sentence each."""
    measured, prompts = bench.chain.measured_plan, bench.prompts_named
    if measured is None:
        return ["The plan runs as packed; it was not measured on this machine: polybasic plan."]
    if measured.prompts and prompts and measured.prompts != prompts:
        return [
            f"The plan was made for other prompts ({measured.prompts}) than these ({prompts}): "
            "polybasic bench --plan-here plans on a third of them."
        ]
    return []


def _plan(bench: Bench, systems: Mapping[str, SystemReport]) -> dict[str, Any]:
    """The chain's plan, what it was expected to cost, and why it was chosen."""
    chain = bench.chain
    measured, own = chain.measured_plan, systems.get("polybasic")
    return {
        **ruled(chain.plan, bench.settings.rule).model_dump(mode="json"),
        "shown": shown_plan(chain.plan, [member.name for member in chain.manifest.verifying]),
        "predicted_seconds_per_token": own and own.predicted_seconds_per_token,
        "measured_seconds_per_token": own and own.measured_seconds_per_token,
        "explanation": measured and measured.explanation,
    }


def _versions() -> dict[str, str]:
    names = ("polybasic", "torch", "transformers", "tokenizers", "safetensors")
    return {"python": platform.python_version()} | {name: version(name) for name in names}
