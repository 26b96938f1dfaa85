"""A conversation with a chain: by lines of a pipe, and in a terminal."""

import io
import json
import os
import pty
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from polybasic.chain.base.errors import UserError
from polybasic.deploy import Chain, load_chain
from polybasic.recipes.cli import main as cli
from polybasic.recipes.cli.shared.conversation import Conversation, run_command
from polybasic.train.data.conversations import read_rows
from tests import forked
from tests.recipes.command_line import call, refusal

SETTINGS = ("--dtype", "float32", "--max-new-tokens", "12")


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch, tiny_chain: Path) -> Any:
    """What `polybasic chat` makes of lines: exit code, stdout, stderr."""

    def say(*lines: str, options: tuple[str, ...] = ()) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return call("chat", tiny_chain, *SETTINGS, *options)

    return say


def expected(chain: Path, *questions: str, system: str = "", **options: Any) -> list[str]:
    """Answers of the library to the same questions, one after the other."""
    loaded, messages = load_chain(chain, dtype="float32"), []
    if system:
        messages.append({"role": "system", "content": system})
    answers = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        answers.append(loaded.generate(messages, **{"max_new_tokens": 12} | options).text)
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def test_a_pipe_gets_the_answers_and_nothing_else(say: Any, tiny_chain: Path) -> None:
    code, out, err = say("w5 w9", "", "w2", "//stats", options=("--tint",))
    assert (code, err) == (0, "")
    assert out.splitlines() == expected(tiny_chain, "w5 w9", "w2", "/stats")


def test_settings_are_those_of_generate(say: Any, tiny_chain: Path) -> None:
    sampled = {"temperature": 0.9, "top_k": 7, "top_p": 0.8, "min_p": 0.01, "seed": 3}
    penalties = {"repetition_penalty": 1.2, "presence_penalty": 1.0, "frequency_penalty": 0.5}
    settings: dict[str, Any] = sampled | penalties
    [answer] = expected(tiny_chain, "w5", system="w8", **settings)
    assert answer != expected(tiny_chain, "w5")[0]
    options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    assert say("w5", options=(*options, "--system", "w8"))[1] == f"{answer}\n"
    commands = [f"/set {name} {value}" for name, value in settings.items()]
    given = ("/system w8", *commands, "w5", "/set", "/set temperature", "/set")
    code, out, err = say(*given, options=("--stop", "w63 w63"))
    assert (code, out) == (0, f"{answer}\n")
    assert "\ntemperature 0.9, top_k 7, top_p 0.8, min_p 0.01" in err
    assert err.splitlines()[-1].startswith("temperature default, top_k 7")


def test_stats_target_and_plan(say: Any, tiny_chain: Path) -> None:
    code, out, err = say("/stats", "/plan", "w5", "/target", "/plan", "w5", "/stats", "/target")
    assert code == 0
    assert out.splitlines() == expected(tiny_chain, "w5", "w5"), "the target's own text"
    lines = err.splitlines()
    assert lines[0] == "no answer is complete yet"
    assert lines[1].startswith(
        "plan: target → intermediate → draft; tree of depth 3, top 2, 6 rows; "
    )
    assert lines[2] == "answering: target alone"
    assert lines[3] == "plan: target alone, no drafting"
    assert re.fullmatch(r"last answer: 12 tokens in .* forward passes: target 11", lines[4])
    by_all, by_target = lines[5:7]
    assert by_all.startswith("1 answer by target, intermediate, draft: 12 tokens in ")
    assert re.search("1.00 tokens per target pass; forward passes: target 11$", by_target)
    assert lines[7] == "answering: target, intermediate, draft"


def test_a_conversation_is_reset_and_saved(say: Any, tiny_chain: Path, tmp_path: Path) -> None:
    first, second = expected(tiny_chain, "w5", "w9")
    path = tmp_path / "saved" / "conversation.json"
    code, out, _ = say("w5", "/reset", "w5", "/system w1 w2", f"/save {path}", "/quit", "w9")
    assert (code, out) == (0, f"{first}\n{first}\n")
    [kept] = json.loads(path.read_text("utf-8"))
    assert kept == {
        "conversations": [
            {"from": "system", "value": "w1 w2"},
            {"from": "human", "value": "w5"},
            {"from": "gpt", "value": first},
        ]
    }
    assert len(list(path.parent.iterdir())) == 1
    [row] = read_rows(str(path))
    assert isinstance(row, dict)
    assert [message["content"] for message in row["messages"]] == ["w1 w2", "w5", first]
    assert second not in out


