"""Read weights of a Hugging Face folder by ranges of elements, so that each rank reads only its shard.

Files are safetensors: a header with each tensor's position, then plain numbers. So a rank reads the bytes of its shard
and no others, without memory maps: peak memory is `READ_AT_ONCE` elements beside the tensor that is filled. Pickles
(``.bin``) are never read.

The tensors of a file are not always the model's parameters. `transformers` renames some, and stacks the experts of a
mixture into one parameter. We follow its rules (`transformers.conversion_mapping`) if a parameter is a concatenation of
file tensors in memory, and raise UserError otherwise. Format: https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zeroshard.host.errors import UserError
from zeroshard.host.regular_files import open_binary, open_regular
from zeroshard.models.adapters import base_name, is_adapter
from zeroshard.models.hugging_face.folder import read_json
from zeroshard.models.quiet_import import quiet_import

READ_AT_ONCE = 1 << 20  # elements
INDEX = "model.safetensors.index.json"
_MOST_HEADER_BYTES = 100 << 20  # the format's own limit
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_WHOLE_MODEL = "take the folder of a whole model"
# Buffers that older releases wrote among the weights.
_NO_WEIGHTS = re.compile(r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$|\.attention\.(masked_)?bias$")


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file."""

    name: str  # key of the tensor in the file
    path: Path  # path of the file
    dtype: str  # the tensor's dtype in safetensors' notation, such as ``BF16``
    shape: tuple[int, ...]  # shape of the tensor
    offset: int  # position of the tensor's first byte in the file

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def find_tensors(folder: Path, field: str = "model") -> dict[str, FileTensor]:
    """Return every tensor in a folder's safetensors files, by name; only headers are read.

    ``field`` names the setting that gave the folder, for error messages.

    Raises:
        UserError: there are no such files, or one of them is missing, truncated or damaged.
    """
    found: dict[str, FileTensor] = {}
    if (folder / INDEX).is_file():
        places = read_json(folder / INDEX, field).get("weight_map")
        if not isinstance(places, dict) or any(Path(str(file)).name != file for file in places.values()):
            raise UserError(field, f"{folder / INDEX} has no weight_map of files beside it", _WHOLE_MODEL)
        for file in sorted(set(places.values())):
            found |= _tensors_of(folder / file, field)
        lost = next((name for name in places if name not in found), None)
        if lost is not None:
            raise UserError(field, f"{lost} is in none of the files of {folder}", _WHOLE_MODEL)
        return found
    if (folder / "model.safetensors").is_file():
        return _tensors_of(folder / "model.safetensors", field)
    pickled = next(iter(sorted(folder.glob("*.bin"))), None)
    if pickled is not None:
        todo = "save the model with save_pretrained of transformers, which writes safetensors"
        raise UserError(field, f"{pickled} is a pickle, and those are never read", todo)
    todo = _WHOLE_MODEL + (", or add --model.from-config to train from scratch" if field == "model" else "")
    raise UserError(field, f"{folder} holds no model.safetensors", todo)


def _tensors_of(path: Path, field: str) -> dict[str, FileTensor]:
    damaged = UserError(field, f"{path} is no whole safetensors file", "fetch it again")
    try:
        with open_binary(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, _MOST_HEADER_BYTES):
                raise damaged
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise UserError(field, f"{path} is missing", _WHOLE_MODEL) from None
    except OSError as error:
        raise UserError(field, f"{path} cannot be read ({error.strerror})", "check the folder") from None
    except (ValueError, RecursionError) as error:
        raise damaged from error
    try:
        found = {}
        for name, facts in header.items():
            if name == "__metadata__":
                continue
            first, last = facts["data_offsets"]
            tensor = FileTensor(name, path, facts["dtype"], tuple(map(int, facts["shape"])), 8 + length + first)
            dtype = DTYPES.get(tensor.dtype)
            if not 0 <= first <= last <= size - 8 - length:
                raise damaged
            if dtype is not None and last - first != tensor.numel * dtype.itemsize:
                raise damaged
            found[name] = tensor
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise error if error is damaged else damaged from error
    return found


def mapped(tensor: FileTensor) -> Tensor:
    """Return the tensor as a memory map, in its own dtype: its pages are read when they are used."""
    dtype = DTYPES[tensor.dtype]
    content = np.memmap(tensor.path, np.uint8, "c", tensor.offset, (tensor.numel * dtype.itemsize,))
    return torch.from_numpy(content).view(dtype).view(tensor.shape)


