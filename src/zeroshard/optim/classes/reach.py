"""May an optimizer be given pieces of tensors, whole tensors, or only all of them? What its class says of it.

A class declares its reach in one line. A subclass does not inherit it, since it may compute something else::

    class Lion(Optimizer):
        zero_reach = Reach.ELEMENT_WISE  # or "element-wise", which needs no import of zeroshard

Someone else's class is declared in the same way: ``bitsandbytes.optim.Adam8bit.zero_reach = Reach.PER_TENSOR``. If the
reach depends on settings, it is a function of them (a mapping, in which a param group's override the class's)::

    @staticmethod
    def zero_reach(settings):
        return Reach.PER_TENSOR if settings.get("trust_ratio", True) else Reach.ELEMENT_WISE

A class that accepts only parameters of certain numbers of dimensions may give an `OptimizerKind`, which lists them. So
does one that keeps a scale for each block of a tensor, because the blocks' size belongs to its reach::

    class Adam8bit(Optimizer):
        zero_reach = OptimizerKind(Reach.BLOCK_WISE, "it has 8-bit states in blocks of 256", ALL_NDIMS, block=256)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import optim
from torch.optim import Optimizer


class Reach(Enum):
    """How far the gradient of one element reaches in an optimizer's step."""

    ELEMENT_WISE = "element-wise"
    """That element alone: the optimizer may be given any pieces of tensors."""

    BLOCK_WISE = "block-wise"
    """The block that it lies in: blocks of so many consecutive elements, counted from each tensor's first one. The
    optimizer may be given 1-D pieces that begin where a block does, and end where one does or with their tensor."""

    PER_TENSOR = "per-tensor"
    """The tensor that it lies in: the optimizer must be given whole tensors, in their shapes."""

    CROSS_TENSOR = "cross-tensor"
    """Other tensors too: no rank may be given less than all."""

    CLOSURE_DRIVEN = "closure-driven"
    """The step itself computes new gradients, at weights that it has moved, or follows the loss of one rank's rows."""

    RANDOM = "random"
    """Besides gradients the step depends on random numbers, which each rank draws for itself."""

    UNUSABLE = "unusable"
    """It fails on dense gradients, or never moves a weight."""

    @property
    def refused(self) -> bool:
        """Whether the class cannot be sharded in any layout."""
        return self not in (Reach.ELEMENT_WISE, Reach.BLOCK_WISE, Reach.PER_TENSOR)


@dataclass(frozen=True)
class OptimizerKind:
    """What an optimizer class may be given, with its settings.

    Raises:
        ValueError: ``block`` does not suit the reach.
    """

    reach: Reach  # how far the gradient of one element reaches in a step
    reason: str  # why, as a clause that begins with "it"
    ndims: tuple[int, ...] = ()  # the numbers of dimensions, from 0 to 4, of the parameters that the class accepts
    block: int = 1  # elements of a block, if the reach is block-wise: a power of two; else 1
    by_unit: bool = False
    """Whether ``step`` may be called several times, each time for some of the parameters, in place of once for all:
    what it counts it counts for each parameter, not in a param group or in the optimizer. Then only one unit's
    gradients are copied at a time, and updates on the host run beside the next forward."""
    no_closure: str = ""
    """Why a step must not be given a closure, as a clause that begins with "it"; "": it may."""

    def __post_init__(self) -> None:
        if self.reach is Reach.BLOCK_WISE:
            if not isinstance(self.block, int) or self.block < 2 or self.block & (self.block - 1):
                raise ValueError(f"block: {self.block!r}; give the elements of a block, a power of two from 2 on")
        elif self.block != 1:
            raise ValueError(f"block: {self.block!r} is not 1, and a class that is {self.reach.value} has no blocks")


ALL_NDIMS = (0, 1, 2, 3, 4)
OF_TORCH: dict[type[Optimizer], OptimizerKind] = {
    **dict.fromkeys(
        (
            *(optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax),
            *(optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD),
        ),
        OptimizerKind(Reach.ELEMENT_WISE, "it updates each element from that element's own history", ALL_NDIMS),
    ),
    optim.Adafactor: OptimizerKind(Reach.PER_TENSOR, "it keeps means of rows and columns of a tensor", ALL_NDIMS),
    optim.LBFGS: OptimizerKind(
        Reach.CLOSURE_DRIVEN,
        "it calls the closure again at weights that it has moved, and ranks gather weights between steps only",
        ALL_NDIMS,
    ),
    optim.Muon: OptimizerKind(Reach.PER_TENSOR, "it orthogonalises the updates of matrices", (2,)),
    optim.SparseAdam: OptimizerKind(Reach.UNUSABLE, "it does not support dense gradients"),
}
"""The answers for torch's own classes, which a test compares with the experiment. They hold for the classes themselves
with any settings, never for a subclass."""


def declared(optimizer_cls: type[Optimizer], settings: Mapping[str, Any]) -> OptimizerKind | None:
    """What the class itself declares; None if it declares nothing, even if a base class does."""
    said = vars(optimizer_cls).get("zero_reach")
    if said is None:
        return None
    answer = said(settings) if callable(said) else said
    if isinstance(answer, OptimizerKind):
        return answer
    try:
        reach = Reach(answer)
    except ValueError:
        values = ", ".join(repr(reach.value) for reach in Reach)
        name = f"{optimizer_cls.__name__}.zero_reach"
        raise ValueError(f"{name}: {answer!r} is no reach; give a zeroshard.zero.Reach, or one of {values}") from None
    if reach is Reach.BLOCK_WISE:
        name = f"{optimizer_cls.__name__}.zero_reach"
        raise ValueError(f"{name}: the size of its blocks is not given; give an OptimizerKind with its block")
    return OptimizerKind(reach, f"it is declared {reach.value} by its zero_reach", ALL_NDIMS)


def no_class(given: object) -> str:
    """The error for something that is no optimizer class; of an instance only the type, as its repr lists settings."""
    what = f"an {type(given).__name__} object" if isinstance(given, Optimizer) else repr(given)
    return f"optimizer_cls: {what} is not a torch.optim.Optimizer class; give the class itself"
