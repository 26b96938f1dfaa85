"""Whole answers on the device: systems in turns, and a search for plans that suit it."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpu_budget import Allowance
from gpu_names import DECODING, EAGLE2, HF_GENERATE, TARGET, THREE, WHOLE
from timing import rotated

from polybasic.chain.errors import UserError
from polybasic.chain.formats.files import sha256_of_object
from polybasic.chain.formats.plan import Flush, Plan, Tree
from polybasic.deploy import Chain
from polybasic.deploy.bench.baselines import TransformersBaseline
from polybasic.deploy.rounds.sampling import Sampling

HF_SECONDS = 8.0
"""That an answer of transformers' loop takes, about."""


@dataclass(frozen=True)
class AnswerSettings:
    """What is asked.

    Attributes:
        turns: of all systems but `hf_generate`, which answers `hf_prompts` of the prompts once.
    """

    max_new_tokens: int
    turns: int
    hf_prompts: int


@dataclass
class Timed:
    """One answer.

    Attributes:
        seconds: prefill included.
        first_seconds: of these, until the first tokens were there, which needs the whole prefill
            and one round.
        first_tokens: how many these were.
        passes: of the target, behind the prefill.
    """

    token_ids: list[int]
    seconds: float
    first_seconds: float
    first_tokens: int
    passes: int


@dataclass
class SystemAnswers:
    """All answers of one system to the same prompts, turn by turn."""

    turns: list[list[Timed]]

    def milliseconds(self) -> dict[str, Any]:
        """A token, the prefill included: the median of the turns, and each of them."""
        return _of_turns(
            [
                (sum(one.seconds for one in turn), sum(len(one.token_ids) for one in turn))
                for turn in self.turns
            ]
        )

    def decoding_milliseconds(self) -> dict[str, Any]:
        """A token behind the first round."""
        return _of_turns(
            [
                (
                    sum(one.seconds - one.first_seconds for one in turn),
                    sum(len(one.token_ids) - one.first_tokens for one in turn),
                )
                for turn in self.turns
            ]
        )

    def to_json(self) -> dict[str, Any]:
        """As a record holds it."""
        first = self.turns[0]
        tokens, passes = sum(len(one.token_ids) for one in first), sum(one.passes for one in first)
        return {
            WHOLE: self.milliseconds(),
            DECODING: self.decoding_milliseconds(),
            "first_milliseconds": 1e3 * statistics.median(one.first_seconds for one in first),
            "tokens": tokens,
            "tokens_per_target_pass": tokens / passes,
            "answers_sha256": sha256_of_object([one.token_ids for one in first]),
        }


def _of_turns(turns: Sequence[tuple[float, int]]) -> dict[str, Any]:
    """Of seconds and tokens of each turn."""
    each = [1e3 * seconds / tokens for seconds, tokens in turns if tokens]
    return {"median": statistics.median(each) if each else None, "turns": each}


def answer(
    chain: Chain, prompt: list[int], plan: Plan, max_new_tokens: int, sampling: Sampling
) -> Timed:
    """Answer by a plan of the chain.

    The clock is read when tokens were handed over, for which the host has waited.
    """
    begin = time.perf_counter()
    stream = chain.stream_ids(prompt, max_new_tokens, sampling, plan)
    first = next(stream)
    first_seconds = time.perf_counter() - begin
    rest = [token for batch in stream for token in batch]
    seconds, found = time.perf_counter() - begin, chain.last_statistics
    assert found is not None
    passes = next(iter(found.forward_passes.values()))
    return Timed([*first, *rest], seconds, first_seconds, len(first), passes)


