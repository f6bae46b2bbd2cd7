"""How much of a run's state leaves the device if ``offload.fraction`` is ``auto``: what `zeroshard plan` would say.

It is the most of the last units for whose updates no step waits (`zeroshard.lab.predict.offload`), by the rates of the
file of ``--plan.device``, or else by those published for the GPU; more of them if the step does not fit otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from zeroshard.host.errors import UserError
from zeroshard.lab.predict.actions import Settings
from zeroshard.lab.predict.buffers import Buffer
from zeroshard.lab.predict.hardware import Device
from zeroshard.lab.predict.memory import OPTIMIZER_STATES, ema_bytes, on_disk
from zeroshard.lab.predict.model_spans import Trace
from zeroshard.lab.predict.model_trace import trace_language_model
from zeroshard.lab.predict.offload import hidden_units, host_rates, least_away, share_of, unit_times, why_all
from zeroshard.lab.predict.rates import attention_of_torch
from zeroshard.lab.predict.step import step_of
from zeroshard.train.profiling.devices import device_by_driver_name
from zeroshard.train.records.plan_contract import Job


class Chosen(NamedTuple):
    """A fraction as `zeroshard.zero.Offload` takes it, and the reason in words."""

    fraction: float
    why: str


def trace_of(job: Job, settings: Settings) -> Trace:
    """The trace of one of the job's micro-batches.

    Raises:
        UserError: the model is not ours and cannot be traced.
    """
    device_type = job.compiled if job.compiled and job.device_type == "cuda" else job.device_type
    how: dict[str, Any] = {"device_type": device_type, "sequence_parallel": job.sequence_parallel}
    how["deterministic"] = job.reproducible is not None
    return trace_language_model(job.model, job.micro_batch_size, job.seq_len, settings.precision, **how)


def chosen_fraction(job: Job, buffers: Sequence[Buffer], settings: Settings, device: Device | None) -> Chosen:
    """Choose for ``job``, whose ``free_bytes`` are those of its device; ``device``: as measured, None: not measured."""
    assert job.offload is not None
    offload, free_bytes = job.offload, job.free_bytes
    if on_disk(offload) and device is None:
        return Chosen(1.0, "the rates of the disk are not known")
    if device is None and job.device_type == "cuda":
        device = device_by_driver_name(torch.cuda.get_device_name())
    if device is None:
        return Chosen(
            1.0, "no rates of this device are known; `zeroshard bench device` measures them for --plan.device"
        )
    state = OPTIMIZER_STATES["AdamW"]
    try:
        trace = trace_of(job, settings)
    except UserError as error:  # a model that is not ours and cannot be traced
        return Chosen(1.0, f"the step cannot be predicted ({error.what})")
    rates = host_rates(device, job.ranks_per_node)
    if why := why_all(offload, rates, job.device_type):
        return Chosen(1.0, why)
    dtype = str(job.compute_dtype).removeprefix("torch.")
    how = {"deterministic": job.reproducible is not None, "in_documents": job.model.eos_id is not None}
    attention = attention_of_torch(device, dtype, **how)
    times = unit_times(trace, buffers, state, settings, device, rates, attention)
    beside = ema_bytes(buffers, settings) if job.keeps_ema else 0

    def left(num_away: int) -> float:
        if free_bytes is None or job.device_type == "cpu":  # whose memory is that of the host
            return 0.0
        fixed = replace(offload, fraction=share_of(buffers, num_away))
        step = step_of(trace, buffers, replace(settings, offload=fixed), state)
        return free_bytes - (step.peak.total + beside)

    hidden, num_units = hidden_units(list(times.values())), len({buffer.unit for buffer in buffers})
    num_away = least_away(hidden, num_units, left)
    source = "as measured" if rates.measured else "by published rates"
    if num_away > hidden:
        why = f"fewer than the last {num_away} of {num_units} units do not fit"
    elif num_away:
        why = f"no step waits for the updates of the last {num_away} of {num_units} units, {source}"
    else:
        why = f"a step would wait for the update of any unit, {source}, and all of it fits"
    return Chosen(share_of(buffers, num_away), why)
