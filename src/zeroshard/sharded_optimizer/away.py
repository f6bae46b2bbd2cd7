"""States of a `ShardedOptimizer` off the device: on the host, or in the rank's file. The class updates there.

    the device   weight, gradient   --copied down-->   stand-in and its gradient
    the host                                           step of the class: stand-in, gradient, states that stay there
    the device   weight             <--copied up---    stand-in

A `ShardedOptimizer` has no master weights: what a user writes into a weight between two steps is in the next copy down.
Weights on the CPU need no stand-in, as the host is their device; then what ``optimizer="host"`` asks for is so already.

Weights are updated a bucket at a time, so that is the memory of stand-ins, and in a file one bucket's states are read
ahead while another's are updated (`zeroshard.zero.offload.on_disk`). `step` returns with all weights in place, so it
waits for all updates; those of `zeroshard.Zero` run while the next forward does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.comm.streams import ByDevice
from zeroshard.sharded_optimizer.ownership import pack
from zeroshard.slab import Slab, room
from zeroshard.zero.offload.disk import DiskStates
from zeroshard.zero.offload.on_disk import UnitOnDisk, shaped_like
from zeroshard.zero.offload.rank_files import file_of_rank
from zeroshard.zero.offload.settings import Offload

if TYPE_CHECKING:
    from zeroshard.state_formats.operands import FormattedStates

HOST = torch.device("cpu")


class StatesAway:
    """Where the states of one rank's parameters are, and how the class's step finds them.

    Args:
        settings: which states leave, and for where; `zeroshard.sharded_optimizer.acceptance.check_offload` has passed.
        rank: of the file.
        bucket_bytes: the most bytes of weights that are updated at a time, unless one weight is larger.

    Raises:
        UserError: the rank's file cannot be made, or another run uses it.
    """

    def __init__(self, settings: Offload, rank: int, bucket_bytes: int) -> None:
        self._settings, self._bucket_bytes, self._streams = settings, bucket_bytes, ByDevice()
        self._file: DiskStates | None = None
        if settings.optimizer == "disk":
            assert settings.folder is not None
            self._file = file_of_rank(settings.folder, rank)
        self._away: dict[Tensor, None] = {}  # parameters whose states leave, in order
        self.parts: list[list[Tensor]] = []  # all of this rank's parameters, a bucket's at a time
        self._stored: dict[Tensor, UnitOnDisk] = {}  # by parameter: the states of its part in the file
        self.stands_for: dict[Tensor, Tensor] = {}  # the parameter of each stand-in that there is
        self._slabs: dict[torch.device, tuple[Slab, Tensor]] = {}  # and all of its bytes, by the device of the weights

    def take(self, params: Sequence[Tensor]) -> None:
        """Take further parameters of this rank: the last of them leave, as `Offload.fraction` says."""
        num_away = self._settings.units_away([param.numel() for param in params])
        self._away.update(dict.fromkeys(params[len(params) - num_away :]))
        sizes, places = [param.nbytes for param in params], [(param.device, param in self._away) for param in params]
        for bucket in pack(range(len(params)), [0] * len(params), sizes, places, self._bucket_bytes, 1):
            part = [params[index] for index in bucket.members]
            self.parts.append(part)
            if self._file is not None and part[0] in self._away:
                self._stored.update(dict.fromkeys(part, UnitOnDisk(self._file, masters=False, states=True)))

    def stands_in(self, param: Tensor) -> bool:
        """Whether the class updates a copy of this parameter on the host."""
        return param in self._away and param.device != HOST

    @contextmanager
    def walk(self, optim: Optimizer, parts: Sequence[Collection[Tensor]]) -> Generator[None]:
        """In this block the class steps on these parts, in their order; behind it states can be read."""
        if self._file is None:
            yield
            return
        self._file.expect([unit for unit in self._units(chain.from_iterable(parts)) if unit in self._file])
        try:
            yield
        finally:
            self._file.settle()
        self._keep(optim)  # what a class has made that stepped on all at once

    def _units(self, params: Iterable[Tensor]) -> list[UnitOnDisk]:
        return list(dict.fromkeys(self._stored[param] for param in params if param in self._stored))

    @contextmanager
    def brought(self, optim: Optimizer, part: Collection[Tensor]) -> Generator[None]:
        """In this block the class, whose groups hold ``part`` alone, finds stand-ins, and states in memory.

        It is one of torch's, which skip parameters without a gradient.
        """
        parts = {unit: [param for param in part if self._stored.get(param) is unit] for unit in self._units(part)}
        for unit, own in parts.items():
            unit.bring(None, optim, own)
        try:
            params = [param for param in part if self.stands_in(param) and param.grad is not None]
            with self._stand_ins(optim, params, self._slab) as copy_grads:
                copy_grads()
                yield
        finally:
            for unit, own in parts.items():
                unit.take_back(None, optim, own)

    @contextmanager
    def all_at_once(self, optim: Optimizer) -> Generator[Callable[[], None]]:
        """In this block the class finds stand-ins for all parameters, and views of states in the file.

        Yields a function that copies gradients down, once they are there.
        """
        params = [param for group in optim.param_groups for param in group["params"] if self.stands_in(param)]
        with self._stand_ins(optim, params, lambda num_bytes, _: torch.empty(num_bytes, dtype=torch.uint8)) as copied:
            yield copied
        self._wait(params)  # before the memory of the copies is given back

    @contextmanager
    def _stand_ins(
        self, optim: Optimizer, params: Sequence[Tensor], memory: Callable[[int, torch.device], Tensor]
    ) -> Generator[Callable[[], None]]:
        """See `all_at_once`; ``memory``: gives bytes on the host for copies from a device, ``[num_bytes]``."""
        copies: dict[Tensor, nn.Parameter] = {}
        grads: dict[Tensor, Tensor] = {}
        for device in dict.fromkeys(param.device for param in params):
            there = [param for param in params if param.device == device]
            left = memory(sum(2 * room(param.nbytes) for param in there), device)
            for param in there:
                taken, left = left.tensor_split([2 * room(param.nbytes)])
                weight, grad = (shaped_like(half[: param.nbytes].view(param.dtype), param) for half in taken.chunk(2))
                copies[param] = nn.Parameter(weight, requires_grad=param.requires_grad)
                grads[param] = grad
        with torch.no_grad():
            for param, copy in copies.items():
                copy.copy_(param, non_blocking=True)

        def copy_grads() -> None:
            for param, copy in copies.items():
                if param.grad is not None:
                    copy.grad = _copied(param.grad.detach(), grads[param])
            self._wait(params)

        self.stands_for = {copy: param for param, copy in copies.items()}
        with _in_place_of(optim, copies):
            yield copy_grads
        self.stands_for = {}
        with torch.no_grad():
            for param, copy in copies.items():
                param.copy_(copy, non_blocking=True)

    def load(self, optim: Optimizer, state_dict: dict[str, Any], formatted: FormattedStates | None = None) -> None:
        """Load a dict by the class's own method, with states that leave on the host, in their format."""
        params = [param for group in optim.param_groups for param in group["params"] if self.stands_in(param)]
        there = {param: nn.Parameter(torch.empty_like(param, device=HOST)) for param in params}  # nobody writes there
        with _in_place_of(optim, there):
            optim.load_state_dict(state_dict)
        if formatted is not None:
            formatted.loaded(param for group in optim.param_groups for param in group["params"])
        self._keep(optim)

    def _keep(self, optim: Optimizer) -> None:
        for unit in self._units(self._stored):
            unit.keep(optim, [param for param, own in self._stored.items() if own is unit])

    def _slab(self, num_bytes: int, device: torch.device) -> Tensor:
        """The memory of one part's copies, ``[num_bytes]``.

        It is used again for each part: its copies up and the next part's copies down are on one stream, and
        `_stand_ins` waits for those before the host writes.
        """
        slab = self._slabs.get(device)
        if slab is None or len(slab[1]) < num_bytes:
            if slab is not None:
                self._finish(device)
                slab[0].close()
            limit = self._settings.pinned_bytes
            others = sum(other.num_bytes for at, (other, _) in self._slabs.items() if at != device and other.is_pinned)
            made = Slab(num_bytes, device=device, pinned=limit is None or others + num_bytes <= limit)
            slab = self._slabs[device] = made, made.take(num_bytes, torch.uint8)
        return slab[1][:num_bytes]

    def _wait(self, params: Iterable[Tensor]) -> None:
        """Wait for the copies of these parameters."""
        for device in dict.fromkeys(param.device for param in params):
            self._finish(device)

    def _finish(self, device: torch.device) -> None:
        """Wait for what the device has to do; on the CPU that is nothing."""
        mark = self._streams[device].mark()
        if mark is not None:
            mark.synchronize()


@contextmanager
def _in_place_of(optim: Optimizer, copies: Mapping[Tensor, nn.Parameter]) -> Generator[None]:
    """In this block the groups and states of ``optim`` are of ``copies``, in place of their keys."""
    whole = [group["params"] for group in optim.param_groups]
    for group in optim.param_groups:
        group["params"] = [copies.get(param, param) for param in group["params"]]
    _rename(optim.state, copies)
    try:
        yield
    finally:
        for group, members in zip(optim.param_groups, whole, strict=True):
            group["params"] = members
        _rename(optim.state, {copy: param for param, copy in copies.items()})


def _rename(state: dict[Any, Any], names: Mapping[Tensor, Tensor]) -> None:
    for old, new in names.items():
        if old in state:
            state[new] = state.pop(old)


def _copied(grad: Tensor, memory: Tensor) -> Tensor:
    """Begin to copy a gradient to ``memory``, if that has its form; return it there."""
    if grad.layout != torch.strided:
        return grad.to(HOST)
    memory = memory if memory.dtype == grad.dtype else torch.empty_like(grad, device=HOST)
    return memory.copy_(grad, non_blocking=True)