@torch.no_grad()
def read_elements(tensor: FileTensor, start: int, values: Tensor) -> None:
    """Fill ``values [n]``, of any device and floating dtype, with the tensor's elements from ``start`` on.

    Raises:
        UserError: the file ends too early, because it changed after its header was read.
    """
    dtype = DTYPES[tensor.dtype]
    buffer = torch.empty(min(READ_AT_ONCE, values.numel()), dtype=dtype)
    descriptor = open_regular(tensor.path)
    try:
        for first in range(0, values.numel(), READ_AT_ONCE):
            part = values[first : first + READ_AT_ONCE]
            piece = buffer[: part.numel()]
            raw = memoryview(piece.view(torch.uint8).numpy())
            at = tensor.offset + (start + first) * dtype.itemsize
            while raw:
                count = os.preadv(descriptor, [raw], at)
                if count == 0:
                    raise UserError("model", f"{tensor.path} ends before {tensor.name} does", "fetch it again")
                raw, at = raw[count:], at + count
            part.copy_(piece)
    finally:
        os.close(descriptor)


class FileWeights:
    """The parameters and buffers of a model, as stored in a folder's files.

    Args:
        model: a model of `transformers`, on any device; only names, shapes and its class's rules for files are used.

    Raises:
        UserError: the files lack a parameter or have it in another shape, contain a tensor that the model has no place
            for, two different tensors for one parameter, or a dtype that is not in `DTYPES`.
    """

    def __init__(self, model: nn.Module, folder: Path) -> None:
        found = find_tensors(folder)
        self._runs, copies = _match(model, {name: tensor.shape for name, tensor in found.items()})
        self._found = found
        for name in {key for keys in (*self._runs.values(), *copies) for key in keys}:
            if found[name].dtype not in DTYPES:
                what = f"{name} in {folder} is of dtype {found[name].dtype}"
                raise UserError("model", what, "take the model before quantisation")
        for copy, kept in copies:
            if not are_equal(found[copy], found[kept]):
                what = f"{copy} in {folder} differs from {kept}, and the model has one tensor for both"
                todo = 'with "tie_word_embeddings": false in its config.json it has two, as transformers takes them'
                raise UserError("model", what, todo)

    def __contains__(self, name: str) -> bool:
        """Whether the files contain the parameter or buffer ``name``."""
        return name in self._runs

    def fill(self, name: str, values: Tensor, start: int = 0) -> None:
        """Fill ``values [n]`` with the elements from ``start`` of the flattened parameter ``name``."""
        for key in self._runs[name]:
            tensor = self._found[key]
            low, high = max(start, 0), min(start + values.numel(), tensor.numel)
            if low < high:
                read_elements(tensor, low, values[low - start : high - start])
            start -= tensor.numel
            values_left = start + values.numel()
            if values_left <= 0:
                break


def match(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[str]]:
    """Return for each parameter and buffer of ``model`` the names of the file tensors whose concatenation it is.

    Args:
        model: a model of `transformers`.

    Raises:
        UserError: as `FileWeights`, but dtypes are not checked.
    """
    return _match(model, shapes)[0]


def _match(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, list[str]], list[tuple[str, str]]]:
    """Return what `match` returns, and pairs of file tensors for one place in the model: an unread copy, and the other.

    Files have such a pair if their head is a tensor of its own and the model's is tied to the embedding.
    """
    model_any: Any = model
    state = _state(model)
    names = _names(state)
    renamed, operations = _renamed(model_any, shapes, state)
    runs: dict[str, list[str]] = {}
    rest: list[str] = []
    copies: list[tuple[str, str]] = []
    for target, by_pattern in renamed.items():
        if target not in state:
            rest += [key for keys in by_pattern.values() for key in keys]
            continue
        runs[target] = _in_order(target, by_pattern, operations.get(target))
        if operations.get(target) is None:
            copies += [(key, runs[target][0]) for keys in by_pattern.values() for key in keys if key != runs[target][0]]
    ignored = [re.compile(pattern) for pattern in _patterns(model_any, "unexpected")]
    unexpected = [key for key in rest if not (_NO_WEIGHTS.search(key) or any(p.search(key) for p in ignored))]
    if unexpected:
        more = f" and {len(unexpected) - 1} more" if unexpected[1:] else ""
        what = f"the model has no place for {unexpected[0]}{more}, which the weights have"
        raise UserError("model", what, "take weights and config.json from one folder")
    missing_may = [re.compile(pattern) for pattern in _patterns(model_any, "missing")]
    for name, aliases in names.items():
        there = next((each for each in aliases if each in runs), None)
        if there is None:
            if any(p.search(name) for p in missing_may) and not isinstance(state[name], nn.Parameter):
                continue
            raise UserError("model", f"{name} is not among the weights", _WHOLE_MODEL)
        copies += [pair for each in aliases if each in runs for pair in zip(runs[each], runs[there], strict=True)]
        runs[name] = runs[there]
        _require_shape(name, tuple(state[name].shape), [tuple(shapes[key]) for key in runs[name]])
    pairs = [(copy, kept) for copy, kept in copies if copy != kept]
    return {name: runs[name] for name in names if name in runs}, pairs