def test_the_oldest_turns_are_left_out_where_the_context_is_full(
    say: Any, tiny_chain: Path
) -> None:
    question = " ".join(["w5"] * 20)
    code, out, err = say(*[question] * 4, options=("--context-tokens", "80"))
    assert code == 0
    answers = out.splitlines()
    assert answers[:2] == expected(tiny_chain, question, question)
    told = [line for line in err.splitlines() if "is full" in line]
    assert told[0] == (
        "the context of 80 tokens is full: of 4 turns, the 2 oldest are no longer read"
    )
    loaded = load_chain(tiny_chain, dtype="float32")
    kept = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answers[1]},
        {"role": "user", "content": question},
    ]
    assert loaded.generate(kept, max_new_tokens=12).text == answers[2]


def test_what_is_refused(say: Any, tiny_chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_chain(tiny_chain, dtype="float32")
    conversation = Conversation(loaded, {"max_new_tokens": 12, "members": None})
    for line, said in (
        ("/sats", "unknown command: /sats; /help lists"),
        ("/set colour 3", "unknown setting: /set colour 3; use one of temperature"),
        ("/set top_k few", "not a number: /set top_k few; write /set top_k NUMBER"),
        ("/set temperature -1", "temperature=-1.0"),
        ("/set max_new_tokens 0", "/set max_new_tokens 0; use 1 or more"),
        ("/save", "write /save FILE"),
        (f"/save {tiny_chain}", "cannot write"),
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            run_command(line, conversation)
    for question, said in (("w1 " * 200, "does not fit the context"), ("a\udcffb", "prompt=")):
        with pytest.raises(UserError, match=said):
            list(conversation.answer(question, lambda: False))
    assert not conversation.turns
    assert conversation.options == {"max_new_tokens": 12, "members": None}
    code, out, err = say("w5", "/sats", "w9")
    assert code == 2
    assert len(out.splitlines()) == 1
    assert err.splitlines() == [
        "error: unknown command: /sats; /help lists those that there are",
    ]
    for options, said in (
        (("--members", "target,nobody"), "plan cannot run: "),
        (("--max-new-tokens", "1000"), "does not fit the context"),
    ):
        code, out, err = say("w5", options=options)
        assert (code, out) == (2, "")
        assert said in err
    assert "--rule x" in refusal("chat", "nowhere", "--rule", "x")
    assert "top_p" in refusal("chat", "nowhere", "--top-p", "2")


def test_an_answer_that_is_stopped_is_kept_as_far_as_it_came(tiny_chain: Path) -> None:
    loaded = load_chain(tiny_chain, dtype="float32", sequences=1)
    whole = loaded.generate("w1", max_new_tokens=40).text
    conversation = Conversation(loaded, {"max_new_tokens": 40, "members": ["target"]})
    shown: list[str] = []
    for piece in conversation.answer("w1", lambda: len(shown) >= 5):
        shown.append(piece.text)
    text = "".join(shown)
    assert 5 <= len(shown) < 8
    assert whole.startswith(text)
    assert [turn["content"] for turn in conversation.turns] == ["w1", text]
    assert not conversation.costs
    assert list(conversation.answer("w5", lambda: True)) == []
    assert len(conversation.turns) == 2, "a question that was stopped at once is not kept"
    assert list(conversation.answer("w5", lambda: False)), "the sequence is free again"


def test_a_chain_without_a_chat_template_cannot_talk(tiny_chain_parts: Any, tmp_path: Path) -> None:
    (tiny_chain_parts.target / "chat_template.jinja").unlink()
    tiny_chain_parts.package(tmp_path / "chain")
    assert "no chat template: the tokenizer of" in refusal("chat", tmp_path / "chain")


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    run_command("/help", None)  # type: ignore[arg-type]
    told = capsys.readouterr().err
    names = ("stats", "target", "plan", "system", "set", "reset", "save", "help", "quit")
    assert [f"/{name}" for name in names] == [
        line.split()[0] for line in told.splitlines() if line[1] != "/"
    ]


class Terminal:
    """`polybasic chat` in a terminal of its own."""

    def __init__(self, chain: Path, log: Path, *options: str, **environment: str) -> None:
        ours, self.theirs = pty.openpty()
        self.ours, self.shown = ours, ""
        arguments = ["chat", str(chain), "--dtype", "float32", *options]
        self.process = forked.start(
            in_terminal, os.ttyname(self.theirs), arguments, log=log, environment=environment
        )
        os.set_blocking(ours, False)

    def wait(self, text: str) -> str:
        """Until a text is shown; all that is shown since the last call."""
        end = time.monotonic() + 30
        while text not in self.shown:
            assert time.monotonic() < end, f"no {text!r} in {self.shown!r}"
            assert self.process.is_alive() or text in self.shown, self.shown
            time.sleep(0.01)
            try:
                self.shown += os.read(self.ours, 1 << 16).decode()
            except BlockingIOError:
                continue
        before, _, self.shown = self.shown.partition(text)
        return before

    def type(self, text: str) -> None:
        os.write(self.ours, text.encode())

    def exit_code(self) -> int | None:
        self.process.join(30)
        os.close(self.ours)
        os.close(self.theirs)
        return self.process.exitcode


def in_terminal(name: str, arguments: list[str]) -> None:
    """`polybasic ARGUMENTS` in a terminal, with passes that take a while."""
    os.setsid()
    terminal = os.open(name, os.O_RDWR)  # the first one that a session opens is its terminal
    for number in range(3):
        os.dup2(terminal, number)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
    with patch.object(Chain, "step", slow_step):
        cli.main(arguments)


def slow_step(chain: Chain, step: Callable[[Chain], bool] = Chain.step) -> bool:
    time.sleep(0.05)
    return step(chain)


@pytest.mark.proof
def test_control_c_stops_the_answer_and_leaves_at_the_prompt(
    tiny_chain: Path, tmp_path: Path
) -> None:
    options = ("--max-new-tokens", "3", "--members", "target")
    terminal = Terminal(tiny_chain, tmp_path / "log", *options, TERM="dumb", NO_COLOR="1")
    assert "target; /help lists commands" in terminal.wait("Ctrl-D leaves")
    terminal.wait("> ")
    terminal.type("w5 w9\n")
    [answer] = expected(tiny_chain, "w5 w9", max_new_tokens=3)
    terminal.wait(f"{answer}\r\n(")
    assert "tokens per target pass" in terminal.wait("> ")
    terminal.type("/set max_new_tokens 90\n")
    terminal.wait("> ")
    terminal.type("w1\n")
    terminal.wait("w1\r\nw")  # the answer has begun
    terminal.type("\x03")
    begun = "w" + terminal.wait("\r\nstopped")
    terminal.wait("> ")
    terminal.type(f"/save {tmp_path / 'saved.json'}\n")
    terminal.wait("wrote ")
    terminal.wait("> ")
    terminal.type("/stats\n")
    assert "\x1b" not in terminal.wait("1 answer by target: 3 tokens")
    terminal.wait("> ")
    [kept] = json.loads((tmp_path / "saved.json").read_text("utf-8"))
    assert [turn["value"] for turn in kept["conversations"]][:3] == ["w5 w9", answer, "w1"]
    assert begun.replace("^C", "") == kept["conversations"][3]["value"]
    assert len(begun.split()) < 40
    for leaves in (False, True):
        terminal.type("\x03")
        terminal.wait("once more to leave")
        terminal.type("\x03" if leaves else "/set\n")
        if not leaves:
            terminal.wait("> ")
            terminal.wait("> ")
    assert terminal.exit_code() == 0


@pytest.mark.proof
def test_a_terminal_is_left_at_a_signal(tiny_chain: Path, tmp_path: Path) -> None:
    options = ("--max-new-tokens", "12")
    terminal = Terminal(tiny_chain, tmp_path / "log", *options, TERM="dumb")
    terminal.wait("> ")
    terminal.process.terminate()
    terminal.wait("interrupted by SIGTERM")
    assert terminal.exit_code() == 143


@pytest.mark.proof
def test_tokens_are_tinted_by_who_proposed_them(tiny_chain: Path, tmp_path: Path) -> None:
    generation = load_chain(tiny_chain, dtype="float32").generate("w5 w9", max_new_tokens=12)
    assert len(set(generation.members)) > 1
    looks = {"target": "1;4", "intermediate": "3;36", "draft": "32"}
    tinted = re.compile(r"\x1b\[([\d;]+)m(.*?)\x1b\[0m")
    options = ("--tint", "--max-new-tokens", "12")
    terminal = Terminal(tiny_chain, tmp_path / "log", *options, TERM="xterm-256color")
    explained = tinted.findall(terminal.wait("> "))
    assert explained == [(look, name) for name, look in looks.items()] + [("33", "ngram")]
    terminal.type("w5 w9\n")
    shown = tinted.findall(terminal.wait("tokens per target pass)"))
    assert [look for look, _ in shown] == [looks[member] for member in generation.members]
    assert "".join(text for _, text in shown) == generation.text
    terminal.wait("> ")
    terminal.type("\x04")
    assert terminal.exit_code() == 0
