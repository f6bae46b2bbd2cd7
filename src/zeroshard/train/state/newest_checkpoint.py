"""The newest complete checkpoint of a run, for commands that read weights; newer ones that are incomplete are named."""

from __future__ import annotations

import sys
from pathlib import Path

from zeroshard import checkpoint
from zeroshard.checkpoint.manifest import MANIFEST
from zeroshard.columns import printable


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in ``folder``, or None; print which newer ones it passes over, and why."""
    for found in checkpoint.find(folder):
        if found.complete:
            return found.path
        line = f"warning: passed over {found.path}: it is not complete (no {MANIFEST})"
        print(printable(line), file=sys.stderr, flush=True)
    return None
