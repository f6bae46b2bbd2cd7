"""What a user has done to the parameters of one buffer: written into them, or assigned a tensor to their ``.data``.

[Note: Writes without a trace]
    Autograd counts no write through ``param.data``. So some values of each parameter are remembered where the engine
    has written the weights, and compared before a step: `SAMPLED` elements, the first and the last among them, or all
    of a smaller one. Only on the CPU: elsewhere the host would wait for the device. What the engine or a user writes
    through a piece of the master is counted by the buffer's own version.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from zeroshard.host.torch_internals import all_in, as_plain, storage_id, version_of, versions_of
from zeroshard.zero.core.layout import FlatLayout, Slot

if TYPE_CHECKING:
    from numpy.typing import NDArray

SAMPLED = 16  # elements of a parameter that are compared


def resized(name: str, now: Sequence[int], before: Sequence[int]) -> str:
    """The error for a parameter whose ``.data`` has another shape now: `resize_token_embeddings` gives it one."""
    return (
        f"{name}: its .data is a tensor of shape {tuple(now)} now; a parameter under an engine keeps its shape, "
        f"{tuple(before)}: resize it before Zero()"
    )


class ParamChanges:
    """Compares the parameters of one buffer with what the engine has made them show.

    That is given to each method as ``shown``, in the order of the parameters: views of one buffer, or of one
    placeholder.

    Args:
        layout: names of the parameters.
        params: the parameters, in its order.
    """

    def __init__(self, layout: FlatLayout, params: Sequence[nn.Parameter]) -> None:
        self._layout, self._params = layout, params
        self._versions = self._count()
        self._sampled: NDArray[np.int64] | None = None  # places of sampled elements in the buffer
        self._seen: tuple[int, bytes] | None = None  # version of the buffer, and the sampled values then

    def name_of(self, param: Tensor) -> str:
        """Return the name of one of the parameters."""
        return next(slot.name for slot, each in zip(self._layout.slots, self._params, strict=True) if each is param)

    def accept(self) -> None:
        """Count writes into the parameters from here on."""
        self._versions = self._count()

    @property
    def written(self) -> bool:
        """Whether autograd has seen a write into a parameter since `accept`."""
        return self._versions != self._count()

    def _count(self) -> int:
        with as_plain():
            return versions_of(self._params)

    def remember(self, full: Tensor | None) -> None:
        """Remember values of the buffer as the engine's; None: they are about to change."""
        self._seen = None if full is None else (version_of(full), self.sample(full))

    def differs(self, full: Tensor) -> bool:
        """Whether values of the buffer have changed by a write that left no trace: [Note: Writes without a trace]."""
        if self._seen is None or version_of(full) != self._seen[0]:
            return False
        return self.sample(full) != self._seen[1]

    def sample(self, full: Tensor) -> bytes:
        """Some elements of each parameter in a contiguous buffer on the CPU that has the layout, of any dtype."""
        if self._sampled is None:
            self._sampled = np.array([place for slot in self._layout.slots for place in _sampled(slot)], dtype=np.int64)
        # past torch: these few bytes are none of the tensors that a step is measured to hold
        memory = (ctypes.c_uint8 * full.nbytes).from_address(full.data_ptr())
        elements = np.ctypeslib.as_array(memory).reshape(-1, full.itemsize)
        return elements[self._sampled].tobytes()

    def reassigned(self, shown: Sequence[Tensor]) -> list[tuple[str, nn.Parameter, Tensor]]:
        """Return ``(name, parameter, expected .data)`` of parameters to whose ``.data`` a tensor was assigned."""
        home = storage_id(shown[0])
        with as_plain():
            if all_in(home, self._params):  # as nearly always
                return []
            triples = zip(self._layout.slots, self._params, shown, strict=True)
            return [(slot.name, p, view) for slot, p, view in triples if storage_id(p) != home]

    def take_assigned(self, shown: Sequence[Tensor]) -> bool:
        """Copy tensors that were assigned to parameters' ``.data`` to their places; return if any were."""
        reassigned = self.reassigned(shown)
        for name, param, view in reassigned:
            if (param.dtype, param.device) != (view.dtype, view.device):
                raise RuntimeError(
                    f"{name}: its .data is {param.dtype} on {param.device} now; a parameter under an engine stays "
                    f"{view.dtype} on {view.device}"
                )
            if param.shape != view.shape:
                raise RuntimeError(resized(name, param.shape, view.shape))
            with torch.no_grad():
                view.copy_(param.data)
            param.data = view
        return bool(reassigned)

    def drop_assigned(self, shown: Sequence[Tensor], *, visible: bool) -> bool:
        """Make parameters with another ``.data`` show ``shown`` again; return if these are visible and differ."""
        reassigned = self.reassigned(shown)
        with as_plain():
            differs = any(visible and not torch.equal(param.detach(), view) for _, param, view in reassigned)
            for _, param, view in reassigned:
                param.data = view
        return differs

    def refuse_assigned(self, shown: Sequence[Tensor]) -> None:
        """Raise RuntimeError if a tensor was assigned to ``.data`` of hidden weights."""
        for name, param, freed in self.reassigned(shown):
            with as_plain():
                param.data = freed
            raise RuntimeError(
                f"{name}: its .data was assigned to while the weights were sharded; "
                "do it inside zero.full_params(write_back=True)"
            )

    def refuse_touched(self, name: str, shown: Sequence[Tensor], placeholder: Tensor) -> None:
        """Raise RuntimeError if hidden weights were assigned, or (on the CPU: no sync with a GPU) written to.

        ``name``: of the buffer; ``placeholder``: the NaN that hidden weights show.
        """
        self.refuse_assigned(shown)
        if placeholder.device.type != "cpu" or not placeholder.is_floating_point() or placeholder.isnan():
            return
        placeholder.fill_(float("nan"))
        raise RuntimeError(
            f"{name}: weights were written to while they were sharded or older than the last step; "
            "do it inside zero.full_params(write_back=True)"
        )


def _sampled(slot: Slot) -> list[int]:
    """The places in the buffer of the elements of a slot that are compared, evenly far from each other."""
    last, num = slot.numel - 1, min(slot.numel, SAMPLED)
    return [slot.offset + (last * n // (num - 1) if num > 1 else 0) for n in range(num)]
