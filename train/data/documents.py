"""Places in rows that hold several conversations, one behind another."""

import torch
from torch import Tensor


def positions_in_documents(document_ids: Tensor) -> Tensor:
    """The place of each token in its own conversation, int64 [B, T].

    Args:
        document_ids: int64 [B, T], 0, 1, 2, .. by conversation in the row, -1 where it is padding.
    """
    places = torch.arange(document_ids.shape[1], device=document_ids.device)
    is_first = torch.ones_like(document_ids, dtype=torch.bool)
    is_first[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return places - torch.where(is_first, places, 0).cummax(dim=1).values
