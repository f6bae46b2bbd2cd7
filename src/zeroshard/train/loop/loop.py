"""The training loop: steps, evaluations, checkpoints, and why a run ends.

A step is forward and backward over the micro-batches, clipping, one small collective in which the ranks agree on loss
and stopping, and the update (`zeroshard.train.loop.step`). All randomness is a pure function of (seed, step, rank), and
the order of the data one of (seed, step). So no random state needs saving, and a resumed run is bit-identical to one
that was never interrupted.

``step`` counts completed steps: the first record has ``step`` 1, and ``step-00000100`` is the state after 100 steps.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from math import inf, isfinite
from statistics import median
from time import perf_counter
from typing import Any

import torch

from zeroshard.comm import CONTROL, buffer_bytes, labelled
from zeroshard.data.base import EvalBatch
from zeroshard.host import gc_frequency
from zeroshard.host.errors import ExitStatus
from zeroshard.host.launch.environment import has_launcher, world_from_env
from zeroshard.train.loop.diagnose import first_not_finite
from zeroshard.train.loop.run import Run
from zeroshard.train.loop.saving import Saving
from zeroshard.train.loop.step import backward, step_seed, take_step
from zeroshard.train.loop.stopping import STOPPED
from zeroshard.train.loop.validation_loss import evaluate
from zeroshard.train.loop.watchdog import PATIENCE_S, Alive
from zeroshard.train.records.origin import origin
from zeroshard.train.records.plan_contract import Contract
from zeroshard.train.records.records import Observer, StepRecord
from zeroshard.zero import ReplicaDivergedError


def train(
    run: Run, stop_wanted: Callable[[], int] = lambda: False, alive: Alive = lambda patience_s: None
) -> ExitStatus:
    """Train until ``max_steps``, an early stop, too many NaN/Inf steps in a row, or until some rank wants to stop.

    Args:
        run: the run to train.
        stop_wanted: returns the number of the signal that was received, or True for any; 0 for none. If it returns one
            on any rank, all ranks stop after that step (replicas: after their next outer step) and save a checkpoint.
        alive: called after each step, batch of an evaluation and part of a save: `Watchdog.alive`.
    """
    saving = Saving(run, alive)
    try:
        return _train(run, saving, stop_wanted, alive)
    except ReplicaDivergedError as error:  # raised on every rank
        if run.strategy.comm.rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return ExitStatus.NOT_FINITE
    finally:
        saving.close()
        gc_frequency.unfreeze()


def _train(run: Run, saving: Saving, stop_wanted: Callable[[], int], alive: Alive) -> ExitStatus:
    schedule, step, status = run.schedule, run.first_step, ExitStatus.OK
    losses: dict[str, float] = {}  # of the last evaluation
    loss, started = None, perf_counter()
    step_s: list[float] = []
    if step >= schedule.max_steps > 0:
        if run.strategy.comm.rank == 0:
            what = f"step {step} of {schedule.max_steps} is done, and nothing is left to do"
            print(f"resume: {what}; give a larger --max-steps to go on", file=sys.stderr, flush=True)
        return status
    _tell(run, lambda observer: observer.on_start(_start_info(run)))
    if step == 0 and schedule.eval_interval:
        losses = _evaluate(run, step, saving.settle)
    while step < schedule.max_steps and status == ExitStatus.OK:
        with run.measures.step() if run.measures else nullcontext():
            record, stop = take_step(run, step, stop_wanted)
        saving.alive()
        if step == run.first_step:
            gc_frequency.default_collections()
        _tell(run, lambda observer, record=record: observer.on_step(record))
        saving.poll(taken=not record.skipped)
        status = _verdict(run, record, saving)
        if status != ExitStatus.OK:
            break
        step, loss, status = step + 1, record.loss, stop
        step_s.append(record.step_s)
        at_end, is_best, proven = step == schedule.max_steps, False, False
        if status == ExitStatus.OK and (at_end or _is_due(step, schedule.eval_interval)):
            if not losses:
                alive(PATIENCE_S)  # the first evaluation may compile
            losses = _evaluate(run, step, saving.settle, saving.alive)
            proven = isfinite(losses["val_loss"])
            is_best = run.best.record(step, losses["val_loss"]) and schedule.keep_best
        if is_best or stop or at_end or _is_due(step, schedule.checkpoint_interval):
            saving.begin(step, proven=proven)
        saving.alive()
        if at_end:
            break
    status = saving.finish(status)
    alive(inf)  # everything is saved; a tracker may now upload for as long as it needs
    summary = {
        "status": status.name.lower(),
        "step": step,
        "loss": loss,
        "val_loss": None,
        **({} if run.strategy.ema is None else {"ema_val_loss": None}),
        **losses,
        **({} if run.best.step is None else {"best_step": run.best.step, "best_val_loss": run.best.loss}),
        "tokens": run.tokens_at(step),
        "num_skipped": run.guard.num_skipped,
        "last_checkpoint_step": saving.saved_at,
        "wall_s": perf_counter() - started,
        **_measured(run, step_s),
    }
    _tell(run, lambda observer: observer.on_end(summary))
    if status in STOPPED and run.strategy.comm.rank == 0:
        how = f"continue with: zeroshard train --config {shlex.quote(str(run.folder / 'config.toml'))} --resume auto"
        if world_from_env() is not None and not has_launcher():
            how = "continue with the same command and --resume auto"
        with suppress(OSError):  # nobody reads our output any more
            print(f"stopped at step {step}, saved; {how}", flush=True)
    return status


def _verdict(run: Run, record: StepRecord, saving: Saving) -> ExitStatus:
    """Return OK, or the status with which the run ends after this step; the reason is printed here. Collective."""
    if run.guard.given_up or (run.scaler and run.scaler.exhausted):
        _complain(run, record, saving)
        return ExitStatus.NOT_FINITE
    if run.contract and run.contract.enforce and _broken(run, run.contract):
        return ExitStatus.CHECK_FAILED
    return ExitStatus.OK


def _evaluate(
    run: Run, step: int, settle: Callable[[], None], alive: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Evaluate, and return the losses as `Observer.on_eval` gets them.

    Replicas that take local steps evaluate the global weights, the last that all of them had in common. ``settle``
    is called before these or averages replace the weights, which an unfinished save may still read.
    """
    strategy = run.strategy

    def loss_on(batches: Iterable[EvalBatch]) -> float:
        return evaluate(strategy.model, batches, strategy.comm, run.device, alive)

    if run.local_steps is not None:
        settle()
    with nullcontext() if run.local_steps is None else run.local_steps.global_weights():
        losses = {"val_loss": loss_on(run.corpus.eval_batches)}
        named = {f"val_loss/{name}": loss_on(batches) for name, batches in run.corpus.named_evals.items()}
    if strategy.ema is not None:
        settle()
        with strategy.ema.weights():
            losses["ema_val_loss"] = loss_on(run.corpus.eval_batches)
    losses |= named
    _tell(run, lambda observer: observer.on_eval(step, losses))
    if run.contract:
        run.contract.interrupt()
    if run.comm:
        run.comm.drain()  # the evaluation's collectives belong to no step
        run.comm.exposed.take_seconds()
    return losses


