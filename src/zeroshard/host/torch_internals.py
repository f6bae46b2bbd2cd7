"""Every name of torch beginning with an underscore that the engine uses, each with the public way that is missing.

Tests of each are those of the feature that uses it: if torch drops a name, this file fails to import, or they fail.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._autograd import _unsafe_set_version_counter
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._compile import _disable_dynamo
from torch._guards import CompileContext
from torch.nn.modules.module import _IncompatibleKeys as IncompatibleKeys
from torch.optim import Optimizer
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [  # with public names in modules that have none
    "IncompatibleKeys",  # what `nn.Module.load_state_dict` returns
    "is_functorch_wrapped_tensor",  # whether a tensor stands for several, inside of vmap and its kin
    "is_traceable_wrapper_subclass",  # whether a tensor is made of others, as DTensor is
    "tree_leaves",  # of nested containers, as autograd and dynamo walk them
    "tree_map",
]

# -- autograd -------------------------------------------------------------------------------------------------------


def in_backward() -> bool:
    """Whether this thread is inside autograd's backward. No public way; FSDP2 asks this, too."""
    return torch._C._current_graph_task_id() != -1


def at_end_of_backward(run: Callable[[], None]) -> None:
    """Call ``run`` when the backward that runs now is over. No public way; DDP and FSDP2 use this one.

    Raises:
        RuntimeError: compiled autograd runs it: it forgets such calls where they come from code that is not compiled.
    """
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled is not None and compiled.in_compiled_autograd_region:
        raise RuntimeError(
            "backward: compiled autograd does not tell when a backward is over, and gradients would stay unreduced; "
            "leave torch._dynamo.config.compiled_autograd off (torch.compile works without it)"
        )
    torch.autograd.Variable._execution_engine.queue_callback(run)


def version_of(tensor: Tensor) -> int:
    """How often the tensor was written to, as autograd counts. No public way; documented for `autograd.Function`."""
    return tensor._version


def versions_of(tensors: Iterable[Tensor]) -> int:
    """The sum of the tensors' versions, which grows with each write to one of them."""
    return sum([tensor._version for tensor in tensors])


def set_versions(params: Sequence[Tensor], numbers: Sequence[int]) -> None:
    """Set versions back; `torch.autograd.graph.increment_version` only counts on."""
    _unsafe_set_version_counter(tuple(params), tuple(numbers))


def base_of(view: Tensor) -> Tensor | None:
    """The tensor of which ``view`` is a view for autograd; None: it is none. No public way."""
    return view._base if view._is_view() else None


# -- the compiler ---------------------------------------------------------------------------------------------------


def breaks_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep ``function`` out of compiled graphs. `torch.compiler.disable` does it, and imports the compiler."""
    vars(function)["_torchdynamo_disable"] = True
    return function


def runs_eagerly(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `breaks_graphs`, of all that ``function`` calls too; it imports the compiler when it is called first.

    `torch.compiler.disable` imports it at once. `Optimizer.add_param_group` is decorated in this way.
    """
    return _disable_dynamo(function)


# -- collectives ----------------------------------------------------------------------------------------------------


@cache
def before_collectives(check: Callable[[Tensor], None]) -> None:
    """Call ``check`` with each tensor that a function of `torch.distributed` is given from now on.

    No public way: what is not a tensor with ``__torch_dispatch__`` goes to C++, which takes its address. The functions
    check the types of their arguments by two of their own, and nothing else is alike in all of them.
    """
    if not dist.is_available():
        return
    from torch.distributed import distributed_c10d

    check_one, check_list = distributed_c10d._check_single_tensor, distributed_c10d._check_tensor_list

    def of_one(param: Any, param_name: str) -> None:
        check_one(param, param_name)
        check(param)

    def of_list(param: Any, param_name: str) -> None:
        check_list(param, param_name)
        for each in param:
            check(each)

    vars(distributed_c10d).update(_check_single_tensor=of_one, _check_tensor_list=of_list)


# -- tensors --------------------------------------------------------------------------------------------------------


def storage_id(tensor: Tensor) -> int:
    """What tells storages apart, also on the meta device, where all addresses are 0. No public way."""
    return tensor.untyped_storage()._cdata


