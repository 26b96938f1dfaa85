"""How the reasons for a plan, from `polybasic.deploy.planner.explanation`, are shown."""

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.padding import Padding

from polybasic.chain.base.readable import counted
from polybasic.chain.base.tables import Table, print_table
from polybasic.chain.formats.plan import decision_lines
from polybasic.deploy.planner.explanation import shown_budget


def print_explanation(explanation: dict[str, Any], console: Console) -> None:
    """Print what `explain` returned: the decision and its reasons, then what they follow from."""
    headline, *reasons = decision_lines(explanation)
    console.print(headline[0].upper() + headline[1:], style="bold", highlight=False)
    for reason in reasons:
        console.print(Padding(reason, (0, 0, 0, 2)), highlight=False)
    console.print(f"\n{_measured(explanation)}", highlight=False)
    if explanation["budget"] is not None:
        console.print(shown_budget(explanation["budget"]), highlight=False)
    for table in tables_of(explanation):
        console.print()
        print_table(table, console)


def tables_of(explanation: dict[str, Any]) -> list[Table]:
    """What `explain` returned, as tables, those that the decision compares first."""
    tables = (
        _members_table(explanation),
        _rule_table(explanation),
        _window_table(explanation),
        _load_table(explanation),
        _context_table(explanation),
        _pass_table(explanation),
        _kept_table(explanation),
        _candidates_table(explanation),
        _lemma_table(explanation),
        _moments_table(explanation),
        _insertion_table(explanation),
    )
    return [table for table in tables if table.rows]


def _measured(explanation: dict[str, Any]) -> str:
    machine = explanation["machine"]
    return (
        f"{machine['hardware']}, {machine['dtype']}, temperature {machine['temperature']:g}; "
        f"{counted(explanation['num_traces'], 'answer')}, "
        f"{counted(explanation['num_tokens'], 'token')}; "
        f"{counted(explanation['num_plans'], 'plan')} simulated"
    )


def _pass_table(explanation: dict[str, Any]) -> Table:
    by_member = explanation["pass_seconds"]
    rows = sorted({int(rows) for seconds in by_member.values() for rows in seconds})
    cells = [
        [name, *(_milliseconds(seconds.get(str(num_rows)), 2) for num_rows in rows)]
        for name, seconds in by_member.items()
    ]
    title = "Milliseconds a pass, by its rows"
    return Table(title, ["member", *map(str, rows)], cells, may_turn=True)


def _kept_table(explanation: dict[str, Any]) -> Table:
    rows = [
        [pair["below"], pair["above"], f"{pair['kept']:.3f}"]
        for pair in explanation["acceptance"]["verifying"]
    ]
    header = ["proposed by", "kept by", "share"]
    return Table("Tokens kept between neighbours", header, rows, num_text_columns=2)


def _candidates_table(explanation: dict[str, Any]) -> Table:
    drafters = explanation["acceptance"]["drafters"]
    deepest = max((len(drafter["by_depth"]) for drafter in drafters), default=0)
    rows = []
    for drafter in drafters:
        shares = [f"{100 * share:.0f}" for share in drafter["by_depth"]]
        name = f"{drafter['drafter']} for {drafter['verifying']}, top {drafter['top_k']}"
        rows.append([name, *shares, *(["-"] * (deepest - len(shares)))])
    title = "Per cent of positions whose next tokens were all candidates, by their number"
    header = ["drafter", *map(str, range(1, deepest + 1))]
    return Table(title, header, rows, may_turn=True)


def _lemma_table(explanation: dict[str, Any]) -> Table:
    lemma = explanation["lemma_3_1"]
    rows = [
        [
            term["member"],
            f"{1 / passes:.2f}" if (passes := term["passes_per_token"]) else "-",
            "-" if term["rows_per_pass"] is None else f"{term['rows_per_pass']:.1f}",
            _milliseconds(term["pass_seconds"], 2),
            _milliseconds(term["seconds_per_token"]),
        ]
        for term in lemma["terms"]
    ]
    for name, key in (
        ("sum", "seconds_per_token"),
        ("beside passes", "beside_passes_seconds"),
        ("simulated", "simulated_seconds_per_token"),
    ):
        rows.append([name, "", "", "", _milliseconds(lemma[key])])
    header = ["member", "tokens a pass", "rows", "ms a pass", "ms a token"]
    return Table("Lemma 3.1 for the chosen plan", header, rows)


def _moments_table(explanation: dict[str, Any]) -> Table:
    rows = [
        [
            pair["below"],
            pair["above"],
            f"{pair['acceptance']:.3f}",
            str(pair["max_tokens"]),
            f"{pair['mean']:.2f}",
            f"{pair['variance']:.2f}",
            f"{pair['simulated_mean']:.2f}",
        ]
        for pair in explanation["accepted_length"]
    ]
    header = ["proposed by", "kept by", "share kept", "at most", "mean", "variance", "simulated"]
    title = "Tokens a pass by Theorem 3.3, corrected"
    return Table(title, header, rows, num_text_columns=2)


