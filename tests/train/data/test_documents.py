"""Documents packed into rows: whole, and in an order of its own each epoch."""

from polybasic.train.data.documents import (
    Document,
    document_batches,
    document_tensors,
    pack_documents,
    split_document,
)


def document(number: int, length: int) -> Document:
    return Document([number] * length, [False] * (length - 1) + [True])


def test_packing_keeps_every_document_whole() -> None:
    documents = [document(index, 1 + 7 * index % 30) for index in range(100)]
    rows = pack_documents(documents, 32)
    assert sorted(each for row in rows for each in row) == sorted(documents)
    assert all(sum(len(each.input_ids) for each in row) <= 32 for row in rows)
    assert sum(len(each.input_ids) for each in documents) > 0.9 * 32 * len(rows)


def test_epochs_have_orders_of_their_own() -> None:
    documents = [document(index, 64) for index in range(8)]
    batches = document_batches(documents, row_tokens=64, num_rows=4, seed=0)
    first, second = (
        [row[0].input_ids[0] for rows in (next(batches), next(batches)) for row in rows]
        for _ in range(2)
    )
    assert sorted(first) == sorted(second) == list(range(8))
    assert first != second


def test_tensors_say_whose_tokens_they_are() -> None:
    batch = document_tensors([[document(5, 2), document(6, 1)], [document(7, 4)]], 4)
    assert batch.token_ids.tolist() == [[5, 5, 6, 0], [7, 7, 7, 7]]
    assert batch.document_ids.tolist() == [[1, 1, 2, 0], [1, 1, 1, 1]]
    assert batch.is_assistant.tolist() == [[False, True, True, False], [False] * 3 + [True]]


def test_what_is_longer_than_a_row_is_split() -> None:
    assert split_document(document(3, 5), 2) == [
        Document([3, 3], [False, False]),
        Document([3, 3], [False, False]),
        Document([3], [True]),
    ]