def all_in(storage: int, tensors: Sequence[Tensor]) -> bool:
    """Whether all tensors lie in the storage with that `storage_id`: one call for many."""
    return [tensor.untyped_storage()._cdata for tensor in tensors].count(storage) == len(tensors)


def as_plain() -> AbstractContextManager[None]:
    """In this block subclasses' ``__torch_function__`` is not called. `torch.overrides` has a way for modes alone."""
    return torch._C.DisableTorchFunctionSubclass()


UNWATCHED = torch._C._disabled_torch_function_impl
"""The ``__torch_function__`` of a class that does not watch its functions; the docs of subclasses name it."""


def wrapper_without_memory(cls: type, like: Tensor, dtype: torch.dtype, device: torch.device) -> Any:
    """A tensor of class ``cls`` with the shape and strides of ``like``. DTensor is made in this way; no public one.

    It has no memory of its own, so that memory counters do not count it twice.
    """
    strides = like.stride()
    return Tensor._make_wrapper_subclass(cls, like.shape, strides=strides, storage_size=0, dtype=dtype, device=device)


def let_foreach_take(kind: type) -> None:
    """Have torch's optimizers and clipping use foreach functions for a subclass, as for DTensor. No public way.

    If the list is gone, numbers are the same, but there is one operation, or collective, for each parameter.
    """
    known = getattr(_foreach_utils, "_foreach_supported_types", None)
    if isinstance(known, list) and kind not in known:
        known.append(kind)


def copy_each(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy many small tensors in one kernel. Foreach functions are documented, though their names begin so."""
    torch._foreach_copy_(targets, sources)


def scale_each(targets: list[Tensor], factor: float) -> None:
    """Multiply many small tensors in one kernel."""
    torch._foreach_mul_(targets, factor)


def add_each(targets: list[Tensor], sources: list[Tensor], factor: float) -> None:
    """Add many small tensors, multiplied by a number, to others; in one kernel if all have one dtype."""
    torch._foreach_add_(targets, sources, alpha=factor)


def lerp_each(targets: list[Tensor], sources: list[Tensor], weight: float) -> None:
    """Move many tensors towards others in one kernel."""
    torch._foreach_lerp_(targets, sources, weight)


# -- transforms and the compiler --------------------------------------------------------------------------------------


def in_transform() -> bool:
    """Whether this is called inside a transform of `torch.func`: grad, vmap, jvp and those built from them."""
    return not torch.compiler.is_compiling() and torch._C._functorch.maybe_current_level() is not None


def compiler_looks() -> bool:
    """Whether dynamo reads this tensor, whose values it does not need. `torch.compiler.is_compiling` is False there."""
    return CompileContext.try_get() is not None


# -- modules and optimizers -------------------------------------------------------------------------------------------


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The module's own entries, which may be written to; ``parameters(recurse=False)`` leaves names and ties out."""
    return module._parameters


def contents_of(modules: Iterable[nn.Module]) -> list[int]:
    """What tells whether modules got, lost or exchanged parameters or children: much cheaper than a walk over them."""
    modules = list(modules)
    owned = [*map(attrgetter("_parameters"), modules), *map(attrgetter("_modules"), modules)]
    return [*map(len, owned), *map(id, chain.from_iterable(map(methodcaller("values"), owned)))]


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The module's own entries, which may be written to."""
    return module._buffers


def not_saved(module: nn.Module) -> set[str]:
    """The names of the module's own buffers that are not in its ``state_dict``."""
    return module._non_persistent_buffers_set


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether anybody has hooked the module's forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def hooks_of(optimizer: Optimizer, event: str) -> OrderedDict[int, Any]:
    """The hooks of an optimizer, whose order may be changed; torch only appends.

    ``event``: ``step_pre``, ``step_post``, ``state_dict_pre``, ``load_state_dict_pre``, ...
    """
    return getattr(optimizer, f"_optimizer_{event}_hooks")


@contextmanager
def without_state_hooks(optimizer: Optimizer) -> Generator[None]:
    """In this block the class's ``state_dict`` and ``load_state_dict`` call none of the hooks that come with a dict."""
    names = [f"_optimizer_{event}_hooks" for event in ("state_dict_pre", "state_dict_post", "load_state_dict_pre")]
    hooks = {name: getattr(optimizer, name) for name in names}
    vars(optimizer).update({name: OrderedDict() for name in names})
    try:
        yield
    finally:
        vars(optimizer).update(hooks)