def _broken(run: Run, contract: Contract) -> bool:
    """Whether any rank's step differed from its plan; the first such rank prints the difference. Collective."""
    comm = run.together
    first = torch.tensor([comm.rank if contract.difference else comm.world_size], device=comm.control_device)
    with labelled(CONTROL):
        comm.all_reduce(first, "min").wait()
    if int(first) == comm.rank:
        print(f"error: plan: rank {comm.rank}, {contract.difference}", file=sys.stderr, flush=True)
    return int(first) < comm.world_size


def _measured(run: Run, step_s: list[float]) -> dict[str, Any]:
    """Return for ``summary.json`` what the run measured, and its plan beside the measured values. Collective."""
    found = run.measures.summary() if run.measures else {}
    if run.contract:
        peak = run.measures.peak_bytes if run.measures else None
        settled = step_s[1:] or step_s  # leave out the first step, which warms up
        step = median(settled) if settled else None
        found["plan"] = run.contract.report(peak, step, buffer_bytes(run.strategy.comm))
    return {**found, "link": run.link} if run.link else found


def _is_due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


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


def _tell(run: Run, call: Callable[[Observer], None]) -> None:
    for observer in run.observers:
        call(observer)


def _complain(run: Run, record: StepRecord, saving: Saving) -> None:
    """Print why the run is given up, and which module produced the first NaN/Inf; collective.

    The first of the ranks that step together prints it.
    """
    step = record.step - 1
    torch.manual_seed(step_seed(run.schedule.seed, step, run.strategy.comm.rank))
    origin = first_not_finite(run.strategy.model, run.together, lambda: backward(run, step))
    run.strategy.optimizer.zero_grad()
    if run.together.rank == 0:
        scale = "" if record.loss_scale is None else f" at a loss scale of {record.loss_scale:g}"
        print(
            f"error: step {record.step}: loss {record.loss} or gradient norm {record.grad_norm} is NaN/Inf{scale},"
            f" the last of {run.guard.num_skipped} skipped steps; the first NaN/Inf was {origin}; "
            f"lower lr, lengthen warmup_steps or set grad_clip, and {saving.sound()}",
            file=sys.stderr,
        )
