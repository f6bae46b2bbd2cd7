"""Reads a checkpoint as another: its weights alone, with LoRA adapters merged into them, or with new adapters.

Adapters are merged while the checkpoint is read piece by piece:

W' = W + scale * B A        of a `Conv1D`, which keeps W transposed: W + scale * (B A)^T

A model with the merged weights computes the same without adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from zeroshard.comm import Communicator, LocalCommunicator
from zeroshard.host.errors import UserError
from zeroshard.models.adapters import adapted_name, adapters_of, base_name
from zeroshard.optim.named_shards import MODEL_KINDS, NamedShard, ShardReader, read_whole
from zeroshard.optim.state_conversion import FullWeights
from zeroshard.zero.ema.average import EMA

if TYPE_CHECKING:
    from zeroshard.parallel import Strategy


class WeightsAlone:
    """A target for ``checkpoint.load`` that passes only the model's tensors on to ``strategy``.

    Weights in bf16 of which an optimizer's states have further bits are passed on with these, in fp32.

    Args:
        kinds: kinds of tensors to load, such as weights, buffers and averages.
        seen_as: wraps the checkpoint's reader, to present the checkpoint in another form (as with adapters merged).
    """

    def __init__(
        self,
        strategy: Strategy,
        kinds: Collection[str] = MODEL_KINDS,
        seen_as: Callable[[ShardReader], ShardReader] = lambda reader: reader,
    ) -> None:
        self._strategy, self._kinds, self._seen_as = strategy, kinds, seen_as
        self.comm = strategy.comm

    def named_shards(self) -> Iterable[NamedShard]:
        """Return nothing: this object is only loaded, never saved."""
        return ()

    def load_named_shards(self, reader: ShardReader) -> None:
        """Load the tensors of the chosen kinds into the strategy."""
        self._strategy.load_named_shards(_OfKinds(self._seen_as(FullWeights(reader)), self._kinds))


class WeightsOnly:
    """Loads only a model's weights from a checkpoint, without optimizer state: a target of `checkpoint.load`.

    ``kind`` chooses the weights: ``"param"``, or ``"ema"`` for their moving average; ``seen_as`` wraps the reader.
    """

    comm: Communicator = LocalCommunicator()

    def __init__(
        self, model: nn.Module, kind: str, seen_as: Callable[[ShardReader], ShardReader] = lambda reader: reader
    ) -> None:
        self._model = model
        self._kind, self._seen_as = kind, seen_as

    def named_shards(self) -> Iterable[NamedShard]:
        """Return nothing: this object is only loaded."""
        return ()

    @torch.no_grad()
    def load_named_shards(self, reader: ShardReader) -> None:
        """Copy weights, with further bits that are in states, and buffers from the checkpoint into the model."""
        reader = self._seen_as(FullWeights(reader))
        for kind, tensors in ((self._kind, self._model.named_parameters()), ("buffer", self._model.named_buffers())):
            for name, tensor in tensors:
                if kind == "buffer" and kind not in reader.kinds(name):  # a buffer that is not saved (persistent=False)
                    continue
                tensor.copy_(read_whole(reader, name, kind, tuple(tensor.shape)))


class _OfKinds:
    """Presents ``reader``'s checkpoint as if it contained only tensors of ``kinds``."""

    def __init__(self, reader: ShardReader, kinds: Collection[str]) -> None:
        self._reader, self._kinds = reader, kinds

    def kinds(self, name: str) -> dict[str, tuple[int, ...]]:
        """Return the saved kinds of the tensor that are to be loaded, with their shapes."""
        return {kind: shape for kind, shape in self._reader.kinds(name).items() if kind in self._kinds}

    def read(self, name: str, kind: str, interval: tuple[int, int]) -> Tensor:
        """Read from the underlying reader."""
        return self._reader.read(name, kind, interval)


class MergedWeights:
    """A `ShardReader` that presents a checkpoint with adapters as one without, with the adapters merged.

    Args:
        reader: reads the checkpoint, which may have no adapters.
        scale: factor of the adapters; not used if the checkpoint has none.
        transposed: names of the weights that are stored as [in, out]; see `transposed_weights`.
    """

    def __init__(self, reader: ShardReader, scale: float, transposed: Collection[str] = ()) -> None:
        self._reader, self._scale, self._transposed = reader, scale, transposed

    def kinds(self, name: str) -> Mapping[str, tuple[int, ...]]:
        """Return every saved kind of the weight with its shape."""
        return self._reader.kinds(self._saved(name))

    def read(self, name: str, kind: str, interval: tuple[int, int]) -> Tensor:
        """Return ``[start, stop)`` of the flattened weight: 1-D, on the CPU; float32 if adapters were merged.

        Raises:
            UserError: an adapter is missing, or does not have the weight's shape.
        """
        saved = self._saved(name)
        values = self._reader.read(saved, kind, interval)
        if saved == name or not name.endswith(".weight") or kind not in ("param", EMA):
            return values
        start, stop = interval
        shape = self._reader.kinds(saved)[kind]
        a_name, b_name = adapters_of(saved)
        a, b = self._whole(a_name, kind), self._whole(b_name, kind)  # [rank, in], [out, rank]
        product = (b.shape[0], a.shape[1])
        if a.shape[0] != b.shape[1] or shape != (product[::-1] if name in self._transposed else product):
            what = f"its adapters have shapes {tuple(a.shape)} and {tuple(b.shape)}, the weight {shape}"
            raise UserError(name, what, "take a checkpoint that `zeroshard train` wrote")
        width = shape[1]
        first, last = start // width, -(-stop // width)
        rows = a[:, first:last].t() @ b.t() if name in self._transposed else b[first:last] @ a
        return values.float() + self._scale * rows.flatten()[start - first * width : stop - first * width]

    def _saved(self, name: str) -> str:
        return name if self._reader.kinds(name) else adapted_name(name)

    def _whole(self, name: str, kind: str) -> Tensor:
        shape = self._reader.kinds(name).get(kind, ())
        if len(shape) != 2:
            what = f"the checkpoint has no matrix of this adapter ({kind})"
            raise UserError(name, what, "take a checkpoint that `zeroshard train` wrote")
        return self._reader.read(name, kind, (0, shape[0] * shape[1])).view(shape).float()


def transposed_weights(model: nn.Module) -> frozenset[str]:
    """Names, as in the model without adapters, of weights stored as [in, out]: those of `transformers`' ``Conv1D``."""
    return frozenset(
        base_name(f"{name}.weight") for name, module in model.named_modules() if type(module).__name__ == "Conv1D"
    )


class NewAdapters:
    """A `ShardReader` that adds newly initialised adapters to weights that have none.

    Args:
        adapters: initial values of each adapter by name, on the CPU.
    """

    def __init__(self, reader: ShardReader, adapters: Mapping[str, Tensor]) -> None:
        self._reader, self._adapters = reader, adapters

    def kinds(self, name: str) -> Mapping[str, tuple[int, ...]]:
        """Return every kind of the parameter, with its shape; an adapter has only ``"param"``."""
        if name in self._adapters:
            return {"param": tuple(self._adapters[name].shape)}
        return self._reader.kinds(base_name(name))

    def read(self, name: str, kind: str, interval: tuple[int, int]) -> Tensor:
        """Return ``[start, stop)`` of the flattened parameter: 1-D, on the CPU."""
        if name in self._adapters:
            return torch.flatten(self._adapters[name])[slice(*interval)]
        return self._reader.read(base_name(name), kind, interval)
