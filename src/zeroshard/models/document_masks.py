"""Document masks: attention stays inside a document when one sequence contains several documents.

The id ``eos_id`` separates documents. It counts as the first token of the document that follows it: a position attends
to that id and to the tokens after it. The id's target is the first token of its document, so no position loses its
target. Generation that starts from that id alone (as GPT-2's does) sees what training saw. Examples that were packed
into a row have no such id: each begins where its positions restart at 0.

A mask of all pairs takes B T^2 bytes. On a GPU attention gets `DocumentBlocks` in its place, of B T^2 / 700 bytes:

    query block  0   1   2   3
            0    p                  p: some pairs are masked, f: none are, and blank: all are, so nothing is computed
            1    f   p              a document begins in key block 1: the later queries see nothing before it
            2        p   p
            3        p   f   p

[Note: Blocks by arithmetic]
    Documents do not interleave, so the first key that a query may see, ``first``, never falls. Query block i sees key
    blocks ``lowest[i]`` to i, and all pairs of it and ``filled[i]`` to i - 1. So each row of a table is a range, and
    each column too. No shape depends on where documents begin, and the host waits for nothing.

Shape legend: B batch, T sequence, N blocks of a sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128  # queries, and keys, of a block: what flex attention's kernels are made for


class DocumentBlocks(NamedTuple):
    """A mask as flex attention takes it, by blocks; numbers [B, 1, N] and indices [B, 1, N, N] of blocks, int32.

    Attributes:
        first_BT: the first token of each one's document, in its row.
        num_keys, keys: for each block of queries, the blocks of keys of which it sees some pairs.
        num_full_keys, full_keys: those of which it sees all pairs.
        num_queries, queries, num_full_queries, full_queries: the same for each block of keys.
    """

    first_BT: Tensor
    num_keys: Tensor
    keys: Tensor
    num_full_keys: Tensor
    full_keys: Tensor
    num_queries: Tensor
    queries: Tensor
    num_full_queries: Tensor
    full_queries: Tensor


Mask = Tensor | DocumentBlocks


def mask_of(begins_BT: Tensor, *, by_blocks: bool = False) -> Mask:
    """Return the mask that keeps attention inside documents: a query sees the keys of its document, up to itself.

    Args:
        begins_BT: bool [B, T], whether a document begins at a token.
        by_blocks: for `zeroshard.models.attention.takes_blocks`; False: a mask [B, 1, T, T], true if a query (row) may
            attend to a key (column).
    """
    first_BT = _first(begins_BT)
    if by_blocks:
        return _blocks(first_BT.int())
    place_T = torch.arange(begins_BT.shape[1], device=begins_BT.device)
    return (place_T >= first_BT[:, :, None]).tril()[:, None]


def positions(tokens_BT: Tensor, eos_id: int) -> Tensor:
    """Return positions [B, T], int64, from 0 in each document; ``eos_id`` begins one at each of its occurrences."""
    return torch.arange(tokens_BT.shape[1], device=tokens_BT.device) - _first(tokens_BT == eos_id)


def _first(begins_BT: Tensor) -> Tensor:
    place_T = torch.arange(begins_BT.shape[1], device=begins_BT.device)
    return torch.where(begins_BT, place_T, 0).cummax(1).values


def _blocks(first_BT: Tensor) -> DocumentBlocks:
    """See [Note: Blocks by arithmetic]."""
    T = first_BT.shape[1]
    block_N = torch.arange(-(-T // BLOCK), device=first_BT.device, dtype=torch.int32)
    lowest = first_BT[:, None, ::BLOCK] // BLOCK  # [B, 1, N], of a block's first query
    last = F.pad(first_BT, (0, -T % BLOCK), value=T)[:, None, BLOCK - 1 :: BLOCK]  # a cut block sees no key block whole
    filled = torch.minimum((last + BLOCK - 1) // BLOCK, block_N)
    # of each block of keys, the first block of queries that sees no, and not all, pairs of it
    ends, half = (((each[..., None] <= block_N).sum(-2, dtype=torch.int32)) for each in (lowest, filled))

    def ranges(begins: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        return ends - begins, (begins[..., None] + block_N).clamp(max=len(block_N) - 1)

    def with_diagonal(begins: Tensor, ends: Tensor, *, last: bool) -> tuple[Tensor, Tensor]:
        num, indices = ranges(begins if last else begins - 1, ends)
        diagonal = block_N[:, None]
        beside = block_N == num[..., None] if last else block_N == 0
        return num + last, torch.where(beside, diagonal, indices)

    return DocumentBlocks(
        first_BT,
        *with_diagonal(lowest, filled, last=True),
        *ranges(filled, block_N),
        *with_diagonal(half, ends, last=False),
        *ranges((block_N + 1).expand_as(half), half),
    )
