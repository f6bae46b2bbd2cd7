"""The possible answers to: may an optimizer be given pieces of tensors, whole tensors, or only all tensors at once?"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch.optim import Optimizer


class Reach(Enum):
    """How far the gradient of one element reaches in an optimizer's step."""

    ELEMENT_WISE = "element-wise"
    """That element alone: the optimizer may be given any pieces of tensors."""

    PER_TENSOR = "per-tensor"
    """The tensor that it lies in: the optimizer must be given whole tensors, in their shapes."""

    CROSS_TENSOR = "cross-tensor"
    """Other tensors too: no rank may be given less than all."""

    CLOSURE_DRIVEN = "closure-driven"
    """The step itself computes new gradients, at weights that it has moved."""

    RANDOM = "random"
    """Besides gradients the step depends on random numbers, which each rank draws for itself."""

    UNUSABLE = "unusable"
    """It fails on dense gradients, or never moves a weight."""


@dataclass(frozen=True)
class OptimizerKind:
    """What an optimizer class may be given, with its settings.

    Attributes:
        reach: how far the gradient of one element reaches in a step.
        reason: why, as a clause that begins with "it".
        ndims: the numbers of dimensions, from 0 to 4, of the parameters that the class accepts.
    """

    reach: Reach
    reason: str
    ndims: tuple[int, ...] = ()

    @property
    def refused(self) -> bool:
        """Whether the class cannot be sharded in any layout."""
        return self.reach not in (Reach.ELEMENT_WISE, Reach.PER_TENSOR)


def no_class(given: object) -> str:
    """The error for something that is no optimizer class; of an instance only the type, as its repr lists settings."""
    what = f"an {type(given).__name__} object" if isinstance(given, Optimizer) else repr(given)
    return f"optimizer_cls: {what} is not a torch.optim.Optimizer class; give the class itself"
