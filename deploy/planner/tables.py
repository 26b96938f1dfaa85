"""How the reasons for a plan, from `polybasic.deploy.planner.explanation`, are shown."""

from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from polybasic.chain.console import Console
from polybasic.deploy.planner.explanation import shown_budget


def print_explanation(explanation: dict[str, Any], console: Console) -> None:
    """Print what `explain` returned."""
    for shown in render(explanation):
        console.print(shown, soft_wrap=isinstance(shown, str), highlight=False)


def render(explanation: dict[str, Any]) -> list[RenderableType]:
    """What `explain` returned, as lines and tables."""
    machine = explanation["machine"]
    headline = (
        f"{machine['hardware']}, {machine['dtype']}, temperature {machine['temperature']:g}; "
        f"{explanation['num_traces']} answers, {explanation['num_tokens']} tokens; "
        f"{explanation['num_plans']} plans simulated"
    )
    shown: list[RenderableType] = [
        headline,
        _pass_table(explanation),
        _acceptance_table(explanation),
        _lemma_table(explanation),
    ]
    if explanation["accepted_length"]:
        shown.append(_moments_table(explanation))
    if explanation["insertions"]:
        shown.append(_insertion_table(explanation))
    if explanation["rules"]:
        shown.append(_rule_table(explanation))
    if explanation["windows"]:
        shown.append(_window_table(explanation))
    if explanation["loads"]:
        shown.append(_load_table(explanation))
    if explanation["budget"] is not None:
        shown.append(shown_budget(explanation["budget"]))
    return [*shown, _members_table(explanation), f"decision: {explanation['decision']}"]


def _pass_table(explanation: dict[str, Any]) -> Table:
    by_member = explanation["pass_seconds"]
    rows = sorted({int(rows) for seconds in by_member.values() for rows in seconds})
    table = _table("ms a pass, by rows", ["member", *map(str, rows)])
    for name, seconds in by_member.items():
        cells = [seconds.get(str(one)) for one in rows]
        table.add_row(name, *("-" if cell is None else f"{1e3 * cell:.2f}" for cell in cells))
    return table


def _acceptance_table(explanation: dict[str, Any]) -> Group:
    acceptance = explanation["acceptance"]
    between = _table("tokens kept between neighbours", ["proposed by", "kept by", "share"])
    for one in acceptance["verifying"]:
        between.add_row(one["below"], one["above"], f"{one['kept']:.3f}")
    deepest = max((len(one["by_depth"]) for one in acceptance["drafters"]), default=0)
    depths = [str(depth) for depth in range(1, deepest + 1)]
    title = "per cent of positions whose next tokens were all candidates, by their number"
    drafted = _table(title, ["drafter", "for", "top k", *depths])
    for one in acceptance["drafters"]:
        shares = [f"{100 * share:.0f}" for share in one["by_depth"]]
        shares += ["-"] * (deepest - len(shares))
        drafted.add_row(one["drafter"], one["verifying"], str(one["top_k"]), *shares)
    return Group(*(table for table in (between, drafted) if table.rows))


def _lemma_table(explanation: dict[str, Any]) -> Table:
    lemma = explanation["lemma_3_1"]
    columns = ["member", "tokens a pass", "rows", "ms a pass", "ms a token"]
    table = _table("Lemma 3.1 for the chosen plan", columns)
    for term in lemma["terms"]:
        passes, rows, seconds = (
            term[key] for key in ("passes_per_token", "rows_per_pass", "pass_seconds")
        )
        table.add_row(
            term["member"],
            f"{1 / passes:.2f}" if passes else "-",
            "-" if rows is None else f"{rows:.1f}",
            "-" if seconds is None else f"{1e3 * seconds:.2f}",
            f"{1e3 * term['seconds_per_token']:.3f}",
        )
    table.add_row("sum", "", "", "", f"{1e3 * lemma['seconds_per_token']:.3f}")
    table.add_row("beside passes", "", "", "", f"{1e3 * lemma['beside_passes_seconds']:.3f}")
    table.add_row("simulated", "", "", "", f"{1e3 * lemma['simulated_seconds_per_token']:.3f}")
    return table


