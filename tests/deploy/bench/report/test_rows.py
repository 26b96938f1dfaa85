"""Tables and lines of a report, against figures that are worked out here."""

from typing import Any

import pytest

from polybasic.chain.base.tables import Table
from polybasic.chain.formats.head_kinds.table import HEAD_KINDS
from polybasic.deploy.bench.report.chain_rows import exactness_table, law_table, rounding_table
from polybasic.deploy.bench.report.lines import (
    exactness_line,
    hardware_line,
    headline_lines,
    noise_line,
    rounding_line,
    settings_line,
    status_lines,
)
from polybasic.deploy.bench.report.member_rows import (
    REST,
    acceptance_table,
    length_table,
    prediction_table,
    spent_by_system,
    spent_table,
)
from polybasic.deploy.bench.report.parts import ITSELF, not_conclusive, shown_ratio, shown_value
from polybasic.deploy.bench.report.rows import (
    compared,
    group_table,
    headline_table,
    insertion_table,
    latency_table,
    speed_table,
    task_table,
)
from polybasic.deploy.bench.report.sections import sections_of
from polybasic.deploy.bench.schema import Agreement, Lengths, MemberCost, NoiseReport, Ratio
from polybasic.deploy.planner.settings import BenchSettings
from tests.deploy.bench.report.example import (
    BASE_RATE,
    REMEDY,
    SPEEDS,
    TASKS,
    TOKENS,
    example,
    ratio,
    with_system,
    with_totals,
)

WIDE = Ratio(value=1.2, low=0.9, high=1.6, remedy=REMEDY)


def row(table: Table | None, name: str) -> dict[str, str]:
    """Cells by column."""
    assert table is not None
    [found] = [row for row in table.rows if row[0] == name]
    return dict(zip(table.header, found, strict=True))


# Ratios


def test_a_ratio_shows_its_interval() -> None:
    assert shown_ratio(Ratio(value=2.144, low=2.05, high=2.23)) == "2.14x (2.05–2.23)"
    assert shown_ratio(Ratio(value=1.0, low=1.0, high=1.0)) == "1.00x"
    assert shown_ratio(WIDE) == "1.20x (0.90–1.60)\nnot conclusive"
    assert shown_value(WIDE) == "1.20x\nnot conclusive"
    assert shown_value(Ratio(value=2.144, low=2.05, high=2.23)) == "2.14x"
    single = Ratio(value=2.0, low=2.0, high=2.0, remedy=REMEDY)
    assert shown_ratio(single) == "2.00x\nnot conclusive", "a single question has no interval"
    assert shown_ratio(None) == "-"
    assert shown_ratio(Ratio(value=0.03, low=0.0212, high=0.0999)) == "0.030x (0.021–0.10)"
    assert shown_ratio(Ratio(value=21.06, low=9.994, high=157.1)) == "21.1x (9.99–157)"


def test_each_remedy_is_named_once() -> None:
    other = WIDE.model_copy(update={"remedy": "quiet cores"})
    found = not_conclusive(
        {
            ("eagle2", "qa"): WIDE,
            ("ngram", "qa"): ratio(2.0),
            ("polybasic", "qa"): WIDE,
            ("draft_model", "qa"): other,
            ("eagle2", ""): other,
            ("draft_model", "mt_bench"): None,
            ("ngram", ""): WIDE,
            ("ngram", "rag"): WIDE,
            ("polybasic", ""): None,
        }
    )
    assert found == (
        f"Not conclusive: eagle2, polybasic in qa; ngram in all, rag. What would help: {REMEDY}.",
        "Not conclusive: draft_model in qa; eagle2. What would help: quiet cores.",
    )
    assert not_conclusive({("eagle2", ""): ratio(2.0)}) == ()
    all_of_them = {("target", ""): ITSELF, ("eagle2", ""): WIDE, ("polybasic", ""): WIDE}
    assert not_conclusive(all_of_them) == (f"No ratio is conclusive. What would help: {REMEDY}.",)


# Systems


