"""Conversations answered again by the target, with an account of every one that was given.

Each assistant turn is answered anew, in order, after the target's own earlier answers. Who
answers is an `Answerer`; this module knows neither servers nor runtimes.
"""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.processes.coordinator import wait_for_all
from polybasic.chain.base.processes.place import Place
from polybasic.chain.base.progress import ProgressReport
from polybasic.chain.formats.files import sha256_of_object, whole_file, write_json
from polybasic.train.answers.accounting import (
    Outcome,
    account_in_words,
    counts_of,
    listed,
    reasons_of,
)
from polybasic.train.answers.answer_journal import AnswerJournal
from polybasic.train.answers.answer_shards import read_shards, remove_shards, write_shard
from polybasic.train.answers.answerer import Answerer, AskedPrompt, FailedAnswer, WrittenTurn
from polybasic.train.answers.seeds import seed_of
from polybasic.train.answers.working import for_each
from polybasic.train.data.chat import Messages, RefusedConversation, encode_prompt
from polybasic.train.data.conversations import FEATURES, SkippedRow, fit_to_template, read_rows
from polybasic.train.settings import SELF_PROMPTED, DataSettings, RegenerateSettings

CONVERSATIONS_NAME = "conversations.jsonl"
ACCOUNTING_NAME = "accounting.json"
_SENDERS = {"system": "system", "user": "human", "assistant": "gpt"}
_INCOMPLETE = "\ufffd"
_ALONE = Place()


@dataclass
class _Conversation:
    """A usable row of the source, and the messages that it has at the end."""

    row: int
    id: str
    task: str | None
    group: str | None
    messages: Messages
    key: str
    answered: list[dict[str, str]] = field(default_factory=list)


def regenerate(
    source: str,
    data: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    opened: AbstractAsyncContextManager[Answerer],
    *,
    identity: Mapping[str, Any],
    seed: int,
    journals: Path,
    out: Path,
    self_prompted: Sequence[str] = (),
    place: Place = _ALONE,
) -> dict[str, Any]:
    """Answer all conversations again and write them, with the account of every row.

    Answers are kept in a journal as they come and never asked for again, whatever ended an earlier
    run. Turns after the first `data.max_tokens` tokens, which training does not read, are left
    out, and so are those that do not fit the context. Rows that failed are left out of the result
    and counted.

    Args:
        source: as `load_conversations` takes it.
        data: `limit`, `max_tokens` and `regenerate`, which must be set.
        tokenizer: the target's, with its chat template.
        opened: gives who answers.
        identity: JSON content that identifies the target and its chat template.
        seed: of all answers, at a temperature above 0.
        journals: folder of journals, kept for other runs.
        out: folder for `CONVERSATIONS_NAME` (ShareGPT rows with the source's ids, tasks, groups and
            marks) and `ACCOUNTING_NAME` (counts, and an outcome for each row of the source).
        self_prompted: questions that the target wrote; they count as further rows of the source, of
            task `SELF_PROMPTED`.
        place: of this process, which answers each `world_size`-th conversation from number `rank`.
            The first one waits for the others and writes what a single one would write, with the
            counts of all shards in `MANIFEST_NAME`.

    Returns:
        The counts of the accounting; those of done, failed and skipped rows sum to the rows read.
        In all processes but the first, the counts of their shard.

    Raises:
        UserError: unusable source, more than a tenth of the usable conversations failed, none was
            answered, nobody answers, a shard is missing, or a full disk.
    """
    settings = data.regenerate
    assert settings is not None, "asked for without data.regenerate"
    conversations, skipped = _read(source, data.limit, self_prompted, tokenizer)
    run = _Run(settings, data.max_tokens, tokenizer, seed, conversations, place)
    try:
        asyncio.run(run.answer_all(opened, identity, journals))
    except KeyboardInterrupt:
        print(f"stopped; {run.kept}", file=sys.stderr)
        raise
    answered = {each.row: each.answered for each in run.share if each.answered}
    write_shard(out, place.rank, run.outcomes, answered)
    if place.world_size > 1:
        wait_for_all()
    if not place.is_first:
        return counts_of(run.outcomes)
    run.merge(out)
    outcomes = sorted([*run.outcomes, *skipped], key=lambda outcome: outcome.row)
    assert [outcome.row for outcome in outcomes] == list(range(len(outcomes))), "a row was lost"
    counts = counts_of(outcomes)
    accounting = {"answered_by": run.answered_by, **counts}
    if not counts["num_done"]:
        raise UserError(
            "no conversation was answered",
            f"{source} ({counts['num_inputs']} rows: {listed(reasons_of(outcomes, 'skipped'))})",
            "give conversations that the target's template and context take",
        )
    _write(out / CONVERSATIONS_NAME, [each for each in conversations if each.answered])
    reasons = {status: reasons_of(outcomes, status) for status in ("failed", "skipped")}
    inputs = [outcome.line() for outcome in outcomes]
    write_json(out / ACCOUNTING_NAME, {**accounting, **reasons, "inputs": inputs})
    remove_shards(out)
    print(account_in_words(outcomes), file=sys.stderr)
    return accounting


