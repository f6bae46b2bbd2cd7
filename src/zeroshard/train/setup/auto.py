"""``--strategy auto``: the lowest stage whose step fits, and one more whenever memory ran out all the same.

Lower stages send less, higher ones hold less. What fits is predicted before the run (by
`zeroshard.lab.planner.lowest_stage`, which the command line hands in); fragments and neighbours are not, so a rank may
still run out. It may do so alone, in the middle of a collective, where no rank can be asked to take another turn. So
that rank leaves word in the run folder and ends, and the next start, at once under our launcher, goes on from the last
checkpoint a stage higher: checkpoints know no stage.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from zeroshard.comm import CONTROL, Communicator, scope
from zeroshard.errors import UserError
from zeroshard.models import LanguageModel
from zeroshard.regular_files import json_of, read_text
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.setup.assemble import compute_dtype, reduce_dtype

HIGHEST_STAGE = 3
# From a model on the meta device, the number of ranks, the dtype that computes, the device, rows and tokens of a
# micro-batch, whether there is an average, whether stage 3 frees weights after forward, the dtype of reductions
# (None: fp32), and the leaves (None: none): stage, and why.
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
    """The stage to start at; ``choose_stage`` says what fits on this rank. Collective."""
    chosen = 0, "where nobody predicts"
    if choose_stage is not None:
        shapes = config.micro_batch_size, config.seq_len
        kept = config.ema_decay > 0, config.reshard_after_forward, reduce_dtype(config), config.reproducible or None
        chosen = choose_stage(model, comm.world_size, compute_dtype(config), device, *shapes, *kept)
    stage, why = lowest_stage(chosen, comm, Path(config.out), resuming=config.resume != "none")
    if comm.rank == 0:
        print(f"strategy auto: zero{stage}: {why}")
    return stage


def lowest_stage(chosen: tuple[int, str], comm: Communicator, folder: Path, *, resuming: bool) -> tuple[int, str]:
    """The stage to start at, the same on every rank, and why; collective.

    Args:
        chosen: what fits on this rank.
        comm: the ranks; the one with the least memory decides.
        folder: of the run, where an earlier start may have left word.
        resuming: whether that start was of this run.
    """
    stage, why = chosen
    if resuming and _word(folder).exists():
        left_stage, left_why = _read_word(_word(folder))
        if left_stage > stage:
            stage, why = left_stage, left_why
    message = torch.tensor([stage], device=comm.control_device)
    with scope(CONTROL):
        comm.all_reduce(message, op="max").wait()
    return (stage, why) if int(message) == stage else (int(message), "another rank has less memory")


def move_up(config: TrainConfig, stage: int, rank: int, world_size: int) -> str:
    """Leave word that memory ran out at ``stage``, if a higher one can help; in words, empty where none can."""
    if config.strategy != "auto" or stage >= HIGHEST_STAGE or world_size == 1:
        return ""
    why = f"rank {rank} ran out of memory at zero{stage}"
    unfinished = _word(Path(config.out)).with_suffix(f".{rank}")  # ranks may run out together
    unfinished.write_text(json.dumps({"stage": stage + 1, "why": why}), encoding="utf-8")
    unfinished.replace(_word(Path(config.out)))
    return f"{why}; zero{stage + 1} is next"


def _read_word(path: Path) -> tuple[int, str]:
    try:
        left = json_of(read_text(path))
        return int(left["stage"]), str(left["why"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError("strategy", f"{path} cannot be read ({error})", "delete it, or name a stage") from None


def _word(folder: Path) -> Path:
    return folder / "auto-stage.json"
