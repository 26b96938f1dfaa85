"""What reaches stderr under the options of the whole command line: text, or JSON a line."""

import json
import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polybasic.chain.base.logs import JsonLines, LogSettings, log_settings, logging_as
from polybasic.chain.base.progress import ProgressReport
from polybasic.chain.base.terminal import say
from tests.recipes.command_line import call, refusal

_SHOW = ("recipes", "show", "base")


@pytest.fixture
def talkative(monkeypatch) -> None:
    """A command that logs, prints, warns, draws a bar of its own and fails."""

    def fail(name: str) -> None:
        logging.getLogger("polybasic.chain.anything").info("it is %s", "chosen")
        logging.getLogger("another.library").info("chatter")
        say("two lines,\nthe second")
        print("warning: it is slow", file=sys.stderr)
        warnings.warn("deprecated", stacklevel=1)
        print("\r 10%", end="", file=sys.stderr)
        print("\r\x1b[1m100%\x1b[0m", file=sys.stderr)
        with ProgressReport("steps", 2) as progress:
            progress.step("loss 1")
            progress.step("loss 0")
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("polybasic.recipes.schema.loading.find_recipe", fail)
    monkeypatch.setenv("FORCE_COLOR", "1")


@pytest.fixture(autouse=True)
def _marked_records() -> Iterator[None]:
    """Records have a field that no message was given, as Ray's import sees to."""
    make = logging.getLogRecordFactory()

    def marked(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        record.__dict__["_marked_at"] = 1
        return record

    logging.setLogRecordFactory(marked)
    yield
    logging.setLogRecordFactory(make)


def objects(err: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in err.splitlines()]


@pytest.mark.parametrize("words", [("--log-json", *_SHOW), (*_SHOW, "--log-json")])
def test_a_collector_gets_an_object_a_line(talkative, words: tuple[str, ...]) -> None:
    before = logging.getLogger().handlers[:], logging.getLogger("polybasic").level
    code, out, err = call(*words)
    assert (code, out) == (1, "")
    found = objects(err)
    assert all(list(entry)[:4] == ["time", "level", "logger", "message"] for entry in found)
    assert "_marked_at" not in err
    said = [(entry["level"], entry["message"]) for entry in found]
    assert said[:3] == [
        ("info", "it is chosen"),
        ("info", "two lines,\nthe second"),
        ("warning", "warning: it is slow"),
    ]
    assert "UserWarning: deprecated" in said[3][1]
    assert said[4:] == [
        ("info", "100%"),
        ("info", "steps: 1 of 2  loss 1  0:00:00 left"),
        ("info", "steps: 2 of 2  loss 0  0:00:00 left"),
        ("error", "failed: ZeroDivisionError: division by zero"),
    ]
    assert found[-1]["traceback"].startswith("Traceback")
    assert (logging.getLogger().handlers[:], logging.getLogger("polybasic").level) == before
    assert log_settings() == LogSettings()


def test_without_the_option_nothing_is_json(talkative) -> None:
    with pytest.warns(UserWarning, match="deprecated"):
        err = call(*_SHOW)[2]
    assert "it is chosen" not in err
    assert "two lines,\nthe second\n" in err
    assert err.endswith("failed: ZeroDivisionError: division by zero\n")


def test_levels_leave_out_what_is_below_them(talkative) -> None:
    found = objects(call("--log-json", "--log-level=error", *_SHOW)[2])
    assert [entry["level"] for entry in found] == ["error"]
    with pytest.warns(UserWarning, match="deprecated"):
        err = call("-v", *_SHOW)[2]
    assert " info    it is chosen\n" in err
    assert "chatter" not in err
    assert refusal(*_SHOW, "--log-level", "loud") == (
        "error: unknown level: --log-level loud; use one of debug, info, warning, error"
    )


def test_errors_of_input_and_of_usage_are_objects(tmp_path: Path) -> None:
    [found] = objects(call("inspect", tmp_path, "--log-json")[2])
    assert (found["level"], found["message"].partition(":")[0]) == ("error", "error")
    assert all(objects(call("inspect", "--log-json")[2]))


def test_a_loaded_chain_is_logged(tiny_chain: Path) -> None:
    code, out, err = call("generate", tiny_chain, "-p", "Hi", "--max-new-tokens", 1, "--log-json")
    assert (code, bool(out)) == (0, True)
    messages = [entry["message"] for entry in objects(err)]
    assert any(message.startswith(f"loaded {tiny_chain} in ") for message in messages)
    assert "tokens/s" in messages[-1]


def test_silent_processes_say_nothing_in_json_either(capsys) -> None:
    from polybasic.chain.base.processes.coordinator import show, silent_unless_first
    from polybasic.chain.base.processes.place import Place

    with logging_as(LogSettings(as_json=True)), silent_unless_first(Place(1, 2, 1, 2)):
        logging.getLogger("polybasic").warning("twice")
        print("twice", file=sys.stderr)
        show("failed: here")
    [found] = objects(capsys.readouterr().err)
    assert found["message"] == "failed: here"
    assert not isinstance(sys.stderr, JsonLines)
