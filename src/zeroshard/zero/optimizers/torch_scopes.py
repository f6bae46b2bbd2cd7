"""The scope of each optimizer in `torch.optim`, as a table: torch's own classes need no experiment.

A test compares every row with the experiment (`scope_probe`), for each setting that changes what a class computes.
The table answers for torch's classes themselves, never for a subclass, and only for settings that were compared: a
setting that it does not know (of a newer torch), or with which the class fails, is left to the experiment.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any, cast

import torch
from torch import nn, optim
from torch.optim import Optimizer

from zeroshard.zero.optimizers.scope import OptimizerKind, Scope

ALL_NDIMS = (0, 1, 2, 3, 4)
_ELEMENT_WISE = OptimizerKind(Scope.ELEMENT_WISE, "it updates each element from that element's own history", ALL_NDIMS)

KINDS: dict[type[Optimizer], OptimizerKind] = {
    optim.ASGD: _ELEMENT_WISE,
    optim.Adadelta: _ELEMENT_WISE,
    optim.Adafactor: OptimizerKind(
        Scope.PER_TENSOR, "it keeps a state 'row_var' of shape (5, 1) for a tensor of shape (5, 7)", ALL_NDIMS
    ),
    optim.Adagrad: _ELEMENT_WISE,
    optim.Adam: _ELEMENT_WISE,
    optim.AdamW: _ELEMENT_WISE,
    optim.Adamax: _ELEMENT_WISE,
    optim.LBFGS: OptimizerKind(
        Scope.CLOSURE_DRIVEN,
        "it calls the closure again at weights that it has moved, and ranks gather weights between steps only",
        ALL_NDIMS,
    ),
    optim.Muon: OptimizerKind(
        Scope.PER_TENSOR,
        "it does not take one-dimensional pieces: ValueError: Muon only supports 2D parameters whereas we found a "
        "parameter with size: torch.Size([15])",
        (2,),
    ),
    optim.NAdam: _ELEMENT_WISE,
    optim.RAdam: _ELEMENT_WISE,
    optim.RMSprop: _ELEMENT_WISE,
    optim.Rprop: _ELEMENT_WISE,
    optim.SGD: _ELEMENT_WISE,
    optim.SparseAdam: OptimizerKind(
        Scope.UNUSABLE,
        "it fails on dense gradients: RuntimeError: SparseAdam does not support dense gradients, please consider Adam "
        "instead",
    ),
}

# If one of these is not at its default, the experiment decides: most make every step fail, and LBFGS computes
# something else with few iterations.
TRIED = frozenset({"capturable", "differentiable", "max_eval", "max_iter", "tolerance_change", "tolerance_grad"})
# All other settings: the answer is the same whatever their values.
HARMLESS = frozenset(
    {
        *("adjust_lr_fn", "alpha", "amsgrad", "beta2_decay", "betas", "centered", "d", "dampening"),
        *("decoupled_weight_decay", "eps", "etas", "foreach", "fused", "history_size", "initial_accumulator_value"),
        *("lambd", "line_search_fn", "lr", "lr_decay", "maximize", "momentum", "momentum_decay", "nesterov"),
        *("ns_coefficients", "ns_steps", "rho", "step_sizes", "t0", "weight_decay"),
    }
)


def look_up(
    optimizer_cls: type[Optimizer], settings: Mapping[str, Any], group: Mapping[str, Any], device: torch.device
) -> OptimizerKind | None:
    """Return the table's answer for a class with its settings; None if it has none.

    The class is built over one element, without taking a step, so that it refuses wrong settings itself.

    Args:
        optimizer_cls: any optimizer class.
        settings: keyword arguments for it.
        group: settings of the param group in question, which override them.
        device: where the parameters live.

    Raises:
        Exception: whatever torch's class raises when it is built with these settings.
    """
    kind = KINDS.get(optimizer_cls)
    if kind is None or not optimizer_cls.__module__.startswith("torch.optim"):  # its names may be replaced
        return None
    make, param = cast("Any", optimizer_cls), nn.Parameter(torch.zeros(1, 1, device="cpu"))
    make([{**group, "params": [param]}], **settings)
    accepted = {name: each.default for name, each in signature(optimizer_cls).parameters.items() if name != "params"}
    given = {name: value for name, value in {**settings, **group}.items() if name in accepted}
    harmless = HARMLESS if device.type == "cpu" else HARMLESS | {"capturable"}  # it fails on the CPU only
    if any(value != accepted[name] for name, value in given.items() if name not in harmless):
        return None
    try:
        make([param], **given)  # classes validate constructor arguments, not settings of groups
    except Exception:  # noqa: BLE001 -- each class raises its own; the experiment decides
        return None
    return kind
