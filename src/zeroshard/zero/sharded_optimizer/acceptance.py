"""Checks the classes, settings and parameters given to `ShardedOptimizer`; each error says in one line what to do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.host.torch_internals import is_traceable_wrapper_subclass
from zeroshard.optim.classes.reach import no_class
from zeroshard.optim.classes.requirements import Reach, classify
from zeroshard.zero.optimizers.adoption import has_owner

PER_RANK = ("params", "param_names")  # keys whose values differ between a group and the inner optimizer's group

# Reaches that need more than one rank's tensors. Others are fine: a class that fails on dense gradients may be given
# sparse ones, and random numbers are drawn by a parameter's owner only, so that weights are the same on every rank.
_REFUSED = (Reach.CROSS_TENSOR, Reach.CLOSURE_DRIVEN)


def check_class(optimizer_cls: type[Optimizer], kwargs: dict[str, Any]) -> None:
    """Raise TypeError if ``optimizer_cls`` is no optimizer class, ValueError if it is set to be differentiable."""
    if not (isinstance(optimizer_cls, type) and issubclass(optimizer_cls, Optimizer)):
        raise TypeError(no_class(optimizer_cls))
    for name in {"offload", "state_format"} & kwargs.keys():
        instead = "Zero(model, stage=1, offload=...)" if name == "offload" else "zero.optimizer(..., state_format=...)"
        raise TypeError(f"{name}: a ShardedOptimizer keeps states on the device as its class does; use {instead}")
    if kwargs.get("differentiable"):
        raise ValueError("differentiable: autograd cannot follow weights from rank to rank; leave it False")


def check_reach(optimizer_cls: type[Optimizer], kwargs: dict[str, Any], groups: list[dict[str, Any]]) -> str:
    """Refuse a class that lets tensors influence each other, with the settings of any of the groups.

    Returns why a step must not be given a closure; "": it may.
    """
    no_closure = ""
    for group in groups:
        settings = {key: value for key, value in group.items() if key not in PER_RANK}
        device = group["params"][0].device if group["params"] else "cpu"
        kind = classify(optimizer_cls, kwargs, settings, device)
        if kind.reach in _REFUSED:
            raise ValueError(f"optimizer_cls: {optimizer_cls.__name__} cannot be sharded: {kind.reason}")
        no_closure = no_closure or kind.no_closure
    return no_closure


def check_param(param: Tensor) -> None:
    """Raise ValueError for a parameter that is not unsharded and dense in this process."""
    what = None
    if is_traceable_wrapper_subclass(param):
        what = f"a {type(param).__name__}, of which this rank may hold only a part"
    elif param.layout != torch.strided:
        what = "sparse"
    elif param.is_meta:
        what = "on the meta device"
    elif has_owner(param):
        raise ValueError(
            f"params: a parameter of shape {tuple(param.shape)} is one of a model under Zero(), which shards optimizer "
            "states itself; use zero.optimizer()"
        )
    if what is not None:
        raise ValueError(f"params: a parameter of shape {tuple(param.shape)} is {what}; give whole, dense parameters")


def describe(param: Tensor) -> str:
    """Describe a parameter in words that are the same on every rank: dtype, shape, type of device, frozen or not."""
    frozen = "" if param.requires_grad else " (frozen)"
    return f"{str(param.dtype).removeprefix('torch.')} {list(param.shape)} on {param.device.type}{frozen}"