class _Run:
    """The conversations that are asked for, by some at once, and what became of them.

    Attributes:
        share: those of this process.
    """

    def __init__(
        self,
        settings: RegenerateSettings,
        max_tokens: int,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
        conversations: list[_Conversation],
        place: Place,
    ) -> None:
        self.settings, self.max_tokens, self.seed = settings, max_tokens, seed
        self.tokenizer, self.conversations, self.place = tokenizer, conversations, place
        self.share = conversations[place.rank :: place.world_size]
        self.outcomes: list[Outcome] = []
        self.failed: list[Outcome] = []
        self.answered_by: dict[str, Any] = {}
        self.kept = "nothing was asked for yet"

    async def answer_all(
        self,
        opened: AbstractAsyncContextManager[Answerer],
        identity: Mapping[str, Any],
        journals: Path,
    ) -> None:
        """Answer every conversation, or raise what makes that futile."""
        async with opened as answerer:
            self.answered_by = {
                **answerer.identity,
                "max_new_tokens": self.settings.max_new_tokens,
                "temperature": self.settings.temperature,
            }
            decisive = {**identity, **self.answered_by}
            if self.settings.temperature:
                decisive["seed"] = self.seed
            with AnswerJournal(journals, decisive, self.place.rank) as journal:
                self.kept = f"all answers are kept in {journal.path}; run again to continue"
                if self.place.world_size > 1:
                    wait_for_all()  # each has read what others wrote in earlier runs
                if len(journal):
                    print(
                        f"{len(journal):,} answers of earlier runs: {journal.path}", file=sys.stderr
                    )
                with ProgressReport("the target answers", len(self.share)) as progress:
                    await self._work(answerer, journal, progress)

    async def _work(
        self, answerer: Answerer, journal: AnswerJournal, progress: ProgressReport
    ) -> None:
        num_answers = 0

        async def answer(conversation: _Conversation) -> None:
            nonlocal num_answers
            # lets an interrupt in even where every answer is in the journal
            await asyncio.sleep(0)
            outcome = await self._outcome(conversation, answerer, journal)
            self.outcomes.append(outcome)
            if outcome.status == "failed":
                self.failed.append(outcome)
            num_answers += outcome.num_answers
            speed = progress.per_second(num_answers)
            progress.step(f"failed {len(self.failed):,}  {speed:.1f} answers/s")
            self._check_failures()

        await for_each(self.share, answerer.num_parallel, answer)

    def merge(self, out: Path) -> None:
        """Take over what became of all conversations, from the shards in `out`."""
        rows = [each.row for each in self.conversations]
        count = self.place.world_size
        self.outcomes, answered = read_shards(out, [rows[rank::count] for rank in range(count)])
        for each in self.conversations:
            each.answered = list(answered.get(each.row, []))
        self.failed = [outcome for outcome in self.outcomes if outcome.status == "failed"]
        self._check_failures()

    async def _outcome(
        self, conversation: _Conversation, answerer: Answerer, journal: AnswerJournal
    ) -> Outcome:
        outcome = Outcome(conversation.row, conversation.id, "done")
        try:
            messages = await self._answered(conversation, answerer, journal, outcome)
        except FailedAnswer as error:
            return Outcome(conversation.row, conversation.id, "failed", str(error))
        except RefusedConversation as error:
            reason = f"{error.what}: {error.where}"
            return Outcome(conversation.row, conversation.id, "skipped", reason)
        if not outcome.num_answers:
            reason = f"first turn of {self._limit(answerer)} tokens or more"
            return Outcome(conversation.row, conversation.id, "skipped", reason)
        conversation.answered = messages
        return outcome

    async def _answered(
        self,
        conversation: _Conversation,
        answerer: Answerer,
        journal: AnswerJournal,
        outcome: Outcome,
    ) -> list[dict[str, str]]:
        """The conversation's messages with the answers to it, which are counted in `outcome`."""
        messages: list[dict[str, str]] = []
        turns = [index for index, each in enumerate(conversation.messages) if _is_answer(each)]
        for turn, index in enumerate(turns):
            asked = [*messages, *conversation.messages[len(messages) : index]]
            token_ids = encode_prompt(self.tokenizer, asked)
            if len(token_ids) >= self._limit(answerer):
                outcome.num_turns_left_out = len(turns) - turn
                break
            answer = journal.get(conversation.key, turn)
            if answer is None:
                room = answerer.context_tokens - len(token_ids)
                prompt = AskedPrompt(
                    asked,
                    token_ids,
                    min(self.settings.max_new_tokens, room),
                    self.settings.temperature,
                    seed_of(self.seed, conversation.key, turn),
                )
                answer = _checked(await answerer.answer(prompt))
                journal.add(conversation.key, turn, answer)
            messages = [*asked, {"role": "assistant", "content": answer.text}]
            outcome.num_answers += 1
            outcome.num_cut_answers += answer.is_cut
        return messages

    def _limit(self, answerer: Answerer) -> int:
        """Prompts of so many tokens are not asked."""
        return min(self.max_tokens, answerer.context_tokens)

    def _check_failures(self) -> None:
        num_failed, total = len(self.failed), len(self.conversations)
        if 10 * num_failed > total:
            raise UserError(
                "more than a tenth of the conversations failed",
                f"{num_failed:,} of {total:,}, the first: {self.failed[0].reason}",
                f"mend the cause; {self.kept}",
            )