def _moments_table(explanation: dict[str, Any]) -> Table:
    columns = ["proposed by", "kept by", "share kept", "at most", "mean", "variance", "simulated"]
    table = _table("tokens a pass by Theorem 3.3, corrected", columns)
    for one in explanation["accepted_length"]:
        table.add_row(
            one["below"],
            one["above"],
            f"{one['acceptance']:.3f}",
            str(one["max_tokens"]),
            f"{one['mean']:.2f}",
            f"{one['variance']:.2f}",
            f"{one['simulated_mean']:.2f}",
        )
    return table


def _insertion_table(explanation: dict[str, Any]) -> Table:
    columns = ["inserted", "into", "condition 1", "condition 2", "ms a token", "with it", "pays"]
    table = _table("Theorem 3.2: does an intermediate pay? (conditions are sufficient)", columns)
    for one in explanation["insertions"]:
        table.add_row(
            one["inserted"],
            one["into"],
            _inequality(one["fewer_passes_above"]),
            _inequality(one["fewer_drafts"]),
            f"{1e3 * one['seconds_per_token_without']:.3f}",
            f"{1e3 * one['seconds_per_token_with']:.3f}",
            "yes" if one["pays"] else "no",
        )
    return table


def _rule_table(explanation: dict[str, Any]) -> Table:
    columns = ["rule", "members", "ms a token", "tokens/pass"]
    table = _table("best plan of each rule that sampled tokens are drawn by", columns)
    for one in explanation["rules"]:
        table.add_row(
            one["rule"],
            one["members"],
            f"{1e3 * one['seconds_per_token']:.3f}",
            f"{one['tokens_per_target_pass']:.2f}",
        )
    return table


def _window_table(explanation: dict[str, Any]) -> Table:
    columns = ["members", "windows", "ms a token", "with them", "taken"]
    table = _table("members that see a part of the context: first + latest tokens", columns)
    for one in explanation["windows"]:
        windows = (
            f"{name}: {window['sinks']} + {window['tokens']:,}"
            for name, window in one["windows"].items()
        )
        table.add_row(
            one["members"],
            ", ".join(windows),
            f"{1e3 * one['seconds_per_token_without']:.3f}",
            f"{1e3 * one['seconds_per_token_with']:.3f}",
            "yes" if one["is_taken"] else "no",
        )
    return table


def _load_table(explanation: dict[str, Any]) -> Table:
    columns = ["sequences", "plan", "tokens/s", "alone", "plan of 1"]
    table = _table(
        "best plan by number of sequences; tokens/s of all, beside the target alone", columns
    )
    table.columns[1].justify = "left"
    for one in explanation["loads"]:
        seconds = ("seconds_per_token", "seconds_of_target_alone", "seconds_of_plan_of_one")
        table.add_row(
            str(one["sequences"]),
            f"{one['members']}\n{one['shape']}",
            *(f"{1 / one[key]:,.{0 if one[key] < 0.01 else 1}f}" for key in seconds),
        )
    return table


def _members_table(explanation: dict[str, Any]) -> Table:
    columns = ["members", "shape", "ms a token", "speedup", "tokens/pass"]
    table = _table("best plan of each set of members", columns)
    for one in explanation["by_members"]:
        table.add_row(
            one["members"],
            one["shape"],
            f"{1e3 * one['seconds_per_token']:.3f}",
            f"{one['speedup_over_target']:.2f}x",
            f"{one['tokens_per_target_pass']:.2f}",
        )
    return table


def _table(title: str, columns: list[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 else "right")
    return table


def _inequality(condition: dict[str, Any] | None) -> str:
    if condition is None:
        return "-"
    sign, verdict = ("<", "holds") if condition["holds"] else (">=", "fails")
    return f"{condition['left']:.3f} {sign} {condition['right']:.3f} ({verdict})"
