"""Runs that a program makes in one process, and in two ranks at stages 1 and 3: ``python PROGRAM OUT [NAME ...]``.

A run takes a folder and a stage (None: one process, without the engine) and returns numbers, which must agree.
``OUT/results.pt`` has by "plain", 1 and 3 (of each rank), and by the run's name, what it returned, or its error's text.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from loops import in_ranks


def main(runs, prepare, between=lambda: None):
    """``prepare`` imports what the ranks need before they are forked; ``between`` is called before each run."""
    out, names = Path(sys.argv[1]), sys.argv[2:]

    def run_all(stage):
        found = {}
        for run in runs:
            if names and run.__name__ not in names:
                continue
            between()
            try:
                found[run.__name__] = run(out / f"{run.__name__}-{stage}", stage)
            except Exception as error:  # noqa: BLE001 -- it is told to the test
                found[run.__name__] = f"{type(error).__name__}: {error}"
        return found

    def plain(_):
        return run_all(None)

    def first_stage(_):
        return run_all(1)

    def third_stage(_):
        return run_all(3)

    prepare()
    results = {"plain": in_ranks(1, plain, out)[0], 1: in_ranks(2, first_stage, out), 3: in_ranks(2, third_stage, out)}
    torch.save(results, out / "results.pt")
