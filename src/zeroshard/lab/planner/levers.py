"""What frees memory without changing what is trained, in the order of its cost in time.

    loss in chunks       nothing: it is the default, and `--kernels reference` is without it
    full recomputation   a third of a step's FLOPs
    inputs on the host   two copies of a block's input over the bus, under the computation
    tiles                one product of a block more, and smaller products
    sequences shared     two all-to-alls around each attention, and fewer sequences at a time
    state on the host    copies of it over the bus, and updates by the host
    state in files       of a CPU: each step reads and writes them

docs/how-to/long-context.md says what each frees; the last one is of training state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import gcd
from pathlib import Path
from typing import Literal, NamedTuple

from zeroshard.lab.planner.planner import Planner
from zeroshard.lab.planner.request import uncompiled
from zeroshard.settings.offload import OffloadConfig
from zeroshard.settings.rules import left_uncompiled_with
from zeroshard.zero import Offload


class Lever(NamedTuple):
    """A lever.

    Attributes:
        what: it in words.
        flag: the flag that pulls it.
        frees: what it frees, in words.
        pull: makes the job with it of a job without it.
    """

    what: str
    flag: str
    frees: str
    pull: Callable[[Planner], Planner]


def levers(planner: Planner) -> Iterator[Lever]:
    """Yield the levers of activations that the job has not pulled yet; none if the model is not ours."""
    workload = planner.workload
    model = workload.described
    if model.config is None:
        return
    if workload.kernels == "reference" and planner.device.device_type == "cuda" and workload.autocast is None:
        yield Lever("the loss in chunks", "--kernels auto", "logits", _by_kernels)
    recomputed, tiles = model.recomputation, model.config.tiles
    if recomputed not in ("full", "offload"):
        what, pull = "activation checkpointing", partial(_with, activation_checkpointing="full")
        yield Lever(what, "--model.activation-checkpointing full", "activations of blocks", pull)
    if recomputed != "offload":
        what, pull = "inputs of blocks on the host", partial(_with, activation_checkpointing="offload")
        yield Lever(what, "--model.activation-checkpointing offload", "inputs of blocks", pull)
    uncompiled_too = planner.software.impl != "compile" or planner.software.by_default
    if tiles == "none" and uncompiled_too and model.matmul != "fp8" and not planner.asked.reproducible:
        what, pull = "feed-forward layers by tiles", partial(_with, tiles="auto")
        yield Lever(what, "--tiles auto", "the feed-forward layer's middle", pull)
    size = gcd(planner.cluster.world_size, model.config.n_head)
    if size > 1 and workload.sequence_parallel == 1 and not planner.asked.reproducible:
        what, pull = f"sequences shared by {size} GPUs", partial(shared_by, size=size)
        yield Lever(what, f"--sequence-parallel {size}", "a GPU's tokens", pull)


def off_the_device(planner: Planner, *, files: bool = False) -> Iterator[Lever]:
    """Yield the levers of training state, if the job has pulled none and updates hide beside the next forward.

    ``files``: whether those of a CPU, which has no other memory, may go to files of this machine.
    """
    hides = planner.workload.states[0].by_unit and not planner.asked.reproducible
    if planner.asked.offload is None and hides and planner.device.device_type == "cuda":
        yield Lever("state in host memory", "--offload optimizer", "states", lambda job: job.on(offload=Offload()))
    if files and planner.asked.offload is None and hides and planner.device.device_type == "cpu":
        for state, what in (("disk", "states in files"), ("disk-all", "states and gradients in files")):
            yield Lever(what, f"--offload {state}", "states", partial(_in_files, state=state))


def _in_files(planner: Planner, state: Literal["disk", "disk-all"]) -> Planner:
    given = OffloadConfig(state=state)
    return planner.on(offload=Offload(**given.places(shards_weights=True), path=given.folder(Path("OUT"))))


def _by_kernels(planner: Planner) -> Planner:
    chunked = replace(planner.workload, kernels="auto").changed()
    compiled = planner.software.impl == "compile"
    impl = "compile" if compiled else uncompiled(chunked.model, chunked.kernels)
    return replace(planner, workload=chunked, software=replace(planner.software, impl=impl))


def _with(planner: Planner, **overrides: str) -> Planner:
    return _as_its_run(planner.on(workload=planner.workload.changed(overrides)))


def _as_its_run(planner: Planner) -> Planner:
    """The job, compiled if its run is by default, where that is planned."""
    if not planner.software.by_default:
        return planner
    workload = planner.workload
    model = workload.described
    parts = model.config.tiles, workload.sequence_parallel, model.recomputation
    why = left_uncompiled_with(planner.asked.reproducible, *parts)
    impl = uncompiled(workload.model, workload.kernels) if why else "compile"
    return replace(planner, software=replace(planner.software, impl=impl, left_uncompiled_with=why))


def shared_by(planner: Planner, size: int) -> Planner:
    """The job with each sequence shared by ``size`` GPUs; a sequence that they cannot share evenly is cut."""
    workload = replace(planner.workload, sequence_parallel=size)
    return _as_its_run(planner.on(workload=workload.changed(seq_len=max(workload.seq_len // size, 1) * size)))
