"""``--strategy auto``: starts at the lowest stage whose step fits in memory, and moves a stage up after each OOM.

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
from zeroshard.host.errors import UserError
from zeroshard.host.regular_files import json_of, read_text, write_inside
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.records.plan_contract import Job, Predict
from zeroshard.train.setup.plans import Plans
from zeroshard.zero import STAGES

HIGHEST_STAGE = 3
HEADROOM = 0.1  # share of free memory that must stay free: other processes, fragments, communicators' buffers
GIB = 2**30
_STAGE_FILE = "auto-stage.json"


def with_stage(config: TrainConfig, plans: Plans) -> tuple[TrainConfig, int | None]:
    """Return ``config`` with a stage in the place of ``auto``, and that stage; None: it names its own.

    Collective; rank 0 prints the stage. Without a planner ``auto`` starts at stage 0.
    """
    if config.strategy != "auto":
        return config, None
    comm, chosen = plans.comm, (0, "no memory prediction is available")
    if plans.predict is not None:
        jobs = {stage: plans.job(config, stage) for stage in STAGES}
        chosen = fitting_stage(jobs, plans.predict, num_free_bytes(plans.device, comm.world_size))
    stage, why = lowest_stage(chosen, comm, Path(config.out), resuming=config.resume != "none")
    if comm.rank == 0:
        print(f"strategy auto: zero{stage}: {why}")
    return config.model_copy(update={"strategy": f"zero{stage}"}), stage


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
