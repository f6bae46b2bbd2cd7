"""What an export says of a run that saw its base in fewer bits: the loss over that base, and over the exact one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zeroshard import checkpoint
from zeroshard.host.errors import UserError
from zeroshard.train.config.command_settings import EvalConfig
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.inference.evaluation import local_score
from zeroshard.train.setup.prepare_data import data_folder
from zeroshard.train.state.folders import checkpoint_folder

MOST_EVALUATED = 500_000_000  # parameters of a model that an export has in memory twice, one after the other
MOST_ROWS = 32


def losses_said(run: Path, saved: Path, out: Path, trained: TrainConfig, num_params: int) -> str:
    """Return a line on the checkpoint ``saved`` of ``run``, whose adapters are merged in ``out`` into an exact base."""
    name = trained.base.format
    said = f"adapters were trained on this base in {name}, and are added to it as it was before"
    on_your_text = f"{said}: compare zeroshard eval {run} and zeroshard eval {out} on your text"
    if num_params > MOST_EVALUATED or checkpoint.latest(checkpoint_folder(run)) != saved:
        return on_your_text
    try:
        how: dict[str, Any] = {"data_dir": str(data_folder(trained.data)), "seq_len": trained.seq_len}
        how["rows"] = min(trained.eval_rows, MOST_ROWS)
        seen, written = (local_score(EvalConfig(run=str(each), **how)) for each in (run, out))
    except UserError:  # the run's tokens are not here, or were streamed
        return on_your_text
    return f"{said}: loss {seen.loss:.4f} with {name}, {written.loss:.4f} as written, on {seen.num_tokens:,} tokens"
