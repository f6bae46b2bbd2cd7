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
        *args: as in torch; ``normalized_shape`` is the width, as an int or a sequence of one int.
        kernels: backend; None: that of `zeroshard.kernels.use_kernels`, or auto without one.
        **kwargs: as in torch.

    Raises:
        ValueError: ``normalized_shape`` has more than one dimension.
    """

    def __init__(self, *args: Any, kernels: Choice | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _check_shape(self.normalized_shape)
        self.kernels = kernels

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Any:
        """[..., width] -> [..., width]; with a residual the pair (y, input + residual)."""
        return layer_norm(input, self.weight, self.bias, self.eps, residual=residual, kernels=self.kernels)


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` over one dimension, computed by `zeroshard.kernels.rms_norm`; arguments as in `LayerNorm`.

    Without an ``eps``, it is 1e-5.
    """

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, *args: Any, kernels: Choice | None = None, **kwargs: Any
    ) -> None:
        super().__init__(normalized_shape, eps, *args, **kwargs)
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
