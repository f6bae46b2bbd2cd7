"""Where things lie in a run folder."""

from __future__ import annotations

from pathlib import Path


def checkpoint_folder(run_folder: Path) -> Path:
    """The folder of a run's checkpoints, inside its run folder."""
    return run_folder / "checkpoints"
