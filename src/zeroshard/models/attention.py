"""Causal attention by the kernels that a device has for it.

Shape legend: B batch, H query heads, K key and value heads (H is a multiple), T queries, S keys, D width of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from zeroshard.kernels.launch import is_traced


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, dropout: float = 0.0) -> Tensor:
    """Each query's mean of the values it may see, [B, H, T, D].

    Grouped queries (K < H) share a key where the kernel can. On CUDA the one that takes a mask, or fp32, cannot, and
    PyTorch would fall back to one that holds the scores, [B, H, T, S]: keys and values are repeated for it instead.

    Args:
        q: [B, H, T, D].
        k, v: [B, K, S, D].
        mask: bool, broadcast to [B, H, T, S], true where a query may see a key; None: causal where S == T, else all.
        dropout: probability with which a weight is zeroed.
    """
    causal = mask is None and q.shape[2] == k.shape[2]
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1 and (q.is_cuda or is_traced()) and (mask is not None or q.dtype == torch.float32):
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, dropout_p=dropout, enable_gqa=grouped
    )
