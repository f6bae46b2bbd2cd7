"""What stands in for methods of the user's optimizer, so that it does what it would do in one process, or says why not.

All of it is on the instance: its type stays exactly the user's class.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import wraps
from types import FunctionType, MethodType
from typing import Any

import torch
from torch.optim import Optimizer

from zeroshard.zero.optimizers.narrow_grads import NarrowGrads
from zeroshard.zero.optimizers.piecewise import PiecewiseOptimizer, SavesPasses
from zeroshard.zero.optimizers.state_dict import cut_into_pieces, whole_here

_OURS = "_zeroshard"  # on an optimizer that an engine knows


def is_known(optimizer: Optimizer) -> bool:
    """Whether an engine has put its methods in."""
    return _OURS in vars(optimizer)


def put_in(piecewise: PiecewiseOptimizer) -> None:
    """Have the optimizer's methods speak of the model's parameters, and its steps be heard of."""
    optimizer = piecewise.optimizer
    own = vars(optimizer)
    own[_OURS] = True
    own["_step_supports_amp_scaling"] = False  # then GradScaler unscales gradients, which all ranks judge alike
    grads = NarrowGrads(piecewise)
    _hear_of_steps(piecewise, grads)
    if "step" not in own:  # else a scheduler's, which counts
        own["step"] = MethodType(_step_of(piecewise, grads, type(optimizer).step), optimizer)
    add_group = optimizer.add_param_group
    own["add_param_group"] = lambda param_group: piecewise.add_param_group(add_group, param_group)
    own["zero_grad"] = lambda set_to_none=True: piecewise.listener.clear_grads(
        piecewise.members, set_to_none=set_to_none
    )
    own["state_dict"] = lambda: _state_dict(piecewise)
    own["load_state_dict"] = lambda state_dict: _load_state_dict(piecewise, state_dict)
    _wrap_own_methods(piecewise)


def _step_of(piecewise: PiecewiseOptimizer, grads: NarrowGrads, class_step: Any) -> Callable[..., Any]:
    @wraps(class_step)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        try:
            return class_step(self, *args, **kwargs)
        finally:
            grads.restore()
            piecewise.show_params()

    return step


def _hear_of_steps(piecewise: PiecewiseOptimizer, grads: NarrowGrads) -> None:
    """Between the user's hooks and the class's own step: there the param groups hold pieces."""
    optimizer, listener = piecewise.optimizer, piecewise.listener

    def before(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Show the class pieces, and what clipping left to multiply; a closure does so after its backward."""
        itself, *given = args  # torch passes the optimizer along
        closure = given[0] if given else kwargs.get("closure")
        if closure is None:
            factor = listener.before_update(optimizer)
            piecewise.show_pieces()
            grads.widen(by_unit=True)
            if factor is None:
                return None
            own = kwargs.get("grad_scale")
            return args, {**kwargs, "grad_scale": factor if own is None else own * factor}
        wrapped = _once(piecewise, grads, closure)
        piecewise.show_pieces()
        return ((itself, wrapped, *given[1:]), kwargs) if given else (args, {**kwargs, "closure": wrapped})

    def after(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Show the user parameters again, and tell the engine."""
        grads.restore()
        piecewise.show_params()
        piecewise.has_state = True
        listener.after_update(optimizer)

    last = optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    _move_to_end(optimizer._optimizer_step_post_hooks, *list(optimizer._optimizer_step_post_hooks)[:-1])

    def register_step_pre_hook(hook: Callable[..., Any]) -> Any:
        handle = type(optimizer).register_step_pre_hook(optimizer, hook)
        _move_to_end(optimizer._optimizer_step_pre_hooks, last.id)
        return handle

    vars(optimizer)["register_step_pre_hook"] = register_step_pre_hook


def _move_to_end(hooks: dict[int, Any], *ids: int) -> None:
    for each in ids:
        hooks[each] = hooks.pop(each)


def _once(piecewise: PiecewiseOptimizer, grads: NarrowGrads, closure: Callable[[], Any]) -> Callable[[], Any]:
    """The closure runs backward inside ``step``: only after it are there gradients to use."""
    called = False

    def run() -> Any:
        """The user's closure, once."""
        nonlocal called
        if called:
            raise RuntimeError(
                "step: the optimizer calls its closure a second time, and ranks would compute with weights from before "
                "the step; use an optimizer that calls it once"
            )
        called = True
        piecewise.show_params()
        result = closure()
        piecewise.listener.before_update(None)
        piecewise.show_pieces()
        grads.widen(by_unit=False)
        return result

    return torch.enable_grad()(run)


def _wrap_own_methods(piecewise: PiecewiseOptimizer) -> None:
    """What the class has beside torch's interface (``eval()`` of schedule-free ones, say) works on pieces."""
    optimizer = piecewise.optimizer
    if type(optimizer).__module__.startswith("torch.optim.") or isinstance(optimizer, SavesPasses):
        return
    for cls in type(optimizer).__mro__:
        if cls is Optimizer:
            break
        for name, method in vars(cls).items():
            known = hasattr(Optimizer, name) or name in vars(optimizer) or name.startswith("_") or name == "step"
            if isinstance(method, FunctionType) and not known:
                vars(optimizer)[name] = _at_pieces(piecewise, getattr(optimizer, name))


def _at_pieces(piecewise: PiecewiseOptimizer, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with piecewise.at_pieces():
            result = method(*args, **kwargs)
        piecewise.listener.weights_changed(piecewise.members)
        return result

    return run


# -- state ----------------------------------------------------------------------------------------------------------


def _state_dict(piecewise: PiecewiseOptimizer) -> dict[str, Any]:
    optimizer = piecewise.optimizer
    for hook in optimizer._optimizer_state_dict_pre_hooks.values():
        hook(optimizer)
    state = whole_here(piecewise)
    for hook in optimizer._optimizer_state_dict_post_hooks.values():
        changed = hook(optimizer, state)
        state = state if changed is None else changed
    return state


def _load_state_dict(piecewise: PiecewiseOptimizer, state_dict: Mapping[str, Any]) -> None:
    optimizer = piecewise.optimizer
    state_dict = dict(state_dict)
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = hook(optimizer, state_dict)
        state_dict = state_dict if changed is None else changed
    load_pieces(piecewise, cut_into_pieces(piecewise, state_dict))


def load_pieces(piecewise: PiecewiseOptimizer, state_dict: dict[str, Any]) -> None:
    """Through the class's own `load_state_dict`, which knows the dtype and device of each kind of state.

    Args:
        piecewise: whose optimizer.
        state_dict: its parameters are the pieces, numbered in their order.
    """
    optimizer = piecewise.optimizer
    hooks, optimizer._optimizer_load_state_dict_pre_hooks = (
        optimizer._optimizer_load_state_dict_pre_hooks,
        OrderedDict(),
    )
    try:
        with piecewise.at_pieces():
            type(optimizer).load_state_dict(optimizer, state_dict)
    finally:
        optimizer._optimizer_load_state_dict_pre_hooks = hooks
    piecewise.has_state = True
