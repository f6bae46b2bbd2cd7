"""Asks the planner for the plan of a run, with which it is compared (`Contract`), and for a stage that fits.

``--strategy auto`` starts at the lowest stage whose step fits in memory, and moves a stage up after each OOM.

Lower stages communicate less, higher ones need less memory. The lowest stage that fits is predicted before the run, by
the planner that makes the run's plan. The prediction ignores fragmentation and other processes, so a rank may still run
out of memory. That may happen on one rank alone, in the middle of a collective, when
the ranks cannot agree on anything any more. So that rank writes the next stage into ``auto-stage.json`` in the run
folder and ends. The next start, which our launcher makes at once, resumes from the last checkpoint one stage higher;
checkpoints do not depend on the stage.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from zeroshard.comm import Communicator
from zeroshard.comm.agree import largest
from zeroshard.comm.registry import name_of
from zeroshard.host.errors import UserError
from zeroshard.host.regular_files import json_of, read_text, write_inside
from zeroshard.models import LanguageModel
from zeroshard.parallel import strategy_entry
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.config.optimizer_settings import IN_8_BITS
from zeroshard.train.links import Links
from zeroshard.train.records.plan_contract import Contract, Job, Predict
from zeroshard.train.setup.assemble import compute_dtype, local_steps, offload, reduce_dtype, wire
from zeroshard.train.setup.compiled import in_one_graph
from zeroshard.zero import STAGES

HIGHEST_STAGE = 3
HEADROOM = 0.1  # share of free memory that must stay free: other processes, fragments, communicators' buffers
GIB = 2**30
_STAGE_FILE = "auto-stage.json"
# the trainer's optimizers that plans know, by their names there
PLANNED = {"adamw": "AdamW", "adamw8bit": "AdamW8bit", "flash-adamw": "FlashAdamW"}


def automatic_stage(
    config: TrainConfig,
    model: LanguageModel,
    comm: Communicator,
    device: torch.device,
    grad_accum_steps: int,
    predict: Predict | None,
) -> int:
    """Return the stage to start at and print it on rank 0; ``predict`` says what fits this rank. Collective."""
    chosen = 0, "no memory prediction is available"
    if predict is not None:
        jobs = {stage: job_of(config, stage, model, comm, device, grad_accum_steps) for stage in STAGES}
        chosen = fitting_stage(jobs, predict, num_free_bytes(device, comm.world_size))
    stage, why = lowest_stage(chosen, comm, Path(config.out), resuming=config.resume != "none")
    if comm.rank == 0:
        print(f"strategy auto: zero{stage}: {why}")
    return stage


def fitting_stage(jobs: Mapping[int, Job], predict: Predict, free_bytes: int) -> tuple[int, str]:
    """Return the lowest stage that fits, or the highest if none does, and a phrase with the reason.

    Args:
        jobs: this rank's part of the run, by stage.
        predict: predicts the peak of a step, with the job's optimizer and activations.
        free_bytes: bytes that this rank may use.
    """
    free, step = f"{free_bytes / GIB:.2f}GiB free, {HEADROOM:.0%} to spare", ""
    for stage, job in jobs.items():
        planned = predict(replace(job, calibration="", estimates=True))  # of memory alone, on every rank
        if planned.peak_bytes is None:
            return 0, f"no memory prediction is available ({planned.why_no_peak})"
        step = f"a step of {planned.peak_bytes / GIB:.2f}GiB"
        if planned.peak_bytes <= free_bytes * (1 - HEADROOM):
            return stage, f"{step} in {free}"
    return max(jobs), f"{step}, which does not fit either in {free}"


def num_free_bytes(device: torch.device, num_ranks: int) -> int:
    """Return the bytes that this rank may still allocate: the device's free memory, on CPUs over ``num_ranks``."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available // num_ranks


