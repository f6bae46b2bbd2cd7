"""`torch.nn`'s norms on our kernels: the same arguments, parameters and state-dict names."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from zeroshard.kernels.dispatch import Choice
from zeroshard.kernels.norm import layer_norm, rms_norm


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` over one dimension, computed by `zeroshard.kernels.layer_norm`.

    A subclass, so that code which looks for torch's norms (weight decay, initial values) finds this one too.

    Args:
        normalized_shape: the width, as an int or a sequence of one int.
        eps: added to the variance.
        elementwise_affine: whether there are a weight and a bias.
        bias: whether there is a bias.
        kernels: backend; None: that of `zeroshard.kernels.use_kernels`, or auto without one.

    Raises:
        ValueError: ``normalized_shape`` has more than one dimension.
    """

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        kernels: Choice | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        _check_shape(self.normalized_shape)
        self.kernels = kernels

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Any:
        """[..., width] -> [..., width]; with a residual the pair (y, input + residual)."""
        return layer_norm(input, self.weight, self.bias, self.eps, residual=residual, kernels=self.kernels)


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` over one dimension, computed by `zeroshard.kernels.rms_norm`.

    Args:
        normalized_shape: the width, as an int or a sequence of one int.
        eps: added to the mean square.
        elementwise_affine: whether there is a weight.
        kernels: backend; None: that of `zeroshard.kernels.use_kernels`, or auto without one.

    Raises:
        ValueError: ``normalized_shape`` has more than one dimension.
    """

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        kernels: Choice | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        _check_shape(self.normalized_shape)
        self.kernels = kernels

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """[..., width] -> [..., width]; with a residual the pair (y, x + residual)."""
        eps = 1e-5 if self.eps is None else self.eps
        return rms_norm(x, self.weight, eps, residual=residual, kernels=self.kernels)


def _check_shape(shape: tuple[int, ...]) -> None:
    if len(shape) != 1:
        raise ValueError(
            f"normalized_shape: {tuple(shape)} has {len(shape)} dimensions; only one, the last, is supported"
        )
