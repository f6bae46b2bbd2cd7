"""Predicts memory, traffic and time of a training run on one rank, for `zeroshard.train.records.plan_contract`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from zeroshard.comm.links import Links
from zeroshard.comm.wrappers.throttle import bytes_per_link, num_hops
from zeroshard.host.errors import UserError
from zeroshard.lab.planner.run_fraction import chosen_fraction, trace_of
from zeroshard.lab.predict.actions import Message
from zeroshard.lab.predict.buffers import Buffer, buffers_of
from zeroshard.lab.predict.cluster import Cluster
from zeroshard.lab.predict.hardware import Calibration, Device, Link, read_calibration
from zeroshard.lab.predict.memory import OPTIMIZER_STATES, ema_bytes, file_parts, resident_bytes
from zeroshard.lab.predict.model_trace import trace_language_model
from zeroshard.lab.predict.offload import host_rates, unit_times, waiting_s
from zeroshard.lab.predict.outer_steps import outer_bytes, outer_step_cost, outer_step_messages
from zeroshard.lab.predict.process_memory import comm_buffer_bytes
from zeroshard.lab.predict.step import Settings, Step, step_of
from zeroshard.lab.predict.timeline import Timing, simulate
from zeroshard.lab.predict.traffic import collectives, flows_of
from zeroshard.models import LanguageModel
from zeroshard.models.inputs_on_host import CATEGORY
from zeroshard.models.ulysses import LABEL
from zeroshard.train.records.plan_contract import Job, Planned, Sent
from zeroshard.zero import MixedPrecision, ShardingStrategy
from zeroshard.zero.core.strategy import SHARD
from zeroshard.zero.frozen_formats.settings import frozen_format_of

NOBODY = Link("none", 0.0, 1.0, "one rank talks to nobody")


def predict(job: Job) -> Planned:
    """Predict the resident bytes and collectives of ``job`` exactly, and estimate its peak and, on a measured device,
    the time of a step; or choose how much of the state leaves the device, which is decided before any of these.

    The optimizer is the trainer's AdamW, in 32 or 8 bits. The peak counts memory of the engine and autograd, and not
    communicators'.

    Raises:
        UserError: the calibration file is missing or invalid, or has no link although there are several ranks.
    """
    calibration = _calibration(job) if job.calibration else None
    settings = _settings(job)
    state = OPTIMIZER_STATES[job.optimizer]
    buffers = buffers_of(
        job.model,
        job.num_sharding,
        job.model.units,
        precision=settings.precision,
        reproducible=job.reproducible,
        block=state.block,
        frozen_format=frozen_format_of(job.frozen_format),
    )
    if job.offload is not None and job.offload.fraction == "auto" and job.free_bytes is not None:
        found = chosen_fraction(job, buffers, settings, None if calibration is None else calibration.device)
        job = replace(job, offload=replace(job.offload, fraction=found.fraction))
        settings = replace(settings, offload=job.offload)
        return replace(_exact(job, buffers, settings), fraction=found.fraction, why_fraction=found.why)
    planned = _exact(job, buffers, settings)
    if not job.estimates:
        return planned
    try:
        step = step_of(trace_of(job, settings), buffers, settings, state)
    except UserError as error:  # a model that is not ours and cannot be traced
        if calibration is not None:
            raise
        return replace(planned, why_no_peak=error.what)
    beside = planned.memory_bytes.get("ema", 0) + planned.memory_bytes.get("outer", 0)
    step_s = None if calibration is None else _step_s(job, buffers, step, calibration)
    if step_s is not None and calibration is not None and job.offload is not None:
        step_s += _waiting_s(job, buffers, settings, calibration.device)
    planned = replace(planned, peak_bytes=step.peak.total + beside, step_s=step_s)
    if job.sequence_parallel == 1:
        return planned
    exchanges = (message for message in step.messages() if f"{message.buffer}/{message.phase}" == LABEL)
    return replace(planned, exchanges=_sent(job, exchanges))


def _settings(job: Job) -> Settings:
    """The engine's settings in this run."""
    param_dtype = job.compute_dtype if job.compute_dtype != torch.float32 else None
    return Settings(
        job.row,
        MixedPrecision(param_dtype, job.reduce_dtype, **job.wire),
        num_micro=job.num_micro,
        # with local steps each replica steps alone
        num_replicas=job.world_size // job.num_sharding if job.local_steps is None else 1,
        uniform_order=job.uniform_order,
        device_type=job.device_type,
        rank=job.rank % job.num_sharding,
        agrees=True,
        **job.choices,
    )


def _exact(job: Job, buffers: list[Buffer], settings: Settings) -> Planned:
    """Resident bytes and collectives, which must equal those of the run."""
    resident = resident_bytes(buffers, settings, OPTIMIZER_STATES[job.optimizer])
    if job.keeps_ema:
        resident["ema"] = ema_bytes(buffers, settings)
    if job.local_steps is not None:
        resident["outer"] = outer_bytes(buffers)
    num_tokens = job.micro_batch_size * job.seq_len // job.sequence_parallel
    if waiting := job.model.offloaded_input_bytes(num_tokens, job.compute_dtype.itemsize):
        resident[CATEGORY] = waiting
    step = collectives(buffers, settings, flows=None if job.model.lora is None else flows_of(buffers))
    return Planned(
        resident,
        _sent(job, step.messages()),
        outer_steps=_outer_steps(job, buffers),
        file_bytes=sum(file_parts(buffers, settings, OPTIMIZER_STATES["AdamW"])),
        comm_bytes=comm_buffer_bytes(job.backend, job.world_size, _group_sizes(job), step),
    )


