"""Mixed precision: the dtype of computation, the dtype of gradients, the dtype of master weights.

Micikevicius et al. 2018, "Mixed Precision Training", https://arxiv.org/abs/1710.03740, section 3.1: weights and
activations may be 16 bits wide if a 32-bit master copy of the weights takes the updates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zeroshard.settings.wire_formats import check_has_range


@dataclass(frozen=True)
class Precision:
    """A dtype policy. The default changes nothing: parameters compute and are sent in the dtype that they have.

    A dtype that is not a floating-point one raises ValueError. `zeroshard.zero.MixedPrecision` says more of the fields.
    """

    param_dtype: torch.dtype | None = None  # of weights in forward and backward; masters keep the parameters' own
    reduce_dtype: torch.dtype | None = None  # in which gradients accumulate and are reduced; None: the master's
    cast_forward_inputs: bool = True  # whether floating-point inputs of the model are cast to `param_dtype`

    def __post_init__(self) -> None:
        if not isinstance(self.cast_forward_inputs, bool):
            raise ValueError(f"cast_forward_inputs: {self.cast_forward_inputs!r} is not a bool; give True or False")
        for field, dtype in (("param_dtype", self.param_dtype), ("reduce_dtype", self.reduce_dtype)):
            if dtype is None:
                continue
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{field}: {dtype!r} is not a torch.dtype; use torch.bfloat16 or torch.float32")
            check_has_range(field, dtype)
            if not dtype.is_floating_point:
                raise ValueError(f"{field}: {dtype} is not a floating-point dtype; use torch.bfloat16 or torch.float32")

    def compute_dtype(self, master: torch.dtype) -> torch.dtype:
        """The dtype of unsharded weights whose master has dtype ``master``."""
        return self.param_dtype if self.param_dtype is not None and master.is_floating_point else master

    def gradient_dtype(self, master: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of weights with that master dtype accumulate and are reduced."""
        return self.reduce_dtype if self.reduce_dtype is not None and master.is_floating_point else master

    def reduced_dtype(self, master: torch.dtype) -> torch.dtype:
        """The dtype in which reduced gradients of weights with that master dtype wait for the optimizer.

        Gradients that are reduced in bfloat16 stay bfloat16, which has the range of fp32, and so need no wider buffer.
        Others are cast to the master's dtype: float16 too, because a `GradScaler` divides gradients by its scale.
        """
        reduce = self.gradient_dtype(master)
        return reduce if reduce == torch.bfloat16 else master
