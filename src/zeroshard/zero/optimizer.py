"""The user's optimizer over shards: the class that was asked for, given 1-D pieces of the masters.

[Note: Element by element]
    An optimizer whose update of an element depends on that element's own history alone computes on pieces of a
    tensor what it computes on the whole. Every optimizer of `torch.optim` does, but for those named in `REFUSED`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.zero.unit import FlatGroup

REFUSED: dict[str, str] = {
    "LBFGS": "it needs all parameters in one vector and calls the closure several times a step",
    "SparseAdam": "it takes sparse gradients only, and reduced gradients are dense",
    "Adafactor": "it factors the second moment of whole matrices, and would see one-dimensional pieces",
    "Muon": "it orthogonalises whole matrices, and would see one-dimensional pieces",
}

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
        """From now on, write each of these parameters into the tensor beside it too, in that one's dtype."""
        ...


class StepListener(Protocol):
    """What the engine does around an optimizer's step."""

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
        for group in groups:
            for slot, param in enumerate(group.params.params):
                self._homes[param] = (group, slot)
        self._taken: set[nn.Parameter] = set()

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self._homes)

    def group(self, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[nn.Parameter]]:
        """A param group of the model's parameters as one of their pieces, and those parameters.

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
        shards = [shard for param in chosen for _, shard in self.home(param)[0].shards_of(self.home(param)[1])]
        return {**given, "params": shards}, chosen

    @contextmanager
    def all_or_none(self) -> Generator[None]:
        """What `group` took in this block is free again if the block fails."""
        before = set(self._taken)
        try:
            yield
        except BaseException:
            self._taken = before
            raise

    def home(self, param: nn.Parameter) -> tuple[FlatGroup, int]:
        """The flat group that holds a parameter, and its slot."""
        return self._homes[param]


def check_class(optimizer_cls: type[Optimizer]) -> None:
    """Raise for a class that is no optimizer (TypeError), or that cannot work on pieces of tensors (ValueError)."""
    if not (isinstance(optimizer_cls, type) and issubclass(optimizer_cls, Optimizer)):
        raise TypeError(f"optimizer_cls: {optimizer_cls!r} is not a torch.optim.Optimizer class; give the class itself")
    for base in optimizer_cls.__mro__:
        if base.__module__.startswith("torch.optim") and base.__name__ in REFUSED:
            raise ValueError(f"optimizer_cls: {optimizer_cls.__name__} cannot be sharded: {REFUSED[base.__name__]}")


def build_optimizer(
    optimizer_cls: type[Optimizer],
    params: Iterable[Any] | None,
    kwargs: dict[str, Any],
    sharded: ShardedParams,
    listener: StepListener,
) -> tuple[Optimizer, set[nn.Parameter]]:
    """An ``optimizer_cls`` over pieces that tells ``listener`` of its steps, and the model's parameters it updates."""
    check_class(optimizer_cls)
    given = list(sharded) if params is None else params
    if isinstance(given, Tensor):
        raise TypeError("params: give an iterable of parameters or of group dicts, not one tensor")
    given: list[Any] = list(given)
    if not given:
        raise ValueError("params: the optimizer got an empty list; give it at least one parameter")
    groups: list[dict[str, Any]] = given if isinstance(given[0], dict) else [{"params": given}]
    members: set[nn.Parameter] = set()
    mapped = []
    with sharded.all_or_none():
        for group in groups:
            shards, chosen = sharded.group(group)
            mapped.append(shards)
            members.update(chosen)
        optimizer = optimizer_cls(mapped, **kwargs)
    _listen(optimizer, sharded, listener, members)
    listener.after_joining(optimizer, members)
    return optimizer, members


def _listen(optimizer: Optimizer, sharded: ShardedParams, listener: StepListener, members: set[nn.Parameter]) -> None:
    add_group = optimizer.add_param_group

    def add_param_group(param_group: dict[str, Any]) -> None:
        with sharded.all_or_none():
            shards, chosen = sharded.group(param_group)
            add_group(shards)
        members.update(chosen)
        listener.after_joining(optimizer, members)

    def zero(set_to_none: bool = True) -> None:
        listener.clear_grads(members, set_to_none=set_to_none)

    def before(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        itself, *given = args  # torch passes the optimizer along
        closure = given[0] if given else kwargs.get("closure")
        if closure is None:
            factor = listener.before_update(optimizer)
            if factor is None:
                return None
            own = kwargs.get("grad_scale")
            return args, {**kwargs, "grad_scale": factor if own is None else own * factor}
        wrapped = _then(closure, lambda: listener.before_update(None))
        return ((itself, wrapped, *given[1:]), kwargs) if given else (args, {**kwargs, "closure": wrapped})

    # On the instance, so that its type stays exactly the user's class.
    optimizer.add_param_group = add_param_group
    optimizer.zero_grad = zero
    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(lambda optim, args, kwargs: listener.after_update(optim))


def _then(closure: Callable[[], Any], after: Callable[[], Any]) -> Callable[[], Any]:
    """The closure runs backward inside ``step``: only after it are there gradients to use."""

    def run() -> Any:
        result = closure()
        after()
        return result

    return torch.enable_grad()(run)