def test_the_headline_is_speedup_and_accepted_length_by_task() -> None:
    report = example()
    table = headline_table(report)
    assert table is not None
    assert table.header == ["system", "all", *TASKS]
    assert [cells[0] for cells in table.rows] == ["eagle2", "polybasic_full", "polybasic"]
    eagle2 = report.systems["eagle2"]
    qa = eagle2.tasks["qa"]
    assert qa.accepted_length is not None
    assert row(table, "eagle2")["qa"] == (
        f"{qa.speedup.value:.2f}x ({qa.accepted_length.mean:.2f})"
    )
    assert row(table, "eagle2")["all"].startswith("2.14x (4.")
    rag = eagle2.tasks["rag"]
    assert rag.accepted_length is not None
    assert row(table, "eagle2")["rag"] == (
        f"{rag.speedup.value:.2f}x ({rag.accepted_length.mean:.2f})\nnot conclusive"
    )
    below = f"\n{rag.speedup.low:.2f}–{rag.speedup.high:.2f}\nnot conclusive"
    assert row(task_table(report), "eagle2")["rag"].endswith(below)
    assert table.notes[-1] == (
        f"Not conclusive: eagle2, polybasic_full, polybasic in rag. What would help: {REMEDY}."
    )
    assert headline_table(example(systems=("target", "hf_generate"))) is None


def test_heads_of_all_kinds_can_be_asked_for_and_have_a_headline() -> None:
    names = tuple(kind.name for kind in HEAD_KINDS.own)
    assert BenchSettings(systems=names).systems == names
    report = example()
    systems = dict.fromkeys(("target", *names), report.systems["eagle2"])
    table = headline_table(report.model_copy(update={"systems": systems}))
    assert table is not None
    assert [cells[0] for cells in table.rows] == list(names)


def test_a_task_that_was_not_reached_has_no_figure() -> None:
    report = example()
    tasks = {name: task for name, task in report.systems["eagle2"].tasks.items() if name != "qa"}
    report = with_system(report, "eagle2", tasks=tasks)
    assert row(headline_table(report), "eagle2")["qa"] == "-"
    assert row(task_table(report), "eagle2")["qa"] == "-"


def test_the_first_sentences_say_what_was_gained() -> None:
    assert headline_lines(example()) == [
        "`polybasic` is 2.38 times as fast as the target alone (2.26–2.50) and 23.8 times as fast "
        "as `hf_generate`, prefill included.",
        "Of other runtimes the fastest is `llama.cpp_q4_0_lookup` in Q4_0, with 864 tokens/s "
        "beside the 1523 of `polybasic`.",
        "The fastest in bfloat16, as the target's, is `llama.cpp_bfloat16`, with 595 tokens/s.",
    ]
    assert headline_lines(example(systems=("target",))) == ["`target` answers at 640 tokens/s."]
    ours = with_totals(example(systems=("target", "polybasic")), "polybasic", speedup=WIDE)
    assert headline_lines(ours) == [
        "`polybasic` is 1.20 times as fast as the target alone (0.90–1.60), prefill included: not "
        f"conclusive. What would help: {REMEDY}."
    ]


def test_a_copy_that_repeats_the_codes_of_its_file_makes_no_headline() -> None:
    ours = example(systems=("target", "polybasic")).model_copy(update={"repeating": ["small"]})
    [line] = headline_lines(ours)
    assert line.startswith("No headline: `small` can repeat the 4-bit codes of the target's own")
    assert headline_lines(ours.model_copy(update={"systems": {"target": ours.systems["target"]}}))[
        0
    ].startswith("`target` answers at")


def test_a_target_that_transformers_computes_faster_is_said() -> None:
    slow = with_totals(example(), "target", over_hf=ratio(0.7, 0.1))
    said = headline_lines(slow)[-1]
    assert "`target`, without drafts, is 0.70 times as fast as `hf_generate` (0.63–0.77)" in said
    assert "POLYBASIC_KERNELS=eager" in said
    stated = {"stated": slow.memory["stated"] | {"kernels": "eager"}}
    eager = slow.model_copy(update={"memory": slow.memory | stated})
    assert "POLYBASIC_KERNELS" not in headline_lines(eager)[-1]
    unsure = with_totals(example(), "target", over_hf=ratio(0.95, 0.1))
    assert headline_lines(unsure) == headline_lines(example())


