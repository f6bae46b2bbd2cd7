"""What stands in for methods of the user's optimizer, so that it does what it would do in one process, or says why not.

All of it is on the instance: its type stays exactly the user's class.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from functools import wraps
from types import FunctionType
from typing import Any

from torch.optim import Optimizer

from zeroshard.zero.optimizers.piecewise import PiecewiseOptimizer, SavesPasses
from zeroshard.zero.optimizers.state_dict import cut_into_pieces, whole_here
from zeroshard.zero.optimizers.step_hooks import put_around

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
    put_around(piecewise)
    add_group = optimizer.add_param_group
    own["add_param_group"] = lambda param_group: piecewise.add_param_group(add_group, param_group)
    own["zero_grad"] = lambda set_to_none=True: piecewise.listener.clear_grads(
        piecewise.members, set_to_none=set_to_none
    )
    own["state_dict"] = lambda: _state_dict(piecewise)
    own["load_state_dict"] = lambda state_dict: _load_state_dict(piecewise, state_dict)
    _tell_where_states_are(piecewise)
    _wrap_own_methods(piecewise)


class NoState:
    """What makes the state of a key that has none: an empty dict for the class's own code, an error for any other.

    torch's makes an empty one for each key. So a log of ``optimizer.state[param]``, or a reset of what is there, would
    find nothing and change nothing.

    Args:
        holds_pieces: whether the class's own code runs now.
    """

    def __init__(self, holds_pieces: Callable[[], bool]) -> None:
        self._holds_pieces = holds_pieces

    def __call__(self) -> dict[str, Any]:
        """Of a key that has no state."""
        if self._holds_pieces():
            return {}
        raise RuntimeError(
            "optimizer.state: a parameter's is kept by the pieces of this rank, once there was a step: ask by those of "
            "zero.pieces(optimizer), or use zero.optim_state_dict(optimizer)"
        )

    def __reduce__(self) -> Any:  # a copy, or what was pickled, belongs to no engine
        return type, ({},)  # which is dict


def _tell_where_states_are(piecewise: PiecewiseOptimizer) -> None:
    if isinstance(piecewise.optimizer.state, defaultdict):
        piecewise.optimizer.state.default_factory = NoState(lambda: piecewise.holds_pieces)


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
        _tell_where_states_are(piecewise)  # in the dict that torch has put there
    piecewise.has_state = True
