"""What a training run should come to on one rank: the planner's side of `zeroshard.train.contract`."""

from __future__ import annotations

import torch

from zeroshard.lab.buffers import Buffer, buffers_of
from zeroshard.lab.memory import OPTIMIZER_STATES, state_bytes
from zeroshard.lab.traffic import messages
from zeroshard.train.contract import Job, Planned, Sent
from zeroshard.zero import MixedPrecision
from zeroshard.zero.strategy import SHARD


def predict(job: Job) -> Planned:
    """What ``job`` holds and sends, exactly; AdamW, as the trainer has it."""
    precision = MixedPrecision(param_dtype=job.compute_dtype) if job.compute_dtype != torch.float32 else None
    buffers = buffers_of(job.model, job.shard_size, list(job.model.blocks))
    rank = job.rank % job.shard_size
    optimizer = OPTIMIZER_STATES["AdamW"]
    held = state_bytes(buffers, job.row, rank, optimizer, precision, device_type=job.device_type)
    if job.keeps_ema:
        held["ema"] = sum(_master_bytes(buffer, job, rank) for buffer in buffers)
    found = messages(
        buffers,
        job.row,
        precision,
        num_micro=job.num_micro,
        uniform_order=job.uniform_order,
        num_replicas=job.world_size // job.shard_size,
    )
    sent = [Sent(m.op, m.num_bytes, f"{m.buffer}/{m.phase}", m.world_size) for m in found]
    return Planned(held, sent)


def _master_bytes(buffer: Buffer, job: Job, rank: int) -> int:
    """What the optimizer sees of a buffer, without padding."""
    layout = buffer.layout
    sharded = job.row.optim is SHARD and layout.world_size > 1
    numel = sum(piece.numel for piece in layout.owned(rank)) if sharded else layout.numel
    return numel * buffer.dtype.itemsize
