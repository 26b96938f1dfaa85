"""What `polybasic generate` is asked: on the command line, by standard input, or by files."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.progress import tracked
from polybasic.chain.formats.files import (
    disk_errors,
    lies_anywhere,
    parse_json,
    partial_path,
    read_json,
    read_text,
)

if TYPE_CHECKING:
    from polybasic.deploy import Chain
    from polybasic.deploy.planner.prompts import Question
    from polybasic.deploy.runtime.grammar import Grammar

_STANDARD_INPUT = "-"


def check_source(command: str, **named: str | Path | None) -> None:
    """Whether one source of prompts is named; none is what standard input is piped for.

    Args:
        command: for messages.
        named: what is given for each option.

    Raises:
        UserError: several, or none on a terminal.
    """
    given = [f"--{name}" for name, value in named.items() if value is not None]
    if len(given) > 1 or not (given or _is_piped()):
        where = " and ".join(given) or command
        options = ", ".join(f"--{name}" for name in named)
        raise UserError("no single prompt", where, f"give one of {options}, or pipe a text in")


def check_sources(
    text: str | None, messages: Path | None, prompts: Path | None, out: Path | None
) -> None:
    """As `check_source`, and whether there is a place for answers where they are many.

    Raises:
        UserError: --prompts without --out, or the other way round.
    """
    check_source("generate", prompt=text, file=messages, prompts=prompts)
    given = "--prompts" if out is None else "--out"
    if (prompts is None) != (out is None):
        missing = "--out" if out is None else "--prompts"
        raise UserError(
            "no place for answers" if out is None else "a place for one answer",
            given,
            f"give {missing} FILE as well",
        )


def one_prompt(text: str | None, messages: Path | None) -> str | list[dict[str, str]]:
    """The prompt that is to be answered: one of these.

    Args:
        text: as it is; "-" stands for what standard input holds, as None does beside no file.
        messages: a file of them, as JSON.

    Raises:
        UserError: no such file, or it holds no list of messages; nothing on standard input.
    """
    if messages is not None:
        found = read_json(messages, "messages")
        if not isinstance(found, list):
            do = 'write [{"role": "user", "content": "..."}]'
            raise UserError("no list of messages", str(messages), do)
        return found
    if text is not None and text != _STANDARD_INPUT:
        return text
    read = sys.stdin.read()
    if not read.strip():
        raise UserError("empty prompt", "standard input", "pipe a text in, or give --prompt TEXT")
    return read.removesuffix("\n")


def _is_piped() -> bool:
    return sys.stdin is not None and not sys.stdin.isatty()


def grammar_asked(
    json_schema: Path | None, regex: str | None, choice: list[str], grammar: Path | None
) -> "Grammar | None":
    """What the answer has to match, as the command line says it.

    Args:
        json_schema: a file with a schema.
        choice: texts.
        grammar: a file in Lark's syntax.

    Raises:
        UserError: several of them, no such file, or what is no grammar.
    """
    from polybasic.deploy.runtime.grammar import Grammar

    named = {"--json-schema": json_schema, "--regex": regex, "--choice": choice or None}
    named["--grammar"] = grammar
    given = [name for name, value in named.items() if value is not None]
    if len(given) > 1:
        raise UserError("several grammars", " and ".join(given), "give one of them")
    if json_schema is not None:
        return Grammar.json_schema(read_json(json_schema, "JSON schema"))
    if grammar is not None:
        return Grammar.lark(read_text(grammar, "grammar"))
    if regex is not None:
        return Grammar.regex(regex)
    return Grammar.choice(choice) if choice else None


class AnswerFile:
    """Answers to a file of prompts, a JSON object a line; it bears its name once it is whole.

    Until then what is answered lies beside it, and is not asked again.

    Args:
        prompts: a file as `polybasic.deploy.planner.prompts.read_questions` reads it.
        out: the file to write.
        asked: chain and settings; answers of others are not gone on with.

    Raises:
        UserError: as `read_questions`; the file is there; the answers beside it are of other
            prompts, another chain or other settings.
    """

    def __init__(self, prompts: Path, out: Path, asked: dict[str, Any]) -> None:
        from polybasic.deploy.planner.prompts import read_questions

        if lies_anywhere(out):
            do = "choose another --out, or remove it to have all answered again"
            raise UserError("answers are there", str(out), do)
        self._out, self._asked = out, asked
        self._partial = partial_path(out)
        self._questions = read_questions(prompts)
        self._kept = self._answered()

    def complete(self, chain: "Chain", options: dict[str, Any]) -> int:
        """Answer what is not answered yet; returns how many were.

        Raises:
            UserError: as `Chain.generate`; the disk is full or not writable. What is answered then
                stays.
        """
        left = self._questions[len(self._kept) :]
        with disk_errors(self._out):
            self._out.parent.mkdir(parents=True, exist_ok=True)
            with self._partial.open("a", encoding="utf-8") as file:
                file.truncate(len("".join(self._kept).encode()))
                for question in tracked(left, "answers"):
                    file.write(_line(self._identity(question), chain, question, options))
                    file.flush()
            self._partial.replace(self._out)
        return len(left)

    def _identity(self, question: "Question") -> dict[str, Any]:
        return {
            "question_id": question.question_id,
            "task": question.task,
            "prompts": list(question.turns),
            "asked": self._asked,
        }

    def _answered(self) -> list[str]:
        """Lines of an interrupted run, without one that was cut while it was written."""
        if not self._partial.is_file():
            return []
        lines = self._partial.read_text("utf-8").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n")]
        for number, line in enumerate(kept, 1):
            found = parse_json(line, "answers", str(self._partial), number)
            question = self._questions[number - 1] if number <= len(self._questions) else None
            expected = None if question is None else self._identity(question)
            if not isinstance(found, dict) or expected is None or found | expected != found:
                raise UserError(
                    "interrupted answers of other prompts or settings",
                    f"{self._partial} line {number}",
                    "repeat the command that began them, or remove the file",
                )
        return kept


def _line(
    identity: dict[str, Any], chain: "Chain", question: "Question", options: dict[str, Any]
) -> str:
    """The answers to all turns of a question, as JSON."""
    messages: list[dict[str, str]] = []
    answers = []
    for turn in question.turns:
        messages.append({"role": "user", "content": turn})
        # a lone text is also for tokenizers without a chat template
        answers.append(chain.generate(turn if len(messages) == 1 else messages, **options))
        messages.append({"role": "assistant", "content": answers[-1].text})
    content = {
        **identity,
        "answers": [answer.text for answer in answers],
        "token_ids": [answer.token_ids for answer in answers],
        "statistics": [asdict(answer.statistics) for answer in answers],
    }
    return json.dumps(content, ensure_ascii=False) + "\n"