def are_equal(one: FileTensor, other: FileTensor) -> bool:
    """Whether two tensors have the same values; they are read piece by piece."""
    if one.shape != other.shape:
        return False
    both = [torch.empty(min(READ_AT_ONCE, one.numel)) for _ in range(2)]
    for start in range(0, one.numel, READ_AT_ONCE):
        parts = [each[: one.numel - start] for each in both]
        for tensor, part in zip((one, other), parts, strict=True):
            read_elements(tensor, start, part)
        if not torch.equal(*parts):
            return False
    return True


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers under all their names, which are those of the model without adapters."""
    state = model.state_dict(keep_vars=True)
    return {base_name(name): tensor for name, tensor in state.items() if not is_adapter(name)}


def _names(state: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return for the first name of each tensor all names of that tensor."""
    by_id: dict[int, list[str]] = {}
    for name, tensor in state.items():
        by_id.setdefault(id(tensor), []).append(name)
    return {aliases[0]: aliases for aliases in by_id.values()}


def _require_shape(name: str, shape: tuple[int, ...], parts: list[tuple[int, ...]]) -> None:
    whole = parts[0] == shape if len(parts) == 1 else sum(map(prod, parts)) == prod(shape)
    if not whole:
        what = f"{name} has shape {list(shape)} in the model and {list(parts[0])} among the weights"
        raise UserError("model", what, "take weights and config.json from one folder")


def _patterns(model: Any, kind: str) -> Iterable[str]:
    return getattr(model, f"_keys_to_ignore_on_load_{kind}", None) or ()


def _renamed(
    model: Any, shapes: Mapping[str, tuple[int, ...]], state: Mapping[str, Tensor]
) -> tuple[dict[str, dict[str, list[str]]], dict[str, Any]]:
    """Assign the files' tensors to names in the model.

    Returns:
        For each name in the model, the keys of its tensors, grouped by the pattern of `transformers` that they match or
        by their own names; and for each name whose tensors must be combined, the converter of `transformers`.
    """
    prefix = getattr(model, "base_model_prefix", "")
    found: dict[str, dict[str, list[str]]] = {}
    operations: dict[str, Any] = {}
    loading: Any = quiet_import("transformers.core_model_loading")
    mapping: Any = quiet_import("transformers.conversion_mapping")
    transforms = mapping.get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, loading.WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, loading.WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    for key in sorted(shapes, key=loading.dot_natural_key):
        name, pattern = loading.rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = key, None
        if pattern is not None:
            operations[name] = by_pattern[pattern]
        found.setdefault(name, {}).setdefault(pattern or key, []).append(key)
    return found, operations


def _in_order(target: str, by_pattern: Mapping[str, list[str]], converter: Any) -> list[str]:
    """Return the file tensors of one parameter in the order in which the parameter concatenates them."""
    if converter is None:
        return [key for keys in by_pattern.values() for key in keys][-1:]
    kinds = [(type(each).__name__, getattr(each, "dim", 0)) for each in converter.operations]
    groups = [by_pattern[pattern] for pattern in converter.source_patterns if pattern in by_pattern]
    same_length = len({len(group) for group in groups}) == 1
    if kinds == [("MergeModulelist", 0)] and len(groups) == 1:
        return groups[0]
    if kinds == [("MergeModulelist", 0), ("Concatenate", 1)] and same_length:
        return [key for together in zip(*groups, strict=True) for key in together]
    if kinds == [("Concatenate", 0)] and all(len(group) == 1 for group in groups):
        return [group[0] for group in groups]
    names = ", ".join(name for name, _ in kinds)
    what = f"{target} is stored in a form ({names}) that is not streamed"
    raise UserError("model", what, "save the model with save_pretrained(..., save_original_format=False)")


@dataclass(frozen=True)
class FilePart:
    """A tensor that `transformers` would write to a file, and the position of its elements in the model."""

    name: str  # key of the tensor in the file
    shape: tuple[int, ...]  # shape of the tensor
    source: str  # name of the parameter or buffer of which the tensor is a contiguous range
    start: int  # index of the range's first element in the flattened ``source``


def file_layout(model: nn.Module) -> list[FilePart]:
    """List the tensors that `transformers` writes when it saves ``model``, in the order of the model's parameters.

    Raises:
        UserError: it writes a parameter in a form that is not a contiguous range of it.
    """
    state = _state(model)
    meta = {name: torch.empty(state[name].shape, device="meta") for name in _names(state)}
    loading: Any = quiet_import("transformers.core_model_loading")
    written: Mapping[str, Tensor] = loading.revert_weight_conversion(model, dict(meta))
    shapes = {name: tuple(tensor.shape) for name, tensor in written.items()}
    parts = []
    for source, keys in match(model, shapes).items():
        start = 0
        for key in keys:
            parts.append(FilePart(key, shapes[key], source, start))
            start += prod(shapes[key])
    return parts
