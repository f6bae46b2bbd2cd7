"""The user's optimizer over shards: the class that was asked for, given pieces of the masters.

[Note: Element by element]
    An optimizer whose update of an element depends on that element's own history alone computes on pieces of a
    tensor what it computes on the whole. It is given 1-D pieces, cut wherever shards end. One that looks at whole
    tensors is given whole tensors, each on the rank that owns it. Which of them a class is, and whether either will
    do, is found out by `contract.classify`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.zero.contract import Scope, classify
from zeroshard.zero.unit import FlatGroup

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

    def clear_grads(self, params: set[nn.Parameter] | None, *, set_to_none: bool) -> None:
        """Gradients are to be forgotten, or to be zero."""
        ...


class ShardedParams:
    """Translates the model's parameters into the pieces on this rank."""

    def __init__(self, groups: Iterable[FlatGroup]) -> None:
        self._homes: dict[nn.Parameter, tuple[FlatGroup, int]] = {}
        self._taken: set[nn.Parameter] = set()
        self.locate(groups)

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self._homes)

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
                raise ValueError(f"params: a parameter of shape {tuple(param.shape)} is in two groups; name it once")
            self._taken.add(param)
            chosen.append(param)
        return chosen

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
        has_state: whether it has stepped, or state was loaded into it: the same on every rank.
    """

    def __init__(
        self,
        optimizer_cls: type[Optimizer],
        params: Iterable[Any] | None,
        kwargs: dict[str, Any],
        sharded: ShardedParams,
        listener: StepListener,
    ) -> None:
        if not (isinstance(optimizer_cls, type) and issubclass(optimizer_cls, Optimizer)):
            raise TypeError(
                f"optimizer_cls: {optimizer_cls!r} is not a torch.optim.Optimizer class; give the class itself"
            )
        given = list(sharded) if params is None else params
        if isinstance(given, Tensor):
            raise TypeError("params: give an iterable of parameters or of group dicts, not one tensor")
        given: list[Any] = list(given)
        if not given:
            raise ValueError("params: the optimizer got an empty list; give it at least one parameter")
        groups: list[dict[str, Any]] = given if isinstance(given[0], dict) else [{"params": given}]
        self.sharded, self.listener = sharded, listener
        self.has_state = False
        self._make: Callable[[list[dict[str, Any]]], Optimizer] = partial(optimizer_cls, **kwargs)
        with sharded.all_or_none():
            self.by_group = [sharded.take(group) for group in groups]
            pairs = list(zip(groups, self.by_group, strict=True))
            whole = {param for group, chosen in pairs for param in _whole(optimizer_cls, kwargs, group, chosen)}
            if whole:
                # Before anything is laid out anew, the class may refuse what it is given by shape.
                self._make([{**group, "params": [_stand_in(param) for param in chosen]} for group, chosen in pairs])
                listener.keep_whole(whole)
            self.optimizer = self._make([{**group, "params": sharded.pieces(chosen)} for group, chosen in pairs])
        self._kwargs = kwargs
        self._listen()
        listener.after_joining(self.optimizer, self.members)

    @property
    def members(self) -> set[nn.Parameter]:
        """The model's parameters that it updates."""
        return {param for chosen in self.by_group for param in chosen}

    def take_pieces_anew(self) -> None:
        """Hold the pieces of its parameters where they lie now; for an optimizer without state."""
        assert not self.has_state
        groups = self._point_at_pieces()
        # Some classes have state from the start (Adagrad): that of the new pieces.
        fresh = self._make([dict(group) for group in groups])
        self.optimizer.state.clear()
        self.optimizer.state.update(fresh.state)
        self.listener.after_joining(self.optimizer, self.members)

    def hold_pieces(self) -> None:
        """Hold the pieces of its parameters where they lie now; their states are there already."""
        self._point_at_pieces()
        self.listener.after_joining(self.optimizer, self.members)

    def _point_at_pieces(self) -> list[dict[str, Any]]:
        groups = self.optimizer.param_groups
        assert len(groups) == len(self.by_group), "param groups were taken out of the optimizer"
        for group, chosen in zip(groups, self.by_group, strict=True):
            group["params"] = self.sharded.pieces(chosen)
        return groups

    def _add_param_group(self, add_group: Callable[[dict[str, Any]], None], given: dict[str, Any]) -> None:
        with self.sharded.all_or_none():
            chosen = self.sharded.take(given)
            whole = _whole(type(self.optimizer), self._kwargs, given, chosen)
            if whole:
                self._make([{**given, "params": [_stand_in(param) for param in chosen]}])
                self.listener.keep_whole(whole)
            add_group({**given, "params": self.sharded.pieces(chosen)})
        self.by_group.append(chosen)
        self.listener.after_joining(self.optimizer, self.members)

    def _listen(self) -> None:
        optimizer, listener = self.optimizer, self.listener
        add_group = optimizer.add_param_group

        def add_param_group(param_group: dict[str, Any]) -> None:
            self._add_param_group(add_group, param_group)

        def zero(set_to_none: bool = True) -> None:
            listener.clear_grads(self.members, set_to_none=set_to_none)

        def before(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
            itself, *given = args  # torch passes the optimizer along
            closure = given[0] if given else kwargs.get("closure")
            if closure is None:
                factor = listener.before_update(optimizer)
                if factor is None:
                    return None
                own = kwargs.get("grad_scale")
                return args, {**kwargs, "grad_scale": factor if own is None else own * factor}
            wrapped = _once_then(closure, lambda: listener.before_update(None))
            return ((itself, wrapped, *given[1:]), kwargs) if given else (args, {**kwargs, "closure": wrapped})

        def after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.has_state = True
            listener.after_update(optimizer)

        def loaded(_: Optimizer) -> None:
            self.has_state = True

        # On the instance, so that its type stays exactly the user's class.
        optimizer.add_param_group = add_param_group
        optimizer.zero_grad = zero
        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
        optimizer.register_load_state_dict_post_hook(loaded)


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
    return nn.Parameter(param.detach().new_zeros(()).expand(param.shape), requires_grad=param.requires_grad)


def _once_then(closure: Callable[[], Any], after: Callable[[], Any]) -> Callable[[], Any]:
    """The closure runs backward inside ``step``: only after it are there gradients to use."""
    called = False

    def run() -> Any:
        nonlocal called
        if called:
            raise RuntimeError(
                "step: the optimizer calls its closure a second time, and ranks would compute with weights from before "
                "the step; use an optimizer that calls it once"
            )
        called = True
        result = closure()
        after()
        return result

    return torch.enable_grad()(run)
