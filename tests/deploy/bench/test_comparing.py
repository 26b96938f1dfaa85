"""Two reports compared: what is seen, what is not, and what a reader is told first."""

import io
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from polybasic.deploy.bench.comparing import Comparison, NumberChange, compare
from polybasic.deploy.bench.report.comparison import print_comparison
from polybasic.deploy.bench.schema import LawCheck, NoiseReport, Report
from tests.deploy.bench.report.example import example, with_system

SYSTEMS = ("target", "eagle2", "polybasic")


def measured(
    seed: int,
    factors: Mapping[str, float] | None = None,
    of: Report | None = None,
    between: float = 0.2,
    noise: float = 0.02,
) -> Report:
    """Answers whose seconds differ by prompt, alike in all reports, and by chance.

    Args:
        factors: of a system's seconds.
    """
    report = of or example(systems=SYSTEMS)
    chance, prompts = np.random.default_rng(seed), np.random.default_rng(99)
    for name, system in report.systems.items():
        by_prompt = np.exp(between * prompts.standard_normal(len(report.prompts)))
        factor = (factors or {}).get(name, 1.0)
        seconds = [
            [
                duration * factor * float(of_prompt * np.exp(noise * chance.standard_normal()))
                for duration, of_prompt in zip(row, by_prompt, strict=False)
            ]
            for row in system.answers.seconds
        ]
        answers = system.answers.model_copy(update={"seconds": seconds})
        report = with_system(report, name, answers=answers)
    return report


def with_other_prompts(report: Report) -> Report:
    prompts = [
        prompt.model_copy(update={"sha256": f"other {prompt.sha256}"}) for prompt in report.prompts
    ]
    return report.model_copy(update={"prompts": prompts})


def speedup(comparison: Comparison, name: str) -> NumberChange:
    found = comparison.systems[name].speedup
    assert found is not None
    return found


def rate(report: Report, name: str) -> float:
    answers = report.systems[name].answers
    return float(np.sum(answers.num_tokens) / np.sum(answers.seconds))


# Numbers


def test_ratios_are_those_of_the_reports() -> None:
    before, after = measured(1), measured(2, {"polybasic": 0.8})
    found = compare(before, after)
    assert found.is_paired
    assert found.num_prompts == (24, 24)
    system = found.systems["polybasic"]
    assert system.tokens_per_second is not None
    assert system.tokens_per_second.before == pytest.approx(rate(before, "polybasic"))
    assert system.tokens_per_second.after == pytest.approx(rate(after, "polybasic"))
    assert system.tokens_per_second.ratio == pytest.approx(
        rate(after, "polybasic") / rate(before, "polybasic")
    )
    assert speedup(found, "polybasic").before == pytest.approx(
        rate(before, "polybasic") / rate(before, "target")
    )
    assert system.accepted_length is not None
    assert system.accepted_length.before == pytest.approx(4.4)
    assert found.systems["target"].speedup is None


@pytest.mark.parametrize("seed", range(5))
def test_a_system_that_got_faster_is_seen_and_others_are_not(seed: int) -> None:
    found = compare(measured(1), measured(10 + seed, {"polybasic": 0.9}))
    change = speedup(found, "polybasic")
    assert change.is_seen
    assert change.low is not None
    assert change.high is not None
    assert change.low < 1 / 0.9 < change.high
    assert not found.systems["polybasic"].before.law
    assert speedup(found, "eagle2").ratio == pytest.approx(1, abs=0.03)


def test_pairs_see_what_independent_samples_do_not() -> None:
    before, after = measured(1), measured(2, {"polybasic": 0.9})
    apart = compare(before, with_other_prompts(after))
    assert not apart.is_paired
    assert speedup(compare(before, after), "polybasic").is_seen
    assert not speedup(apart, "polybasic").is_seen
    larger = compare(before, with_other_prompts(measured(2, {"polybasic": 0.4})))
    assert speedup(larger, "polybasic").is_seen


def test_no_change_is_seen_in_as_few_pairs_as_intervals_promise() -> None:
    """Of 80 comparisons of equal systems, 5 % are taken for a change: 4, and rarely over 10."""
    two = example(systems=("target", "polybasic"))
    pairs = [(measured(seed, of=two), measured(1000 + seed, of=two)) for seed in range(80)]
    seen = [speedup(compare(*pair), "polybasic").is_seen for pair in pairs]
    assert sum(seen) <= 10


