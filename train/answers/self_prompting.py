"""Questions that the target writes itself, by going on from where a user's turn opens.

So a chat model shows what it was trained on (Magpie, Xu et al. 2024, arXiv 2406.08464). Who writes
is a `Writer`; what is kept follows from the seed alone, however many are written at once.
"""

import asyncio
import json
import math
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.progress import ProgressReport
from polybasic.chain.formats.files import parse_json, whole_file
from polybasic.train.answers.accounting import listed
from polybasic.train.answers.answer_journal import AnswerJournal
from polybasic.train.answers.answerer import WrittenTurn
from polybasic.train.answers.seeds import seed_of
from polybasic.train.answers.working import for_each
from polybasic.train.data.chat import UserTurn, user_turn
from polybasic.train.settings import SELF_PROMPTED

QUESTIONS_NAME = "questions.jsonl"
MOST_TOKENS = 256
TEMPERATURE = 1.0
TOP_P = 0.95
_WORDS = range(4, 201)
_ASCII_SHARE = 0.98
_DISTINCT_SHARE = 0.45
_FEW_WORDS = 20
"""That may repeat each other, as in short sentences."""
_BEGINNING_WORDS = 8
"""Of two questions with the same ones the second is left out."""
_TRIED = 100
_LEAST_KEPT = 0.1
"""Of `_TRIED` or more; a model that writes fewer usable ones writes none that teach."""


class Writer(Protocol):
    """Who writes.

    Attributes:
        num_parallel: questions that it writes at once.
    """

    @property
    def num_parallel(self) -> int: ...

    async def write(self, turn: UserTurn, seed: int) -> WrittenTurn:
        """Go on from the opening of a user's turn, at `TEMPERATURE` and `TOP_P`, for `MOST_TOKENS`.

        The text may go on behind `turn.closing`, but not behind `turn.stop_tokens`.
        """


def write_questions(
    tokenizer: PreTrainedTokenizerBase,
    opened: AbstractContextManager[Writer],
    *,
    num: int,
    identity: Mapping[str, Any],
    seed: int,
    journals: Path,
    out: Path,
) -> dict[str, Any]:
    """Let the target write `num` questions, and keep them in `QUESTIONS_NAME` as JSON texts.

    Left out are those that were cut, of fewer than 4 or more than 200 words, in another script than
    Latin, that repeat themselves, or begin as an earlier one did. All that was written is kept in a
    journal, from which an interrupted run goes on, as does one that wants more.

    Args:
        tokenizer: the target's, with its chat template.
        opened: gives who writes.
        num: questions.
        identity: JSON content that identifies the target and its chat template.
        seed: of all questions; those of a smaller `num` are the first ones.
        journals: folder of journals, kept for other runs.
        out: folder.

    Returns:
        How many were written, and how many of them were left out, by reason.

    Raises:
        UserError: a chat template without an opening, hardly a usable question, or a full disk.
    """
    turn = user_turn(tokenizer)
    sampling = {"temperature": TEMPERATURE, "top_p": TOP_P, "max_new_tokens": MOST_TOKENS}
    decisive = {**identity, "self_prompted": sampling, "seed": seed}
    kept, refused, num_written = dict[str, str](), Counter[str](), 0
    with opened as writer, AnswerJournal(journals, decisive) as journal:
        while len(kept) < num:
            share = len(kept) / num_written if num_written else 1
            batch = range(num_written, num_written + math.ceil((num - len(kept)) / share))
            try:
                asyncio.run(_write(batch, turn, seed, writer, journal))
            except KeyboardInterrupt:
                print(f"stopped; all questions are kept in {journal.path}", file=sys.stderr)
                raise
            for number in batch:
                if len(kept) == num:
                    break
                written = journal.get(str(number), 0)
                assert written is not None, f"question {number} was not written"
                num_written += 1
                question = turn.content_of(written.text)
                beginning = " ".join(question.lower().split()[:_BEGINNING_WORDS])
                why = "cut" if _is_cut(written, question) else reason_against(question)
                if why is None and beginning in kept:
                    why = "seen"
                if why is None:
                    kept[beginning] = question
                else:
                    refused[why] += 1
            if num_written >= _TRIED and len(kept) < _LEAST_KEPT * num_written:
                raise UserError(
                    "the target writes hardly any usable question",
                    f"{len(kept):,} of {num_written:,} ({listed(dict(refused.most_common()))})",
                    "give questions of your own in data.conversations, and set "
                    "data.self_prompted to null",
                )
    with whole_file(out / QUESTIONS_NAME) as partial, partial.open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(each, ensure_ascii=False) + "\n" for each in kept.values())
    return {"num_written": num_written, "num_kept": num, "left_out": dict(refused.most_common())}


def read_questions(path: Path) -> list[str]:
    """What `write_questions` has written.

    Raises:
        UserError: the file is missing or damaged.
    """
    with path.open("rb") as lines:
        return [parse_json(line, "question", str(path), n) for n, line in enumerate(lines, start=1)]


def reason_against(question: str) -> str | None:
    """Why a question is left out: its length, its script, or that it repeats itself; else None."""
    words = question.split()
    if len(words) not in _WORDS:
        return "length"
    if sum(character.isascii() for character in question) < _ASCII_SHARE * len(question):
        return "script"
    if len(words) > _FEW_WORDS and len(set(words)) < _DISTINCT_SHARE * len(words):
        return "repetition"
    return None


def _is_cut(written: WrittenTurn, question: str) -> bool:
    """Whether a question goes on behind the last token, not so where the turn has closed before."""
    return written.is_cut and written.text.strip().endswith(question)


async def _write(
    numbers: range, turn: UserTurn, seed: int, writer: Writer, journal: AnswerJournal
) -> None:
    missing = [number for number in numbers if journal.get(str(number), 0) is None]
    num_done = len(numbers) - len(missing)

    async def write(number: int) -> None:
        journal.add(str(number), 0, await writer.write(turn, seed_of(seed, SELF_PROMPTED, number)))
        progress.step()

    with ProgressReport("the target writes questions", len(numbers), num_done) as progress:
        await for_each(missing, writer.num_parallel, write)
