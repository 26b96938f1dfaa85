import gzip
import json
import tracemalloc
from pathlib import Path

import pytest
import zstandard
from datasets import Dataset
from huggingface_hub.errors import LocalEntryNotFoundError
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from polybasic.chain.base.errors import UserError
from polybasic.train.data.conversation_sources import HubData, parse_source
from polybasic.train.data.conversations import (
    data_digest,
    fit_to_template,
    load_conversations,
    split_conversations,
)
from polybasic.train.settings import SHIPPED


def turns(*senders_and_values):
    return [{"from": sender, "value": value} for sender, value in senders_and_values]


GOOD = [
    {"id": "a", "task": "qa", "conversations": turns(("human", "Why?"), ("gpt", "Because."))},
    {
        "id": 7,
        "license": {"name": "MIT"},
        "conversations": turns(("system", "Be kind."), ("user", "Hello"), ("assistant", "Hi")),
    },
]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return str(path)


def test_rows_take_one_shape_whatever_else_they_carry(tmp_path):
    source = write_lines(tmp_path / "mixed.jsonl", [*GOOD, {**GOOD[0], "id": None, "license": 3}])
    dataset = load_conversations(source)
    assert dataset.column_names == ["id", "task", "group", "messages"]
    assert dataset["id"][:] == ["a", "7", "2"]
    assert dataset["task"][:] == ["qa", None, "qa"]
    assert dataset[1]["messages"] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
    ]


def test_messages_as_openai_writes_them_are_the_same_rows(tmp_path):
    rows = [
        {
            **{key: value for key, value in row.items() if key != "conversations"},
            "messages": [
                {"role": turn["from"].replace("system", role), "content": turn["value"]}
                for turn in row["conversations"]
            ],
        }
        for row, role in zip(GOOD, ("system", "developer"), strict=True)
    ]
    expected = load_conversations(write_lines(tmp_path / "a.jsonl", GOOD)).to_list()
    assert load_conversations(write_lines(tmp_path / "b.jsonl", rows)).to_list() == expected


def test_list_lines_gzip_and_zstd_hold_the_same(tmp_path):
    lines = "".join(json.dumps(row) + "\n" for row in GOOD).encode()
    listed = json.dumps(GOOD, indent=1).encode()
    files = {
        "a.json": listed,
        "a.jsonl": lines,
        "a.json.gz": gzip.compress(listed, mtime=0),
        "a.jsonl.gz": gzip.compress(lines, mtime=0),
        "a.json.zst": zstandard.compress(listed),
        "a.jsonl.zst": zstandard.compress(lines),
    }
    expected = load_conversations(write_lines(tmp_path / "expected.jsonl", GOOD)).to_list()
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        assert load_conversations(str(tmp_path / name)).to_list() == expected, name


def test_ends_are_trimmed_and_unusable_rows_are_counted(tmp_path, capsys):
    rows = [
        {"conversations": turns(("gpt", "late"), ("human", "q"), ("gpt", "a"), ("human", "?"))},
        {"conversations": turns(("human", "alone"))},
        {"conversations": turns(("human", "q"), ("human", "q"), ("gpt", "a"), ("gpt", "a"))},
        {"conversations": turns(("human", "q"), ("tool", "x"), ("gpt", "a"))},
        {"conversations": turns(("human", "q"), ("gpt", " "))},
        {"conversations": turns(("human", "q"), ("gpt", None))},
        {"conversations": turns(("human", "q"), ("system", "s"), ("gpt", "a"))},
        {"conversations": []},
    ]
    dataset = load_conversations(write_lines(tmp_path / "real.jsonl", rows))
    assert [each["content"] for each in dataset[0]["messages"]] == ["q", "a"]
    assert capsys.readouterr().err == (
        "kept 1 of 8 conversations; skipped 7: fewer than two turns (2), "
        "roles do not alternate (2), unknown role 'tool' (1), empty turn (1), "
        "turn without 'from' and 'value' text, or 'role' and 'content' (1)\n"
    )


def test_limit_counts_usable_rows(tmp_path):
    rows = [{"conversations": []}, *GOOD, *GOOD]
    assert len(load_conversations(write_lines(tmp_path / "a.jsonl", rows), limit=3)) == 3


