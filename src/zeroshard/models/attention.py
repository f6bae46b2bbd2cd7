"""Causal attention by PyTorch's fused kernels, called so that none of them materializes the attention scores.

Shape legend: B batch, H query heads, K key and value heads (H is a multiple), T queries, S keys, D width of a head.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from zeroshard.kernels.launch import is_traced
from zeroshard.models.sequence_parallel import SequenceParallel

_FIRST_WITH_FLASH = (8, 0)  # compute capability: Ampere
_WIDEST_FLASH = 192  # for wider heads, flash attention has a backward pass on some devices only


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, dropout: float = 0.0) -> Tensor:
    """Return for each query the softmax-weighted mean of the values that it may attend to, [B, H, T, D].

    Grouped queries (K < H) share keys and values without copies if the kernel supports it. On CUDA only flash attention
    does; it takes no mask, no fp32, no heads wider than 192, and no GPU before Ampere. Otherwise PyTorch would fall
    back to a kernel that materializes the scores [B, H, T, S], so keys and values are repeated for another kernel.

    Args:
        q: [B, H, T, D].
        k, v: [B, K, S, D].
        mask: bool, broadcast to [B, H, T, S], true if a query may attend to a key; None: causal if S == T, else all.
        dropout: probability with which a weight is zeroed.
    """
    causal = mask is None and q.shape[2] == k.shape[2]
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1 and (q.is_cuda or is_traced()) and not _by_flash(q, mask):
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, dropout_p=dropout, enable_gqa=grouped
    )


def attend_in(
    sequence: SequenceParallel | None, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, dropout: float = 0.0
) -> Tensor:
    """Return `attend` as [B, T, H, D]; with a ``sequence`` of this rank's tokens, and the mask of whole sequences."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, mask, dropout=dropout).transpose(1, 2)

    return attention(q, k, v) if sequence is None else sequence.around(attention, q, k, v)


def _by_flash(q: Tensor, mask: Tensor | None) -> bool:
    """Whether flash attention can compute these queries' attention on a GPU."""
    narrow = q.dtype in (torch.bfloat16, torch.float16)
    return mask is None and narrow and q.shape[-1] <= _WIDEST_FLASH and (not q.is_cuda or _has_flash(q.device))


def _has_flash(device: torch.device) -> bool:
    """Whether a GPU has flash attention."""
    return _capability(device) >= _FIRST_WITH_FLASH


# The effect of `torch.compiler.assume_constant_result`, which would import the compiler.
vars(_has_flash)["_dynamo_marked_constant"] = True


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    """Return a GPU's compute capability; without a GPU, when only shapes are computed, that of Ampere."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else _FIRST_WITH_FLASH
