"""``--strategy auto``: starts at the lowest stage whose step fits in memory, and moves a stage up after each OOM.

Lower stages communicate less, higher ones need less memory. The lowest stage that fits is predicted before the run by
`zeroshard.lab.planner.lowest_stage`, which the command line passes in. The prediction ignores fragmentation and other
processes, so a rank may still run out of memory. That may happen on one rank alone, in the middle of a collective, when
the ranks cannot agree on anything any more. So that rank writes the next stage into ``auto-stage.json`` in the run
folder and ends. The next start, which our launcher makes at once, resumes from the last checkpoint one stage higher;
checkpoints do not depend on the stage.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from zeroshard.comm import Communicator
from zeroshard.comm.agree import largest
from zeroshard.errors import UserError
from zeroshard.models import LanguageModel
from zeroshard.regular_files import json_of, read_text
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.setup.assemble import compute_dtype, reduce_dtype

HIGHEST_STAGE = 3
# A function that returns the stage and why. Its arguments: the model on the meta device, the number of ranks, the
# compute dtype, the device, sequences in a micro-batch, tokens in a sequence, whether there is a moving average of the
# weights, whether stage 3 frees weights after forward, the reduce dtype (None: fp32), and the number of leaves of
# ``reproducible`` (None: off).
ChooseStage = Callable[
    [LanguageModel, int, torch.dtype, torch.device, int, int, bool, bool, torch.dtype | None, int | None],
    tuple[int, str],
]


def automatic_stage(
    config: TrainConfig,
    model: LanguageModel,
    comm: Communicator,
    device: torch.device,
    choose_stage: ChooseStage | None,
) -> int:
    """Return the stage to start at and print it on rank 0; ``choose_stage`` finds what fits this rank. Collective."""
    chosen = 0, "no memory prediction is available"
    if choose_stage is not None:
        shapes = config.micro_batch_size, config.seq_len
        kept = config.ema_decay > 0, config.reshard_after_forward, reduce_dtype(config), config.reproducible or None
        chosen = choose_stage(model, comm.world_size, compute_dtype(config), device, *shapes, *kept)
    stage, why = lowest_stage(chosen, comm, Path(config.out), resuming=config.resume != "none")
    if comm.rank == 0:
        print(f"strategy auto: zero{stage}: {why}")
    return stage


def lowest_stage(chosen: tuple[int, str], comm: Communicator, folder: Path, *, resuming: bool) -> tuple[int, str]:
    """Return the stage to start at, the same on every rank, and why; collective.

    It is the highest of all ranks' ``chosen``, and if the run resumes of the one that an earlier start left in
    ``auto-stage.json``.
    """
    stage, why = chosen
    if resuming and _stage_file(folder).exists():
        left_stage, left_why = _read_word(_stage_file(folder))
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
    unfinished = _stage_file(Path(config.out)).with_suffix(f".{rank}")  # several ranks may write at the same time
    unfinished.write_text(json.dumps({"stage": stage + 1, "why": why}), encoding="utf-8")
    unfinished.replace(_stage_file(Path(config.out)))
    return f"{why}; zero{stage + 1} is next"


def _read_word(path: Path) -> tuple[int, str]:
    try:
        left = json_of(read_text(path))
        return int(left["stage"]), str(left["why"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError("strategy", f"{path} cannot be read ({error})", "delete it, or name a stage") from None


def _stage_file(folder: Path) -> Path:
    return folder / "auto-stage.json"
