"""What frees memory without changing what is trained, in the order of its cost in time.

    loss in chunks       nothing: it is the default, and `--kernels reference` is without it
    full recomputation   a third of a step's FLOPs
    inputs on the host   two copies of a block's input over the bus, under the computation
    tiles                one product of a block more, and smaller products
    sequences shared     two all-to-alls around each attention, and fewer sequences at a time
    state on the host    copies of it over the bus, and updates by the host

docs/how-to/long-context.md says what each frees; the last one is of training state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import gcd
from typing import NamedTuple

from zeroshard.lab.planner.planner import Planner
from zeroshard.models import LanguageModel
from zeroshard.zero import Offload


class Lever(NamedTuple):
    """A lever, pulled beside all that come before it.

    Attributes:
        what: it in words.
        flag: the flag that pulls it.
        frees: what it frees, in words.
        planner: the job with it, and with those before it.
    """

    what: str
    flag: str
    frees: str
    planner: Planner


def levers(planner: Planner) -> Iterator[Lever]:
    """Yield the levers of activations that the job has not pulled yet; none if the model is not ours."""
    workload = planner.workload
    model = workload.model
    if not isinstance(model, LanguageModel):
        return
    if workload.kernels == "reference" and planner.device.device_type == "cuda" and workload.autocast is None:
        chunked = replace(workload, kernels="auto").changed()
        kernels = "kernels" if chunked.model.has_fused_blocks else planner.software.impl
        planner = replace(planner, workload=chunked, software=replace(planner.software, impl=kernels))
        yield Lever("the loss in chunks", "--kernels auto", "logits", planner)
    recomputed, tiles = model.config.activation_checkpointing, model.config.tiles
    if recomputed not in ("full", "offload"):
        planner = _with(planner, activation_checkpointing="full")
        what = "activation checkpointing"
        yield Lever(what, "--model.activation-checkpointing full", "activations of blocks", planner)
    if recomputed != "offload":
        planner = _with(planner, activation_checkpointing="offload")
        what = "inputs of blocks on the host"
        yield Lever(what, "--model.activation-checkpointing offload", "inputs of blocks", planner)
    if tiles == "none" and planner.software.impl != "compile" and not planner.reproducible:
        planner = _with(planner, tiles="auto")
        yield Lever("feed-forward layers by tiles", "--tiles auto", "the feed-forward layer's middle", planner)
    size = gcd(planner.cluster.world_size, model.config.n_head)
    if size > 1 and planner.workload.sequence_parallel == 1 and not planner.reproducible:
        planner = shared_by(planner, size)
        yield Lever(f"sequences shared by {size} GPUs", f"--sequence-parallel {size}", "a GPU's tokens", planner)


def off_the_device(planner: Planner) -> Iterator[Lever]:
    """Yield the lever of training state, if the job has not pulled it and updates hide beside the next forward."""
    hides = planner.workload.states[0].by_unit and not planner.reproducible
    if planner.offload is None and hides and planner.device.device_type == "cuda":
        yield Lever("state in host memory", "--offload optimizer", "states", planner.on(offload=Offload()))


def _with(planner: Planner, **overrides: str) -> Planner:
    return planner.on(workload=planner.workload.changed(overrides))


def shared_by(planner: Planner, size: int) -> Planner:
    """The job with each sequence shared by ``size`` GPUs; a sequence that they cannot share evenly is cut."""
    workload = replace(planner.workload, sequence_parallel=size)
    return planner.on(workload=workload.changed(seq_len=max(workload.seq_len // size, 1) * size))