CUT_GZIP = gzip.compress(b'{"conversations": []}\n', mtime=0)[:-9]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            b'{"conversations": []}\n{"x": \n',
            r"not JSON: \S+a.jsonl line 2 ",
        ),
        ("a.json", b'[\n{"conversations": []},\n\n{"x" 1}]', r"not JSON: \S+a.json line 4 "),
        ("a.json", b'[\n{"conversations": []}\n{"a": 1}]', r"not JSON: \S+a.json line 3 "),
        ("a.json", b'[{"conversations": []}', r"not JSON: \S+a.json line 1 "),
        ("a.jsonl", b'\n{"text": "x"}\n', r"row without a list 'conversations' or .* line 2"),
        ("a.json", b'[\n\n{"conversations": {}}]', r"or 'messages': \S+a.json line 3"),
        (
            "a.jsonl",
            b'{"conversations": [{"from": "human", "value": "q"}, {"from": "gpt"}]}',
            r"no usable conversation: \S+ \(1 rows: turn without 'from' and 'value' text, .*",
        ),
        ("a.jsonl", b'{"conversations": ["hello"]}', r"no usable .*turn without 'from' and"),
        ("a.jsonl", b"", "empty conversation file"),
        ("a.jsonl.zst", b"", "empty conversation file"),
        ("a.jsonl", b"\n \n", "empty conversation file"),
        ("a.json", b"[]", r"no usable conversation: \S+ \(0 rows\)"),
        ("a.jsonl", b'{"conversations": []}', r"no usable .*1 rows: fewer than two turns \(1\)"),
        ("a.jsonl.gz", CUT_GZIP, "corrupt compressed file"),
        ("a.jsonl.gz", b"not gzip at all", "corrupt compressed file"),
        ("a.jsonl.zst", zstandard.compress(b"x" * 99)[:-3] + b"abc", "corrupt compressed file"),
        ("a.jsonl", b'{"a": "\xff"}', "not UTF-8"),
        ("a.parquet", b"PAR1", "not a conversation file"),
    ],
)
def test_malformed_input_is_one_line_with_file_and_line(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        load_conversations(str(path))
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def many_lines() -> bytes:
    return b"".join(json.dumps({**GOOD[0], "id": n}).encode() + b"\n" for n in range(1000))


def cut_after_a_block() -> bytes:
    """400 of 1,000 rows in whole blocks of zstd, without the frame's end."""
    packer, lines = zstandard.ZstdCompressor().compressobj(), many_lines().splitlines(True)
    packed = packer.compress(b"".join(lines[:400])) + packer.flush(
        zstandard.COMPRESSOBJ_FLUSH_BLOCK
    )
    assert zstandard.ZstdDecompressor().decompressobj().decompress(packed) == b"".join(lines[:400])
    return packed


TRUNCATED = {
    "zst-block": ("a.jsonl.zst", cut_after_a_block()),
    "zst-byte": ("a.jsonl.zst", zstandard.compress(many_lines())[:-1]),
    "zst-second-frame": (
        "a.jsonl.zst",
        zstandard.compress(many_lines()) + zstandard.compress(many_lines())[:40],
    ),
    "gz-half": ("a.jsonl.gz", gzip.compress(many_lines())[:1000]),
    "gz-trailer": ("a.jsonl.gz", gzip.compress(many_lines())[:-1]),
}


@pytest.mark.parametrize(("name", "content"), TRUNCATED.values(), ids=TRUNCATED)
def test_a_truncated_archive_loses_nothing_in_silence(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=r"corrupt compressed file: \S+ \(Truncated compressed"):
        load_conversations(str(tmp_path / name))


def test_frames_behind_each_other_are_one_file(tmp_path):
    for name, pack in (("a.jsonl.zst", zstandard.compress), ("a.jsonl.gz", gzip.compress)):
        (tmp_path / name).write_bytes(pack(many_lines()) + pack(many_lines()))
        assert len(load_conversations(str(tmp_path / name))) == 2000


@pytest.mark.parametrize("pack", [zstandard.compress, gzip.compress], ids=["zst", "gz"])
@pytest.mark.parametrize("start", [b"", b"["], ids=["lines", "list"])
def test_what_expands_too_far_is_refused_before_it_fills_the_memory(
    tmp_path, monkeypatch, pack, start
):
    monkeypatch.setattr("polybasic.train.data.conversation_files._ALWAYS_EXPANDED", 1 << 20)
    path = tmp_path / ("a.jsonl.zst" if pack is zstandard.compress else "a.jsonl.gz")
    path.write_bytes(pack(start + many_lines() + b" " * (1 << 25)))
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=r"expands too far: \S+ \(more than 200 times"):
            load_conversations(str(path))
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


