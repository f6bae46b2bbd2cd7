"""The user's optimizer over shards: the class that was asked for, given pieces of the masters.

[Note: Element by element]
    An optimizer whose update of an element depends on that element's own history alone computes on pieces of a
    tensor what it computes on the whole. It is given 1-D pieces, cut wherever shards end. One that looks at whole
    tensors is given whole tensors, each on the rank that owns it. Which of them a class is, and whether either will
    do, `requirements.classify` says.

[Note: Whose parameters]
    ``param_groups`` hold the model's parameters, as in one process: clipping, scalers and schedules read them there,
    and their ``grad`` is global. Only while the class's own code runs (its ``step``, ``add_param_group``, loading) they
    hold this rank's pieces. ``state`` is by piece.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from itertools import zip_longest
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.zero.buffers.unit import FlatGroup
from zeroshard.zero.optimizers.requirements import Scope, classify
from zeroshard.zero.optimizers.scope import no_class

# States that torch keeps as one number per parameter, not one per element.
SCALAR_STATES = frozenset({"step", "eta", "mu", "mu_product"})


@runtime_checkable
class SavesPasses(Protocol):
    """An optimizer that does as it passes over memory what would else take passes of its own.

    `zeroshard.optim.FusedAdamW` is one. Its ``step`` takes ``grad_scale``: a 0-dim fp32 tensor by which it multiplies
    gradients as it reads them.
    """

    def sum_of_squares(self, flat: Tensor) -> Tensor:
        """Of all elements of a contiguous tensor: 0-dim, float64, the same bits each time."""
        ...

    def write_copies(self, copies: Mapping[Tensor, Tensor]) -> None:
        """From now on, write each of these parameters, and no other, into the tensor beside it, in that one's dtype."""
        ...


class StepListener(Protocol):
    """What the engine does around an optimizer's step."""

    def keep_whole(self, params: set[nn.Parameter]) -> None:
        """An optimizer that needs these parameters as whole tensors is about to be given them."""
        ...

    def after_joining(self, optimizer: Optimizer, members: set[nn.Parameter]) -> None:
        """``members`` are all that this optimizer updates from now on."""
        ...

    def before_update(self, optimizer: Optimizer | None) -> Tensor | None:
        """Gradients are about to be used.

        Args:
            optimizer: who can be told what gradients are still to be multiplied by; None: nobody can.

        Returns:
            That factor; None where gradients are as they should be.
        """
        ...

    def after_update(self, optimizer: Optimizer) -> None:
        """The masters of this optimizer's parameters have changed."""
        ...

    def weights_changed(self, members: set[nn.Parameter]) -> None:
        """The masters of these parameters have changed, whether they had gradients or not."""
        ...

    def clear_grads(self, params: set[nn.Parameter] | None, *, set_to_none: bool) -> None:
        """Gradients are to be forgotten, or to be zero."""
        ...


