"""The settings of each `zeroshard bench`, except for the paths of its JSON and its figure."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from zeroshard.train.config.registered import communicators, one_of
from zeroshard.train.config.sections import Config

Dtype = Literal["float32", "bfloat16"]
CommName = Annotated[str, one_of(communicators())]


class MemoryBench(Config):
    """Bytes on a rank at three points and at the peak, component by component, beside the formula."""

    models: tuple[str, ...] = Field(("gpt2-demo", "llama-tiny"), min_length=1, description="Presets.")
    stages: tuple[int, ...] = Field((0, 1, 2, 3), min_length=1, description="ZeRO stages.")
    nproc: int = Field(2, ge=1, description="Ranks that there would be; one of them is built.")
    rank: int = Field(0, ge=0, description="The rank that is built.")
    dtype: Dtype = Field("float32", description="Compute type; the master weights are float32.")
    seq_len: int = Field(128, ge=1, description="Tokens in a sequence, at most the model's.")
    micro_batch_size: int = Field(1, ge=1, description="Sequences in a forward pass.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: a GPU where there is one.")


class StepBench(Config):
    """Time of one training step: stages beside DDP and a plain loop."""

    nproc: int = Field(2, ge=1, description="Ranks, as processes of this machine.")
    shapes: tuple[Literal["wide", "deep", "small", "tiny"], ...] = Field(
        ("wide",), min_length=1, description="Models: 29.5 M parameters and few tokens, 12.3 M and more, 2.0 M, 0.12 M."
    )
    contestants: tuple[str, ...] = Field(
        (),
        description="plain, ddp, zeroN, zeroN@COMM, with +reproducible for the same bits on any number of ranks; "
        "others are held against the first. None: ddp and all stages.",
    )
    comm: CommName = Field("torch", description="What stages without @COMM communicate with.")
    rounds: int = Field(8, ge=1, description="Rounds, after one that warms up.")
    steps: int = Field(3, ge=1, description="Timed steps of each contestant in a round, after one untimed.")
    threads: int = Field(1, ge=1, description="Threads of a rank that compute.")
    device: Literal["auto", "cpu", "cuda"] = Field("cpu", description="auto: GPUs where there are any.")


class CollectivesBench(Config):
    """Time and bandwidth of collectives: communicator x operation x size."""

    worlds: tuple[int, ...] = Field((2, 4), min_length=1, description="Ranks, as processes of this machine.")
    sizes: tuple[str, ...] = Field(
        ("64KiB", "1MiB", "16MiB", "64MiB"), min_length=1, description="Sizes of the tensor."
    )
    dtypes: tuple[Dtype, ...] = Field(("float32", "bfloat16"), min_length=1, description="Types of its elements.")
    comms: tuple[CommName, ...] = Field(
        ("torch", "ring", "shm"), min_length=1, description="Communicators; others are held against the first."
    )
    rounds: int = Field(9, ge=1, description="Rounds.")
    device: Literal["auto", "cpu", "cuda"] = Field("cpu", description="Where tensors lie; auto: GPUs where any are.")


class DeviceBench(Config):
    """What this machine can do, for `zeroshard plan` and --plan.device: computation, memory, links."""

    nproc: int = Field(1, ge=1, description="Ranks that measure at once, as those of a run would share the machine.")
    comms: tuple[CommName, ...] = Field(
        ("torch",), min_length=1, description="Communicators; the file has the first one's link."
    )
    rounds: int = Field(7, ge=1, description="Rounds.")
    threads: int = Field(1, ge=1, description="Threads of a rank that compute.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: GPUs where there are any.")
    out: str = Field("device.json", min_length=1, description="The file to write.")


class KernelsBench(Config):
    """Our kernels beside eager PyTorch, torch.compile and torch's fused optimizer."""

    operations: tuple[str, ...] = Field((), description="Operations to measure; none: all.")
    dtypes: tuple[Dtype, ...] = Field(("bfloat16", "float32"), min_length=1, description="Types of their tensors.")
    rounds: int = Field(0, ge=0, description="Rounds; 0: 7 on a GPU, else 1.")


BENCHES: dict[str, type[Config]] = {
    "memory": MemoryBench,
    "step": StepBench,
    "collectives": CollectivesBench,
    "device": DeviceBench,
    "kernels": KernelsBench,
}
