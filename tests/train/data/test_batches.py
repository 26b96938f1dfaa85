"""Batches: what is left out, whose tokens they hold, and how conversations share rows."""

from collections import Counter

import pytest
import torch
from datasets import Dataset

from polybasic.chain.base.errors import UserError
from polybasic.train.data.batches import WINDOW_BATCHES, Batch, BatchStream, Drawn, collate_rows
from polybasic.train.data.chat import EncodedConversation, RefusedConversation, encode_conversation
from polybasic.train.data.packing import PackedWindows
from tests.checkpoints import byte_level_tokenizer

PICKY = (
    "{% for message in messages %}"
    "{% if 'FORBIDDEN' in message.content %}{{ raise_exception('not this one') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


FORBIDDEN_LETTER = byte_level_tokenizer().convert_tokens_to_ids("F")
"""Only refused conversations have it."""

MAX_TOKENS = 96
NUM_CONVERSATIONS = 23


def picky_tokenizer():
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = PICKY
    return tokenizer


def as_dataset(conversations):
    messages = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question, answer in conversations
    ]
    ids = [f"conversation {number}" for number in range(len(messages))]
    return Dataset.from_dict({"id": ids, "messages": messages})


def stream(*questions: str) -> BatchStream:
    dataset = as_dataset([(question, "yes") for question in questions])
    return BatchStream(dataset, picky_tokenizer(), 2, 64, seed=0)


def counting(pack: bool, seed: int = 0, batch_size: int = 2) -> BatchStream:
    """One of its conversations is cut, one refused, and of two no answer is left behind the cut."""
    conversations = [(f"{n} " * (1 + n % 7), f"{n} " * (1 + n % 5)) for n in range(19)]
    conversations += [("FORBIDDEN", "yes"), ("a" * 70, "a" * 40), ("b" * 99, "no"), ("c" * 99, "")]
    assert len(conversations) == NUM_CONVERSATIONS
    dataset = as_dataset(conversations)
    return BatchStream(dataset, picky_tokenizer(), batch_size, MAX_TOKENS, seed, pack)


USABLE = {f"conversation {number}" for number in [*range(19), 20]}


def documents(batch: Batch):
    """Ids with the tokens and the marks of the assistant's of all conversations of a batch."""
    for row, (ids, lengths) in enumerate(zip(batch.conversation_ids, batch.lengths, strict=True)):
        end = 0
        for conversation_id, length in zip(ids, lengths, strict=True):
            start, end = end, end + length
            token_ids = batch.token_ids[row, start:end].tolist()
            yield conversation_id, token_ids, batch.is_assistant[row, start:end].tolist()
        assert not batch.token_ids[row, end:].any()
        assert not batch.is_assistant[row, end:].any()


def test_a_refused_conversation_is_left_out_and_told_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    batches = stream("is it so?", "FORBIDDEN?", "why?")
    for step in range(24):
        batch = batches.batch(step)
        assert batch.is_assistant.any(dim=1).all()
        forbidden = batch.token_ids[batch.token_ids == FORBIDDEN_LETTER]
        assert not len(forbidden)
    reported = capsys.readouterr().err
    assert reported.count("conversations that the chat template refuses are left out") == 1
    assert "not this one" in reported


@pytest.mark.parametrize("pack", [False, True])
def test_a_template_that_refuses_all_stops_the_run(pack: bool) -> None:
    refused = as_dataset([("FORBIDDEN", "yes"), ("also FORBIDDEN", "yes")])
    batches = BatchStream(refused, picky_tokenizer(), 2, 64, 0, pack)
    with pytest.raises(RefusedConversation, match="not this one"):
        batches.batch(0)
    with pytest.raises(RefusedConversation, match="not this one"):
        list(batches.conversations(1))


@pytest.mark.parametrize("pack", [False, True])
def test_conversations_without_an_answer_stop_the_run(pack: bool) -> None:
    batches = BatchStream(as_dataset([("why? " * 9, "so")]), picky_tokenizer(), 2, 32, 0, pack)
    with pytest.raises(UserError, match="no assistant tokens to train on"):
        batches.batch(0)


@pytest.mark.parametrize("pack", [False, True])
def test_each_conversation_of_a_batch_is_whole_and_named(pack: bool) -> None:
    batches = counting(pack)
    tokenizer, dataset = picky_tokenizer(), batches._conversations
    for step in range(2 * WINDOW_BATCHES):
        batch = batches.batch(step)
        found = list(documents(batch))
        assert sum(len(token_ids) for _, token_ids, _ in found) == batch.num_tokens
        for conversation_id, token_ids, is_assistant in found:
            messages = dataset[dataset["id"].index(conversation_id)]["messages"]
            expected = encode_conversation(tokenizer, messages, MAX_TOKENS)
            assert token_ids == expected.input_ids
            assert is_assistant == expected.is_assistant
            assert not any(is_assistant[:2]), "a user's turn comes first"
        if not pack:
            assert batch.document_ids is None
            assert all(len(ids) == 1 for ids in batch.conversation_ids)


