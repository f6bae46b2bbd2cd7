"""Which optimizers may take local steps: those that keep only moments of gradients in their state, and no weights.

A meeting of replicas replaces the weights that an optimizer has stepped to. Moments of gradients stay valid. A state
that contains weights itself (an average of them, as torch's ASGD keeps, the iterate of a schedule-free method, the slow
weights of Lookahead) would be out of date, and the next steps would continue from the old weights.

So the class is run on tiny tensors twice, with the same gradients. In one run a constant is added to the weights
between two steps, as a meeting would do. A state that differs by that constant afterwards contains weights. An
optimizer that keeps weights anywhere else (in its groups, in an attribute) is found out when it goes back to them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

_SHIFT = 64.0  # far beyond what these steps move
_TOLERANCE = 1.0
_STEPS = 8  # Lookahead goes back after five or six
_SHIFTED_AFTER = 2


def require_no_weights_in_state(
    name: str, make: Callable[[list[dict[str, Any]]], Optimizer], groups: Sequence[dict[str, Any]]
) -> None:
    """Raise ValueError if the optimizer keeps weights in its state, or cannot be tried.

    Args:
        name: the name of the class.
        make: makes an optimizer from param groups.
        groups: the optimizer's param groups; their parameters are replaced by tiny ones of one or two dimensions.
    """
    try:
        (near, moved), (far, moved_far) = (_tried(make, groups, shift) for shift in (0.0, _SHIFT))
    except Exception as error:  # whatever a user's class raises
        raise ValueError(
            f"optimizer_cls: {name} could not be tried for local steps ({type(error).__name__}: {error}); "
            "give another class, or leave out replicas"
        ) from error
    goes_back = any((one - other).abs().max() > _TOLERANCE for one, other in zip(moved, moved_far, strict=True))
    todo = "give one that keeps moments of gradients alone, such as AdamW, or leave out replicas"
    for one, other in zip(near, far, strict=True):
        for kind, value in one.items():
            there = other.get(kind)
            if not isinstance(value, torch.Tensor) or not isinstance(there, torch.Tensor):
                continue
            if value.shape == there.shape and (value - there).abs().max() > _TOLERANCE:
                raise ValueError(
                    f"optimizer_cls: {name} keeps weights in its state ({kind!r}), which a meeting of replicas "
                    f"replaces; {todo}"
                )
    if goes_back:
        raise ValueError(
            f"optimizer_cls: {name} goes back to weights that it has kept, which a meeting of replicas replaces; {todo}"
        )


def _tried(
    make: Callable[[list[dict[str, Any]]], Optimizer], groups: Sequence[dict[str, Any]], shift: float
) -> tuple[list[dict[str, Any]], list[torch.Tensor]]:
    """Take `_STEPS` steps from zeros; return the state of each tiny tensor, and its values without ``shift``."""
    generator = torch.Generator().manual_seed(0)
    stand_ins = [
        [nn.Parameter(torch.zeros([4] * min(param.dim(), 2) or [4])) for param in group["params"][:2]]
        for group in groups
    ]
    # No weight decay: it adds weights to gradients, so moments would depend on the shift, although they stay valid.
    optimizer = make(
        [
            {**copy.copy(group), "params": params, **({"weight_decay": 0.0} if "weight_decay" in group else {})}
            for group, params in zip(groups, stand_ins, strict=True)
            if params
        ]
    )
    for group in optimizer.param_groups:
        group.update({"weight_decay": 0.0} if "weight_decay" in group else {})
        group.update({"lr": 1e-3} if isinstance(group.get("lr"), float) else {})
    params = [param for group in stand_ins for param in group]
    for step in range(_STEPS):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
            if step == _SHIFTED_AFTER:
                param.data.add_(shift)
        optimizer.step()
    return [dict(optimizer.state.get(param, {})) for param in params], [param.detach() - shift for param in params]
