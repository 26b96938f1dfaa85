"""Answers of a served target: every one that can be had, none twice, and an account of the rest."""

import asyncio
import json
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from threading import Barrier
from typing import Any

import anyio
import pytest
from transformers import PreTrainedTokenizerBase

from polybasic.chain.base.errors import UserError
from polybasic.train.answers.answer_journal import AnswerJournal
from polybasic.train.answers.answerer import AskedPrompt, WrittenTurn
from polybasic.train.answers.endpoint import open_endpoint
from polybasic.train.answers.regeneration import regenerate
from polybasic.train.data.conversations import load_conversations, split_conversations
from polybasic.train.settings import DataSettings
from tests.checkpoints import CHATML, byte_level_tokenizer
from tests.train.fake_endpoint import FakeEndpoint, Fault, answer_to, completion, serve

CONTEXT_TOKENS = 4096
OVERLOADED = Fault(503, b'{"error": {"message": "overloaded"}}')
REFUSED = Fault(400, b'{"error": {"message": "not that"}}')
KEY = "sk-very-secret-0123456789"

Run = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the client would have waited between its tries."""
    seconds = []

    async def note(delay: float) -> None:
        seconds.append(delay)

    monkeypatch.setattr(anyio, "sleep", note)
    return seconds


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEndpoint]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with serve() as served:
        yield served


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return byte_level_tokenizer()


@pytest.fixture
def run(endpoint: FakeEndpoint, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Run:
    """Regenerate a file through the endpoint, with other settings where they are named."""

    def regenerated(
        source: str,
        out: str = "out",
        data: dict[str, Any] | None = None,
        opened: Any = None,
        seed: int = 0,
        **settings: Any,
    ) -> dict[str, Any]:
        chosen = {"endpoint": endpoint.url, "timeout_seconds": 600.0, "num_parallel": 4, **settings}
        given = {"max_tokens": 2048, **(data or {}), "regenerate": chosen}
        wanted = DataSettings.model_validate(given)
        assert wanted.regenerate is not None
        return regenerate(
            source,
            wanted,
            tokenizer,
            opened or open_endpoint(wanted.regenerate, CONTEXT_TOKENS),
            identity={"target": "a"},
            seed=seed,
            journals=tmp_path / "answers",
            out=tmp_path / out,
        )

    return regenerated


def row_of(identity: str, *questions: str, **more: Any) -> dict[str, Any]:
    turns = []
    for question in questions:
        turns.append({"from": "human", "value": question})
        turns.append({"from": "gpt", "value": f"a ready-made answer to {question}"})
    return {"id": identity, "conversations": turns, **more}


def write_rows(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return str(path)


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def many(tmp_path: Path, num: int) -> str:
    rows = [row_of(f"id{index}", f"question {index}") for index in range(num)]
    return write_rows(tmp_path / "many.jsonl", rows)


def account(folder: Path) -> dict[str, Any]:
    """The accounting, which must account for every row."""
    found = json.loads((folder / "accounting.json").read_text("utf-8"))
    sums = found["num_done"] + found["num_failed"] + found["num_skipped"]
    assert found["num_inputs"] == len(found["inputs"]) == sums
    assert [each["row"] for each in found["inputs"]] == list(range(sums))
    for status in ("failed", "skipped"):
        listed = [each["reason"] for each in found["inputs"] if each["status"] == status]
        assert len(listed) == found[f"num_{status}"] == sum(found[status].values())
        assert set(listed) == set(found[status])
    return found


def test_each_turn_is_answered_after_the_targets_own_answers(
    run: Run, endpoint: FakeEndpoint, tmp_path: Path
) -> None:
    long = row_of("long", "one", "two", "three", task="talk")
    long["group"] = "all"
    long["conversations"].insert(0, {"from": "system", "value": "be brief"})
    source = write_rows(tmp_path / "rows.jsonl", [long, row_of("short", "four")])
    counts = run(source, max_new_tokens=77)
    first, second = read_rows(tmp_path / "out" / "conversations.jsonl")
    assert (first["id"], first["task"], first["group"]) == ("long", "talk", "all")
    turns = [{"from": "human", "value": "four"}, {"from": "gpt", "value": "turn 0 about four"}]
    assert second == {"id": "short", "conversations": turns}
    values = [turn["value"] for turn in first["conversations"]]
    assert values == [
        "be brief",
        *("one", "turn 0 about one"),
        *("two", "turn 1 about two"),
        *("three", "turn 2 about three"),
    ]
    last = next(each for each in endpoint.asked if each.question == "three")
    contents = [message["content"] for message in last.body["messages"]]
    assert contents == values[:-1]
    roles = [message["role"] for message in last.body["messages"]]
    assert roles == ["system", *["user", "assistant"] * 2, "user"]
    assert last.body["model"] == "tiny"
    assert (last.body["max_tokens"], last.body["temperature"]) == (77, 0.0)
    assert "seed" not in last.body
    assert (counts["num_done"], counts["num_answers"], counts["num_cut_answers"]) == (2, 4, 0)
    assert counts["answered_by"]["model"] == "tiny"


def test_who_is_held_out_stays_the_same(run: Run, endpoint: FakeEndpoint, tmp_path: Path) -> None:
    source = many(tmp_path, 40)
    given, heldout = split_conversations(load_conversations(source), 6)
    run(source)
    answered = str(tmp_path / "out" / "conversations.jsonl")
    training, same = split_conversations(load_conversations(answered), 6)
    assert (training["id"], same["id"]) == (given["id"], heldout["id"])
    assert all("turn 0 about" in messages[1]["content"] for messages in training["messages"])
    # whoever fails, nobody who was held out is trained on
    for index in (0, 3):
        endpoint.faults[heldout["messages"][index][0]["content"]] = [REFUSED]
    run(source, "other", max_new_tokens=5)
    answered = str(tmp_path / "other" / "conversations.jsonl")
    training, _ = split_conversations(load_conversations(answered), 6)
    assert not set(training["id"]) & set(heldout["id"])
    assert len(training) == 32


def test_what_passes_is_asked_again(run: Run, endpoint: FakeEndpoint, tmp_path: Path) -> None:
    faults = {
        "server error": Fault(500, b"<html>oops</html>"),
        "overloaded": OVERLOADED,
        "too many requests": Fault(429),
        "broken connection": Fault(drops=True),
        "malformed": Fault(200, b'{"choices": [{"mess'),
        "no completion": Fault(200, b'{"choices": []}'),
        "lone surrogate": Fault(200, json.dumps(completion("\ud800", "stop")).encode()),
        "broken off": Fault(200, json.dumps(completion("half an", "abort")).encode()),
    }
    endpoint.faults = {question: [fault] for question, fault in faults.items()}
    rows = [row_of(question, question) for question in faults]
    counts = run(write_rows(tmp_path / "rows.jsonl", rows), num_retries=1)
    assert counts["num_done"] == len(faults)
    assert endpoint.questions() == sorted([*faults, *faults])
    values = [
        row["conversations"][1]["value"] for row in read_rows(tmp_path / "out/conversations.jsonl")
    ]
    assert values == [f"turn 0 about {question}" for question in faults]


def test_an_answer_that_does_not_come_is_asked_for_again(
    run: Run, endpoint: FakeEndpoint, tmp_path: Path
) -> None:
    endpoint.faults = {"question 0": [Fault(hangs=True)]}
    # a busy machine may be late with the next answer too
    counts = run(many(tmp_path, 1), num_retries=100, timeout_seconds=0.5)
    assert counts["num_done"] == 1
    assert len(endpoint.asked) > 1


def test_the_wait_that_the_server_asks_for_is_honoured(
    run: Run, endpoint: FakeEndpoint, tmp_path: Path, waited: list[float]
) -> None:
    endpoint.faults = {
        "none": [OVERLOADED] * 2,
        "in seconds": [Fault(429, headers={"Retry-After": "17"})],
        "too long": [Fault(429, headers={"Retry-After": "3600"})],
    }
    rows = [row_of(question, question) for question in [*endpoint.faults, *map(str, range(8))]]
    counts = run(write_rows(tmp_path / "rows.jsonl", rows), num_parallel=1)
    assert (counts["num_done"], counts["num_failed"]) == (10, 1)
    assert list(account(tmp_path / "out")["failed"]) == ["HTTP 429 (no reason given)"]
    assert 0 < waited[0] < waited[1]
    assert waited[2:] == [17]


def test_every_row_is_accounted_for(
    run: Run,
    endpoint: FakeEndpoint,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refusing = "{% if 'secret' in messages[0].content %}{{ raise_exception('hush') }}{% endif %}"
    monkeypatch.setattr(tokenizer, "chat_template", refusing + CHATML)
    rows = [row_of(f"id{index}", f"question {index}") for index in range(40)]
    rows[2] = {"id": "strange", "conversations": [{"from": "martian", "value": "x"}]}
    rows[5] = row_of("template", "a secret")
    rows[7] = row_of("too long", "long " * 1000)
    rows[9] = {"conversations": [{"from": "human", "value": "nobody answers"}]}
    endpoint.faults = {
        "question 11": [REFUSED],
        "question 12": [OVERLOADED] * 3,
        "question 13": [Fault(200, json.dumps(completion(" \n", "stop")).encode())],
    }
    counts = run(write_rows(tmp_path / "rows.jsonl", rows), num_retries=2)
    assert (counts["num_done"], counts["num_failed"], counts["num_skipped"]) == (33, 3, 4)
    found = account(tmp_path / "out")
    reasons = {each["id"]: each["reason"] for each in found["inputs"] if "reason" in each}
    assert "hush" in reasons.pop("template")
    assert reasons == {
        "strange": "unknown role 'martian'",
        "too long": "first turn of 2048 tokens or more",
        "9": "fewer than two turns",
        "id11": "HTTP 400 (not that)",
        "id12": "HTTP 503 (overloaded) in each of 3 tries, at the last",
        "id13": "empty answer",
    }
    written = [row["id"] for row in read_rows(tmp_path / "out" / "conversations.jsonl")]
    assert written == [each["id"] for each in found["inputs"] if each["status"] == "done"]
    assert endpoint.questions().count("question 11") == 1  # a refusal is final
    assert endpoint.questions().count("question 12") == 3
    reported = capsys.readouterr().err
    assert "answered 33 of 40 conversations again" in reported
    assert re.search(
        r"the target answers: 38 of 38  failed 3  [\d.]+ answers/s  0:00:00 left", reported
    )
    assert "failed 3: HTTP 400 (not that) (1)" in reported


def test_more_than_a_tenth_failed_is_an_error_and_loses_nothing(
    run: Run, endpoint: FakeEndpoint, tmp_path: Path
) -> None:
    source = many(tmp_path, 30)
    endpoint.faults = {f"question {index}": [REFUSED] for index in (20, 21, 22)}
    counts = run(source, "a tenth", max_new_tokens=9)
    assert counts["num_failed"] == 3
    endpoint.asked.clear()
    endpoint.faults = {f"question {index}": [REFUSED] for index in (20, 21, 22, 23)}
    with pytest.raises(UserError, match=r"more than a tenth .* 4 of 30, the first: HTTP 400 \(not"):
        run(source, num_parallel=1)
    assert len(endpoint.asked) == 24  # no use in asking the others
    assert not (tmp_path / "out" / "conversations.jsonl").exists()
    endpoint.asked.clear()
    assert run(source)["num_done"] == 30
    assert endpoint.questions() == [f"question {index}" for index in range(20, 30)]
    rows = read_rows(tmp_path / "out" / "conversations.jsonl")
    assert [row["id"] for row in rows] == [f"id{index}" for index in range(30)]


class Interrupted:
    """Answers as the fake server does, and is interrupted as by Ctrl-C while it answers."""

    context_tokens = CONTEXT_TOKENS
    num_parallel = 3

    def __init__(self, after: int) -> None:
        self.identity = {"model": "here"}
        self.after, self.asked = after, 0

    async def answer(self, prompt: AskedPrompt) -> WrittenTurn:
        self.asked += 1
        if self.asked == self.after:
            signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(0.001)
        return WrittenTurn(answer_to(list(prompt.messages)), is_cut=False)


def test_an_interrupt_loses_nothing_that_was_answered(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    rows = [row_of(f"id{index}", f"a{index}", f"b{index}") for index in range(10)]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    first = Interrupted(after=12)
    with pytest.raises(KeyboardInterrupt):
        run(source, opened=nullcontext(first))
    [journal] = (tmp_path / "answers").glob("*.jsonl")
    num_kept = len(read_rows(journal))
    assert f"all answers are kept in {journal}; run again" in capsys.readouterr().err
    assert first.asked - first.num_parallel <= num_kept < first.asked
    second = Interrupted(after=-1)
    assert run(source, opened=nullcontext(second))["num_answers"] == 20
    assert num_kept + second.asked == 20
    again = Interrupted(after=-1)
    run(source, "again", opened=nullcontext(again))
    assert again.asked == 0
    files = [tmp_path / name / "conversations.jsonl" for name in ("out", "again")]
    continued, from_journal = (path.read_bytes() for path in files)
    assert continued == from_journal
    assert continued.count(b"turn 1 about b") == 10


def test_a_killed_run_loses_its_last_line_alone(
    run: Run, endpoint: FakeEndpoint, tmp_path: Path
) -> None:
    source = many(tmp_path, 6)
    run(source, num_parallel=1)
    [journal] = (tmp_path / "answers").glob("*.jsonl")
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-20])
    endpoint.asked.clear()
    assert run(source)["num_done"] == 6
    assert endpoint.questions() == ["question 5"]
    assert journal.read_bytes() == whole
    lines = whole.splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:2], b'{"conversation\n', *lines[3:]]))
    with pytest.raises(UserError, match=r"damaged journal of answers: .*\.jsonl line 3"):
        run(source)


def test_answers_are_kept_for_more_conversations_and_not_for_other_settings(
    run: Run, endpoint: FakeEndpoint, tmp_path: Path
) -> None:
    source = many(tmp_path, 8)
    assert run(source, data={"limit": 3})["num_inputs"] == 3
    assert run(source, data={"limit": 5}, num_retries=0)["num_inputs"] == 5
    assert len(endpoint.asked) == 5
    run(source, data={"limit": 5}, max_new_tokens=9)
    assert len(endpoint.asked) == 10
    endpoint.models = [{"id": "another"}]
    run(source, data={"limit": 5})
    assert len(endpoint.asked) == 15


def test_equal_questions_are_different_conversations(
    run: Run, endpoint: FakeEndpoint, tmp_path: Path
) -> None:
    rows = [row_of("a", "same"), row_of("b", "same"), row_of("a", "same")]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    run(source, temperature=0.7)
    seeds = {request.body["seed"] for request in endpoint.asked}
    assert len(seeds) == 3
    assert [row["id"] for row in read_rows(tmp_path / "out/conversations.jsonl")] == ["a", "b", "a"]
    endpoint.asked.clear()
    run(source, "other", seed=1, temperature=0.7)
    others = {request.body["seed"] for request in endpoint.asked}
    assert len(others) == 3
    assert not others & seeds


def test_turns_that_nobody_reads_or_that_do_not_fit_are_left_out(
    run: Run, endpoint: FakeEndpoint, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    rows = [row_of("a", "x" * 60, "y" * 60, "z" * 60)]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    assert run(source, data={"max_tokens": 260})["num_turns_left_out"] == 1
    [row] = read_rows(tmp_path / "out" / "conversations.jsonl")
    assert [turn["value"][0] for turn in row["conversations"]] == ["x", "t", "y", "t"]
    assert account(tmp_path / "out")["inputs"][0]["num_turns_left_out"] == 1
    with pytest.raises(UserError, match=r"no conversation was answered: .*first turn of 50 tok"):
        run(source, data={"max_tokens": 50})
    # a conversation that was shortened is continued where more of it is read
    assert run(source, data={"max_tokens": 600})["num_turns_left_out"] == 0
    assert len(endpoint.asked) == 3
    # a server may have less room than the target is declared for
    endpoint.models = [{"id": "tiny", "max_model_len": 300}]
    endpoint.asked.clear()
    assert run(source, max_new_tokens=190)["num_turns_left_out"] == 1
    sizes = []
    for request in endpoint.asked:
        prompt = tokenizer.apply_chat_template(
            request.body["messages"], add_generation_prompt=True, return_dict=True
        )
        sizes.append(len(prompt["input_ids"]) + request.body["max_tokens"])
    assert endpoint.asked[0].body["max_tokens"] == 190
    assert endpoint.asked[1].body["max_tokens"] < 190
    assert sizes[0] < sizes[1] <= 300


def test_cut_answers_are_kept_and_counted(run: Run, endpoint: FakeEndpoint, tmp_path: Path) -> None:
    for question, text in (("question 1", "half a character\ufffd"), ("question 2", "half an")):
        cut = Fault(200, json.dumps(completion(text, "length")).encode())
        endpoint.faults[question] = [cut]
    assert run(many(tmp_path, 4))["num_cut_answers"] == 2
    rows = read_rows(tmp_path / "out" / "conversations.jsonl")
    assert rows[1]["conversations"][1]["value"] == "half a character"
    found = account(tmp_path / "out")["inputs"]
    assert [each.get("num_cut_answers", 0) for each in found] == [0, 1, 1, 0]
    assert run(many(tmp_path, 4))["num_cut_answers"] == 2  # the journal knows it too


def test_requests_run_in_parallel_and_not_in_more(
    run: Run, endpoint: FakeEndpoint, tmp_path: Path
) -> None:
    endpoint.together = Barrier(8)
    run(many(tmp_path, 16), num_parallel=8)
    assert endpoint.most_at_once == 8
    endpoint.together, endpoint.most_at_once = None, 0
    run(many(tmp_path, 3), num_parallel=1, max_new_tokens=3)
    assert endpoint.most_at_once == 1


def test_the_key_is_sent_and_never_shown(
    run: Run,
    endpoint: FakeEndpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", f" {KEY}\n")
    source = many(tmp_path, 20)
    echo = Fault(400, json.dumps({"error": {"message": f"quota of {KEY}"}}).encode())
    endpoint.faults["question 4"] = [echo]
    run(source)
    assert {request.authorization for request in endpoint.asked} == {f"Bearer {KEY}"}
    assert list(account(tmp_path / "out")["failed"]) == ["HTTP 400 (quota of (the key))"]
    endpoint.always = Fault(401, echo.body)
    endpoint.asked.clear()
    with pytest.raises(UserError, match=r"refuses every request: .*401.*OPENAI_API_KEY") as caught:
        run(source, "again")
    assert KEY not in str(caught.value)
    assert KEY not in "".join(capsys.readouterr())
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or KEY not in path.read_text("utf-8")
    # a key that is revoked on the way stops the run at once
    endpoint.always, endpoint.faults["question 7"] = None, [Fault(403)]
    with pytest.raises(UserError, match=r"refuses every request: POST .*HTTP 403"):
        run(source, "again", num_parallel=1, max_new_tokens=3)
    assert len(endpoint.asked) == 8
    monkeypatch.setenv("OPENAI_API_KEY", "two words")
    with pytest.raises(UserError, match="unusable key: OPENAI_API_KEY") as caught:
        run(source, "again")
    assert "two words" not in str(caught.value)


def test_a_server_that_does_not_answer_is_reported_in_one_line(run: Run, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"endpoint does not answer: .*9/v1"):
        run(many(tmp_path, 2), endpoint="http://127.0.0.1:9/v1", num_retries=1)


def test_the_model_is_named_where_there_are_several(
    run: Run, endpoint: FakeEndpoint, tmp_path: Path
) -> None:
    source = many(tmp_path, 2)
    endpoint.models = [{"id": "tiny"}, {"id": "other"}]
    with pytest.raises(UserError, match=r"serves 2 models \(other, tiny\); set .*model"):
        run(source)
    run(source, model="other")
    assert {request.body["model"] for request in endpoint.asked} == {"other"}
    with pytest.raises(UserError, match=r"refuses every request: GET .*HTTP 404.*up to /v1"):
        run(source, endpoint=endpoint.url.removesuffix("/v1"))


def test_a_full_disk_is_reported_and_the_journal_stays_readable(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    with AnswerJournal(tmp_path, {"a": 1}) as journal:
        journal.add("x", 0, WrittenTurn("kept", is_cut=True))
        path = journal.path
    with AnswerJournal(tmp_path, {"a": 1}) as journal:
        assert journal.get("x", 0) == WrittenTurn("kept", is_cut=True)
        with full.open("ab", buffering=0) as nowhere:
            kept, journal._file = journal._file, nowhere
            with pytest.raises(UserError, match="disk full"):
                journal.add("y", 0, WrittenTurn("lost", is_cut=False))
            journal._file = kept
        assert journal.get("y", 0) is None
    assert len(read_rows(path)) == 1
