"""Liger-Kernel's functions under our signatures, for ``kernels="liger"``: a baseline to hold ours against.

Hsu et al. 2024, arXiv:2410.10989. Imported when first called; it needs a GPU. What it cannot do is refused.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from zeroshard.errors import UserError


def _function(module: str, name: str) -> Any:
    return getattr(import_module(f"liger_kernel.ops.{module}"), name).apply


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """As `zeroshard.kernels.layer_norm` without a residual; it has no form without a weight."""
    if weight is None:
        raise UserError("kernels", "liger has no layer_norm without a weight", "give a weight, or use auto")
    bias = torch.zeros_like(weight) if bias is None else bias
    return _function("layer_norm", "LigerLayerNormFunction")(x, weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """As `zeroshard.kernels.rms_norm` without a residual; the gradient is not written over its own input."""
    return _function("rms_norm", "LigerRMSNormFunction")(x, weight, eps, 0.0, "gemma", False)


def cross_entropy(
    logits: Tensor, targets: Tensor, ignore_index: int, label_smoothing: float, z_loss: float, reduction: str
) -> Tensor:
    """As `zeroshard.kernels.cross_entropy`; the gradient is always written over the logits."""
    rows = logits.reshape(-1, logits.shape[-1])
    options = (None, ignore_index, z_loss, label_smoothing, reduction)
    return _function("cross_entropy", "LigerCrossEntropyFunction")(rows, targets.flatten(), *options)[0]


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As `zeroshard.kernels.rope`; its tables hold each angle twice."""
    tables = (torch.cat((table, table), dim=-1)[None] for table in (cos, sin))
    return _function("rope", "LigerRopeFunction")(q, k, *tables)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """As `zeroshard.kernels.swiglu`; the gradients are written over the inputs."""
    return _function("swiglu", "LigerSiLUMulFunction")(gate, up)


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """As `zeroshard.kernels.geglu`; the gradients are written over the inputs."""
    return _function("geglu", "LigerGELUMulFunction")(gate, up)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
) -> Tensor:
    """As `zeroshard.kernels.linear_cross_entropy`, the weight's gradient summed in fp32 too."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    function = _function("fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction")
    options = (None, None, ignore_index, z_loss, label_smoothing, reduction, None, False, torch.float32)
    return function(rows, weight, targets.flatten(), *options)[0]