def _insertion_table(explanation: dict[str, Any]) -> Table:
    rows = [
        [
            f"{insertion['inserted']} into {insertion['into']}",
            _milliseconds(insertion["seconds_per_token_without"]),
            _milliseconds(insertion["seconds_per_token_with"]),
            "yes" if insertion["pays"] else "no",
            _inequality(insertion["fewer_passes_above"]),
            _inequality(insertion["fewer_drafts"]),
        ]
        for insertion in explanation["insertions"]
    ]
    return Table(
        "Theorem 3.2: does an intermediate pay?",
        ["inserted", "ms a token", "with it", "pays", "condition 1", "condition 2"],
        rows,
        ("The conditions are sufficient.",),
        text_columns=("pays", "condition 1", "condition 2"),
    )


def _rule_table(explanation: dict[str, Any]) -> Table:
    rows = [
        [
            plan["rule"],
            plan["members"],
            _milliseconds(plan["seconds_per_token"]),
            f"{plan['tokens_per_target_pass']:.2f}",
        ]
        for plan in explanation["rules"]
    ]
    title = "Best plan of each rule that sampled tokens are drawn by"
    header = ["rule", "members", "ms a token", "tokens/pass"]
    return Table(title, header, rows, num_text_columns=2)


def _window_table(explanation: dict[str, Any]) -> Table:
    rows = []
    for trial in explanation["windows"]:
        windows = (
            f"{name}: {window['sinks']} + {window['tokens']:,}"
            for name, window in trial["windows"].items()
        )
        rows.append(
            [
                trial["members"],
                _milliseconds(trial["seconds_per_token_without"]),
                _milliseconds(trial["seconds_per_token_with"]),
                "yes" if trial["is_taken"] else "no",
                ", ".join(windows),
            ]
        )
    title = "Members that see a part of the context: first + latest tokens"
    header = ["members", "ms a token", "with windows", "taken", "windows"]
    return Table(title, header, rows, text_columns=("taken",), wraps=True)


def _load_table(explanation: dict[str, Any]) -> Table:
    return _alternatives_table(
        explanation["loads"],
        "Best plan by number of sequences",
        ("sequences", "tokens/s", "plan of 1"),
        "seconds_of_plan_of_one",
        lambda seconds: f"{1 / seconds:,.{0 if seconds < 0.01 else 1}f}",
        "Tokens/s of all sequences; of the target alone, and of the plan of one sequence.",
    )


def _context_table(explanation: dict[str, Any]) -> Table:
    return _alternatives_table(
        explanation["contexts"],
        "Best plan by tokens of context",
        ("tokens", "ms a token", "plan of short"),
        "seconds_of_plan_of_short",
        lambda seconds: _milliseconds(seconds, 1),
        "Of the target alone, and of the plan that is the fastest behind the planning prompts.",
    )


def _alternatives_table(
    found: list[dict[str, Any]],
    title: str,
    names: tuple[str, str, str],
    usual: str,
    shown: Callable[[float], str],
    note: str,
) -> Table:
    """Of what `polybasic.deploy.planner.alternatives.compared` returned."""
    number, figure, of_usual = names
    keys = ("seconds_per_token", "seconds_of_target_alone", usual)
    plans = [f"{each['members']}; {each['shape']}" for each in found]
    rows = [
        [
            f"{each[number]:,}",
            *(shown(each[key]) for key in keys),
            "the same" if plan == before else plan,
        ]
        for each, plan, before in zip(found, plans, ["", *plans], strict=False)
    ]
    header = [number, figure, "target alone", of_usual, "plan"]
    return Table(title, header, rows, (note,), wraps=True)


def _members_table(explanation: dict[str, Any]) -> Table:
    rows = [
        [
            plan["members"],
            _milliseconds(plan["seconds_per_token"]),
            f"{plan['speedup_over_target']:.2f}x",
            f"{plan['tokens_per_target_pass']:.2f}",
            plan["shape"],
        ]
        for plan in explanation["by_members"]
    ]
    header = ["members", "ms a token", "speedup", "tokens/pass", "shape"]
    return Table("Best plan of each set of members", header, rows, wraps=True)


def _milliseconds(seconds: float | None, digits: int = 3) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.{digits}f}"


def _inequality(condition: dict[str, Any] | None) -> str:
    if condition is None:
        return "-"
    sign, verdict = ("<", "holds") if condition["holds"] else (">=", "fails")
    return f"{condition['left']:.3f} {sign} {condition['right']:.3f} ({verdict})"
