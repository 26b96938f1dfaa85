"""`polybasic trace`: an answer round by round, in colour, as JSON lines and as a picture."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polybasic.chain.base.terminal import say
from polybasic.recipes.cli.chain import ChainArgument
from polybasic.recipes.cli.shared.asked import check_source, one_prompt
from polybasic.recipes.cli.shared.options import (
    DtypeOption,
    MaxNewTokensOption,
    MembersOption,
    MessagesOption,
    PromptOption,
    RuleOption,
    SeedOption,
    SmallOption,
    TargetOption,
    TemperatureOption,
    with_small,
)
from polybasic.recipes.cli.shared.repeated import checked_rule

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from polybasic.deploy import Chain
    from polybasic.deploy.runtime.tracing import TracedRound

_KEPT, _DRAWN, _REFUSED = "green", "bold underline", "red"


def trace(
    chain: ChainArgument,
    small: SmallOption = None,
    prompt: PromptOption = None,
    file: MessagesOption = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write all that is shown, and more, as JSON lines."),
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Write what the terminal shows as SVG.")] = None,
    timeline: Annotated[
        bool,
        typer.Option(
            "--timeline", help="Show where the time went: each pass, draft and draw, and its bound."
        ),
    ] = False,
    max_new_tokens: MaxNewTokensOption = 64,
    temperature: TemperatureOption = None,
    seed: SeedOption = None,
    rule: RuleOption = None,
    members: MembersOption = None,
    dtype: DtypeOption = None,
    target: TargetOption = None,
) -> None:
    """Show an answer round by round, or where its time went."""
    from polybasic.chain.base.console import Console
    from polybasic.chain.formats.files import whole_file
    from polybasic.deploy import load_chain
    from polybasic.recipes.cli.shared.timeline import timeline_tables

    check_source("trace", prompt=prompt, file=file)
    question = one_prompt(prompt, file)
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "seed": seed,
        "rule": checked_rule(rule, False),
        "members": members.split(",") if members is not None else None,
    }
    loaded = load_chain(with_small(chain, small), dtype=dtype, target=target, graphs=False, say=say)
    console = Console(record=svg is not None)
    rows: list[dict[str, Any]]
    if timeline:
        timed = loaded.timeline(question, **options)
        rows, what = list(timed.to_json()), "events"
        for shown_part in timeline_tables(timed):
            console.print(shown_part)
    else:
        found, shown = loaded.trace(question, **options), _Shown(loaded)
        rows = [
            {**traced.to_json(), "texts": shown.texts(traced.tokens)} for traced in found.rounds
        ]
        what = "rounds"
        console.print(shown.table(found.rounds))
        console.print(shown.legend())
    if out is not None:
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        with whole_file(out) as partial:
            partial.write_text("".join(lines), "utf-8")
        say(f"wrote {out}: {len(rows)} {what}")
    if svg is not None:
        with whole_file(svg) as partial:
            partial.write_text(console.export_svg(title="polybasic trace"), "utf-8")
        say(f"wrote {svg}")


class _Shown:
    """Rounds as rows of a terminal."""

    def __init__(self, chain: "Chain") -> None:
        self._tokenizer = chain.tokenizer

    def texts(self, tokens: list[int]) -> list[str]:
        """Of tokens, one by one."""
        return [self._tokenizer.decode([token]) for token in tokens]

    def table(self, rounds: "list[TracedRound]") -> "Table":
        """Who proposed to whom, how much was kept, how long it took, and the text."""
        from rich.table import Table

        table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False)
        for header in ("round", "kept", "ms"):
            table.add_column(header, justify="right", no_wrap=True)
        table.add_column("by → for", no_wrap=True)
        table.add_column("text", overflow="fold")
        for number, traced in enumerate(rounds, 1):
            who = f"{traced.proposer} → {traced.verifier}" if traced.proposer else traced.verifier
            kept = f"{len(traced.kept)} of {len(traced.tokens)}" if traced.proposer else "–"
            table.add_row(str(number), kept, f"{1e3 * traced.seconds:.1f}", who, self._text(traced))
        return table

    def _text(self, traced: "TracedRound") -> "Text":
        from rich.text import Text

        shown = Text()
        for place, text in enumerate(self.texts(traced.gained)):
            shown.append(text.replace("\n", "⏎"), _KEPT if place < len(traced.kept) else _DRAWN)
        if (missed := _best_refused(traced)) is not None:
            text, share = self.texts([traced.tokens[missed]])[0], traced.probabilities[missed]
            shown.append(f"  {text.strip() or repr(text)} {share:.0%}", _REFUSED)
        return shown

    def legend(self) -> "Text":
        """What the looks mean."""
        from rich.text import Text

        return Text.assemble(
            ("accepted", _KEPT),
            ", ",
            ("drawn by the verifier", _DRAWN),
            ", ",
            ("proposed and refused, with the verifier's probability", _REFUSED),
        )


def _best_refused(traced: "TracedRound") -> int | None:
    """The place of the likeliest proposal where the verifier drew a token of its own."""
    if len(traced.kept) == len(traced.gained):
        return None
    last = traced.kept[-1] if traced.kept else -1
    places = [place for place, parent in enumerate(traced.parents) if parent == last]
    return max(places, key=lambda place: traced.probabilities[place], default=None)
