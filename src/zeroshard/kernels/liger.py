"""Liger-Kernel's functions under our signatures, for ``kernels="liger"``: a baseline to compare our kernels with.

It is imported on the first call, and needs a GPU. A call that it does not support raises an error. Hsu et al. 2024,
arXiv:2410.10989.
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
    """As `zeroshard.kernels.layer_norm` without a residual; a weight is required."""
    if weight is None:
        raise UserError("kernels", "liger has no layer_norm without a weight", "give a weight, or use auto")
    bias = torch.zeros_like(weight) if bias is None else bias
    return _function("layer_norm", "LigerLayerNormFunction")(x, weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """As `zeroshard.kernels.rms_norm` without a residual; backward does not overwrite the upstream gradient."""
    return _function("rms_norm", "LigerRMSNormFunction")(x, weight, eps, 0.0, "gemma", False)


def cross_entropy(
    logits: Tensor, targets: Tensor, ignore_index: int, label_smoothing: float, z_loss: float, reduction: str
) -> Tensor:
    """As `zeroshard.kernels.cross_entropy`, but the gradient always overwrites the logits."""
    rows = logits.reshape(-1, logits.shape[-1])
    options = (None, ignore_index, z_loss, label_smoothing, reduction)
    return _function("cross_entropy", "LigerCrossEntropyFunction")(rows, targets.flatten(), *options)[0]


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As `zeroshard.kernels.rope`; Liger-Kernel's tables contain each angle twice."""
    tables = (torch.cat((table, table), dim=-1)[None] for table in (cos, sin))
    return _function("rope", "LigerRopeFunction")(q, k, *tables)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """As `zeroshard.kernels.swiglu`, but the gradients overwrite the inputs."""
    return _function("swiglu", "LigerSiLUMulFunction")(gate, up)


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """As `zeroshard.kernels.geglu`, but the gradients overwrite the inputs."""
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
    """As `zeroshard.kernels.linear_cross_entropy`; here too the weight's gradient is accumulated in fp32."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    function = _function("fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction")
    options = (None, None, ignore_index, z_loss, label_smoothing, reduction, None, False, torch.float32)
    return function(rows, weight, targets.flatten(), *options)[0]
