"""The module's own methods, where they would be silently wrong under an engine: each is made right, or refused by name.

The user goes on to call the model as if it were an ordinary one. Most of it stays ordinary; this is the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from zeroshard.zero.runtime import Runtime

_MARK = "_zeroshard"  # on a module that has an engine


class Guard:
    """What stands in for methods of ``model`` and its parts until `remove`.

    Args:
        model: that the engine has taken over.
        runtime: of the engine.
        clear_grads: ``clear_grads(None, set_to_none=...)`` forgets all gradients.
    """

    def __init__(self, model: nn.Module, runtime: Runtime, clear_grads: Callable[..., None]) -> None:
        self._model = model
        self._handles: list[Any] = []
        self._on_model = {
            "zero_grad": lambda set_to_none=True: clear_grads(None, set_to_none=set_to_none),
            "_apply": _apply_in_place(model),
            _MARK: True,
        }
        model.__dict__.update(self._on_model)
        for module in model.modules():
            self._handles.append(module.register_state_dict_pre_hook(_refuse_state(runtime)))
            self._handles.append(module.register_load_state_dict_pre_hook(_refuse_load))
            module.__dict__["__deepcopy__"] = _refuse_copy
        if runtime.levels.shard.world_size > 1:  # else weights are always whole and current
            self._bring_the_roots_weights(runtime)

    def _bring_the_roots_weights(self, runtime: Runtime) -> None:
        """Have modules outside of units compute with current weights where another method than forward calls them."""

        def bring(module: nn.Module, args: tuple[Any, ...]) -> None:
            if not runtime.root.readable:
                runtime.root.unshard()

        params = {param for group in runtime.root.groups for param in group.params.params}
        for module in self._model.modules():
            if module is not self._model and not params.isdisjoint(module.parameters(recurse=False)):
                self._handles.append(module.register_forward_pre_hook(bring))

    def remove(self) -> None:
        """Give all methods back."""
        for handle in self._handles:
            handle.remove()
        for name in self._on_model:
            self._model.__dict__.pop(name, None)
        for module in self._model.modules():
            module.__dict__.pop("__deepcopy__", None)


def has_engine(model: nn.Module) -> bool:
    """Whether the model, or a part of it, has one already."""
    return any(_MARK in module.__dict__ for module in model.modules())


def _refuse_state(runtime: Runtime) -> Callable[[nn.Module, str, bool], None]:
    def refuse(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not runtime.weights_readable:
            raise RuntimeError(
                "model.state_dict(): the weights are sharded or older than the last step; "
                "use zero.state_dict(), or call it inside zero.full_params()"
            )

    return refuse


def _refuse_load(*_: Any) -> None:
    raise RuntimeError("model.load_state_dict(): the weights are sharded; use zero.load_state_dict()")


def _refuse_copy(memo: dict[int, Any]) -> nn.Module:
    raise RuntimeError(
        "copy.deepcopy(model): the copy would drive this model's engine; copy it before Zero(), "
        "use zero.ema() for an average of its weights, or load zero.state_dict() into a new one"
    )


def _apply_in_place(model: nn.Module) -> Callable[..., nn.Module]:
    """``model._apply``, for functions that leave every parameter where it is."""

    def apply(fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        tensors = [param.data for param in model.parameters()]
        if any(fn(tensor) is not tensor for tensor in tensors):
            raise RuntimeError(
                "model: to(), double() and their like would part its parameters from the engine's buffers; "
                "call them before Zero(), or give it a MixedPrecision"
            )
        return type(model)._apply(model, fn, *args, **kwargs)

    return apply
