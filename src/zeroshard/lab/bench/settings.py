"""The settings of each `zeroshard bench`, except for the paths of its JSON and its figure."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from zeroshard.settings.base import Config
from zeroshard.train.config.registered import communicators, one_of

CommName = Annotated[str, one_of(communicators())]


class StepBench(Config):
    """Time of one training step: stages beside DDP and a plain loop."""

    nproc: int = Field(2, ge=1, description="Ranks, as processes of this machine.")
    shapes: tuple[Literal["wide", "deep", "small", "tiny"], ...] = Field(
        ("wide",), min_length=1, description="Models: 29.5 M parameters and few tokens, 12.3 M and more, 2.0 M, 0.12 M."
    )
    contestants: tuple[str, ...] = Field(
        (),
        description="plain, ddp, zeroN, zeroN@COMM, with +reproducible for the same bits on any number of ranks, "
        "+offload for states on the host; others are held against the first. None: ddp and all stages.",
    )
    comm: CommName = Field("torch", description="What stages without @COMM communicate with.")
    rounds: int = Field(8, ge=1, description="Rounds, after one that warms up.")
    steps: int = Field(3, ge=1, description="Timed steps of each contestant in a round, after one untimed.")
    threads: int = Field(1, ge=1, description="Threads of a rank that compute.")
    device: Literal["auto", "cpu", "cuda"] = Field("cpu", description="auto: GPUs where there are any.")


class DeviceBench(Config):
    """What this machine can do, for `zeroshard plan` and --plan.device: computation, memory, links."""

    nproc: int = Field(1, ge=1, description="Ranks that measure at once, as those of a run would share the machine.")
    comms: tuple[CommName, ...] = Field(
        ("torch",), min_length=1, description="Communicators; the file has the first one's link."
    )
    rounds: int = Field(7, ge=1, description="Rounds.")
    threads: int = Field(1, ge=1, description="Threads of a rank that compute.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: GPUs where there are any.")
    disk: str = Field("", description="Folder on the disk that --offload disk is to use, to measure; empty: none is.")
    out: str = Field("device.json", min_length=1, description="The file to write.")


BENCHES: dict[str, type[Config]] = {"step": StepBench, "device": DeviceBench}  # by the name of its module
