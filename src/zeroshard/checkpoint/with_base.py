"""Readers by which a checkpoint that has digests of its base shows the base itself, read where the run began.

    checkpoint            adapters, embedding, norms | digests of codes
    where the run began                              | a Hugging Face folder, a checkpoint, or drawn values
    shown as one          all weights: those of the base as they are there, or as the run computed with them

Each weight of the base is encoded as the run encoded it, and its digest compared, before anything is done with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from zeroshard.checkpoint.api import open_manifest
from zeroshard.checkpoint.hf_weight_reader import reader_of
from zeroshard.checkpoint.reader import CheckpointReader
from zeroshard.host.errors import UserError
from zeroshard.kernels import dequantise, quantise
from zeroshard.models import LanguageModel
from zeroshard.models.adapters import base_name, is_adapter
from zeroshard.models.base import Part
from zeroshard.models.hugging_face.config import HuggingFaceConfig
from zeroshard.models.hugging_face.folder import weight_folder
from zeroshard.optim.named_shards import FROZEN, ShardReader, read_whole
from zeroshard.optim.state_conversion import FullWeights
from zeroshard.settings.wire_formats import BlockFormat
from zeroshard.zero.frozen_formats.coded import digest_of


class WithBase:
    """A `ShardReader` that shows a checkpoint with digests of its base as one that has the base itself.

    Args:
        reader: of the checkpoint.
        base: of the weights where the run began, by their names without adapters.
        form, dtype: how the run encoded them, and of which numbers.
        rounded: whether they are shown as the run computed with them, not as they are in ``base``.
    """

    def __init__(
        self, reader: ShardReader, base: ShardReader, form: BlockFormat, dtype: torch.dtype, *, rounded: bool
    ) -> None:
        self._reader, self._base = reader, base
        self._form, self._dtype, self._rounded = form, dtype, rounded
        self._read_last: tuple[str, Tensor] = ("", torch.empty(0))

    def kinds(self, name: str) -> Mapping[str, tuple[int, ...]]:
        """See `ShardReader.kinds`: values in place of a digest."""
        found = dict(self._reader.kinds(name))
        if found.pop(FROZEN, None) is not None:
            found |= self._base.kinds(base_name(name))
        return found

    def read(self, name: str, kind: str, interval: tuple[int, int]) -> Tensor:
        """See `ShardReader.read`.

        Raises:
            UserError: the base has other values than the one on which the adapters were trained.
        """
        if kind != "param" or FROZEN not in self._reader.kinds(name):
            return self._reader.read(name, kind, interval)
        if self._read_last[0] != name:  # an entire weight is encoded, and may be read piece by piece
            self._read_last = name, self._values(name)
        return self._read_last[1][slice(*interval)]

    def _values(self, name: str) -> Tensor:
        shape = self._base.kinds(base_name(name)).get("param", ())
        values = read_whole(self._base, base_name(name), "param", shape).flatten().to(self._dtype)
        codes = torch.empty(self._form.num_bytes(values.numel()), dtype=torch.uint8)
        quantise(values, codes, self._form)
        if digest_of(codes) != int(self._reader.read(name, FROZEN, (0, 1))):
            what = f"its values in {self._form.name} are not those that the checkpoint's run trained adapters on"
            raise UserError(base_name(name), what, "restore what the run began with (model, init_from)")
        if self._rounded:
            dequantise(codes, values, self._form)
        return values


class DrawnWeights:
    """A `ShardReader` of the initial values that a model draws."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._shapes = {base_name(name): tuple(each.shape) for name, each in model.named_parameters()}

    def kinds(self, name: str) -> Mapping[str, tuple[int, ...]]:
        """See `ShardReader.kinds`."""
        return {"param": self._shapes[name]} if name in self._shapes and not is_adapter(name) else {}

    def read(self, name: str, kind: str, interval: tuple[int, int]) -> Tensor:
        """See `ShardReader.read`."""
        values = torch.empty(interval[1] - interval[0])
        self._model.initial_value(name, values, Part(interval[0], prod(self._shapes[name])))
        return values


def initial_weights(model: LanguageModel) -> ShardReader:
    """A reader of the weights with which a model begins: those of its Hugging Face folder, or drawn ones."""
    theirs = model.config
    if isinstance(theirs, HuggingFaceConfig) and not theirs.from_config:
        return reader_of(weight_folder(theirs.source), model)
    return DrawnWeights(model)


class OfCheckpoint:
    """A `ShardReader` of a checkpoint's weights, seen as ``seen_as`` shows them, that opens its files for each read."""

    def __init__(self, path: Path, seen_as: Callable[[ShardReader], ShardReader]) -> None:
        self._opened, self._seen_as = open_manifest(path), seen_as

    def kinds(self, name: str) -> Mapping[str, tuple[int, ...]]:
        """See `ShardReader.kinds`."""
        with CheckpointReader(*self._opened) as reader:
            return self._seen_as(FullWeights(reader)).kinds(name)

    def read(self, name: str, kind: str, interval: tuple[int, int]) -> Tensor:
        """See `ShardReader.read`."""
        with CheckpointReader(*self._opened) as reader:
            return self._seen_as(FullWeights(reader)).read(name, kind, interval)
