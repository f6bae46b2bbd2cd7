"""Predicts the largest micro-batch of a training run that fits into a given memory."""

from __future__ import annotations

import torch

from zeroshard.lab.planner import inverse
from zeroshard.lab.planner.planner import planner_for
from zeroshard.lab.predict.hardware import this_machine
from zeroshard.lab.predict.workload import DTYPES
from zeroshard.parallel import strategy_entry
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.setup.assemble import lora_of, model_overrides
from zeroshard.train.setup.numerics import automatic_dtype


def largest_micro_batch(config: TrainConfig, num_bytes: int) -> int:
    """Sequences of the largest micro-batch with which a rank of ``config`` is predicted to fit in ``num_bytes``, or 1.

    Only a run can confirm it: the tokenizer may have fewer token ids than the model's preset.
    """
    on_cuda = config.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda" if on_cuda else "cpu")
    planner = planner_for(
        config.model.name,
        overrides=model_overrides(config.model),
        world_size=max(config.nproc, 1),
        gpu=this_machine(num_bytes, device.type),
        within_node="10Gbit/s",
        seq_len=config.seq_len,
        dtype={"auto": automatic_dtype(device), "fp8": "bfloat16"}.get(config.dtype, config.dtype),  # fp8 keeps as much
        reduce_dtype=None if config.reduce_dtype == "master" else config.reduce_dtype,
        wire=config.wire.as_precision(DTYPES),
        node_copy=config.node_copy or None,
        accumulate=None if config.accumulate == "auto" else config.accumulate,
        prefetch=config.prefetch,
        leaves=config.reproducible or None,
        reshard_after_forward=config.reshard_after_forward,
        kernels=config.kernels,
        document_mask=config.data.document_mask or config.data.packing,
        lora=lora_of(config.lora),
        headroom=0.0,
    )
    return int(inverse.largest_micro_batch(planner, strategy_entry(config.strategy).stage).value or 1)