def measure_answers(
    chain: Chain,
    baseline: TransformersBaseline | None,
    plans: Mapping[str, Plan],
    prompts: Sequence[list[int]],
    temperature: float,
    settings: AnswerSettings,
    found: dict[str, Any],
    allowance: Allowance,
) -> None:
    """Answer all prompts by all plans, in turns, and some by transformers' own loop.

    Args:
        baseline: transformers' loop over the target; None leaves it out.
        found: system -> times and speedups; filled turn by turn.
    """
    running = {}
    for name, plan in plans.items():
        if allowance.allows(f"answers of {name}"):
            with allowance.trying(name):
                sampling = Sampling(temperature=temperature, seed=0)
                # captures, and is not counted
                answer(chain, prompts[0], plan, settings.max_new_tokens, sampling)
                running[name] = plan
    if baseline is not None and allowance.allows(HF_GENERATE, HF_SECONDS):
        with allowance.trying(HF_GENERATE):
            found[HF_GENERATE] = _by_transformers(
                baseline, chain, prompts, temperature, settings, allowance
            )
    turns: dict[str, list[list[Timed]]] = {name: [] for name in running}
    for turn in range(settings.turns):
        begun = _turn(chain, running, prompts, temperature, settings, turn, allowance)
        is_whole = all(len(answers) == len(prompts) for answers in begun.values())
        # of a first turn whatever there is
        if any(begun.values()) and (is_whole or turn == 0):
            for name, answers in begun.items():
                turns[name].append(answers)
            _fill(found, turns, temperature == 0)
            allowance.save()
        if not is_whole:
            return


def _turn(
    chain: Chain,
    plans: Mapping[str, Plan],
    prompts: Sequence[list[int]],
    temperature: float,
    settings: AnswerSettings,
    turn: int,
    allowance: Allowance,
) -> dict[str, list[Timed]]:
    """Answers by all plans to as many of the prompts as there is time for."""
    begun: dict[str, list[Timed]] = {name: [] for name in plans}
    sampling = Sampling(temperature=temperature, seed=1 + turn)
    for number, prompt in enumerate(prompts):
        if not allowance.allows(f"turn {turn} from prompt {number} on"):
            break
        for name in rotated(list(plans), turn + number):
            timed = answer(chain, prompt, plans[name], settings.max_new_tokens, sampling)
            begun[name].append(timed)
    return begun


def _by_transformers(
    baseline: TransformersBaseline,
    chain: Chain,
    prompts: Sequence[list[int]],
    temperature: float,
    settings: AnswerSettings,
    allowance: Allowance,
) -> dict[str, Any]:
    """Times of transformers' loop, and how many of its answers begin as the target's."""
    alone = chain.plan_of([chain.manifest.members[0].name])
    sampling, answers, same = Sampling(temperature=temperature, seed=1), [], 0
    baseline.generate(prompts[0], 2, sampling)  # warm-up, not counted
    for prompt in prompts[: settings.hf_prompts]:
        if answers and not allowance.allows(f"further answers of {HF_GENERATE}", HF_SECONDS):
            break
        _, first_seconds = baseline.generate(prompt, 1, sampling)
        tokens, seconds = baseline.generate(prompt, settings.max_new_tokens, sampling)
        answers.append(Timed(tokens, seconds, first_seconds, 1, len(tokens)))
        own = answer(chain, prompt, alone, settings.max_new_tokens, sampling)
        same += own.token_ids == tokens
    content = SystemAnswers([answers]).to_json()
    if temperature == 0:
        content["answers_as_target"], content["answers"] = same, len(answers)
    return content


def _fill(found: dict[str, Any], turns: Mapping[str, list[list[Timed]]], greedy: bool) -> None:
    """Times of all systems so far, and how they compare with each other."""
    systems = {name: SystemAnswers(of_turns) for name, of_turns in turns.items()}
    for name, one in systems.items():
        found[name] = one.to_json()
        found[name]["answers"] = len(one.turns[0])
        # draws of systems differ
        if greedy and TARGET in systems:
            pairs = zip(one.turns[0], systems[TARGET].turns[0], strict=True)
            same = sum(mine.token_ids == other.token_ids for mine, other in pairs)
            found[name]["answers_as_target"] = same
    found["speedups"] = {key: _speedups(found, key) for key in (WHOLE, DECODING)}


