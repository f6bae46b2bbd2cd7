"""The table ``[offload]`` of a run's settings: which of a rank's training state leaves its device, and for where."""

from __future__ import annotations

import os
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from zeroshard.host.errors import UserError
from zeroshard.settings.base import SHORTHANDS, Config, Free
from zeroshard.settings.sizes import parse_size


def _as_text(value: Any) -> Any:
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else value


class OffloadConfig(Config):
    """Training state off the device: in memory of the host, or in a file, where the optimizer updates it there."""

    shorthand = SHORTHANDS["offload"]

    state: Free[Literal["none", "optimizer", "all", "disk", "disk-all"]] = Field(
        "none",
        description="State that leaves the device. optimizer: optimizer states, fp32 master weights and reduced "
        "gradients, to the host, which takes the updates. all: where a stage shards them (zero3) weights too. disk: "
        "states and masters in a file, gradients on the host. disk-all: gradients there too, and at zero3 weights.",
    )
    fraction: Free[Annotated[str, BeforeValidator(_as_text)]] = Field(
        "auto",
        description="Share of a rank's elements whose state leaves, above 0 and up to 1: whole units, the last of the "
        "forward first. auto: what no step waits for, or what must leave so that it fits; all if rates are unknown.",
    )
    pinned: Free[str] = Field(
        "", description="Most page-locked host memory of a rank on a GPU, as 4GiB; empty: all that crosses the bus."
    )
    path: Free[str] = Field(
        "",
        description="disk, disk-all: folder on a fast disk for each rank's file; empty: OUT/offload.",
    )

    @property
    def on(self) -> bool:
        """Whether any state leaves the device."""
        return self.state != "none"

    @property
    def on_disk(self) -> bool:
        """Whether any state goes to a file of each rank."""
        return self.state in ("disk", "disk-all")

    @property
    def share(self) -> float | Literal["auto"]:
        """``fraction`` as `zeroshard.zero.Offload` takes it."""
        return "auto" if self.fraction == "auto" else float(self.fraction)

    @property
    def pinned_bytes(self) -> int | None:
        """``pinned`` as a number; None: as much as is needed."""
        return parse_size("offload.pinned", self.pinned) if self.pinned else None

    def folder(self, out: Path) -> Path | None:
        """The folder of the ranks' files, in the run folder ``out`` if none was given; None: nothing goes to a disk."""
        if not self.on_disk:
            return None
        return Path(os.path.expanduser(self.path)) if self.path else out / "offload"

    def places(self, *, shards_weights: bool, exact_sums: bool = False) -> dict[str, Any]:
        """The place of each kind of state, as `zeroshard.zero.Offload` takes it: ``device``, ``host`` or ``disk``.

        ``exact_sums``: whether sums of gradients are exact, and stay where they are added up.
        """
        if not self.on:
            return dict.fromkeys(("optimizer", "master", "grads", "weights"), "device")
        kept, rest = "disk" if self.on_disk else "host", "disk" if self.state == "disk-all" else "host"
        weights = rest if self.state in ("all", "disk-all") and shards_weights else "device"
        grads = "device" if exact_sums else rest
        return {"optimizer": kept, "master": kept, "grads": grads, "weights": weights}

    @model_validator(mode="after")
    def _something_leaves(self) -> Self:
        given = self.changed()
        if given and not self.on:
            what = f"{getattr(self, given[0])} is given, and offload is none: no state leaves the device"
            raise UserError(f"offload.{given[0]}", what, "add --offload optimizer, or leave it out")
        if self.path and not self.on_disk:
            what = f"{self.path} is given, and offload = {self.state} keeps state in memory"
            raise UserError("offload.path", what, "use --offload disk, or leave it out")
        try:
            share = 1.0 if self.fraction == "auto" else float(self.fraction)
        except ValueError:
            share = -1.0
        if not isfinite(share) or not 0 < share <= 1:
            todo = "give auto, or a number above 0 and up to 1, or leave out --offload"
            raise UserError("offload.fraction", f"{self.fraction} is no share of the elements", todo)
        if self.pinned:
            parse_size("offload.pinned", self.pinned)
        return self
