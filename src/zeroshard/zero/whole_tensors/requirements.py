"""What may an optimizer be given: pieces of tensors, whole tensors, or nothing less than all of them?

Three sources answer, in this order:

| source                            | for which classes                                                 |
|-----------------------------------|-------------------------------------------------------------------|
| the class itself, by `zero_reach` | those that declare their reach, which is not checked              |
| a table, `OF_TORCH`               | those of `torch.optim`                                            |
| an experiment, `reach_probe`      | all others, subclasses of torch's too: tiny tensors, on the CPU,  |
|                                   | once for a class and its settings                                 |

A class declares its reach in one line. A subclass does not inherit it, since it may compute something else::

    class Lion(Optimizer):
        zero_reach = Reach.ELEMENT_WISE  # or "element-wise", which needs no import of zeroshard

Someone else's class is declared in the same way: ``bitsandbytes.optim.Adam8bit.zero_reach = Reach.PER_TENSOR``. If the
reach depends on settings, it is a function of them (a mapping, in which a param group's override the class's)::

    @staticmethod
    def zero_reach(settings):
        return Reach.PER_TENSOR if settings.get("trust_ratio", True) else Reach.ELEMENT_WISE

A class that accepts only parameters of certain numbers of dimensions may give an `OptimizerKind`, which lists them.

Nobody checks a declaration: if an optimizer is declared element-wise and is not, its updates are silently wrong.
``zeroshard doctor --optimizers module:Class`` compares it with the experiment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn, optim
from torch.optim import Optimizer

from zeroshard.optimizer_classes.reach import OptimizerKind, Reach

__all__ = ["OptimizerKind", "Reach", "classify"]

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


def classify(
    optimizer_cls: type[Optimizer],
    settings: Mapping[str, Any] | None = None,
    group: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
) -> OptimizerKind:
    """Return how far the gradient of one element reaches in a step of ``optimizer_cls(params, **settings)``.

    The answer is what the class declares by its attribute ``zero_reach`` (a `Reach`, its value, an `OptimizerKind`, or
    a function of the settings that returns one of them), unchecked. For torch's own classes it is in a table. Else it
    is found by experiment on the CPU, whose result is cached if settings are plain values.

    Args:
        optimizer_cls: any optimizer class.
        settings: keyword arguments for it.
        group: settings of the param group in question, which override them.
        device: where the parameters live; some settings work on some devices only.

    Raises:
        ValueError: ``zero_reach`` is none of the above.
        Exception: whatever the class itself raises when it is built with these settings for any tensor; a class that
            declares its reach, or is torch's own, is not built.
    """
    device, settings = torch.device(device), settings or {}
    options = {key: value for key, value in (group or {}).items() if key != "params"}
    declared = _declared(optimizer_cls, {**settings, **options})
    if declared:
        return declared
    if optimizer_cls in OF_TORCH and optimizer_cls.__module__.startswith("torch.optim"):  # its names may be replaced
        return OF_TORCH[optimizer_cls]
    from zeroshard.reach_probe.answers import found_by_probe  # found late: few classes need the experiment

    return found_by_probe(optimizer_cls, settings, options, device)


def params_kept_whole(
    optimizer_cls: type[Optimizer], kwargs: Mapping[str, Any], group: Mapping[str, Any]
) -> set[nn.Parameter]:
    """Return those of a group's parameters that must be whole tensors, each on the rank that owns it: all or none.

    Arguments and errors are those of `classify`; ValueError too if the class works in no layout.
    """
    chosen = group["params"]
    device = chosen[0].device if chosen else torch.device("cpu")
    kind = classify(optimizer_cls, kwargs, group, device)
    if kind.refused:
        raise ValueError(f"optimizer_cls: {optimizer_cls.__name__} cannot be sharded: {kind.reason}")
    return set(chosen) if kind.reach is Reach.PER_TENSOR else set()


def _declared(optimizer_cls: type[Optimizer], settings: Mapping[str, Any]) -> OptimizerKind | None:
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
    return OptimizerKind(reach, f"it is declared {reach.value} by its zero_reach", ALL_NDIMS)
