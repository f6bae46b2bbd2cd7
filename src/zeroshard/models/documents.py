"""Attention that stays inside a document, where a sequence holds several.

Documents are told apart by the id that ends one and so begins the next: a position attends to that id and what came
after it. The id's own target is the first token of what it begins, so no position loses its target, and a text that
is written after that id alone (as GPT-2's are) is what was trained on. Examples that were packed into a row say by
their positions where they begin: 0.

Shape legend: B batch, T sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor


def separate(tokens_BT: Tensor, eos_id: int) -> tuple[Tensor, Tensor]:
    """Positions inside documents, and who attends to whom.

    Args:
        tokens_BT: token ids [B, T].
        eos_id: begins a document, wherever it stands.

    Returns:
        Positions [B, T], int64, from 0 in each document; and a mask [B, 1, T, T], true where a query (row) may see a
        key (column): causal, and of the same document.
    """
    return positions(tokens_BT, eos_id), _mask(tokens_BT == eos_id)


def mask_of(positions_BT: Tensor) -> Tensor:
    """Who attends to whom where positions begin at 0 in each example: [B, 1, T, T] as of `separate`."""
    return _mask(positions_BT == 0)


def _mask(begins_BT: Tensor) -> Tensor:
    document_BT = begins_BT.cumsum(1)
    return (document_BT[:, :, None] == document_BT[:, None, :]).tril()[:, None]


def positions(tokens_BT: Tensor, eos_id: int) -> Tensor:
    """Positions [B, T], int64, from 0 in each document."""
    place_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
    # where the document of each position begins
    first_BT = torch.where(tokens_BT == eos_id, place_T, 0).cummax(1).values
    return place_T - first_BT
