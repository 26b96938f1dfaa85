"""Documents packed into rows of equal length, batch by batch: what models are trained on here.

Shapes: R = rows of a batch, L = tokens of a row.
"""

import itertools
from collections.abc import Iterator
from random import Random

import torch
from torch import Tensor

_NUM_OPEN_ROWS = 16

Document = list[int]
"""Token ids of one conversation, or of a piece of a long one."""


def pack_documents(documents: list[Document], row_tokens: int) -> list[list[Document]]:
    """Place each document whole in the fullest of a few open rows in which it fits.

    Returns:
        Rows of documents; the lengths of a row sum to at most `row_tokens`.
    """
    closed: list[list[Document]] = []
    open_rows: list[tuple[int, list[Document]]] = []  # (free tokens, documents)
    for document in documents:
        open_rows.sort(key=lambda row: row[0])
        fitting = (i for i, (free, _) in enumerate(open_rows) if free >= len(document))
        index = next(fitting, None)
        if index is None:
            if len(open_rows) == _NUM_OPEN_ROWS:
                closed.append(open_rows.pop(0)[1])
            open_rows.append((row_tokens - len(document), [document]))
        else:
            free, row = open_rows[index]
            open_rows[index] = (free - len(document), [*row, document])
    return closed + [row for _, row in open_rows]


def document_batches(
    documents: list[Document], row_tokens: int, num_rows: int, seed: int
) -> Iterator[list[list[Document]]]:
    """Batches of `num_rows` rows without end: epoch after epoch, each in an order of its own."""
    rows: list[list[Document]] = []
    for epoch in itertools.count():
        order = list(documents)
        Random(f"{seed} {epoch}").shuffle(order)
        rows += pack_documents(order, row_tokens)
        for start in range(0, len(rows) - num_rows + 1, num_rows):
            yield rows[start : start + num_rows]
        rows = rows[len(rows) // num_rows * num_rows :]


def document_tensors(rows: list[list[Document]], row_tokens: int) -> tuple[Tensor, Tensor]:
    """Token ids and, beside each, the number of its document in the row; 0 marks padding."""
    input_ids_RL = torch.zeros(len(rows), row_tokens, dtype=torch.long)
    document_RL = torch.zeros_like(input_ids_RL)
    for index, row in enumerate(rows):
        end = 0
        for number, document in enumerate(row, 1):
            start, end = end, end + len(document)
            input_ids_RL[index, start:end] = torch.tensor(document)
            document_RL[index, start:end] = number
    return input_ids_RL, document_RL
