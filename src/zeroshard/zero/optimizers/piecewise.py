"""The user's optimizer over shards: the class that the user asked for, which is given pieces of the master weights.

[Note: Element by element]
    An optimizer whose update of an element depends on that element's own history alone computes the same on pieces of
    a tensor as on the whole tensor. It is given 1-D pieces, cut wherever shards end. One that looks at whole tensors
    is given whole tensors, each on the rank that owns it. `requirements.classify` says which of the two a class needs,
    and whether either is right for it.

[Note: Whose parameters]
    ``param_groups`` hold the model's parameters, as in one process: clipping, scalers and schedules read them there,
    and their ``grad`` is global. Only while the class's own code runs (its ``step``, ``add_param_group``, loading) do
    they hold this rank's pieces. The keys of ``state`` are pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from itertools import zip_longest
from operator import is_
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.zero.buffers.unit import FlatGroup
from zeroshard.zero.optimizers.kept_states import ParamFacts
from zeroshard.zero.whole_tensors.reach import no_class
from zeroshard.zero.whole_tensors.requirements import Reach, classify

# States that torch keeps as one number per parameter, not one per element.
SCALAR_STATES = frozenset({"step", "eta", "mu", "mu_product"})


class StepListener(Protocol):
    """What the engine does around an optimizer's step: `zeroshard.zero.stepping.engine_optimizers` does it."""

    def keep_tensors_whole(self, params: set[nn.Parameter]) -> None:
        """Lay these parameters out as whole tensors."""

    def before_update(self, optimizer: Optimizer | None) -> None:
        """Refuse a step of this optimizer (None: of one with a closure) that would be wrong."""

    def after_update(self, optimizer: Optimizer) -> None:
        """Note that a step of this optimizer has changed the master weights of its parameters."""

    def weights_changed(self, members: set[nn.Parameter]) -> None:
        """Note that the master weights of these parameters have changed, whether they had gradients or not."""

    def clear_grads(self, params: set[nn.Parameter] | None, *, set_to_none: bool) -> None:
        """Clear the gradients of ``params`` (None: of all), or set them to zero."""


