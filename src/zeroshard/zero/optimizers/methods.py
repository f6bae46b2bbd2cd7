"""Replaces methods of the user's optimizer, so that they do what they would do in one process, or raise a clear error.

The replacements are attributes of the instance: its type stays exactly the user's class.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import wraps
from itertools import chain
from types import FunctionType, MappingProxyType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from zeroshard.host.torch_internals import hooks_of, without_state_hooks
from zeroshard.host.uncompiled import uncompiled
from zeroshard.zero.buffers.unit import FlatGroup
from zeroshard.zero.core.optimizer import State
from zeroshard.zero.optimizers.adoption import KNOWN
from zeroshard.zero.optimizers.operands import Lists
from zeroshard.zero.optimizers.piecewise import PiecewiseOptimizer
from zeroshard.zero.optimizers.state_dict import cut_into_pieces, unsharded_state
from zeroshard.zero.optimizers.step_hooks import surrounding_ids


def install_methods(piecewise: PiecewiseOptimizer) -> None:
    """Replace methods, so that they work on the model's parameters and the engine is notified of steps."""
    optimizer = piecewise.optimizer
    own = vars(optimizer)
    own[KNOWN] = True
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
    if any(group.params.shard_optim and group.params.comm.world_size > 1 for group in piecewise.slots):
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
    piecewise.listener.note_call(f"{type(optimizer).__name__}.load_state_dict")
    state_dict = dict(state_dict)
    for hook in hooks_of(optimizer, "load_state_dict_pre").values():
        changed = hook(optimizer, state_dict)
        state_dict = state_dict if changed is None else changed
    cut = cut_into_pieces(piecewise, state_dict)
    load = StateLoad(piecewise, cut.settings, cut.others, cut.added)
    for group in piecewise.slots:
        load.take(group, cut.states)
    load.end()


class StateLoad:
    """A load of states into an optimizer over pieces, a unit at a time: so states that leave need memory for one unit.

    The class's own `load_state_dict` knows the dtype and device of each kind of state. It is called for each unit, or
    if the class may not be called so, for all of them at the end.

    Args:
        piecewise: the optimizer that loads.
        settings: of each of its param groups, which the class loads; None: they do not change.
        others: states of no parameter.
        added: what the class's own ``state_dict`` adds to torch's.
    """

    def __init__(
        self,
        piecewise: PiecewiseOptimizer,
        settings: Sequence[Mapping[str, Any]] | None = None,
        others: Mapping[Any, Any] = MappingProxyType({}),
        added: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._of, self._others, self._added = piecewise, others, added
        self._settings = settings or [dict(group) for group in piecewise.optimizer.param_groups]
        self._by_unit = piecewise.is_called_by_unit
        self._waiting: dict[nn.Parameter, State] = {}
        self._loaded: dict[Any, Any] = {}

    def take(self, group: FlatGroup, states: MutableMapping[nn.Parameter, State]) -> None:
        """Take out of ``states`` those of the optimizer's pieces in ``group``, and load them."""
        own = set(group.shards_now)
        lists = [[piece for piece in pieces if piece in own] for pieces in self._of.pieces]
        found = {piece: states.pop(piece) for piece in chain.from_iterable(lists) if piece in states}
        if not self._by_unit:
            self._waiting |= found
        elif any(found.values()):
            self._load(lists, found)
            self._of.operands.loaded(self._of.optimizer, group, list(found))
            self._loaded.update(self._of.optimizer.state)

    def end(self) -> None:
        """Load what has waited, and show all that was loaded, in the order of the pieces."""
        piecewise, state = self._of, self._of.optimizer.state
        if not self._loaded:
            self._load(piecewise.pieces, self._waiting)
            for group in piecewise.slots:
                pieces = [piece for piece in group.shards_now if piece in self._waiting]
                piecewise.operands.loaded(piecewise.optimizer, group, pieces)
        else:
            pieces = [piece for piece in chain.from_iterable(piecewise.pieces) if piece in self._loaded]
            ordered = {piece: self._loaded.pop(piece) for piece in pieces}
            state.clear()
            state.update(self._loaded | ordered)
        piecewise.has_state = True

    def _load(self, lists: Lists, states: Mapping[nn.Parameter, State]) -> None:
        """Have the class load the states of these pieces; it then has no others."""
        piecewise, optimizer = self._of, self._of.optimizer
        numbers = {piece: number for number, piece in enumerate(chain.from_iterable(lists))}
        numbered = {numbers[piece]: state for piece, state in states.items() if state}
        groups = [
            {**settings, "params": [numbers[piece] for piece in pieces]}
            for settings, pieces in zip(self._settings, lists, strict=True)
        ]
        try:
            with without_state_hooks(optimizer), piecewise.at_pieces():  # `_load_state_dict` called them
                for group, pieces in zip(optimizer.param_groups, lists, strict=True):
                    group["params"] = pieces
                saved = {**self._added, "state": {**self._others, **numbered}, "param_groups": groups}
                type(optimizer).load_state_dict(optimizer, saved)
        finally:
            _tell_where_states_are(piecewise)  # torch has put in another dict