def test_all_systems_have_rates_waiting_times_and_energy() -> None:
    report = example()
    assert row(speed_table(report), "polybasic") == {
        "system": "polybasic",
        "tokens/s": "1523",
        "speedup": "2.38x (2.26–2.50)",
        "vs hf": "23.8x (22.6–25.0)",
        "identical": "48/48",
    }
    assert row(speed_table(report), "hf_generate")["identical"] == "43/48 +5 ties"
    first = 1e3 * 0.1 * TOKENS / (BASE_RATE * SPEEDS["polybasic"])
    found = row(latency_table(report), "polybasic")
    assert found["first, ms"] == f"{first:.2f} / {2 * first:.2f}"
    assert found["J/token"] == "0.021"


def test_a_baseline_is_as_fast_as_itself() -> None:
    report = example()
    for name in ("target", "hf_generate"):
        single = Ratio(value=1.0, low=1.0, high=1.0, remedy=REMEDY)
        report = with_totals(report, name, speedup=single, decode_speedup=single, over_hf=single)
    assert row(speed_table(report), "target")["speedup"] == "1.00x"
    assert row(latency_table(report), "target")["speedup"] == "1.00x"
    assert row(speed_table(report), "hf_generate")["vs hf"] == "1.00x"
    assert row(speed_table(report), "hf_generate")["speedup"] == "1.00x\nnot conclusive"


def test_what_is_not_known_is_left_out() -> None:
    report = example(systems=("target", "polybasic"))
    for name in report.systems:
        report = with_totals(
            report, name, joules_per_token=None, over_hf=None, decode_speedup=None,
            seconds_per_token=None, decode_tokens_per_second=None,
        )  # fmt: skip
    assert "J/token" not in latency_table(report).header
    assert "vs hf" not in speed_table(report).header
    found = row(latency_table(report), "polybasic")
    assert found["tokens/s"] == found["speedup"] == found["a token, ms"] == "-"


def test_of_other_runtimes_the_fastest_in_the_same_dtype_is_compared() -> None:
    assert list(compared(example())) == [
        "hf_prompt_lookup",
        "ngram",
        "eagle2",
        "polybasic_full",
        "polybasic",
        "llama.cpp_bfloat16",
        "openvino_bfloat16",
    ]
    report = with_system(example(), "llama.cpp_bfloat16", dtype="float16")
    assert "llama.cpp_q4_0_lookup" in compared(report), "none has the target's dtype"


def test_groups_have_a_line_each_only_where_there_are_several() -> None:
    table = group_table(example())
    assert table is not None
    assert table.header == ["system", "all", "known topics", "new topics"]
    known, new = (row(table, "polybasic")[name] for name in table.header[2:])
    assert known.startswith("2.62x (")
    assert new.startswith("1.86x (")
    assert group_table(example(grouped=False)) is None


def test_insertions_compare_the_theorem_with_what_was_measured() -> None:
    table = insertion_table(example())
    found = row(table, "intermediate into eagle2")
    assert (found["left"], found["right"], found["expected"]) == ("0.768", "0.589", "no gain")
    assert found["measured"] == "0.72x (0.69–0.75)"
    report = example()
    gain = report.insertions[0].model_copy(update={"right": 0.9, "speedup": WIDE})
    table = insertion_table(report.model_copy(update={"insertions": [gain]}))
    assert row(table, "intermediate into eagle2")["expected"] == "a gain"
    assert table is not None
    assert REMEDY in table.notes[-1]


# Members


@pytest.mark.parametrize("complete", [True, False])
def test_the_parts_of_a_token_are_all_of_its_time(complete: bool) -> None:
    report = example(complete=complete)
    for name, cost in spent_by_system(report).items():
        totals = report.systems[name].totals
        if complete:
            assert cost.total == pytest.approx(totals.seconds / totals.tokens)
        assert cost.seconds["prefill"] > 0
        assert cost.seconds[REST] > 0
    assert list(row(spent_table(report), "polybasic")) == [
        "system", "prefill", "target", "intermediate", "draft", "ngram", "rest", "total",
    ]  # fmt: skip
    assert spent_table(example(systems=("hf_generate",))) is None


