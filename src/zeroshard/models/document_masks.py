"""Document masks: attention stays inside a document when one sequence contains several documents.

The id ``eos_id`` separates documents. It counts as the first token of the document that follows it: a position attends
to that id and to the tokens after it. The id's target is the first token of its document, so no position loses its
target. Generation that starts from that id alone (as GPT-2's does) sees what training saw. Examples that were packed
into a row have no such id: each begins where its positions restart at 0.

Shape legend: B batch, T sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor


def positions_and_mask(tokens_BT: Tensor, eos_id: int) -> tuple[Tensor, Tensor]:
    """Return positions inside documents, and the mask that keeps attention inside documents.

    Args:
        tokens_BT: token ids [B, T].
        eos_id: the id that begins a document at each of its occurrences.

    Returns:
        Positions [B, T], int64, from 0 in each document; and a mask [B, 1, T, T], true if a query (row) may attend to a
        key (column): the key is not later than the query and in the same document.
    """
    return positions(tokens_BT, eos_id), _mask(tokens_BT == eos_id)


def mask_of(positions_BT: Tensor) -> Tensor:
    """Return the mask [B, 1, T, T] of `positions_and_mask` for packed examples; each begins at position 0."""
    return _mask(positions_BT == 0)


def _mask(begins_BT: Tensor) -> Tensor:
    document_BT = begins_BT.cumsum(1)
    return (document_BT[:, :, None] == document_BT[:, None, :]).tril()[:, None]


def positions(tokens_BT: Tensor, eos_id: int) -> Tensor:
    """Return positions [B, T], int64, from 0 in each document."""
    place_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
    # index at which the document of each position begins
    first_BT = torch.where(tokens_BT == eos_id, place_T, 0).cummax(1).values
    return place_T - first_BT