def test_error_against_a_plain_loop() -> None:
    """The paired change of a speedup, resampled prompt by prompt within its task."""
    before, after = measured(1, noise=0.1), measured(2, noise=0.1)
    found = speedup(compare(before, after), "eagle2")
    assert found.low is not None
    assert found.high is not None
    seconds = np.array(
        [
            np.mean(report.systems[name].answers.seconds, axis=0)
            for report, name in (
                (after, "target"),
                (after, "eagle2"),
                (before, "eagle2"),
                (before, "target"),
            )
        ]
    )
    numbers, logs = np.random.default_rng(5), []
    for _ in range(2000):
        # three of the four prompts of each task; all answers have as many tokens
        drawn = [4 * task + int(numbers.integers(4)) for task in range(6) for _ in range(3)]
        first, second, third, fourth = seconds[:, drawn].sum(1)
        logs.append(math.log(first / second * third / fourth))
    # 2.101: Student's factor with 18 degrees of freedom
    assert math.log(found.high / found.low) == pytest.approx(2 * 2.101 * np.std(logs), rel=0.08)


def test_a_report_is_no_other_than_itself() -> None:
    report = measured(1)
    found = compare(report, report)
    assert found.differences == []
    assert found.notes == []
    for system in found.systems.values():
        for change in (system.tokens_per_second, system.speedup, system.decode_speedup):
            if change is not None:
                assert change.ratio == pytest.approx(1)
                assert not change.is_seen


def test_a_rate_within_the_machines_own_changes_is_not_seen() -> None:
    before, after = measured(1, noise=0), measured(2, {"eagle2": 0.93}, noise=0)
    assert compare(before, after).systems["eagle2"].tokens_per_second.is_seen  # type: ignore[union-attr]
    noise = NoiseReport(repeat_tokens_per_second=[600, 690], spread=0.15)
    noisy = compare(before.model_copy(update={"noise": noise}), after)
    assert not noisy.systems["eagle2"].tokens_per_second.is_seen  # type: ignore[union-attr]
    assert speedup(noisy, "eagle2").is_seen
    warned = noise.model_copy(update={"warnings": ["Others took the cores."]})
    loud = compare(before.model_copy(update={"noise": warned}), after)
    assert not speedup(loud, "eagle2").is_seen


def test_prompts_that_both_have_are_compared() -> None:
    """Of an interrupted report, and of one with some other prompts."""
    before, after = measured(1), measured(2)
    changed = [
        prompt if place % 6 else prompt.model_copy(update={"sha256": f"other {place}"})
        for place, prompt in enumerate(after.prompts)
    ]
    found = compare(before, after.model_copy(update={"prompts": changed}))
    assert (found.is_paired, found.num_prompts, found.num_left_out) == (True, (20, 20), (4, 4))
    assert "Left out are 4 before and 4 after." in " ".join(shown(found).split())
    short = after
    for name, system in after.systems.items():
        answers = system.answers
        cut = {
            key: [row[:9] for row in rows[:1]]
            for key, rows in answers.model_dump(exclude_none=True).items()
        }
        short = with_system(short, name, answers=answers.model_copy(update=cut))
    found = compare(before, short)
    assert (found.is_paired, found.num_prompts, found.num_left_out) == (True, (9, 9), (15, 15))
    assert found.systems["polybasic"].tokens_per_second is not None


def test_a_single_question_has_no_interval() -> None:
    before = measured(1)
    alone = [
        prompt.model_copy(update={"question_id": "1", "task": "qa", "group": ""})
        for prompt in before.prompts
    ]
    before = before.model_copy(update={"prompts": alone})
    found = compare(before, measured(2, {"polybasic": 0.5}, of=before))
    change = speedup(found, "polybasic")
    assert (change.low, change.high, change.is_seen) == (None, None, False)


def test_what_is_not_told_is_not_compared() -> None:
    before = measured(1, of=example(systems=(*SYSTEMS, "llama.cpp_bfloat16", "hf_generate")))
    silent = before.systems["hf_generate"].answers
    none = [[0.0] * len(row) for row in silent.num_tokens]
    broken = with_system(
        before,
        "hf_generate",
        answers=silent.model_copy(update={"num_tokens": none, "num_first": none}),
    )
    found = compare(before, broken)
    assert found.systems["llama.cpp_bfloat16"].accepted_length is None
    assert found.systems["hf_generate"].tokens_per_second is None


def test_memory() -> None:
    before = measured(1)
    assert compare(before, before).memory_bytes == (110_895_104, 110_895_104)
    after = before.model_copy(update={"memory": before.memory | {"measured": None}})
    assert compare(before, after).memory_bytes == (87_101_440, 87_101_440)


# What is said first


