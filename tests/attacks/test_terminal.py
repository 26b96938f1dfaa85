"""Controls in files, names and answers do not reach a terminal."""

import io
import json
import logging
from pathlib import Path

import pytest

from polybasic.chain.base.console import Console
from polybasic.chain.base.errors import UserError
from polybasic.chain.base.terminal import ShownStream, broken_between_words, escaped
from polybasic.recipes.cli import chain as commands
from polybasic.recipes.cli import main as cli
from tests.attacks import outcomes
from tests.recipes.command_line import call

CONTROLS = ("\x1b]0;owned\x07", "\x1b[2J", "\x9b31m", "\x00", "\x08", "\x7f", "\u202e", "\u2066")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("control", CONTROLS, ids=ascii)
def test_controls_are_escaped_wherever_text_leaves(control: str, capsys) -> None:
    assert not escaped(f"a{control}b").count(control)
    assert json.loads(escaped(json.dumps(control, ensure_ascii=False))) == control
    assert control not in str(UserError("malformed", f"a{control}b", "mend it"))
    terminal = Terminal()
    print(f"a{control}b\tc", file=ShownStream(terminal))
    assert terminal.getvalue() == f"a{escaped(control)}b\tc\n"
    Console().print(f"a{control}b [bold]c[/]")
    shown = capsys.readouterr().out
    assert shown.endswith("b [bold]c[/]\n")
    assert shown == escaped(shown)


@pytest.mark.parametrize("control", CONTROLS[:3], ids=ascii)
def test_a_manifest_cannot_write_to_the_terminal(tiny_chain: Path, control: str) -> None:
    path = tiny_chain / "chain.json"
    whole = json.loads(path.read_text())
    plan = {"plan": whole["plan"], "dtype": "float32", "temperature": 0, "seconds_per_token": 1}
    for change in (
        {"plans": [plan | {"hardware": f"CPU {control}"}]},
        {"provenance": whole["provenance"] | {"command": f"polybasic {control}"}},
        {"quality": {"intermediate": {f"kl{control}": f"{control}"}}},
        {"results": {"systems": {f"target{control}": {}}}},
        {"grown": f"{control}"},
        {f"{control}": 1},
    ):
        path.write_text(json.dumps(whole | change))
        outcomes.of_command("inspect", tiny_chain)
        outcomes.of_command("inspect", tiny_chain, "--json")


def test_an_answer_reaches_a_terminal_escaped_and_a_pipe_as_it_is(monkeypatch) -> None:
    shown, said = {}, "\x1b]0;owned\x07"
    for name, stream in (("terminal", Terminal()), ("pipe", io.StringIO())):
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdout", ShownStream(stream))
            print(said, end="", file=commands.answer_stream())
        shown[name] = stream.getvalue()
    assert shown == {"terminal": escaped(said), "pipe": said}


def test_warnings_and_tracebacks_are_escaped(monkeypatch) -> None:
    def fail(name: str) -> None:
        logging.getLogger("polybasic.attacked").warning("\x1b[2J")
        raise ZeroDivisionError("\x1b[2J")

    monkeypatch.setattr("polybasic.recipes.schema.loading.find_recipe", fail)
    code, out, err = call("recipes", "show", "base")
    assert (code, out) == (1, "")
    assert "\x1b" not in err
    assert err.endswith("failed: ZeroDivisionError: \\u001b[2J\n")


def test_what_is_not_escaped_is_seen(monkeypatch, tiny_chain: Path) -> None:
    monkeypatch.setattr(cli, "ShownStream", lambda stream: stream)
    monkeypatch.setattr("polybasic.chain.base.errors.escaped", str)
    with pytest.raises(AssertionError):
        outcomes.of_command("inspect", "\x1b[2J")


def test_lines_are_broken_between_words_and_commands_stay_in_one_piece() -> None:
    line = "wrote the plan into a-rather-long/path; next: polybasic bench a-rather-long/path"
    assert broken_between_words(line, 20).splitlines() == [
        "wrote the plan into",
        "a-rather-long/path",
        "next: polybasic bench a-rather-long/path",
    ]
    assert broken_between_words("plan: a\nmemory: some of it", 14, indent=2).splitlines() == [
        "plan: a",
        "memory: some",
        "  of it",
    ]
