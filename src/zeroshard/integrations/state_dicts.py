"""``state_dict`` and ``load_state_dict`` of a sharded model's modules, for a library that calls them to save or load.

A library that is given the unsharded state still asks the model, or a part of it, for its names or shapes, and loads
what it has read into the model, or a part of it: peft does both for ``modules_to_save`` and for prompts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from zeroshard.host.torch_internals import IncompatibleKeys
from zeroshard.optim.named_shards import named_state
from zeroshard.zero import Zero


@contextmanager
def through_engine(engine: Zero, state: Mapping[str, Tensor] | None = None) -> Generator[None]:
    """In this block the two methods of the model, and of each of its modules, work on the unsharded state.

    ``load_state_dict`` gives each rank its shard; it is collective, and replaces values even with ``assign=True``.

    Args:
        state: what ``state_dict`` returns, as `Zero.state_dict` returned it. None: names, shapes and dtypes, on the
            meta device, so that code that reads values raises.
    """
    if state is None:
        state = {name: torch.empty_like(tensor, device="meta") for name, tensor in named_state(engine.model).items()}
    modules = dict(engine.model.named_modules())
    for name, module in modules.items():
        prefix = f"{name}." if name else ""
        vars(module)["state_dict"] = _reads(prefix, state)
        vars(module)["load_state_dict"] = _loads(prefix, engine)
    try:
        yield
    finally:
        for module in modules.values():
            del vars(module)["state_dict"], vars(module)["load_state_dict"]


def _reads(inside: str, state: Mapping[str, Tensor]) -> Callable[..., dict[str, Any]]:
    def state_dict(
        *, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        found = OrderedDict() if destination is None else destination
        for name, tensor in state.items():
            if name.startswith(inside):
                found[prefix + name.removeprefix(inside)] = tensor
        return found

    return state_dict


def _loads(inside: str, engine: Zero) -> Callable[..., IncompatibleKeys]:
    def load_state_dict(state: Mapping[str, Tensor], strict: bool = True, assign: bool = False) -> IncompatibleKeys:
        own = [name for name in named_state(engine.model) if name.startswith(inside)]
        given = {inside + name: tensor for name, tensor in state.items()}
        missing = [name.removeprefix(inside) for name in own if name not in given]
        unexpected = [name for name in state if inside + name not in own]
        if strict and (missing or unexpected):
            raise RuntimeError(f"load_state_dict: missing keys: {missing}; unexpected keys: {unexpected}")
        engine.load_state_dict(given, strict=False)
        return IncompatibleKeys(missing, unexpected)

    return load_state_dict