def test_lines_and_lists_have_a_longest_size(tmp_path, monkeypatch):
    path = Path(write_lines(tmp_path / "a.jsonl", GOOD))
    longest = max(len(line) for line in path.read_text().splitlines(keepends=True))
    name = "polybasic.train.data.conversation_files"
    monkeypatch.setattr(f"{name}._LINE_CHARACTERS", longest)
    assert len(load_conversations(str(path))) == len(GOOD)
    monkeypatch.setattr(f"{name}._LINE_CHARACTERS", longest - 1)
    with pytest.raises(UserError, match=r"line too long: \S+ line 2 \(more than"):
        load_conversations(str(path))
    listed = tmp_path / "a.json"
    listed.write_text(json.dumps(GOOD))
    assert len(load_conversations(str(listed))) == len(GOOD), "a list may be one long line"
    monkeypatch.setattr(f"{name}._LIST_CHARACTERS", len(listed.read_text()) - 1)
    with pytest.raises(UserError, match="JSON list too long"):
        load_conversations(str(listed))


def test_missing_file_and_nonsense_names(tmp_path):
    with pytest.raises(UserError, match="conversation file not found"):
        load_conversations(str(tmp_path / "none.jsonl"))
    with pytest.raises(UserError, match="conversations not found"):
        load_conversations("no such thing")
    with pytest.raises(UserError, match="cannot load the hub dataset: nobody/nothing@main"):
        load_conversations("nobody/nothing@main")


def test_hub_rows_are_read_like_file_rows(monkeypatch):
    asked = {}

    def load(name, revision, split):
        asked.update(name=name, revision=revision, split=split)
        return Dataset.from_list([{"conversations": GOOD[0]["conversations"], "extra": 1}])

    monkeypatch.setattr("polybasic.train.data.conversations.load_dataset", load)
    dataset = load_conversations("org/chats@v1.2")
    assert asked == {"name": "org/chats", "revision": "v1.2", "split": "train"}
    assert dataset[0]["messages"][1] == {"role": "assistant", "content": "Because."}


@pytest.mark.parametrize("sender", ["gpt", "chatgpt", "bing", "bard", "Assistant"])
def test_whoever_answers_is_the_assistant(tmp_path, sender):
    rows = [{"conversations": turns(("user", "q"), (sender, "a"))}]
    dataset = load_conversations(write_lines(tmp_path / "a.jsonl", rows))
    assert [message["role"] for message in dataset[0]["messages"]] == ["user", "assistant"]


def test_one_file_of_a_hub_dataset_is_fetched_and_read(tmp_path, monkeypatch):
    asked = []

    def fetch(repository, path, **options):
        asked.append((repository, path, options))
        if path != "v1/split.json":
            raise LocalEntryNotFoundError("offline\nmore")
        return write_lines(tmp_path / "cached.jsonl", GOOD)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    source = "org/chats@main:v1/split.json"
    assert len(load_conversations(source)) == 2
    assert asked == [
        ("org/chats", "v1/split.json", {"repo_type": "dataset", "revision": "main"}),
    ]
    # the bytes name the data, wherever they came from
    assert data_digest(source) == data_digest(str(tmp_path / "cached.jsonl"))
    with pytest.raises(UserError, match=r"cannot load the hub dataset: org/chats:v2/a.jsonl \(Loc"):
        load_conversations("org/chats:v2/a.jsonl")
    with pytest.raises(UserError, match=r"not a conversation file: data\.parquet of"):
        load_conversations("org/chats:data.parquet")


def test_sources_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    odd = Path("org") / "chats:split.json"
    write_lines(odd, GOOD)
    assert parse_source(str(odd)) == odd
    assert parse_source("org/chats:other.json") == HubData("org/chats", None, "other.json")
    assert parse_source("org/chats@v1") == HubData("org/chats", "v1", None)
    assert parse_source("org/chats.json") == Path("org/chats.json")


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
REFUSING = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE


