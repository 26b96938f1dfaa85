"""Conversations packed into rows of equal length, batch by batch: what a model is trained on.

Shapes: R = rows of a batch, L = tokens of a row.
"""

import itertools
from collections.abc import Iterator
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from polybasic.train.data.chat import EncodedConversation

_NUM_OPEN_ROWS = 16

Document = EncodedConversation
"""One conversation, or a piece of a long one."""


class PackedRows(NamedTuple):
    """Rows of a batch, each [R, L].

    Attributes:
        token_ids: 0 in the padding.
        document_ids: which document of its row a token belongs to, from 1 on; 0 marks padding.
        is_assistant: whether it is the assistant's.
    """

    token_ids: Tensor
    document_ids: Tensor
    is_assistant: Tensor


def split_document(document: Document, row_tokens: int) -> list[Document]:
    """Pieces that fit into a row."""
    starts = range(0, len(document.input_ids), row_tokens)
    parts = [slice(start, start + row_tokens) for start in starts]
    return [Document(document.input_ids[part], document.is_assistant[part]) for part in parts]


def pack_documents(documents: list[Document], row_tokens: int) -> list[list[Document]]:
    """Place each document whole in the fullest of a few open rows in which it fits.

    Returns:
        Rows of documents; the lengths of a row sum to at most `row_tokens`.
    """
    closed: list[list[Document]] = []
    open_rows: list[tuple[int, list[Document]]] = []  # (free tokens, documents)
    for document in documents:
        num_tokens = len(document.input_ids)
        open_rows.sort(key=lambda row: row[0])
        fitting = (i for i, (free, _) in enumerate(open_rows) if free >= num_tokens)
        index = next(fitting, None)
        if index is None:
            if len(open_rows) == _NUM_OPEN_ROWS:
                closed.append(open_rows.pop(0)[1])
            open_rows.append((row_tokens - num_tokens, [document]))
        else:
            free, row = open_rows[index]
            open_rows[index] = (free - num_tokens, [*row, document])
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


def document_tensors(rows: list[list[Document]], row_tokens: int) -> PackedRows:
    """A batch as tensors; rows are padded on the right."""
    token_ids, document_ids = torch.zeros(2, len(rows), row_tokens, dtype=torch.long)
    is_assistant = torch.zeros(token_ids.shape, dtype=torch.bool)
    for index, row in enumerate(rows):
        end = 0
        for number, document in enumerate(row, 1):
            start, end = end, end + len(document.input_ids)
            token_ids[index, start:end] = torch.tensor(document.input_ids)
            is_assistant[index, start:end] = torch.tensor(document.is_assistant)
            document_ids[index, start:end] = number
    return PackedRows(token_ids, document_ids, is_assistant)