def test_accepted_lengths_are_shares_of_passes() -> None:
    lengths = Lengths(counts=[0, 1, 2, 0, 0, 3, 0, 2], mean=4.25, low=4, high=4.5, variance=5.1)
    members = {"target": MemberCost(passes=8, seconds=1.0, accepted_length=lengths)}
    report = with_system(example(systems=("target", "eagle2")), "eagle2", members=members)
    table = length_table(report)
    found = row(table, "eagle2")
    assert found["mean"] == "4.25 (4.00–4.50)"
    shares = {name: found[name] for name in list(found)[4:]}
    assert shares == {"1": "12%", "2": "25%", "3": "0%", "4": "0%", "5–6": "38%", "7–8": "25%"}
    long = lengths.model_copy(update={"counts": [0] * 30 + [4]})
    members = {"target": MemberCost(passes=8, seconds=1.0, accepted_length=long)}
    assert (
        row(length_table(with_system(report, "eagle2", members=members)), "eagle2")["25–30"]
        == "100%"
    )


def test_acceptance_is_told_apart_by_who_proposes() -> None:
    report = example()
    trees, blocks = acceptance_table(report, False), acceptance_table(report, True)
    assert row(trees, "eagle2: draft")["1"] == "82%"
    assert row(blocks, "polybasic_full: intermediate")["2"] == "76%"
    assert blocks is not None
    assert len(blocks.rows) == 1
    assert acceptance_table(example(systems=("target",)), False) is None


def test_predictions_are_off_by_what_they_miss() -> None:
    report = with_system(
        example(), "eagle2", predicted_seconds_per_token=0.0009, measured_seconds_per_token=0.001
    )
    report = with_system(
        report, "target", predicted_seconds_per_token=0.0018, measured_seconds_per_token=0.0025
    )
    report = with_system(report, "polybasic", predicted_seconds_per_token=None)
    table = prediction_table(report)
    assert row(table, "eagle2") == {
        "system": "eagle2",
        "predicted, ms": "0.90",
        "measured, ms": "1.00",
        "off by": "-10%",
        "predicted speedup": "2.00x",
        "measured speedup": "2.50x",
        "plan": "target → draft",
    }
    assert row(table, "polybasic")["off by"] == "-"
    assert row(table, "polybasic")["predicted speedup"] == "-"


# What is true whatever the speed


def test_exactness_counts_what_rounding_does_not_explain() -> None:
    report = example()
    assert row(exactness_table(report), "hf_generate")["different"] == "0"
    assert row(exactness_table(report), "openvino_bfloat16")["different"] == "5"
    assert exactness_line(report) == (
        "192 of 192 answers of this runtime's systems are identical to the target's. Answers of "
        "other runtimes that differ beyond rounding: llama.cpp_bfloat16 5, llama.cpp_q4_0_lookup "
        "5, openvino_bfloat16 5."
    )
    fault = Agreement(answers=48, identical=45, near_ties=2, widest_near_tie=0.1, tolerance=0.2)
    line = exactness_line(with_system(report, "eagle2", agreement=fault))
    assert line.startswith(
        "189 of 192 answers of this runtime's systems are identical to the target's, 2 part at "
        "near ties, 1 DIFFER beyond rounding."
    )


def test_samples_are_judged_by_their_law() -> None:
    assert law_table(example()) is None
    report = example(sampled=True)
    assert row(law_table(report), "eagle2")["p"] == "0.51"
    assert "consistent with the target's distribution" in exactness_line(report)
    law = report.systems["eagle2"].law
    assert law is not None
    wrong = with_system(report, "eagle2", law=law.model_copy(update={"p_value": 1e-6}))
    assert "do NOT have the target's distribution: eagle2." in exactness_line(wrong)


