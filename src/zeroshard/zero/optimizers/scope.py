"""What an optimizer may be given, pieces of tensors, whole tensors, or only all of them: the possible answers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch.optim import Optimizer


class Scope(Enum):
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
        scope: how far a gradient reaches.
        reason: why, as a clause that begins with "it".
        ndims: the numbers of dimensions, of 0 to 4, that it takes parameters of.
    """

    scope: Scope
    reason: str
    ndims: tuple[int, ...] = ()

    @property
    def refused(self) -> bool:
        """Whether no layout is right for it."""
        return self.scope not in (Scope.ELEMENT_WISE, Scope.PER_TENSOR)


def no_class(given: object) -> str:
    """The error for what is given in place of an optimizer's class; an optimizer's own repr would list its settings."""
    what = f"an {type(given).__name__} object" if isinstance(given, Optimizer) else repr(given)
    return f"optimizer_cls: {what} is not a torch.optim.Optimizer class; give the class itself"