def _group_sizes(job: Job) -> list[int]:
    """Number of ranks of each group that the run's communicator is split into, and of the whole."""
    num_shards, near, node = job.num_sharding, job.row.secondary_shard_size, job.wire.get("node_size")
    found = [job.sequence_parallel, near or 1, *((1 if node == near else node, job.world_size // node) if node else ())]
    found += [num_shards, job.world_size // num_shards] if 1 < num_shards < job.world_size else []
    return [job.world_size, *found]


def _step_s(job: Job, buffers: list[Buffer], step: Step, calibration: Calibration) -> float:
    """Seconds of a step on the measured device; with local steps, including the step's share of an outer step."""
    if calibration.link is not None and job.links is not None:
        calibration = replace(calibration, link=behind(calibration.link, job.links))
    if job.local_steps is None:
        return _timing(step, calibration, job.world_size).step_s
    link = calibration.link or NOBODY
    apart = Cluster(job.world_size, 1, link, link)
    outer_steps = outer_step_cost(buffers, job.local_steps, job.row, apart, calibration.device)
    return outer_steps.added_to(_timing(step, calibration, job.num_sharding)).step_s


def _waiting_s(job: Job, buffers: list[Buffer], settings: Settings, device: Device) -> float:
    """Seconds for which a step waits for state that is off the device; on a CPU also those of its update."""
    trace = trace_of(job, settings)
    rates = host_rates(device, job.ranks_per_node)
    times = unit_times(trace, buffers, OPTIMIZER_STATES[job.optimizer], settings, device, rates)
    return waiting_s(times, buffers, settings, trace, device, rates)


def _sent(job: Job, found: Iterable[Message]) -> list[Sent]:
    """The collectives that the run counts: without those among one rank if replicas take local steps."""
    counted = job.local_steps is None or job.world_size == job.num_sharding
    return [
        Sent(m.op, m.num_bytes, f"{m.buffer}/{m.phase}", m.world_size) for m in found if counted or m.world_size > 1
    ]


def _outer_steps(job: Job, buffers: list[Buffer]) -> dict[int, list[Sent]]:
    """By fragment, the collectives of its outer step; empty without local steps."""
    found: dict[int, list[Sent]] = {}
    for fragment in range(0 if job.local_steps is None else job.local_steps.fragments):
        assert job.local_steps is not None
        whole = job.row.optim is not SHARD and job.num_sharding > 1
        num_replicas = job.world_size // job.num_sharding
        sent = outer_step_messages(buffers, job.local_steps, fragment, num_replicas, unsharded_masters=whole)
        found[fragment] = [
            Sent(m.op, m.num_bytes, f"{m.buffer}/{m.phase}", m.world_size) for m in sent if m.world_size > 1
        ]
    return found


def predicted_step(
    model: LanguageModel,
    row: ShardingStrategy,
    world_size: int,
    micro_batch_size: int,
    seq_len: int,
    calibration: Calibration,
) -> Timing:
    """The time of a step of one micro-batch in fp32 with AdamW, without clipping; ``model`` needs no values."""
    buffers = buffers_of(model, world_size, model.units)
    settings = Settings(row, device_type=calibration.device.device_type, clips=False)
    trace = trace_language_model(model, micro_batch_size, seq_len, settings.precision, device_type=settings.device_type)
    return _timing(step_of(trace, buffers, settings, OPTIMIZER_STATES["AdamW"]), calibration, world_size)


def behind(measured: Link, links: Links) -> Link:
    """The ``measured`` link slowed by ``links``, for each collective.

    Bytes pass through both, so the bottleneck decides the bandwidth; latencies add up. Bursts, which pass at once after
    a pause, are not modelled: they change a step by milliseconds.
    """
    num_ranks, slow = measured.num_ranks, links.between
    if num_ranks <= links.node_size:
        return measured
    bytes_per_s, latency_s = slow.bytes_per_s, slow.latency_s

    def slowed(op: str, constant_s: float, s_per_byte: float) -> tuple[float, float]:
        over_links = bytes_per_link(op, 1, num_ranks) / bytes_per_s
        return constant_s + num_hops(op, num_ranks) * latency_s, max(s_per_byte, over_links)

    return replace(
        measured,
        latency_s=measured.latency_s + latency_s,
        bytes_per_s=min(measured.bytes_per_s, bytes_per_s),
        collectives={op: slowed(op, *costs) for op, costs in measured.collectives.items()},
    )


def _calibration(job: Job) -> Calibration:
    found = read_calibration(job.calibration, "plan.device")
    if found.link is None and job.world_size > 1:
        what = f"{job.calibration} was measured on one rank, and this run has {job.world_size}"
        raise UserError("plan.device", what, f"write one by zeroshard bench device --nproc {job.world_size}")
    return found


def _timing(step: Step, calibration: Calibration, world_size: int) -> Timing:
    link = calibration.link or NOBODY
    return simulate(step, calibration.device, Cluster(world_size, world_size, link, link))
