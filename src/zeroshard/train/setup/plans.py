"""Asks the planner about a run: the plan that it is compared with (`Contract`), and what fits before it begins."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from zeroshard.comm import Communicator
from zeroshard.comm.links import Links
from zeroshard.comm.registry import name_of
from zeroshard.models import LanguageModel
from zeroshard.parallel import strategy_entry
from zeroshard.settings.optimizer import IN_8_BITS
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.records.plan_contract import Contract, Job, Predict
from zeroshard.train.setup.assemble import engine_settings
from zeroshard.train.setup.compiled import in_one_graph
from zeroshard.train.setup.schedule import accumulation_steps
from zeroshard.zero import STAGES

# the trainer's optimizers that plans know, by their names there
PLANNED = {"adamw": "AdamW", "adamw8bit": "AdamW8bit", "flash-adamw": "FlashAdamW"}


@dataclass(frozen=True)
class Plans:
    """This rank's part of a run, of which a planner can be asked.

    Attributes:
        model: on the meta device.
        comm, device: of this rank.
        predict: the planner; None: there is none.
    """

    model: LanguageModel
    comm: Communicator
    device: torch.device
    predict: Predict | None

    def contract(self, config: TrainConfig) -> Contract | None:
        """Return the contract of a run, with its plan; None if the run cannot be planned.

        Runs of our stages with AdamW, also in 8 bits, can be planned.
        """
        entry = strategy_entry(config.strategy)
        if self.predict is None or not entry.planned or config.optimizer not in PLANNED:
            return None
        if config.matmul == "fp8" and self.device.type == "cpu":  # an emulation, whose tensors no GPU has
            return None
        narrow = config.optimizer in IN_8_BITS or config.state_format != "fp32"
        if narrow and config.keeps_state_on_disk:  # the file's bytes of states in fewer bits are not planned
            return None
        return Contract(self.predict(self.job(config, entry.stage)), config.plan.enforce)

    def job(self, config: TrainConfig, stage: int) -> Job:
        """Return what a planner needs to know about this rank's part of a run at ``stage``."""
        comm = self.comm
        fp32, other = config.state_format == "fp32", "AdamW8bit" if config.optimizer in IN_8_BITS else "AdamW"
        return Job(
            model=self.model,
            row=replace(
                STAGES[stage],
                reshard_after_forward=config.reshard_after_forward,
                secondary_shard_size=config.node_copy or None,
            ),
            rank=comm.rank,
            world_size=comm.world_size,
            num_micro=accumulation_steps(config, comm.world_size),
            micro_batch_size=config.micro_batch_size,
            seq_len=config.seq_len,
            uniform_order=comm.uniform_order,
            backend=name_of(comm),
            device_type=self.device.type,
            compiled=""
            if config.compile != "on"
            else "compiled"
            if in_one_graph(config, comm.world_size)
            else "in pieces",
            keeps_ema=config.ema_decay > 0,
            calibration=config.plan.device,
            estimates=comm.rank == 0,  # only rank 0 reports estimates
            links=Links.of(config.link),
            sequence_parallel=config.sequence_parallel,
            optimizer=PLANNED.get(config.optimizer, other) + ("" if fp32 else f" in {config.state_format}"),
            **engine_settings(config, stage, comm.world_size, len(self.model.units)),
        )