def facts(comparison: Comparison) -> dict[str, tuple[str | None, str | None]]:
    return {
        f"{difference.part} {difference.name}": (difference.before, difference.after)
        for difference in comparison.differences
    }


def test_differences_by_part() -> None:
    before = measured(1)
    after = with_system(before, "polybasic", shown_plan="target → intermediate", version="2")
    after = after.model_copy(
        update={
            "chain_digest": "f" * 64,
            "hardware": before.hardware | {"processor": "Xeon", "memory_bytes": 10**10},
            "versions": before.versions | {"torch": "2.14.0"},
            "settings": before.settings | {"max_new_tokens": 128, "prompts": "other.jsonl"},
        }
    )
    found = compare(before, after)
    assert facts(found) == {
        "chain files": ("0123456789ab", "f" * 12),
        "machine processor": ("AMD EPYC", "Xeon"),
        "machine memory": ("26.8 GB", "10.0 GB"),
        "version torch": ("2.13.0", "2.14.0"),
        "setting max_new_tokens": ("96", "128"),
        "system polybasic: plan": ("target → draft", "target → intermediate"),
        "system polybasic: version": (None, "2"),
    }
    assert found.notes == [
        "The machines differ: compare speedups, whose two sides were measured on one machine.",
        "Answers are other ones, as they were asked for with another max_new_tokens.",
    ]


def test_notes_of_each_report() -> None:
    before = measured(1).model_copy(update={"complete": False, "answered": 30, "planned": 48})
    warned = NoiseReport(repeat_tokens_per_second=[1, 1.2], spread=0.2, warnings=["Too loud."])
    after = measured(2).model_copy(update={"grown": "llama3-8b", "noise": warned})
    notes = compare(before, after).notes
    assert notes[0].startswith("The benchmark before was interrupted: 30 of 48 turns")
    assert notes[1].startswith("The chain after is a small one grown to the costs of llama3-8b")
    assert notes[2].startswith(
        "Noise of the machine is warned of after: changes of speed by less than 20 %"
    )


# What is shown


def shown(comparison: Comparison, width: int = 80) -> str:
    file = io.StringIO()
    print_comparison(comparison, Console(file=file, width=width))
    return file.getvalue()


def changed_pair() -> tuple[Report, Report]:
    before = measured(1, of=example(systems=(*SYSTEMS, "hf_generate")))
    after = measured(
        2,
        {"polybasic": 0.8, "eagle2": 1.3},
        of=example(systems=(*SYSTEMS, "llama.cpp_q4_0_lookup")),
    )
    agreement = after.systems["polybasic"].agreement
    assert agreement is not None
    law = LawCheck(tokens=5000, cells=20, chi_square=99, p_value=1e-9)
    changes: dict[str, Any] = {
        "agreement": agreement.model_copy(update={"identical": 46, "near_ties": 1}),
        "law": law,
        "shown_plan": "target → intermediate → draft; tree of depth 6, top 4, 12 rows; flush 32",
    }
    return before, with_system(after, "polybasic", **changes)


def test_what_is_shown_fits_80_columns() -> None:
    text = shown(compare(*changed_pair()))
    assert max(map(len, text.splitlines())) <= 80
    rows = [line.split() for line in text.splitlines()]
    speedups = next(row for row in rows if row[:1] == ["polybasic"])
    assert speedups[4] == "higher"
    assert next(row for row in rows if row[:1] == ["eagle2"])[4] == "lower"
    assert next(row for row in rows if row[:1] == ["target"])[3:6] == ["no", "change", "seen"]
    flat = " ".join(text.split())
    for part in (
        "24 prompts are in both reports: each is compared with itself.",
        "polybasic: answers identical to the target's were 48 of 48, are 46 of 48 (+1 near ties) "
        "(1 DIFFER beyond rounding).",
        "polybasic: sampled tokens did NOT have the target's distribution after (p-value 1e-09).",
        "Only before: hf_generate. Only after: llama.cpp_q4_0_lookup.",
        "Memory that stays: 110.9 MB → 110.9 MB (1.00x).",
        "target → draft, now target → intermediate → draft; tree of depth 6",
    ):
        assert part in flat


def test_what_is_shown_of_equal_reports() -> None:
    text = shown(compare(measured(1), measured(1)))
    assert "Chain, machine, versions and settings are the same." in text
    assert "Exactness is the same." in text
    assert "higher" not in text
    assert text.count("no change seen") == 8


def test_a_comparison_is_json() -> None:
    found = compare(*changed_pair())
    assert Comparison.model_validate_json(found.model_dump_json()) == found
