"""Causal attention by PyTorch's fused kernels, called so that none of them materializes the attention scores.

[Note: Documents by blocks]
    On a GPU attention inside documents is torch's flex attention: its kernel is compiled, also in a model that is not,
    and skips the blocks of pairs that are masked. `torch.nn.attention.varlen` would be told the number of documents,
    for which the host would wait, and takes no fp32. Flex attention has no dropout and no backward on CPUs, and the
    compiler chooses some kernels of its backward by their times: so a mask of all pairs serves these, and runs with
    deterministic algorithms. A plan has the causal kernel instead, which keeps the same tensors for backward.

Shape legend: B batch, H query heads, K key and value heads (H is a multiple), T queries, S keys, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from zeroshard.models.document_masks import BLOCK, DocumentBlocks, Mask
from zeroshard.models.ulysses import SequenceParallel

_FIRST_WITH_FLASH = (8, 0)  # compute capability: Ampere
_WIDEST_FLASH = 192  # for wider heads, flash attention has a backward pass on some devices only
_NARROWEST_FLEX = 16
_planned: ContextVar[Literal["", "fast", "deterministic"]] = ContextVar("planned", default="")


@contextmanager
def as_on_gpu(*, deterministic: bool = False) -> Generator[None]:
    """In this block, on this thread, tensors without values are attended to as on a GPU.

    ``deterministic``: as with `torch.use_deterministic_algorithms`, which is not set for it.
    """
    token = _planned.set("deterministic" if deterministic else "fast")
    try:
        yield
    finally:
        _planned.reset(token)


def _is_planned() -> bool:
    return not torch.compiler.is_compiling() and _planned.get() != ""  # the compiler cannot read a ContextVar


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, *, dropout: float = 0.0) -> Tensor:
    """Return for each query the softmax-weighted mean of the values that it may attend to, [B, H, T, D].

    Grouped queries (K < H) share keys and values without copies if the kernel supports it. On CUDA only flash attention
    does; it takes no mask, no fp32, no heads wider than 192, and no GPU before Ampere. Otherwise PyTorch would fall
    back to a kernel that materializes the scores [B, H, T, S], so keys and values are repeated for another kernel.

    Args:
        q: [B, H, T, D].
        k, v: [B, K, S, D].
        mask: bool, broadcast to [B, H, T, S], true if a query may attend to a key; or its blocks, S == T and no
            dropout; None: causal if S == T, else all.
        dropout: probability with which a weight is zeroed.
    """
    if isinstance(mask, DocumentBlocks):
        return _in_documents(q, k, v, mask)
    causal = mask is None and q.shape[2] == k.shape[2]
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1 and (q.is_cuda or _is_planned()) and not _by_flash(q, mask):
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, dropout_p=dropout, enable_gqa=grouped
    )


def attend_in(
    sequence: SequenceParallel | None, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, *, dropout: float = 0.0
) -> Tensor:
    """Return `attend` as [B, T, H, D]; with a ``sequence`` of this rank's tokens, and the mask of whole sequences."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, mask, dropout=dropout).transpose(1, 2)

    return attention(q, k, v) if sequence is None else sequence.around(attention, q, k, v)


def takes_blocks(x: Tensor, num_tokens: int, head_width: int, dropout: float) -> bool:
    """Whether a mask of documents is given by its blocks: [Note: Documents by blocks].

    Args:
        x: what queries, keys and values are computed of.
        num_tokens: T; a row of less than a block has the mask, as flex attention has another kernel for it.
        dropout: probability with which a weight is zeroed.
    """
    if dropout or num_tokens < BLOCK or head_width < _NARROWEST_FLEX or x.dtype == torch.float64:
        return False
    if torch.are_deterministic_algorithms_enabled():
        return False
    if _is_planned():
        return _planned.get() == "fast"
    return x.is_cuda and _has_flex(x.device)


def _in_documents(q: Tensor, k: Tensor, v: Tensor, blocks: DocumentBlocks) -> Tensor:
    """Attention inside documents, [B, H, T, D]."""
    q, k = q.to(v.dtype), k.to(v.dtype)  # under autocast, rotary positions may leave them wider
    if _is_planned():
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    run = _flex if torch.compiler.is_compiling() else _compiled_flex()
    return run(q, k, v, *blocks)


def _flex(q: Tensor, k: Tensor, v: Tensor, first_BT: Tensor, *tables: Tensor) -> Tensor:
    """Flex attention of `DocumentBlocks`; its function is made here, so that the compiler knows all its tensors."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    def is_seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= first_BT[batch, query])

    T = q.shape[2]
    mask = BlockMask((T, T), *tables, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=is_seen)
    out = flex_attention(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    assert isinstance(out, Tensor)
    return out


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    # one graph, or an error: called without the compiler flex attention would materialize all scores
    return torch.compile(_flex, fullgraph=True)


@cache
def _has_flex(device: torch.device) -> bool:
    """Whether a GPU has flex attention's kernels, which are Triton's."""
    from torch.utils._triton import has_triton

    return has_triton() and _capability(device) >= _FIRST_WITH_FLASH


def _by_flash(q: Tensor, mask: Tensor | None) -> bool:
    """Whether flash attention can compute these queries' attention on a GPU."""
    narrow = q.dtype in (torch.bfloat16, torch.float16)
    return mask is None and narrow and q.shape[-1] <= _WIDEST_FLASH and (not q.is_cuda or _has_flash(q.device))


def _has_flash(device: torch.device) -> bool:
    """Whether a GPU has flash attention."""
    return _capability(device) >= _FIRST_WITH_FLASH


# The effect of `torch.compiler.assume_constant_result`, which would import the compiler.
for _fact in (_has_flash, _has_flex):
    vars(_fact)["_dynamo_marked_constant"] = True


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    """Return a GPU's compute capability; without a GPU, when only shapes are computed, that of Ampere."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else _FIRST_WITH_FLASH
