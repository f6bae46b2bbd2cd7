"""Causal attention by the kernels that a device has for it.

Shape legend: B batch, H query heads, K key and value heads (H is a multiple), T queries, S keys, D width of a head.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from zeroshard.kernels.launch import is_traced

_FIRST_WITH_FLASH = (8, 0)  # compute capability: Ampere
_WIDEST_FLASH = 192  # heads wider than that take gradients by flash attention on some devices alone


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, dropout: float = 0.0) -> Tensor:
    """Each query's mean of the values it may see, [B, H, T, D].

    Grouped queries (K < H) share a key where the kernel can. On CUDA only flash attention can, which takes no mask, no
    fp32, no very wide heads, and no GPU before Ampere. Else PyTorch would fall back to a kernel that holds the scores,
    [B, H, T, S]: keys and values are repeated instead, for one that does not.

    Args:
        q: [B, H, T, D].
        k, v: [B, K, S, D].
        mask: bool, broadcast to [B, H, T, S], true where a query may see a key; None: causal where S == T, else all.
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


def _by_flash(q: Tensor, mask: Tensor | None) -> bool:
    """Whether flash attention serves these queries on a GPU."""
    narrow = q.dtype in (torch.bfloat16, torch.float16)
    return mask is None and narrow and q.shape[-1] <= _WIDEST_FLASH and (not q.is_cuda or _has_flash(q.device))


def _has_flash(device: torch.device) -> bool:
    """Whether a GPU has flash attention."""
    return _capability(device) >= _FIRST_WITH_FLASH


vars(_has_flash)["_dynamo_marked_constant"] = True  # torch.compiler's own decorator would import the compiler


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    """A GPU's compute capability; where there is no GPU, and only shapes are wanted, as if it were a new one."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else _FIRST_WITH_FLASH
