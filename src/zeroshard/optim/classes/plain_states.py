"""States of an optimizer as plain tensors and numbers: what can be sent, cut and saved, whatever a class keeps.

A class may keep tensors in lists, dicts and sets, and tensors of its own that hold several (torchao's 8-bit states)::

    {"step": 3, "Q": [a, b], "exp_avg": OptimState8bit(codes, scale)}
    {"step": 3, "Q/0": a, "Q/1": b, "exp_avg/codes": codes, "exp_avg/scale": scale, "@form": JSON, as uint8}

A state of tensors and numbers alone stays as it is, with no form.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from zeroshard.optim.named_shards import MODEL_KINDS

FORM = "@form"  # the kind of a state that says how the others are nested
_RESERVED = MODEL_KINDS | {"local"}  # a checkpoint has something else under these names
_LISTS: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "Size": torch.Size}


def flat(state: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the tensors and numbers of a state, by kind: those that it nests by their paths, and their form.

    Raises:
        ValueError: it holds an object of some other class.
    """
    found: dict[str, Any] = {}
    forms: list[Any] = []
    for kind, value in state.items():
        reserved = kind in _RESERVED
        if isinstance(kind, str) and not reserved and (isinstance(value, int | float) or _is_plain_tensor(value)):
            found[kind] = value
        else:
            forms.append([_form(kind, "", {}), _form(value, f"{kind}'" if reserved else str(kind), found)])
    if forms:
        found[FORM] = torch.frombuffer(bytearray(json.dumps(forms).encode()), dtype=torch.uint8)
    return found


def nested(found: Mapping[str, Any]) -> dict[Any, Any]:
    """Return the state of which `flat` made this; tensors are not copied.

    Raises:
        ValueError: it is of a class that this process does not know.
    """
    rest = dict(found)
    form = rest.pop(FORM, None)
    if form is None:
        return rest
    made = {_made(kind, rest): _made(value, rest) for kind, value in json.loads(bytes(form.tolist()))}
    return {**rest, **made}


def _is_plain_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and not hasattr(value, "__tensor_flatten__")


def _form(value: Any, path: str, found: dict[str, Any]) -> Any:
    """Describe a value in JSON, and put its tensors into ``found`` by their paths."""
    kind = type(value)
    if value is None or isinstance(value, int | float | str):
        return value
    if kind is torch.dtype:
        return ["dtype", str(value).removeprefix("torch.")]
    if _is_plain_tensor(value):
        while path in found:
            path += "'"
        found[path] = value
        return ["tensor", path]
    if kind is dict:
        return ["dict", [[_form(key, "", {}), _form(each, f"{path}/{key}", found)] for key, each in value.items()]]
    name = next((name for name, each in _LISTS.items() if each is kind), None)
    if name is not None:
        return [name, [_form(each, f"{path}/{index}", found) for index, each in enumerate(value)]]
    if isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
        parts, context = value.__tensor_flatten__()
        inside = [[part, _form(getattr(value, part), f"{path}/{part}", found)] for part in parts]
        layout = [list(value.shape), list(value.stride())]
        return ["parts", f"{kind.__module__}:{kind.__qualname__}", inside, _form(context, "", {}), *layout]
    raise ValueError(
        f"{path}: a {kind.__name__} in an optimizer's state; keep tensors, numbers, text, or lists and dicts of them"
    )


def _made(form: Any, found: dict[str, Any]) -> Any:
    """Return the value that `_form` described, and take its tensors out of ``found``."""
    if not isinstance(form, list):
        return form
    kind, content, *more = form
    if kind == "dtype":
        return getattr(torch, content)
    if kind == "tensor":
        return found.pop(content)
    if kind == "dict":
        return {_made(key, found): _made(each, found) for key, each in content}
    if kind in _LISTS:
        return _LISTS[kind](_made(each, found) for each in content)
    inside, context, shape, stride = more
    tensors = {part: _made(each, found) for part, each in inside}
    return _class_named(content).__tensor_unflatten__(tensors, _made(context, found), torch.Size(shape), tuple(stride))


def _class_named(name: str) -> Any:
    """The class of tensors that has this name, in a module that is imported: nothing else is looked up or run."""
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if isinstance(found, type) and issubclass(found, Tensor) and hasattr(found, "__tensor_unflatten__"):
        return found
    raise ValueError(f"state: it holds a {name}, which is no class of tensors here; import its module before")


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield every tensor of a state, however deep; of one that holds several, each of these."""
    if _is_plain_tensor(value):
        yield value
    elif isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
        yield from tensors_of([getattr(value, part) for part in value.__tensor_flatten__()[0]])
    elif isinstance(value, Mapping | Collection) and not isinstance(value, str | bytes | Tensor):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_of(each)