def lowest_stage(chosen: tuple[int, str], comm: Communicator, folder: Path, *, resuming: bool) -> tuple[int, str]:
    """Return the stage to start at, the same on every rank, and why; collective.

    It is the highest of all ranks' ``chosen``, and if the run resumes of the one that an earlier start left in
    ``auto-stage.json``.
    """
    stage, why = chosen
    path = folder / _STAGE_FILE
    if resuming and path.exists():
        try:
            left = json_of(read_text(path, follow=False))
            left_stage, left_why = int(left["stage"]), str(left["why"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError("strategy", f"{path} cannot be read ({error})", "delete it, or name a stage") from None
        if left_stage > stage:
            stage, why = left_stage, left_why
    highest = largest(comm, stage)
    return (stage, why) if highest == stage else (highest, "another rank has less memory")


def move_up(config: TrainConfig, stage: int, rank: int, world_size: int) -> str:
    """Write into the run folder that memory ran out at ``stage``, if a higher stage can help.

    Returns:
        A line for the user; empty if no higher stage can help, and then nothing is written.
    """
    if config.strategy != "auto" or stage >= HIGHEST_STAGE or world_size == 1:
        return ""
    why = f"rank {rank} ran out of memory at zero{stage}"
    write_inside(config.out, _STAGE_FILE, json.dumps({"stage": stage + 1, "why": why}))
    return f"{why}; zero{stage + 1} is next"


def contract_of(
    config: TrainConfig,
    model: LanguageModel,
    comm: Communicator,
    device: torch.device,
    grad_accum_steps: int,
    predict: Predict | None,
) -> Contract | None:
    """Return the contract of a run, with its plan from ``predict``; None if the run cannot be planned.

    Runs of our stages with AdamW, also in 8 bits, can be planned, if ``predict`` is given.
    """
    entry = strategy_entry(config.strategy)
    if predict is None or not entry.planned or config.optimizer not in PLANNED:
        return None
    if config.matmul == "fp8" and device.type == "cpu":  # an emulation, whose tensors no GPU has
        return None
    narrow = config.optimizer in IN_8_BITS or config.state_format != "fp32"
    if narrow and config.offload.on_disk:  # the file's bytes of states in fewer bits are not planned
        return None
    return Contract(predict(job_of(config, entry.stage, model, comm, device, grad_accum_steps)), config.plan.enforce)


def job_of(
    config: TrainConfig,
    stage: int,
    model: LanguageModel,
    comm: Communicator,
    device: torch.device,
    grad_accum_steps: int,
) -> Job:
    """Return what a planner needs to know about this rank's part of a run at ``stage``."""
    fp32, other = config.state_format == "fp32", "AdamW8bit" if config.optimizer in IN_8_BITS else "AdamW"
    return Job(
        model=model,
        row=replace(
            STAGES[stage],
            reshard_after_forward=config.reshard_after_forward,
            secondary_shard_size=config.node_copy or None,
        ),
        rank=comm.rank,
        world_size=comm.world_size,
        shard_size=config.shard_size or comm.world_size,
        compute_dtype=compute_dtype(config),
        reduce_dtype=reduce_dtype(config),
        wire=wire(config),
        accumulate=None if config.accumulate == "auto" else config.accumulate,
        prefetch=config.prefetch,
        num_micro=grad_accum_steps,
        micro_batch_size=config.micro_batch_size,
        seq_len=config.seq_len,
        uniform_order=comm.uniform_order,
        backend=name_of(comm),
        device_type=device.type,
        compiled="" if config.compile != "on" else "compiled" if in_one_graph(config, comm.world_size) else "in pieces",
        keeps_ema=config.ema_decay > 0,
        calibration=config.plan.device,
        estimates=comm.rank == 0,  # only rank 0 reports estimates
        links=Links.of(config.link),
        local_steps=local_steps(config.local_steps, len(model.units)),
        reproducible=config.reproducible or None,
        sequence_parallel=config.sequence_parallel,
        offload=offload(config, stage, comm.world_size),
        optimizer=PLANNED.get(config.optimizer, other) + ("" if fp32 else f" in {config.state_format}"),
    )
