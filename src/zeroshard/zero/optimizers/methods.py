"""Replaces methods of the user's optimizer, so that they do what they would do in one process, or raise a clear error.

The replacements are attributes of the instance: its type stays exactly the user's class.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import wraps
from itertools import chain
from types import FunctionType
from typing import Any

from torch.optim import Optimizer

from zeroshard.torch_internals import hooks_of, without_load_hooks
from zeroshard.uncompiled import uncompiled
from zeroshard.zero.optimizers.piecewise import PiecewiseOptimizer
from zeroshard.zero.optimizers.state_dict import cut_into_pieces, unsharded_state
from zeroshard.zero.optimizers.step_hooks import surrounding_ids

_OURS = "_zeroshard"  # on an optimizer that an engine knows


def is_known(optimizer: Optimizer) -> bool:
    """Whether an engine has replaced this optimizer's methods."""
    return _OURS in vars(optimizer)


def install_methods(piecewise: PiecewiseOptimizer) -> None:
    """Replace methods, so that they work on the model's parameters and the engine is notified of steps."""
    optimizer = piecewise.optimizer
    own = vars(optimizer)
    own[_OURS] = True
    own["_step_supports_amp_scaling"] = False  # so GradScaler unscales gradients itself; ranks agree on NaN/Inf
    surrounding_ids(piecewise)
    add_group = optimizer.add_param_group
    own["add_param_group"] = lambda param_group: piecewise.add_param_group(add_group, param_group)
    own["zero_grad"] = uncompiled(piecewise.zero_grad)
    own["state_dict"] = lambda: _state_dict(piecewise)
    own["load_state_dict"] = lambda state_dict: _load_state_dict(piecewise, state_dict)
    _tell_where_states_are(piecewise)
    _wrap_own_methods(piecewise)


class NoState:
    """The default factory of ``optimizer.state``: an empty dict for the class's own code, an error for any other.

    torch's factory makes an empty dict for any key that is missing. So code that logs ``optimizer.state[param]``, or
    resets what is there, would find nothing and change nothing, without an error.

    Args:
        holds_pieces: tells whether the class's own code runs now.
    """

    def __init__(self, holds_pieces: Callable[[], bool]) -> None:
        self._holds_pieces = holds_pieces

    def __call__(self) -> dict[str, Any]:
        """Make the state of a key that has none; RuntimeError unless the class's own code asks for it."""
        if self._holds_pieces():
            return {}
        raise RuntimeError(
            "optimizer.state: after a step, each rank keeps states for its pieces of parameters only; index it by "
            "those of zero.pieces(optimizer), or use zero.optim_state_dict(optimizer)"
        )

    def __reduce__(self) -> Any:  # a copied or pickled optimizer belongs to no engine
        return type, ({},)  # type({}) is dict, torch's factory


def _tell_where_states_are(piecewise: PiecewiseOptimizer) -> None:
    if isinstance(piecewise.optimizer.state, defaultdict):
        if (later := piecewise.operands.later) is not None:
            piecewise.optimizer.state = later.states(piecewise.optimizer.state)
        piecewise.optimizer.state.default_factory = NoState(lambda: piecewise.holds_pieces)


def _wrap_own_methods(piecewise: PiecewiseOptimizer) -> None:
    """Have methods beyond torch's interface (``eval()`` of schedule-free optimizers, say) run on pieces."""
    optimizer = piecewise.optimizer
    if type(optimizer).__module__.startswith("torch.optim."):
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
        piecewise.weights_changed()
        return result

    return run


# -- state ----------------------------------------------------------------------------------------------------------


def _state_dict(piecewise: PiecewiseOptimizer) -> dict[str, Any]:
    optimizer = piecewise.optimizer
    for hook in hooks_of(optimizer, "state_dict_pre").values():
        hook(optimizer)
    if any(group.params.shard_optim for group in piecewise.slots):
        raise RuntimeError(
            "optimizer.state_dict(): each rank holds a part of the states; use zero.optim_state_dict(optimizer) on "
            "every rank, or zeroshard.save()"
        )
    state = unsharded_state(piecewise, piecewise.slots)
    for hook in hooks_of(optimizer, "state_dict_post").values():
        changed = hook(optimizer, state)
        state = state if changed is None else changed
    return state


def _load_state_dict(piecewise: PiecewiseOptimizer, state_dict: Mapping[str, Any]) -> None:
    optimizer = piecewise.optimizer
    state_dict = dict(state_dict)
    for hook in hooks_of(optimizer, "load_state_dict_pre").values():
        changed = hook(optimizer, state_dict)
        state_dict = state_dict if changed is None else changed
    load_pieces(piecewise, cut_into_pieces(piecewise, state_dict))


def load_pieces(piecewise: PiecewiseOptimizer, state_dict: dict[str, Any]) -> None:
    """Load by the class's own `load_state_dict`, which knows the dtype and device of each kind of state.

    Args:
        piecewise: the optimizer that loads.
        state_dict: a state of this rank's pieces, numbered in their order.
    """
    optimizer = piecewise.optimizer
    try:
        with without_load_hooks(optimizer), piecewise.at_pieces():
            type(optimizer).load_state_dict(optimizer, state_dict)
    finally:
        _tell_where_states_are(piecewise)  # torch has put in another dict
    if piecewise.operands.formatted is not None:
        piecewise.operands.formatted.loaded(chain.from_iterable(piecewise.pieces))
    piecewise.has_state = True