def _speedups(found: Mapping[str, Any], key: str) -> dict[str, float]:
    names = (TARGET, EAGLE2, THREE, HF_GENERATE)
    medians = {name: found[name][key]["median"] for name in names if name in found}
    return {
        f"{name} over {other}": medians[other] / medians[name]
        for name in medians
        for other in medians
        if name != other and medians[name] and medians[other]
    }


def base_plans(chain: Chain) -> dict[str, Plan]:
    """The systems of a chain of three members, before their plans are searched.

    Raises:
        UserError: other members.
    """
    names = [member.name for member in chain.manifest.members]
    kinds = [member.kind for member in chain.manifest.members]
    if kinds != ["decoder", "awq", "eagle2"]:
        raise UserError(
            "chain of other members",
            f"{chain.folder}: {', '.join(map(str, kinds))}",
            "name a chain of a target, its 4-bit copy and an EAGLE-2 head",
        )
    target, intermediate, head = names
    return {
        TARGET: chain.plan_of([target]),
        EAGLE2: chain.plan_of([target, head]),
        THREE: chain.plan_of([target, intermediate, head]),
    }


def search_plans(
    chain: Chain,
    plans: Mapping[str, Plan],
    prompts: Sequence[list[int]],
    trees: Sequence[Tree],
    flush_lengths: Sequence[int],
    max_new_tokens: int,
    found: dict[str, Any],
    allowance: Allowance,
) -> dict[str, Plan]:
    """The plans that answer fastest here: the best tree, then the best flush length with it.

    Args:
        prompts: others than those that are measured.
        found: system -> what each plan took, in milliseconds a token; filled on the way.
    """
    chosen = dict(plans)
    for name in (THREE, EAGLE2):
        own, tried = plans[name], found.setdefault(name, {})

        def fastest(candidates: Sequence[Plan], tried: dict[str, float] = tried) -> Plan:
            return _fastest(chain, candidates, prompts, max_new_tokens, tried, allowance)

        plan = fastest([own, *(own.model_copy(update={"tree": tree}) for tree in trees)])
        if name == THREE:
            plan = fastest([plan, *(with_flush(plan, length) for length in flush_lengths)])
        chosen[name] = plan
    return chosen


def _fastest(
    chain: Chain,
    candidates: Sequence[Plan],
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    tried: dict[str, float],
    allowance: Allowance,
) -> Plan:
    """The fastest of those that there was time for; the first where there was for none.

    Args:
        tried: plan -> milliseconds a token; those in it are not tried again.
    """
    for plan in candidates:
        shown = shown_shape(plan)
        if shown not in tried and allowance.allows(f"plan {shown}"):
            with allowance.trying(f"plan {shown}"):
                tried[shown] = _milliseconds(chain, plan, prompts, max_new_tokens)
    return min(candidates, key=lambda plan: tried.get(shown_shape(plan), float("inf")))


def with_flush(plan: Plan, length: int) -> Plan:
    """The plan with blocks of so many tokens, never cut short."""
    flush = {name: Flush(length=length, rule=one.rule) for name, one in plan.flush.items()}
    return plan.model_copy(update={"flush": flush})


def shown_shape(plan: Plan) -> str:
    """Tree and flush lengths of a plan."""
    tree = f"{plan.tree.depth}x{plan.tree.top_k}, {plan.tree.rows} rows"
    if len(plan.members) < 3:
        return tree
    lengths = "/".join(
        f"{flush.length}{' adaptive' if flush.adaptive else ''}" for flush in plan.flush.values()
    )
    return f"{tree}, flush {lengths}"


def _milliseconds(
    chain: Chain, plan: Plan, prompts: Sequence[list[int]], max_new_tokens: int
) -> float:
    """A token, the prefill included."""
    sampling = Sampling(temperature=0.0, seed=0)
    answer(chain, prompts[0], plan, max_new_tokens, sampling)  # captures, not counted
    answers = [answer(chain, prompt, plan, max_new_tokens, sampling) for prompt in prompts]
    return float(SystemAnswers([answers]).milliseconds()["median"])
