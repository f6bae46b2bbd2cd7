"""Which dtype computes, which one travels, which one is the truth.

Micikevicius et al. 2018, "Mixed Precision Training", https://arxiv.org/abs/1710.03740, section 3.1: weights and
activations may be 16 bits wide when a 32-bit master copy of the weights takes the updates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MixedPrecision:
    """A dtype policy. The default changes nothing: parameters compute and travel in the dtype that they have.

    Attributes:
        param_dtype: the dtype that forward and backward see; the parameter's own dtype becomes its master's, which
            the optimizer updates. None: the parameter's own, and then no second copy exists. Parameters that are
            frozen when the engine is built are kept in this dtype alone, rounded, until they are trained.
        reduce_dtype: the dtype in which gradients accumulate and are reduced. None: the master's. In bfloat16, which
            has the range of fp32, they also wait for the optimizer; else they are cast to the master's dtype for it.
        cast_forward_inputs: whether floating-point tensors given to the model are cast to ``param_dtype``.

    Raises:
        ValueError: a dtype that is not a floating-point one.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for field in ("param_dtype", "reduce_dtype"):
            dtype = getattr(self, field)
            if dtype is not None and not dtype.is_floating_point:
                raise ValueError(f"{field}: {dtype} is not a floating-point dtype; use torch.bfloat16 or torch.float32")

    def compute_dtype(self, master: torch.dtype) -> torch.dtype:
        """The dtype of full weights whose master is ``master``."""
        return self.param_dtype if self.param_dtype is not None and master.is_floating_point else master

    def gradient_dtype(self, master: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of weights with that master accumulate and travel."""
        return self.reduce_dtype if self.reduce_dtype is not None and master.is_floating_point else master

    def reduced_dtype(self, master: torch.dtype) -> torch.dtype:
        """The dtype in which reduced gradients of weights with that master wait for the optimizer.

        That of the reduction where it is bfloat16, which has the range of fp32: nothing is wider than what was asked
        for. Of float16, whose gradients a `GradScaler` divides by its scale, the master's.
        """
        reduce = self.gradient_dtype(master)
        return reduce if reduce == torch.bfloat16 else master
