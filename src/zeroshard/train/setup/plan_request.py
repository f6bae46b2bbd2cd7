"""Asks the planner for the plan of a run, with which the run is then compared: its `Contract`."""

from __future__ import annotations

from dataclasses import replace

import torch

from zeroshard.comm import Communicator
from zeroshard.models import LanguageModel
from zeroshard.parallel import strategy_entry
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.links import Links
from zeroshard.train.records.plan_contract import Contract, Job, Predict
from zeroshard.train.setup.assemble import FP8, compute_dtype, local_steps, reduce_dtype, wire
from zeroshard.zero import STAGES


def contract_of(
    config: TrainConfig,
    model: LanguageModel,
    comm: Communicator,
    device: torch.device,
    grad_accum_steps: int,
    predict: Predict | None,
) -> Contract | None:
    """Return the contract of a run, with its plan from ``predict``; None if the run cannot be planned.

    Runs of our stages with AdamW can be planned, if ``predict`` is given.
    """
    entry = strategy_entry(config.strategy)
    if predict is None or not entry.planned or config.optimizer != "adamw":
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
        fp8=config.dtype == FP8,
        reduce_dtype=reduce_dtype(config),
        wire=wire(config),
        accumulate=None if config.accumulate == "auto" else config.accumulate,
        prefetch=config.prefetch,
        num_micro=grad_accum_steps,
        micro_batch_size=config.micro_batch_size,
        seq_len=config.seq_len,
        uniform_order=comm.uniform_order,
        device_type=device.type,
        keeps_ema=config.ema_decay > 0,
        calibration=config.plan.device,
        estimates=comm.rank == 0,  # only rank 0 reports estimates
        links=Links.of(config.link),
        local_steps=local_steps(config.local_steps, len(model.units)),
        reproducible=config.reproducible or None,
    )