class ShardedParams:
    """Translates the model's parameters into the pieces on this rank."""

    def __init__(self, groups: Iterable[FlatGroup]) -> None:
        self._homes: dict[nn.Parameter, tuple[FlatGroup, int]] = {}
        self._taken: set[nn.Parameter] = set()
        self.locate(groups)

    def locate(self, groups: Iterable[FlatGroup]) -> None:
        """Learn in which group and slot each parameter lies now."""
        for group in groups:
            for slot, param in enumerate(group.params.params):
                self._homes[param] = (group, slot)

    def take(self, given: Mapping[str, Any]) -> list[nn.Parameter]:
        """The parameters of a param group, which no other group may have from now on.

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
            if param in self._taken:
                raise ValueError(
                    f"params: a parameter of shape {tuple(param.shape)} is in two groups, or another optimizer of this "
                    "engine has it; name it once, and to begin anew clear that one's state (optimizer.state.clear())"
                )
            self._taken.add(param)
            chosen.append(param)
        return chosen

    def home(self, param: nn.Parameter) -> tuple[FlatGroup, int]:
        """The group that holds a parameter, and its slot there."""
        return self._homes[param]

    def name(self, param: nn.Parameter) -> str:
        """A parameter's ordinary name."""
        group, slot = self._homes[param]
        return group.params.layout.slots[slot].name

    def kept_whole(self) -> set[nn.Parameter]:
        """The parameters whose tensors are whole on one rank."""
        return {param for param, (group, _) in self._homes.items() if group.whole}

    def pieces(self, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """What this rank's optimizer sees of ``params``, in their order."""
        homes = (self._homes[param] for param in params)
        return [shard for group, slot in homes for _, shard in group.shards_of(slot)]

    @contextmanager
    def all_or_none(self) -> Generator[None]:
        """What `take` took in this block is free again if the block fails."""
        before = set(self._taken)
        try:
            yield
        except BaseException:
            self._taken = before
            raise


class PiecewiseOptimizer:
    """An optimizer over pieces, and the model's parameters that they are pieces of.

    Attributes:
        optimizer: of exactly the class that was asked for.
        by_group: for each of its param groups, the model's parameters.
        pieces: for each of its param groups, what this rank updates.
        holds_pieces: whether its param groups hold these now, as while the class's own code runs.
        has_state: whether it has stepped, or state was loaded into it: the same on every rank.
        sharded: where parameters lie.
        listener: what hears of its steps.
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
        self._make: Callable[[list[dict[str, Any]]], Optimizer] = partial(optimizer_cls, **kwargs)
        with sharded.all_or_none():
            self.by_group = [sharded.take(group) for group in groups]
            pairs = list(zip(groups, self.by_group, strict=True))
            whole = {param for group, chosen in pairs for param in _whole(optimizer_cls, kwargs, group, chosen)}
            if whole:
                # Before anything is laid out anew, the class may refuse what it is given by shape.
                self._make([{**group, "params": [_stand_in(param) for param in chosen]} for group, chosen in pairs])
                listener.keep_whole(whole)
            self.pieces = [sharded.pieces(chosen) for chosen in self.by_group]
            self.optimizer = self._make(
                [{**group, "params": pieces} for group, pieces in zip(groups, self.pieces, strict=True)]
            )
        listener.after_joining(self.optimizer, self.members)
        self.show_params()

    @classmethod
    def adopted(cls, optimizer: Optimizer, sharded: ShardedParams, listener: StepListener) -> PiecewiseOptimizer:
        """One that the user has made over the model's parameters; its states are cut into pieces by the caller.

        Raises:
            ValueError: it holds other parameters too, or is of a class that no layout suits.
            RuntimeError: it needs tensors that are whole.
        """
        self = cls.__new__(cls)
        name = type(optimizer).__name__
        accepted = signature(type(optimizer)).parameters
        kwargs = {key: value for key, value in optimizer.defaults.items() if key in accepted}
        self.optimizer, self.sharded, self.listener, self._kwargs = optimizer, sharded, listener, kwargs
        self.has_state, self.holds_pieces = bool(optimizer.state), False
        self._make = partial(type(optimizer), **kwargs)
        with sharded.all_or_none():
            self.by_group = [sharded.take(group) for group in optimizer.param_groups]
            for group, chosen in zip(optimizer.param_groups, self.by_group, strict=True):
                try:
                    whole = _whole(type(optimizer), kwargs, group, chosen)
                except TypeError as error:  # its settings do not tell how it was built
                    raise ValueError(f"step: {error}; make it by zero.optimizer({name}, ...)") from error
                if whole - sharded.kept_whole():
                    raise RuntimeError(
                        f"step: {name} needs tensors that are whole on one rank; make it by zero.optimizer({name}, ...)"
                    )
            self.pieces = [sharded.pieces(chosen) for chosen in self.by_group]
        return self

    @property
    def members(self) -> set[nn.Parameter]:
        """The model's parameters that it updates."""
        return {param for chosen in self.by_group for param in chosen}

    def made_of(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Another one of the same class and settings, over these param groups."""
        return self._make(groups)

    # -- whose parameters -------------------------------------------------------------------------------------

    def show_pieces(self) -> None:
        """Have the param groups hold this rank's pieces, as the class's own code needs them.

        Raises:
            ValueError: groups, or parameters in them, are not those that it was given.
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
        """Hold the pieces of its parameters where they lie now; for an optimizer without state."""
        assert not self.has_state
        self.pieces = [self.sharded.pieces(chosen) for chosen in self.by_group]
        # Some classes have state from the start (Adagrad): that of the new pieces.
        groups = zip(self.optimizer.param_groups, self.pieces, strict=True)
        fresh = self._make([{**group, "params": pieces} for group, pieces in groups])
        self.optimizer.state.clear()
        self.optimizer.state.update(fresh.state)
        self._join()

    def hold_pieces(self) -> None:
        """Hold the pieces of its parameters where they lie now; their states are there already."""
        self.pieces = [self.sharded.pieces(chosen) for chosen in self.by_group]
        self._join()

    def _join(self) -> None:
        with self.at_pieces():
            self.listener.after_joining(self.optimizer, self.members)

    def add_param_group(self, add_group: Callable[[dict[str, Any]], None], given: dict[str, Any]) -> None:
        """Add a group of the model's parameters; ``add_group``: as the class does."""
        with self.sharded.all_or_none():
            chosen = self.sharded.take(given)
            whole = _whole(type(self.optimizer), self._kwargs, given, chosen)
            if whole:
                self._make([{**given, "params": [_stand_in(param) for param in chosen]}])
                self.listener.keep_whole(whole)
            pieces = self.sharded.pieces(chosen)
            self.show_pieces()
            try:
                add_group({**given, "params": pieces})
                self.by_group.append(chosen)
                self.pieces.append(pieces)
            finally:
                self.show_params()
        self._join()


def _are(found: Iterable[Any], expected: Sequence[Any]) -> bool:
    found = list(found)
    return len(found) == len(expected) and all(a is b for a, b in zip(found, expected, strict=True))


def _whole(
    optimizer_cls: type[Optimizer], kwargs: Mapping[str, Any], group: Mapping[str, Any], chosen: list[nn.Parameter]
) -> set[nn.Parameter]:
    """Those of a group's parameters whose tensors must be whole: all or none; ValueError where even that won't do."""
    device = chosen[0].device if chosen else torch.device("cpu")
    kind = classify(optimizer_cls, kwargs, group, device)
    if kind.refused:
        raise ValueError(f"optimizer_cls: {optimizer_cls.__name__} cannot be sharded: {kind.reason}")
    return set(chosen) if kind.scope is Scope.PER_TENSOR else set()


def _stand_in(param: nn.Parameter) -> nn.Parameter:
    """A parameter of the same shape, dtype and device without memory of its own."""
    nothing = torch.zeros((), dtype=param.dtype, device=param.device)
    return nn.Parameter(nothing.expand(param.shape), requires_grad=param.requires_grad)
