"""Documents packed into rows: whole, in an order of its own each epoch."""

from polybasic.train.data.documents import document_batches, pack_documents


def test_packing_keeps_every_document_whole() -> None:
    documents = [[index] * (1 + 7 * index % 30) for index in range(100)]
    rows = pack_documents(documents, 32)
    assert sorted(document for row in rows for document in row) == sorted(documents)
    assert all(sum(map(len, row)) <= 32 for row in rows)
    assert sum(map(len, documents)) > 0.9 * 32 * len(rows)


def test_epochs_have_orders_of_their_own() -> None:
    documents = [[index] * 64 for index in range(8)]
    batches = document_batches(documents, row_tokens=64, num_rows=4, seed=0)
    first, second = (
        [row[0][0] for rows in (next(batches), next(batches)) for row in rows] for _ in range(2)
    )
    assert sorted(first) == sorted(second) == list(range(8))
    assert first != second