def test_what_is_wrong_is_not_called_rounding() -> None:
    report = example()
    assert "WRONG" not in rounding_line(report)
    assert "10 near ties, the widest 0.125" in rounding_line(report)
    wrong = {"from_one_row": None, "from_reference": None, "is_sound": False}
    report.rounding["ways"]["blocks of 8 rows"] = wrong
    told = "more than rounding, and it excuses no output: passes in blocks of 8 rows, "
    assert rounding_line(report).endswith(f"{told}no output differs")
    assert row(rounding_table(report), "blocks of 8 rows")["is"] == "more than rounding"
    fault = Agreement(answers=48, identical=47, near_ties=0, widest_near_tie=0.0, tolerance=0.2)
    report = with_system(report, "eagle2", agreement=fault)
    assert rounding_line(report).endswith(f"{told}where outputs are WRONG")
    table = rounding_table(report)
    assert table is not None
    assert ["blocks of 8 rows", "not finite", "not finite", "WRONG"] in table.rows


@pytest.mark.parametrize(
    ("dtype", "shown", "verdict"),
    [
        ("bfloat16", "hf_generate", "more than rounding"),
        ("float16", "hf_generate in float16", "another dtype"),
    ],
)
def test_a_system_whose_answers_are_identical_is_not_wrong(
    dtype: str, shown: str, verdict: str
) -> None:
    report = with_system(example(), "hf_generate", dtype=dtype)
    report.rounding["others"]["hf_generate"]["is_sound"] = False
    assert row(rounding_table(report), shown)["is"] == verdict


# Statements


def test_what_must_be_known_first() -> None:
    assert status_lines(example()) == []
    noise = NoiseReport(repeat_tokens_per_second=[1.0], spread=0.0, warnings=["It drifted."])
    changed = example(complete=False, grown="cpu-100m", notes=["A note."], noise=noise)
    partial, grown, *others = status_lines(changed)
    assert partial.startswith("Partial: the run was interrupted after 27 of 48 turns.")
    assert grown.startswith("Grown to the shapes of cpu-100m")
    assert others == ["A note.", "It drifted."]


@pytest.mark.parametrize(
    ("rates", "told"),
    [([640.0, 620.0], "a spread of 3.2%"), ([640.0], "no drift can be seen"), ([], "not known")],
)
def test_noise_is_told_by_repeats(rates: list[float], told: str) -> None:
    noise = NoiseReport(repeat_tokens_per_second=rates, spread=0.032)
    assert told in noise_line(example(noise=noise))


@pytest.mark.parametrize(
    ("num", "told"),
    [
        (0, "bfloat16"),
        (1, "1 question is longer than the context and was not drawn from"),
        (3, "3 questions are longer than the context and were not drawn from"),
    ],
)
def test_questions_that_were_left_out_are_told(num: int, told: str) -> None:
    settings = example().settings | {"num_questions_left_out_as_too_long": num}
    assert settings_line(settings).endswith(told)


def test_an_accelerator_comes_first() -> None:
    hardware: dict[str, Any] = example().hardware
    assert hardware_line(hardware) == "AMD EPYC, 2 cores, 2 threads, 25 GiB"
    assert hardware_line(hardware | {"accelerator": "H200"}).startswith("H200; AMD EPYC")


def test_the_target_alone_has_a_report() -> None:
    report = example(systems=("target",), tasks=("qa",), grouped=False)
    report = report.model_copy(update={"adaptations": [], "draft_vocabulary": []})
    assert [section.title for section in sections_of(report)] == [
        "Headline",
        "All systems",
        "Where the time goes",
        "Exactness",
        "Rounding",
        "Memory",
        "Plan",
        "Noise",
        "Settings and machine",
    ]


def test_sections_come_in_one_order() -> None:
    assert [section.title for section in sections_of(example(sampled=True))] == [
        "Headline",
        "All systems",
        "Speedup by task",
        "Groups of prompts",
        "Accepted length",
        "Where the time goes",
        "Insertion",
        "Acceptance",
        "Exactness",
        "Rounding",
        "Memory",
        "Adapted members",
        "Draft vocabulary",
        "Plan",
        "Noise",
        "Settings and machine",
    ]