def test_batches_of_like_lengths_come_in_an_order_of_their_own() -> None:
    batches = counting(pack=False)
    lengths = [batches.batch(step).lengths for step in range(WINDOW_BATCHES)]
    longest = [max(length for row in batch for length in row) for batch in lengths]
    assert longest != sorted(longest)
    spread = [max(batch)[0] - min(batch)[0] for batch in lengths]
    assert sum(spread) < sum(longest) / 4


def test_packed_rows_are_full_and_tell_documents_apart() -> None:
    batches = counting(pack=True)
    num_shared = 0
    for step in range(2 * WINDOW_BATCHES):
        batch = batches.batch(step)
        assert len(batch.token_ids) == 2, "batch_size counts rows"
        assert batch.token_ids.shape[1] <= MAX_TOKENS
        assert batch.document_ids is not None
        for row, lengths in enumerate(batch.lengths):
            expected = [number for number, length in enumerate(lengths) for _ in range(length)]
            expected += [-1] * (batch.token_ids.shape[1] - len(expected))
            assert batch.document_ids[row].tolist() == expected
            num_shared += len(lengths) > 1
    assert num_shared > WINDOW_BATCHES


def test_packed_labels_are_those_of_the_conversations_alone() -> None:
    """Even where the assistant's tokens come first; rows of the head predict from token 2 on."""
    first, second = (
        Drawn(name, EncodedConversation([5] * length, [True] * length))
        for name, length in (("first", 4), ("second", 5))
    )
    batch = collate_rows([[first, second], [second]], is_packed=True)
    labels = [[0, 0, 1, 1, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 0, 0, 0, 0]]
    assert batch.is_assistant.int().tolist() == labels
    assert collate_rows([[first]]).is_assistant.all()


@pytest.mark.parametrize("pack", [False, True])
def test_batches_are_a_function_of_seed_and_step(pack: bool) -> None:
    forward, jumping = counting(pack), counting(pack)
    batches = [forward.batch(step) for step in range(40)]
    for step in (37, 3, 21):
        found = jumping.batch(step)
        assert torch.equal(found.token_ids, batches[step].token_ids)
        assert found.conversation_ids == batches[step].conversation_ids
    other = [counting(pack, seed=1).batch(step).conversation_ids for step in range(3)]
    assert other != [batch.conversation_ids for batch in batches[:3]]


@pytest.mark.parametrize("pack", [False, True])
def test_a_stream_has_each_conversation_once_an_epoch(pack: bool) -> None:
    batches = counting(pack)
    counts: Counter[str] = Counter()
    for step in range(10 * WINDOW_BATCHES):
        counts.update(each for each, *_ in documents(batches.batch(step)))
    assert set(counts) == USABLE
    assert max(counts.values()) - min(counts.values()) <= 1
    assert min(counts.values()) > 5


def test_first_fit_by_hand() -> None:
    lengths = [5, 4, 0, 3, 6, 2, 9, 9, 1, 10, 10]
    windows = PackedWindows(lengths.__getitem__, num_rows=2, row_tokens=10, patience=99)
    # position 2 is passed over; 5 and 6 find no room where the windows before them end
    assert windows.window(0) == [[0, 1], [3, 4]]
    assert windows.window(1) == [[5], [6]]
    assert windows.window(2) == [[7, 8], [9]]
    again = PackedWindows(lengths.__getitem__, num_rows=2, row_tokens=10, patience=99)
    assert again.start(99, enough=6) == 7
    assert (again.window(1), again.start(3)) == ([[5], [6]], 10)


def test_stream_of_conversations_that_are_passed_over_has_no_window() -> None:
    assert PackedWindows(lambda _: 0, num_rows=2, row_tokens=10, patience=4).window(0) == []


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("num_steps", [1, 8, 9, 50])
def test_conversations_of_a_run_are_those_that_its_windows_draw(pack: bool, num_steps: int) -> None:
    batches = counting(pack, batch_size=1)
    entered = -(-num_steps // WINDOW_BATCHES) * WINDOW_BATCHES
    drawn = {
        tuple(token_ids)
        for step in range(entered)
        for _, token_ids, _ in documents(batches.batch(step))
    }
    listed = [
        tuple(each.input_ids) for each in counting(pack, batch_size=1).conversations(num_steps)
    ]
    assert len(listed) == len(set(listed))
    assert set(listed) == drawn
    longer = [tuple(each.input_ids) for each in batches.conversations(num_steps + 20)]
    assert longer[: len(listed)] == listed
    if num_steps == 1:
        assert len(listed) < len(USABLE)
    if num_steps == 50:
        assert len(listed) == len(USABLE)


def test_shares_of_packed_rows_keep_what_belongs_to_them() -> None:
    batch = counting(pack=True, batch_size=3).batch(0)
    assert batch.document_ids is not None
    for index in range(2):
        share = batch.share(index, 2)
        assert share.document_ids is not None
        assert torch.equal(share.document_ids, batch.document_ids[index::2])
        assert share.conversation_ids == batch.conversation_ids[index::2]
        assert share.lengths == batch.lengths[index::2]
    nothing = batch.share(3, 4)
    assert not nothing.is_assistant.any()
    assert nothing.document_ids is not None
    assert torch.equal(nothing.document_ids, batch.document_ids[:1])
    assert nothing.lengths == batch.lengths[:1]
