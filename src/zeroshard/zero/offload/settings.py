"""`Offload`: which training state of a rank leaves its device, and for where. Plain arithmetic and checks, no torch.

The optimizer updates a unit where its master weights are. So states, masters and reduced gradients go together; the
weights that the model computes with stay on the device, and get each new value by one copy up.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from zeroshard.host.lazily import loaded
from zeroshard.settings.sizes import parse_size

if TYPE_CHECKING:
    from zeroshard.zero.core.strategy import ShardingStrategy

PLACES = {
    "optimizer": ("device", "host", "disk"),
    "master": ("device", "host", "disk"),
    "grads": ("device", "host", "disk"),
    "weights": ("device", "host", "disk"),
}


@dataclass(frozen=True)
class Offload:
    """Training state off the device; an argument of `zeroshard.Zero`.

    Attributes:
        optimizer, master: optimizer states and master weights: ``"device"``, ``"host"`` or ``"disk"``. Both leave the
            device, or none does.
        grads: reduced gradients, until the optimizer steps: ``"device"``, ``"host"`` or ``"disk"``.
        weights: at stage 3, this rank's shard of the weights in the compute dtype: ``"device"``, ``"host"``, or
            ``"disk"``: there is none, as each gather reads the master weights in the file. Those of frozen weights are
            on the host with either of the last two. One rank alone has one shard, all of them, and frees after use what
            it has gathered from there.
        fraction: the share of the rank's elements whose state leaves, as whole units, the last of the forward first:
            those that are used first stay, because their update has the least time. ``"auto"``: all; the trainer
            puts the planner's number in its place.
        pinned: the most bytes of page-locked host memory on a GPU, a number or ``"4GiB"``; None: what crosses the bus.
        path: the folder of the ranks' files, with ``"disk"``; a leading ``~`` is the user's home.

    Raises:
        ValueError: a place that a kind of state cannot have, or what does not go together; it names field and remedy.
    """

    optimizer: Literal["device", "host", "disk"] = "host"
    master: Literal["device", "host", "disk"] = "host"
    grads: Literal["device", "host", "disk"] = "host"
    weights: Literal["device", "host", "disk"] = "device"
    fraction: float | Literal["auto"] = "auto"
    pinned: int | str | None = None
    path: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        for field, places in PLACES.items():
            value = getattr(self, field)
            if value not in places:
                raise ValueError(f"offload.{field}: {value!r} is no place for it; choose {', '.join(places)}")
        stays = next((field for field in ("optimizer", "master") if getattr(self, field) == "device"), None)
        if stays is not None and (self.optimizer, self.master) != ("device", "device"):
            other = {"optimizer": "master", "master": "optimizer"}[stays]
            what = f"'device' with {other}={getattr(self, other)!r}: the update needs both in one place"
            raise ValueError(f"offload.{stays}: {what}; set both to 'device', or neither")
        for field in ("grads", "weights"):
            place = getattr(self, field)
            if self.master == "device" and place != "device":
                raise ValueError(
                    f"offload.{field}: {place!r} with master='device'; set optimizer and master to {place!r}"
                )
        if self.weights == "disk" and self.master != "disk":
            raise ValueError(f"offload.weights: 'disk' with master={self.master!r}; set master to 'disk'")
        if self.fraction != "auto":
            number = isinstance(self.fraction, int | float) and not isinstance(self.fraction, bool)
            if not number or not isfinite(self.fraction) or not 0 <= self.fraction <= 1:
                raise ValueError(
                    f"offload.fraction: {self.fraction!r} is no share; give a number from 0 to 1, or 'auto'"
                )
        on_disk = "disk" in (self.optimizer, self.master, self.grads)
        if on_disk and self.path is None:
            raise ValueError("offload.path: state goes to a disk, and no folder is given; name one on a fast disk")
        if self.path is not None and not on_disk:
            raise ValueError(f"offload.path: {str(self.path)!r} is given, and no state goes to a disk; leave it out")
        if self.pinned is not None:
            _bytes(self.pinned)

    @property
    def pinned_bytes(self) -> int | None:
        """``pinned`` in bytes; None: as much as is needed."""
        return None if self.pinned is None else _bytes(self.pinned)

    @property
    def folder(self) -> Path | None:
        """``path``, where ``~`` is the user's home."""
        return None if self.path is None else Path(os.path.expanduser(self.path))

    def units_away(self, numels: Sequence[int]) -> int:
        """Return how many of the last units of the forward have their state away, for these numbers of elements.

        They are the fewest that have at least `fraction` of the elements.
        """
        share = 0.0 if self.master == "device" else 1.0 if self.fraction == "auto" else self.fraction
        needed = sum(numels) * share
        away, num_units = 0, 0
        while away < needed:
            num_units += 1
            away += numels[-num_units]
        return num_units

    def attach(
        self, strategy: ShardingStrategy, *, rank: int, alone: bool, local_steps: bool, reproducible: bool
    ) -> Any:
        """Return an engine's `zeroshard.zero.offload.placement.Offloading`; None: nothing leaves the device.

        ``alone``: whether each of several ranks is a replica, which has all state.

        Raises:
            ValueError: another setting of the engine needs on the device what is to leave it; the rank's file cannot
                be made, or another run uses it.
        """
        if self.master == "device":
            return None
        if self.weights != "device" and strategy.params.value != "shard":
            what = f"{self.weights!r} at {strategy.name}, which keeps whole weights"
            raise ValueError(f"offload.weights: {what}; give stage=3")
        if self.weights != "device" and alone:
            what = f"{self.weights!r} with shard_size=1, so that each rank would keep and copy all weights"
            raise ValueError(f"offload.weights: {what}; leave shard_size out, or give weights='device'")
        if local_steps:
            raise ValueError(
                f"offload.master: {self.master!r} with local_steps, whose outer steps use it; leave one out"
            )
        if self.grads != "device" and reproducible:
            what = f"{self.grads!r} with reproducible, whose exact sums stay"
            raise ValueError(f"offload.grads: {what}; give grads='device'")
        file = None
        if self.path is not None:
            file = loaded("zeroshard.zero.offload.rank_files", "file_of_rank")(self.folder, rank)
        return loaded("zeroshard.zero.offload.placement", "Offloading")(self, file)


def _bytes(size: int | str) -> int:
    if isinstance(size, str):
        return parse_size("offload.pinned", size)
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise ValueError(f"offload.pinned: {size!r} is no size; give a number of bytes, or a text such as '4GiB'")
    return size
