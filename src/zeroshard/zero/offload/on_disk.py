"""Units whose state is in the rank's file: master weights, optimizer states, gradients; a step has one in memory.

    between steps   pieces and ``optimizer.state`` show views of the file: [Note: Views of the file] in `disk`
    an update       `DiskOperands.bring` shows copies in a slot, `take_back` writes them and shows the file again

So whatever reads or writes state outside of a step works as with state in memory. States are made by a class's first
step, or by a load, as ordinary tensors: `UnitOnDisk.keep` moves them to the file. Numbers (a step count) stay in
memory. A class from elsewhere, which steps once on all units, steps on the views.

Reduced gradients are written when they arrive, and only read by the update, so a clip factor multiplies the copy that
the update has. It stays to be applied to the file, if anybody asks for the gradients later (`HostGrads`).
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from zeroshard.host.torch_internals import storage_id
from zeroshard.zero.core.layout import view_of
from zeroshard.zero.offload.disk import DiskStates
from zeroshard.zero.offload.grad_slots import GradSlots
from zeroshard.zero.offload.staging import Landing

Ref = weakref.ref["UnitOnDisk"]


class StoredGroup(Protocol):
    """A group with anything in the file: `zeroshard.zero.offload.placement.HostGroup` is one."""

    params: Any
    grads: Any
    stored: UnitOnDisk

    @property
    def shards_now(self) -> list[nn.Parameter]:
        """The pieces, whatever updates them now."""


class _Kept(NamedTuple):
    """A state that has a place in the file."""

    optimizer: Any
    piece: Tensor
    kind: str
    shown: Tensor

    @property
    def is_vacant(self) -> bool:
        """Whether the optimizer has another tensor now: one was loaded, or states were cleared."""
        return self.optimizer.state.get(self.piece, {}).get(self.kind) is not self.shown


class GatherOrder:
    """Which unit is gathered after which, as it was in the step before.

    Two gathers in a row tell a backward from a forward, in which another unit follows.
    """

    def __init__(self) -> None:
        self._recent: tuple[Ref | None, Ref | None] = (None, None)
        self._following: dict[tuple[Ref | None, Ref | None], Ref] = {}

    def restart(self) -> None:
        """Record that a step is over: what its last gather would read ahead, the update changes."""
        self._recent = (None, None)

    def after(self, unit: UnitOnDisk) -> UnitOnDisk | None:
        """Record that ``unit`` is gathered; return the unit that came next the last time, if there was one."""
        now = weakref.ref(unit)
        self._following[self._recent] = now
        self._recent = self._recent[1], now
        following = self._following.get(self._recent)
        return None if following is None else following()


class UnitOnDisk:
    """What one group has in the file.

    Args:
        file: the rank's.
        masters, states: which of the two are kept there.
        slots: memory through which reduced gradients go there; None: they do not.
        order: of the gathers of all units in the file, if they read masters there.

    Attributes:
        grads: the reduced gradients in the file, ``[own_numel]``; None: they are not there.
        factor: by which an update multiplies them, 0-dim; None: by nothing.
    """

    def __init__(
        self,
        file: DiskStates,
        *,
        masters: bool,
        states: bool,
        slots: GradSlots | None = None,
        order: GatherOrder | None = None,
    ) -> None:
        self.file, self.masters, self.states, self._slots = file, masters, states, slots
        self._order = order or GatherOrder()
        self.grads: Tensor | None = None
        self.factor: Tensor | None = None
        self._own_grads: list[tuple[nn.Parameter, Tensor]] = []  # what pieces show outside of the update
        self._kept: list[_Kept] = []
        self._brought: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []

    def take_master(self, values: Tensor) -> Tensor:
        """Return ``values [numel]`` in the file; nothing else is there yet."""
        return self.file.add(self, [values])[0]

    def place_grads(self, numel: int, dtype: torch.dtype) -> bool:
        """Give reduced gradients a place in the file, if they are to be there; return whether they are."""
        if self._slots is not None:
            self.grads = self.file.add_input(self, numel, dtype)
        return self.grads is not None

    def send_grads(self, values: Tensor) -> Landing:
        """Begin to write reduced gradients, on any device, to the file."""
        assert self._slots is not None
        return self._slots.send(self, values)

    @contextmanager
    def reading_master(self, shown: Tensor) -> Generator[Tensor]:
        """The master, which `take_master` has returned as ``shown``, to be read: in a slot, if it is there yet.

        Else once it is in the file, and the next gather's master is read ahead while this one's weights are used: where
        units are updated, that would be read before its update. Only a thread for which the update is over may ask.
        """
        following = self._order.after(self)
        with self.file.in_memory(self) as copies:
            if copies is not None:
                yield next(copies)
                return
        self.wait()
        self.file.will_read(self)
        if following is not None and self.file.is_idle:
            self.file.will_read(following)
        yield shown
        self.read_through()

    def read_through(self) -> None:
        """Let go of the memory of what was read or written through views of the file."""
        self.file.forget_pages(self)

    def wait(self) -> None:
        """Wait until views of the file show what the last update has written: the caller may write there."""
        self.file.wait(self)

    def keep(self, optimizer: Any, pieces: Iterable[Tensor]) -> None:
        """Move the states of these pieces that are in memory to the file."""
        if not self.states:
            return
        known = {id(kept.shown) for kept in self._kept}
        fresh = []
        for piece in pieces:
            state = optimizer.state.get(piece, {})
            for kind, value in state.items():
                if isinstance(value, Tensor) and value.dim() and id(value) not in known and _fits(value):
                    fresh.append((piece, state, kind, value))
        if not fresh:
            return
        own = {storage_id(kept.shown) for kept in self._kept}
        # What was loaded may be a view of the place of another state, which is about to be written.
        fresh = [(p, s, k, v.clone() if storage_id(v) in own else v) for p, s, k, v in fresh]
        vacant = [index for index, kept in enumerate(self._kept) if kept.is_vacant]
        without = []
        for piece, state, kind, value in fresh:
            shown = (self._kept[index].shown for index in vacant)
            found = next((i for i, s in enumerate(shown) if _form(s) == _form(value)), None)
            if found is None:
                without.append((piece, state, kind, value))
                continue
            index = vacant.pop(found)
            state[kind] = self._kept[index].shown.copy_(value)
            self._kept[index] = _Kept(optimizer, piece, kind, state[kind])
        if without:
            places = self.file.add(self, [_flat(value) for _, _, _, value in without])
            for (piece, state, kind, value), place in zip(without, places, strict=True):
                state[kind] = shaped_like(place, value)
                self._kept.append(_Kept(optimizer, piece, kind, state[kind]))

    def bring(self, group: StoredGroup | None, optimizer: Any, pieces: Sequence[Tensor]) -> None:
        """Show copies in a slot of what is in the file of these pieces, which are about to be updated."""
        self.keep(optimizer, pieces)
        if self not in self.file:
            return
        copies, stepped = iter(self.file.read(self)), set(pieces)
        if self.masters:
            assert group is not None
            self._master = next(copies)
            for piece, own in zip(group.params.pieces, group.shards_now, strict=True):
                own.data = view_of(self._master, piece.offset - group.params.master_offset, piece.shape)
        if self.grads is not None:
            assert group is not None
            grads = next(copies)
            if self.factor is not None:
                grads.mul_(self.factor)
            for piece, own in zip(group.params.pieces, group.shards_now, strict=True):
                if own in stepped and own.grad is not None:
                    self._own_grads.append((own, own.grad))
                    own.grad = view_of(grads, piece.offset - group.grads.offset, piece.shape)
        for kept, copied in zip(self._kept, copies, strict=True):
            if kept.optimizer is optimizer and kept.piece in stepped and not kept.is_vacant:
                state, brought = optimizer.state[kept.piece], shaped_like(copied, kept.shown)
                state[kept.kind] = brought
                self._brought.append((state, kept.kind, kept.shown, brought))

    def take_back(self, group: StoredGroup | None, optimizer: Any, pieces: Sequence[Tensor]) -> None:
        """Begin to write what `bring` has shown, show the file again, and move there what the step has made."""
        for state, kind, shown, brought in self._brought:
            now = state.get(kind)
            if now is not brought and isinstance(now, Tensor) and (now.shape, now.dtype) == (shown.shape, shown.dtype):
                brought.copy_(now)  # a class that makes its states anew
                now = brought
            if now is brought:
                state[kind] = shown
        self._brought = []
        for own, shown in self._own_grads:
            own.grad = shown
        self._own_grads, self.factor = [], None
        if self in self.file:
            if self.masters:
                assert group is not None
                group.params.take_update(self._master)
                del self._master
                for piece, own in zip(group.params.pieces, group.shards_now, strict=True):
                    own.data = group.params.piece_of_master(piece)
            self.file.write(self)
        self.keep(optimizer, pieces)


def _fits(value: Tensor) -> bool:
    several = hasattr(value, "__tensor_flatten__")  # a tensor of its own kind, which is no view of one place
    return value.device.type == "cpu" and value.layout == torch.strided and not several and _is_dense(value)


def _is_dense(value: Tensor) -> bool:
    """Whether a strided tensor's elements lie one after another, in whichever order of its dimensions."""
    behind = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size != 1 and stride != behind:
            return False
        behind *= size
    return True