class ShardedParams:
    """Translates the model's parameters into the pieces on this rank."""

    def __init__(self, groups: Iterable[FlatGroup]) -> None:
        self._homes: dict[nn.Parameter, tuple[FlatGroup, int]] = {}
        self._claimed: set[nn.Parameter] = set()
        self.locate(groups)

    def locate(self, groups: Iterable[FlatGroup]) -> None:
        """Record in which group and slot each parameter is now."""
        for group in groups:
            for slot, param in enumerate(group.params.params):
                self._homes[param] = (group, slot)

    def claim(self, given: Mapping[str, Any]) -> list[nn.Parameter]:
        """Return the parameters of a param group, and refuse them to any other group from now on.

        Raises:
            TypeError: ``params`` is a set or holds something that is no tensor.
            ValueError: a parameter that is not the model's, or that another group has.
        """
        members = given["params"]
        if isinstance(members, Tensor):
            members = [members]
        if isinstance(members, set):
            raise TypeError("params: a set has no order, and ranks must agree on one; give a list")
        chosen: list[nn.Parameter] = []
        for member in members:
            param = member[1] if isinstance(member, tuple) else member  # named_parameters() gives pairs
            if not isinstance(param, Tensor):
                raise TypeError(f"params: a {type(param).__name__} is no parameter; give the model's parameters")
            if param not in self._homes:
                raise ValueError(
                    f"params: a tensor of shape {tuple(param.shape)} is no parameter of the model; "
                    "take parameters from the model after Zero(model) was built"
                )
            if param in self._claimed:
                raise ValueError(
                    f"params: a parameter of shape {tuple(param.shape)} is in two groups, or another optimizer of this "
                    "engine has it; name it once, and to begin anew clear that one's state (optimizer.state.clear())"
                )
            self._claimed.add(param)
            chosen.append(param)
        return chosen

    def home(self, param: nn.Parameter) -> tuple[FlatGroup, int]:
        """The group that holds a parameter, and its slot there."""
        return self._homes[param]

    def name(self, param: nn.Parameter) -> str:
        """A parameter's ordinary name."""
        group, slot = self._homes[param]
        return group.params.layout.slots[slot].name

    def present(self, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Those of ``params`` that have not left the model."""
        return [param for param in params if param not in self._homes[param][0].params.absent]

    def kept_whole(self) -> set[nn.Parameter]:
        """The parameters whose layout keeps each tensor whole on one rank."""
        return {param for param, (group, _) in self._homes.items() if group.keeps_tensors_whole}

    def pieces(self, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """This rank's pieces of ``params``, in their order."""
        homes = (self._homes[param] for param in params)
        return [shard for group, slot in homes for _, shard in group.shards_of(slot)]

    @contextmanager
    def all_or_none(self) -> Generator[None]:
        """If this block fails, let other groups have the parameters that `take` returned in it."""
        before = set(self._claimed)
        try:
            yield
        except BaseException:
            self._claimed = before
            raise


class PiecewiseOptimizer:
    """An optimizer over pieces, and the model's parameters that they are pieces of: [Note: Whose parameters].

    Attributes:
        optimizer: an instance of exactly the class that was asked for.
        make: makes another one, of the same class and settings, over the param groups that it is given.
        by_group: the model's parameters, for each param group.
        pieces: the pieces that this rank updates, for each param group.
        holds_pieces: whether its param groups hold the pieces now, as they do while the class's own code runs.
        has_state: whether it has stepped, or state was loaded into it: the same on every rank.
        sharded: maps parameters to their groups and pieces.
        listener: is notified of its steps.
    """

    def __init__(
        self,
        optimizer_cls: type[Optimizer],
        params: Iterable[Any],
        kwargs: dict[str, Any],
        sharded: ShardedParams,
        listener: StepListener,
    ) -> None:
        if not (isinstance(optimizer_cls, type) and issubclass(optimizer_cls, Optimizer)):
            raise TypeError(no_class(optimizer_cls))
        if isinstance(params, Tensor):
            raise TypeError("params: give an iterable of parameters or of group dicts, not one tensor")
        given: list[Any] = list(params)
        if not given:
            raise ValueError("params: the optimizer got an empty list; give it at least one parameter")
        groups: list[dict[str, Any]] = given if isinstance(given[0], dict) else [{"params": given}]
        self.sharded, self.listener, self._kwargs = sharded, listener, kwargs
        self.has_state, self.holds_pieces = False, True
        self._members: set[nn.Parameter] = set()
        self.make = partial(optimizer_cls, **kwargs)
        with sharded.all_or_none():
            self.by_group = [sharded.claim(group) for group in groups]
            pairs = list(zip(groups, self.by_group, strict=True))
            kept_whole = {
                param for group, chosen in pairs for param in _kept_whole(optimizer_cls, kwargs, group, chosen)
            }
            if kept_whole:
                # Build the class once before anything is laid out anew: it may refuse parameters by their shape.
                self.make([{**group, "params": [_stand_in(param) for param in chosen]} for group, chosen in pairs])
                listener.keep_tensors_whole(kept_whole)
            self.pieces = [sharded.pieces(chosen) for chosen in self.by_group]
            self.optimizer = self.make(
                [{**group, "params": pieces} for group, pieces in zip(groups, self.pieces, strict=True)]
            )
        self.show_params()

    @classmethod
    def adopted(
        cls, optimizer: Optimizer, sharded: ShardedParams, listener: StepListener, *, may_move: bool
    ) -> PiecewiseOptimizer:
        """Wrap an optimizer that the user has made over the model's parameters; the caller cuts its states into pieces.

        Raises:
            ValueError: it holds other parameters too, or is of a class that cannot be sharded.
            RuntimeError: it needs whole tensors, and some are cut into pieces that may not move, or cannot.
        """
        self = cls.__new__(cls)
        name = type(optimizer).__name__
        accepted = signature(type(optimizer)).parameters
        kwargs = {key: value for key, value in optimizer.defaults.items() if key in accepted}
        self.optimizer, self.sharded, self.listener, self._kwargs = optimizer, sharded, listener, kwargs
        self.has_state, self.holds_pieces = bool(optimizer.state), False
        self._members = set()
        self.make = partial(type(optimizer), **kwargs)
        with sharded.all_or_none():
            self.by_group = [sharded.claim(group) for group in optimizer.param_groups]
            for group, chosen in zip(optimizer.param_groups, self.by_group, strict=True):
                try:
                    kept_whole = _kept_whole(type(optimizer), kwargs, group, chosen)
                except TypeError as error:  # its settings do not tell how it was built
                    raise ValueError(f"step: {error}; make it by zero.optimizer({name}, ...)") from error
                cut = kept_whole - sharded.kept_whole()
                if cut and not may_move:
                    raise RuntimeError(
                        f"step: {name} needs tensors that are whole on one rank; make it by zero.optimizer({name}, ...)"
                    )
                if cut:
                    listener.keep_tensors_whole(cut)
            self.pieces = [sharded.pieces(chosen) for chosen in self.by_group]
        return self

    @property
    def members(self) -> set[nn.Parameter]:
        """The model's parameters that it updates."""
        if len(self._members) != sum(map(len, self.by_group)):  # no parameter is in two groups, and none leaves one
            self._members = {param for chosen in self.by_group for param in chosen}
        return self._members

    def facts(self) -> list[list[ParamFacts]]:
        """What the optimizer knows of its parameters that are in the model, for each param group."""
        return [[self._facts_of(param) for param in self.sharded.present(chosen)] for chosen in self.by_group]

    def _facts_of(self, param: nn.Parameter) -> ParamFacts:
        group, slot = self.sharded.home(param)
        params, shape = group.params, group.params.layout.slots[slot].shape
        return ParamFacts(
            self.sharded.name(param), tuple(shape), params.dtype, params.master.device, group.keeps_tensors_whole
        )

    # -- whose parameters -------------------------------------------------------------------------------------

    def show_pieces(self) -> None:
        """Have the param groups hold this rank's pieces, as the class's own code needs them.

        Raises:
            ValueError: groups, or parameters in them, are not those that the optimizer was given.
        """
        groups = self.optimizer.param_groups
        if self.holds_pieces:
            return
        for group, chosen in zip_longest(groups, self.by_group):
            if group is None or chosen is None or not _are(group["params"], chosen):
                raise ValueError(
                    "param_groups: groups or their params were changed by hand; use optimizer.add_param_group(), or "
                    "make the optimizer anew"
                )
        for group, pieces in zip(groups, self.pieces, strict=True):
            group["params"] = pieces
        self.holds_pieces = True

    def show_params(self) -> None:
        """Have the param groups hold the model's parameters, as the user knows them."""
        for group, chosen in zip(self.optimizer.param_groups, self.by_group, strict=True):
            group["params"] = list(chosen)
        self.holds_pieces = False

    @contextmanager
    def at_pieces(self) -> Generator[None]:
        """In this block the param groups hold this rank's pieces."""
        if self.holds_pieces:
            yield
            return
        self.show_pieces()
        try:
            yield
        finally:
            self.show_params()

    def take_pieces_anew(self) -> None:
        """Take the pieces in the current groups, to which parameters have moved; for an optimizer without state."""
        assert not self.has_state
        self.pieces = [self.sharded.pieces(chosen) for chosen in self.by_group]
        # Some classes (Adagrad) have state from the start: take the state that is made for the new pieces.
        groups = zip(self.optimizer.param_groups, self.pieces, strict=True)
        fresh = self.make([{**group, "params": pieces} for group, pieces in groups])
        self.optimizer.state.clear()
        self.optimizer.state.update(fresh.state)

    def hold_pieces(self) -> None:
        """Take the pieces in the current groups, by which its states are already."""
        self.pieces = [self.sharded.pieces(chosen) for chosen in self.by_group]

    def add_param_group(self, add_group: Callable[[dict[str, Any]], None], given: dict[str, Any]) -> None:
        """Add a group of the model's parameters; ``add_group``: the class's own method."""
        with self.sharded.all_or_none():
            chosen = self.sharded.claim(given)
            kept_whole = _kept_whole(type(self.optimizer), self._kwargs, given, chosen)
            if kept_whole:
                self.make([{**given, "params": [_stand_in(param) for param in chosen]}])
                self.listener.keep_tensors_whole(kept_whole)
            pieces = self.sharded.pieces(chosen)
            self.show_pieces()
            try:
                add_group({**given, "params": pieces})
                self.by_group.append(chosen)
                self.pieces.append(pieces)
            finally:
                self.show_params()


def _are(found: Iterable[Any], expected: Sequence[Any]) -> bool:
    found = list(found)
    return len(found) == len(expected) and all(map(is_, found, expected))


def _kept_whole(
    optimizer_cls: type[Optimizer], kwargs: Mapping[str, Any], group: Mapping[str, Any], chosen: list[nn.Parameter]
) -> set[nn.Parameter]:
    """Those of a group's parameters that must be whole tensors, all or none: [Note: Element by element].

    ValueError: the class is refused.
    """
    device = chosen[0].device if chosen else torch.device("cpu")
    kind = classify(optimizer_cls, kwargs, group, device)
    if kind.refused:
        raise ValueError(f"optimizer_cls: {optimizer_cls.__name__} cannot be sharded: {kind.reason}")
    return set(chosen) if kind.reach is Reach.PER_TENSOR else set()


def _stand_in(param: nn.Parameter) -> nn.Parameter:
    """A parameter of the same shape, dtype and device without memory of its own."""
    nothing = torch.zeros((), dtype=param.dtype, device=param.device)
    return nn.Parameter(nothing.expand(param.shape), requires_grad=param.requires_grad)
