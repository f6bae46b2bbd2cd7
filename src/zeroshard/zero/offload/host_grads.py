"""`HostGrads`: reduced gradients that wait for the optimizer on the host, and a clip factor that waits with them.

On a GPU each reduction's result is copied down, after the partial norms of its shards are computed on the device in the
order that they always have. Clipping multiplies nothing at once: the factor is applied by the update, on its thread, or
by whoever asks for `reduced` before. Either way each element is rounded once, as without offloading.

Gradients whose place is the rank's file (``grads="disk"``) go there as they arrive, on any device, also after their
norms. `reduced` is then a view of the file, and what arrives in addition is added up in memory and written again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zeroshard.comm.streams import Mark
from zeroshard.host.slab import Slab, room
from zeroshard.zero.core.gradients import Gradients, norm_of
from zeroshard.zero.core.layout import Piece, view_of
from zeroshard.zero.offload.executor import Update
from zeroshard.zero.offload.on_disk import UnitOnDisk
from zeroshard.zero.offload.staging import Staging

HOST = torch.device("cpu")


class HostGrads(Gradients):
    """Gradients whose reduced part is on the host when the optimizer steps.

    Args:
        update: of the group: what it reads is not changed before it is over.
        at_once: whether each reduction's result goes to the host; else what is there at the end of a backward does.
        staging: says what may be page-locked, and keeps what is being copied down.
        stored: what the group has in the rank's file, if anything.
    """

    def __init__(
        self,
        *args: Any,
        update: Update,
        at_once: bool,
        staging: Staging,
        stored: UnitOnDisk | None,
        **kwargs: Any,
    ) -> None:
        self.update, self._at_once, self._staging = update, at_once, staging
        self._reduced: Tensor | None = None
        self._factor: tuple[Tensor, Mark] | None = None  # by which `_reduced` is still to be multiplied
        self._landing: Mark = None  # behind the copy down that is under way
        self._partials: tuple[int, Tensor] | None = None  # version of `_reduced`, and its shards' 2-norms
        self._memory: Tensor | None = None  # of the size of `_reduced`
        self._is_locked = True  # whether it is page-locked, so that a GPU copies there itself
        super().__init__(*args, **kwargs)
        self.adds_in_place = False  # they leave the buffer, or an update reads them there
        numel = self.own_slice.stop - self.own_slice.start
        self._stored = stored if stored is not None and stored.place_grads(numel, self.reduced_dtype) else None

    @property
    def reduced(self) -> Tensor | None:  # an attribute of `Gradients`, which waits here
        """The mean over ranks, clipped, once no update reads it and no copy writes it."""
        if self._reduced is not None:
            self.update.wait()
            if self._landing is not None:
                self._landing.synchronize()
                self._landing = None
            self._apply_factor()
            self._partials = None  # who asks may write, and no version counts what is written through `param.grad`
        return self._reduced

    @reduced.setter
    def reduced(self, tensor: Tensor | None) -> None:
        self._reduced = tensor
        if tensor is None:  # an update that is under way has its own reference
            self._factor = None

    @property
    def away(self) -> HostGrads:  # ty: ignore[incompatible-property-override] -- nobody assigns it
        """These gradients themselves."""
        return self

    @property
    def reduced_now(self) -> Tensor | None:
        """See `GradsAway`."""
        return self._reduced

    @property
    def num_bytes(self) -> int:
        """Bytes of those that wait for the optimizer on the host."""
        reduced = self._reduced
        return 0 if reduced is None or reduced.device != HOST else reduced.untyped_storage().nbytes()

    def scale_later(self, factor: Tensor) -> None:
        """Have the reduced gradients multiplied by ``factor``, 0-dim, before anybody reads them."""
        if self._factor is not None:
            _ = self.reduced  # each of two factors rounds
        if self._reduced is not None:
            self._factor = self._staging.number(factor)

    def take_factor(self) -> Callable[[], None]:
        """Return what applies the factor that is left, as the update does; nobody else will.

        An update of gradients in the file multiplies its copy of them. So the factor stays, for who asks later.
        """
        factor, reduced, stored = self._factor, self._reduced, self._stored
        landing = self._landing if stored is None else None  # a read of the file waits for what is written there
        if stored is None:
            self._factor = None

        def apply() -> None:
            number, known = factor if factor is not None else (None, None)
            for mark in (landing, known):
                if mark is not None:
                    mark.synchronize()
            if number is None or reduced is None:
                return
            if stored is None:
                reduced.mul_(number.to(reduced.device))
            else:
                stored.factor = number

        return apply

    def _apply_factor(self) -> None:
        """Multiply by the factor that is left, once it and the gradients are there."""
        if self._stored is None:
            self.take_factor()()
            return
        factor, self._factor = self._factor, None
        if factor is not None and self._reduced is not None:
            number, known = factor
            if known is not None:
                known.synchronize()
            self._reduced.mul_(number.to(self._reduced.device))

    def norms_there(self, norm_type: float) -> Tensor:
        """``[len(shards)]``: the p-norm of each of the `shards`, computed on the device.

        The 2-norms are known before the copy to the host is over, and nobody waits for that.
        """
        self.update.wait()
        if self._partials is not None and norm_type == 2.0 and self._reduced is not None and self._factor is None:
            version, partials = self._partials
            if version == self._reduced._version:  # what a user has written since would be missing
                return partials
        return torch.stack([norm_of(shard.to(self.device), norm_type) for shard in self.shards()])

    def pieces_there(self, pieces: Sequence[Piece], cuts: list[int]) -> list[Tensor]:
        """Views of `reduced` for the optimizer's pieces, whose values the update waits for: `take_factor`."""
        reduced = self._reduced
        assert reduced is not None
        if cuts:
            return list(reduced.split(cuts)[1::2])
        return [view_of(reduced, piece.offset - self.offset, piece.shape) for piece in pieces]

    def come_back(self) -> None:
        """What arrives is added to what was reduced on the device."""
        reduced = self.reduced
        if reduced is not None:
            self._reduced = reduced.to(self.device)

    def keep(self, arrived: Tensor) -> None:
        """Add what has arrived to what was reduced, and have it leave."""
        if self.device == HOST and self._stored is None:
            self.keep_here(arrived)
        elif self._reduced is None:
            self._reduced = arrived.to(self.reduced_dtype)
            if self._at_once:
                self.land()
            else:
                self._reduced = self._reduced if self.keep_local else self._out_of_local(self._reduced)
        elif arrived is not self._reduced:
            reduced = self.reduced
            assert reduced is not None
            arrived = arrived.to(reduced.device)
            if self._stored is None:
                reduced.add_(arrived)
                if self._at_once:
                    self._free_local()
            else:
                self._reduced = torch.add(reduced, arrived).to(reduced.dtype)
                self.land()

    def land(self) -> None:
        """Begin to copy what is on the device to the host, or what is in memory to the file."""
        there, stored = self._reduced, self._stored
        if there is None or (there.device == HOST if stored is None else there is stored.grads):
            return
        self.update.wait()
        partials = torch.stack([norm_of(shard, 2.0) for shard in self.shards_of(there)])
        if stored is not None:
            self._landing = stored.send_grads(there)
            self._reduced = stored.grads
        else:
            self._copy_down(there)
        assert self._reduced is not None
        self._partials = (self._reduced._version, partials) if there.device == self.device else None
        self._free_local()

    def _free_local(self) -> None:
        """Free what has left, where the core would keep it."""
        if self.keep_local and not self.pending:
            self._local, self._views = None, []

    def _copy_down(self, there: Tensor) -> None:
        """Begin to copy ``there``, on the device, to memory of the host."""
        if self._memory is None or self._memory.numel() != there.numel():
            num_bytes = room(there.nbytes)
            self._is_locked = self._staging.pins(num_bytes)
            self._memory = Slab(num_bytes, device=self.device, pinned=self._is_locked).take(there.numel(), there.dtype)
        self._reduced, streams = self._memory, self._streams
        if not self._is_locked:
            self._landing = self._staging.copy_down(self._memory, there)
            return
        with streams.on("to_host", streams.mark()):
            self._memory.copy_(there, non_blocking=True)
            self._landing = streams.mark()
        self._staging.leaves(there, self._landing)

    def shards_of(self, reduced: Tensor) -> list[Tensor]:
        """As `shards`, of this tensor."""
        before, self._reduced = self._reduced, reduced
        landing, self._landing = self._landing, None
        try:
            return self.shards()
        finally:
            self._reduced, self._landing = before, landing