def _form(value: Tensor) -> tuple[Any, ...]:
    return value.shape, value.stride(), value.dtype


def _flat(value: Tensor) -> Tensor:
    """The elements of a dense tensor in the order in which they lie in memory, ``[numel]``."""
    return value.detach().as_strided((value.numel(),), (1,))


def shaped_like(flat: Tensor, like: Tensor) -> Tensor:
    """View ``flat [numel]`` in the shape of ``like``, and in its order in memory if that is dense."""
    return flat.as_strided(like.shape, like.stride()) if _is_dense(like) else flat.view(like.shape)


class DiskOperands:
    """Operands of one optimizer that are in the file.

    Args:
        optimizer: the optimizer.
        homes: the group of each piece of which anything is in the file.
        in_update: tells whether the calling thread updates one unit now; else a step is on all of them.
    """

    def __init__(self, optimizer: Any, homes: Mapping[nn.Parameter, StoredGroup], in_update: Any) -> None:
        self._optimizer, self._homes, self._in_update = optimizer, homes, in_update
        self._pieces: list[tuple[StoredGroup, list[nn.Parameter]]] = []
        self._swapped = False

    def to_bring(self, pieces: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Those with a master or states in the file."""
        return [piece for piece in pieces if piece in self._homes]

    def bring(self, pieces: Sequence[nn.Parameter]) -> None:
        """Show copies in memory, if it is one unit that is updated."""
        self._swapped, found = self._in_update(), dict[Any, list[nn.Parameter]]()
        for piece in pieces:
            found.setdefault(self._homes[piece], []).append(piece)
        for group, own in found.items():
            if self._swapped:
                group.stored.bring(group, self._optimizer, own)  # what a disk did not give is not taken back
            self._pieces = [*self._pieces, (group, own)]  # another list: copies for other threads have theirs

    def take_back(self) -> None:
        """Write what was brought, and move to the file what the step has made."""
        found, self._pieces = self._pieces, []
        for group, own in found:
            if self._swapped:
                group.stored.take_back(group, self._optimizer, own)
            else:
                group.stored.keep(self._optimizer, own)
