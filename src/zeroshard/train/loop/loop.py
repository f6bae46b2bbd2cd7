"""The training loop: a step, then whatever else takes part, and why a run ends.

A step is forward and backward over the micro-batches, clipping, one small collective in which the ranks agree on loss
and stopping, and the update (`zeroshard.train.loop.step`). All else is a callback
(`zeroshard.train.records.records.Callback`): evaluation, saving, averages, outer steps, plan, logs, profiler.
All randomness is a pure function of (seed, step, rank), and
the order of the data one of (seed, step). So no random state needs saving, and a resumed run is bit-identical to one
that was never interrupted.

``step`` counts completed steps: the first record has ``step`` 1, and ``step-00000100`` is the state after 100 steps.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from math import inf
from time import perf_counter
from typing import Any

import torch

from zeroshard.host import gc_frequency
from zeroshard.host.errors import ExitStatus
from zeroshard.host.launch.environment import has_launcher, world_from_env
from zeroshard.train.loop.evaluation import Evaluation
from zeroshard.train.loop.run import Run
from zeroshard.train.loop.saving import Saving
from zeroshard.train.loop.skipped_steps import SkippedSteps
from zeroshard.train.loop.step import take_step
from zeroshard.train.loop.stopping import STOPPED
from zeroshard.train.loop.watchdog import Alive
from zeroshard.train.records.origin import origin
from zeroshard.zero import ReplicaDivergedError


def train(
    run: Run, stop_wanted: Callable[[], int] = lambda: False, alive: Alive = lambda patience_s: None
) -> ExitStatus:
    """Train until ``max_steps``, an early stop, too many NaN/Inf steps in a row, or until some rank wants to stop.

    Args:
        stop_wanted: returns the number of the signal that was received, or True for any; 0 for none. If it returns one
            on any rank, all ranks stop after that step (replicas: after their next outer step) and save a checkpoint.
        alive: called after each step, batch of an evaluation and part of a save: `Watchdog.alive`.
    """
    if 0 < run.schedule.max_steps <= run.first_step:
        if run.strategy.comm.rank == 0:
            what = f"step {run.first_step} of {run.schedule.max_steps} is done, and nothing is left to do"
            print(f"resume: {what}; give a larger --max-steps to go on", file=sys.stderr, flush=True)
        return ExitStatus.OK
    saving = Saving(run, alive)
    own = [SkippedSteps(run, saving), Evaluation(run, saving, alive), saving]
    run.callbacks.extend(own)
    try:
        return _train(run, stop_wanted, alive)
    except ReplicaDivergedError as error:  # raised on every rank
        if run.strategy.comm.rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return ExitStatus.NOT_FINITE
    finally:
        del run.callbacks[-len(own) :]
        saving.close()
        gc_frequency.unfreeze()


def _train(run: Run, stop_wanted: Callable[[], int], alive: Alive) -> ExitStatus:
    progress, loss, started = run.progress, None, perf_counter()
    progress.step, progress.status, progress.at_end = run.first_step, ExitStatus.OK, False
    info = _start_info(run)
    run.tell(lambda each: each.on_start(info))
    while progress.status == ExitStatus.OK and not progress.at_end:
        run.tell(lambda each: each.before_step(progress.step + 1))
        record, progress.status = take_step(run, progress.step, stop_wanted)
        progress.at_end = record.step == run.schedule.max_steps
        if progress.step == run.first_step:
            gc_frequency.default_collections()
        run.tell(lambda each, record=record: each.on_step(record))
        if not progress.failed:
            progress.step, loss = record.step, record.loss
    found: dict[str, Any] = {}
    run.tell(lambda each: each.before_end(found))
    alive(inf)  # everything is saved; a tracker may now upload for as long as it needs
    status, wall_s = progress.status, perf_counter() - started
    summary = {"status": status.name.lower(), "step": progress.step, "loss": loss, **found, "wall_s": wall_s}
    summary |= {"link": run.link} if run.link else {}
    run.tell(lambda each: each.on_end(summary))
    if status in STOPPED and run.strategy.comm.rank == 0:
        how = f"continue with: zeroshard train --config {shlex.quote(str(run.folder / 'config.toml'))} --resume auto"
        if world_from_env() is not None and not has_launcher():
            how = "continue with the same command and --resume auto"
        with suppress(OSError):  # nobody reads our output any more
            print(f"stopped at step {progress.step}, saved; {how}", flush=True)
    return status


def _start_info(run: Run) -> dict[str, Any]:
    return {
        "step": run.first_step,
        "max_steps": run.schedule.max_steps,
        "world_size": run.strategy.comm.world_size,
        "device": str(run.device),
        "tokens_per_step": run.tokens_per_step,
        "num_params": sum(param.numel() for param in run.strategy.model.parameters()),
        "torch": torch.__version__,
        **origin(),
        "about": dict(run.about),
        **({"rows": dict(run.corpus.facts)} if run.corpus.facts else {}),
        "kernels": dict(run.kernels),
        **({"plan": run.contract.line()} if run.contract else {}),
        "link": dict(run.link),
    }