def _read(
    source: str,
    limit: int | None,
    self_prompted: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[list[_Conversation], list[Outcome]]:
    """The usable conversations as the chat template takes them, and the other rows."""
    rows, numbers, skipped = [], [], []
    for number, row in enumerate(read_rows(source, limit)):
        if isinstance(row, SkippedRow):
            skipped.append(Outcome(number, row.id, "skipped", row.reason))
        else:
            rows.append(row)
            numbers.append(number)
    first = len(rows) + len(skipped)
    for index, question in enumerate(self_prompted):
        rows.append(_row_of(index, question))
        numbers.append(first + index)
    if not rows:
        raise UserError(
            "no usable conversation",
            f"{source} ({len(skipped)} rows: {listed(reasons_of(skipped, 'skipped'))})",
            "give a file with at least one user turn that an assistant answers",
        )
    fitted = fit_to_template(Dataset.from_list(rows, features=FEATURES), tokenizer)
    seen = Counter[str]()
    conversations = []
    for number, row in zip(numbers, fitted, strict=True):
        questions = [each for each in row["messages"] if not _is_answer(each)]
        digest = sha256_of_object(questions)
        # the same questions twice are two conversations, with answers of their own
        key = f"{digest}/{seen[digest]}"
        seen[digest] += 1
        conversations.append(_Conversation(number, messages=row.pop("messages"), key=key, **row))
    return conversations, skipped


def _row_of(index: int, question: str) -> dict[str, Any]:
    """A question that the target wrote, with a place for its answer."""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": ""}]
    return {
        "id": f"{SELF_PROMPTED}-{index}",
        "task": SELF_PROMPTED,
        "group": None,
        "messages": messages,
    }


def _is_answer(message: Mapping[str, str]) -> bool:
    return message["role"] == "assistant"


def _checked(answer: WrittenTurn) -> WrittenTurn:
    """An answer that a conversation can hold: with text, and without half a character at its end.

    Raises:
        FailedAnswer: nothing is left of it.
    """
    text = answer.text.rstrip(_INCOMPLETE) if answer.is_cut else answer.text
    if not text.strip():
        raise FailedAnswer("empty answer")
    return WrittenTurn(text, answer.is_cut)


def _write(path: Path, conversations: list[_Conversation]) -> None:
    with whole_file(path) as partial, partial.open("w", encoding="utf-8") as lines:
        for each in conversations:
            row: dict[str, Any] = {"id": each.id}
            row |= {
                name: value
                for name in ("task", "group")
                if (value := getattr(each, name)) is not None
            }
            row["conversations"] = [
                {"from": _SENDERS[message["role"]], "value": message["content"]}
                for message in each.answered
            ]
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")