@pytest.mark.parametrize(("template", "num_left"), [(TEMPLATE, 1), (REFUSING, 0)])
def test_system_turns_go_where_the_template_refuses_them(tmp_path, capsys, template, num_left):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0})))
    tokenizer.chat_template = template
    dataset = load_conversations(write_lines(tmp_path / "a.jsonl", GOOD))
    fitted = fit_to_template(dataset, tokenizer)
    roles = [message["role"] for row in fitted for message in row["messages"]]
    assert roles.count("system") == num_left
    assert [role for role in roles if role != "system"] == ["user", "assistant"] * 2
    reported = "takes no system turns: dropped those of 1 of 2 conversations"
    assert (reported in capsys.readouterr().err) == (num_left == 0)
    # what splits them is the first user turn, with or without a system turn before it
    assert split_conversations(fitted, 1)[1]["id"][:] == split_conversations(dataset, 1)[1]["id"][:]


def conversation(first, answer):
    return {"conversations": turns(("human", first), ("gpt", answer))}


def test_split_keeps_equal_first_turns_together_and_ignores_order(tmp_path):
    rows = [conversation(f"q{index // 3}", f"a{index}") for index in range(60)]
    forward = load_conversations(write_lines(tmp_path / "forward.jsonl", rows))
    backward = load_conversations(write_lines(tmp_path / "backward.jsonl", rows[::-1]))

    def answers(part):
        return {row["messages"][1]["content"] for row in part}

    def firsts(part):
        return {row["messages"][0]["content"] for row in part}

    train, heldout = split_conversations(forward, 10)
    assert len(heldout) == 12
    assert len(train) == 48
    assert not firsts(train) & firsts(heldout)
    assert answers(split_conversations(backward, 10)[1]) == answers(heldout)
    assert answers(split_conversations(forward, 20)[1]) > answers(heldout)


def test_split_keeps_groups_together(tmp_path):
    rows = [{**conversation(f"q{index}", "a"), "group": f"g{index % 5}"} for index in range(30)]
    dataset = load_conversations(write_lines(tmp_path / "rows.jsonl", rows))
    train, heldout = split_conversations(dataset, 7)
    assert (len(train), len(heldout)) == (18, 12)
    assert not set(train["group"]) & set(heldout["group"])
    plain = load_conversations(
        write_lines(
            tmp_path / "plain.jsonl", [conversation(f"g{index}", "a") for index in range(5)]
        )
    )
    firsts = [row["messages"][0]["content"] for row in split_conversations(plain, 2)[1]]
    assert set(firsts) == set(heldout["group"]), "a group stands for its first turns"


def test_shipped_conversations_are_of_all_tasks_and_split_by_topic():
    dataset = load_conversations(SHIPPED)
    assert len(dataset) == len(set(dataset["id"])) == 955
    assert len(set(dataset["task"])) == 8
    assert all(dataset["group"])
    train, heldout = split_conversations(dataset, 120)
    assert 120 <= len(heldout) < 140
    assert set(heldout["task"]) == set(train["task"])
    path = parse_source(SHIPPED)
    assert isinstance(path, Path)
    assert path.stat().st_size < 400_000


def test_split_refuses_to_leave_nothing(tmp_path):
    same = load_conversations(
        write_lines(tmp_path / "same.jsonl", [conversation("q", f"a{i}") for i in range(9)])
    )
    with pytest.raises(UserError, match=r"too few .* 9 conversations of 1 groups"):
        split_conversations(same, 1)
    few = load_conversations(
        write_lines(tmp_path / "few.jsonl", [conversation(f"q{i}", "a") for i in range(3)])
    )
    with pytest.raises(UserError, match=r"data\.num_heldout = 4"):
        split_conversations(few, 4)
    assert len(split_conversations(few, 2)[0]) == 1


def test_digest_is_of_the_bytes_or_of_the_commit(tmp_path):
    first = write_lines(tmp_path / "a.jsonl", GOOD)
    second = write_lines(tmp_path / "b.jsonl", GOOD)
    assert data_digest(first) == data_digest(second)
    assert data_digest(first) != data_digest(write_lines(tmp_path / "c.jsonl", GOOD[:1]))
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert data_digest(f"org/chats@{commit}") != data_digest(f"org/chats@{commit[::-1]}")
    with pytest.raises(UserError, match="conversation file not found"):
        data_digest(str(tmp_path / "none.jsonl"))
