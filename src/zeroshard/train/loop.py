"""The only training loop.

A step is: forward and backward over the micro-batches, one small message about how it went, clip, update. All
randomness is a pure function of (seed, step, rank) and the data's order one of (seed, step), so a checkpoint
holds tensors and one integer, and a resumed run takes the same steps to the bit.

Steps are counted by how many are done: the first record has ``step`` 1, and ``step-00000100`` is the state after 100.
"""

from __future__ import annotations

import gc
import hashlib
import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf, isfinite
from time import perf_counter
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from zeroshard.comm import CONTROL, scope
from zeroshard.errors import ExitStatus
from zeroshard.profiling.flops import model_flops_utilisation
from zeroshard.train.build import built
from zeroshard.train.config import TrainConfig
from zeroshard.train.evaluate import evaluate
from zeroshard.train.record import Observer, StepRecord
from zeroshard.train.run import Run
from zeroshard.train.saving import Saving


@dataclass(frozen=True)
class _Health:
    """What all ranks know of a step before they take it."""

    loss: float
    stop: bool


def run_training(config: TrainConfig) -> int:
    """Build the run that ``config`` describes, train, clean up; returns the exit status. One call per rank.

    Raises:
        UserError: something in the configuration cannot be had; on every rank.
        KeyboardInterrupt: passed on, with the log intact.
    """
    with _sigterm_noted() as stop_wanted, built(config) as run:
        try:
            return int(train(run, stop_wanted))
        except OSError as error:
            if run.strategy.comm.rank == 0:
                print(f"error: {run.folder}: {error}; free space, then resume", file=sys.stderr)
            return int(ExitStatus.STORAGE)


def train(run: Run, stop_wanted: Callable[[], bool] = lambda: False) -> ExitStatus:
    """Train until ``max_steps``, the first number that is not finite, or until some rank wants to stop.

    Args:
        run: what to train.
        stop_wanted: asked on each rank at each step; one yes stops all after that step, with a checkpoint.
    """
    saving = Saving(run)
    try:
        return _train(run, saving, stop_wanted)
    finally:
        saving.close()
        gc.unfreeze()


def _train(run: Run, saving: Saving, stop_wanted: Callable[[], bool]) -> ExitStatus:
    schedule, step, status = run.schedule, run.first_step, ExitStatus.OK
    val_loss: float | None = None
    ema_val_loss: float | None = None
    loss, started = None, perf_counter()
    _tell(run, lambda observer: observer.on_start(_start_info(run)))
    if step == 0 and schedule.eval_interval:
        val_loss, ema_val_loss = _evaluate(run, step)
    while step < schedule.max_steps and status == ExitStatus.OK:
        record, stop = take_step(run, step, stop_wanted)
        if step == run.first_step:
            gc.freeze()  # what lives from here on is not searched for garbage again and again
        _tell(run, lambda observer, record=record: observer.on_step(record))
        saving.poll()
        if not (isfinite(record.loss) and isfinite(record.grad_norm)) and not record.skipped:
            _complain(run, record)
            status = ExitStatus.NOT_FINITE
            break
        step, loss = step + 1, record.loss
        status = ExitStatus.TERMINATED if stop else ExitStatus.OK
        at_end = step == schedule.max_steps
        if status == ExitStatus.OK and (at_end or _is_due(step, schedule.eval_interval)):
            val_loss, ema_val_loss = _evaluate(run, step)
        if stop or at_end or _is_due(step, schedule.checkpoint_interval):
            saving.begin(step)
    status = saving.finish(status)
    summary = {
        "status": status.name.lower(),
        "step": step,
        "loss": loss,
        "val_loss": val_loss,
        **({} if run.strategy.ema is None else {"ema_val_loss": ema_val_loss}),
        "tokens": step * run.tokens_per_step,
        "last_checkpoint_step": saving.saved_at,
        "wall_s": perf_counter() - started,
    }
    _tell(run, lambda observer: observer.on_end(summary))
    return status


def take_step(run: Run, step: int, stop_wanted: Callable[[], bool]) -> tuple[StepRecord, bool]:
    """One optimizer step, number ``step`` from 0; the weights stay as they were where it is not finite.

    In float16 that is an overflow: the step is skipped on all ranks together. Data go on, the learning rate does not:
    it belongs to the steps that were taken.

    Returns:
        The record, the same on every rank but for times and memory, and whether some rank wants to stop.
    """
    strategy, schedule, scaler = run.strategy, run.schedule, run.scaler
    start = perf_counter()
    torch.manual_seed(_step_seed(schedule.seed, step, strategy.comm.rank))
    loss_scale = scaler.scale if scaler else None
    lr = run.learning_rate(step - (scaler.num_skipped if scaler else 0))
    for group in strategy.optimizer.param_groups:
        group["lr"] = lr
    health = _agree(run, _backward(run, step), stop_wanted())
    finite = scaler.unscale_(strategy.optimizer) if scaler else True
    # The norm is wanted in every record; infinity as the limit measures and clips nothing.
    grad_norm = float(strategy.clip_grad_norm_(schedule.grad_clip or inf)) if finite else inf
    if isfinite(health.loss) and isfinite(grad_norm):
        strategy.optimizer.step()
        if strategy.ema is not None:
            strategy.ema.update()
    if scaler:
        scaler.update()
    memory_bytes = strategy.memory_bytes()  # here all of it is alive at once
    strategy.optimizer.zero_grad()
    step_s = perf_counter() - start
    tokens_per_s = run.tokens_per_step / step_s
    traffic = run.comm.totals() if run.comm else {}
    exposed_s = run.comm.exposed.take() if run.comm and run.comm.world_size > 1 else {}
    if run.comm:
        run.comm.drain()
    record = StepRecord(
        step=step + 1,
        loss=health.loss,
        grad_norm=grad_norm,
        lr=lr,
        step_s=step_s,
        tokens=(step + 1) * run.tokens_per_step,
        tokens_per_s=tokens_per_s,
        mfu=model_flops_utilisation(
            tokens_per_s, run.num_flops_per_token, strategy.comm.world_size, run.peak_flops_per_s
        ),
        memory_bytes=memory_bytes,
        comm=traffic,
        skipped=scaler is not None and not finite and not scaler.exhausted,
        num_skipped=scaler.num_skipped if scaler else 0,
        loss_scale=loss_scale,
        exposed_s=exposed_s,
    )
    return record, health.stop


def _backward(run: Run, step: int) -> Tensor:
    """Forward and backward over this rank's micro-batches; returns the mean of their losses, 0-dim."""
    num_micro = run.schedule.grad_accum_steps
    total = torch.zeros((), dtype=torch.float64, device=run.device)  # stays there: reading it would stop the host
    for micro_step in range(num_micro):
        tokens_BT, targets_BT = (x.to(run.device, non_blocking=True) for x in run.batches(step, micro_step))
        with run.strategy.micro_batch(last=micro_step == num_micro - 1):
            loss = run.strategy.model(tokens_BT, targets_BT)
            (run.scaler.scale_loss(loss / num_micro) if run.scaler else loss / num_micro).backward()
        total += loss.detach().to(total)
    return total / num_micro


def _agree(run: Run, loss: Tensor, stop: bool) -> _Health:
    """The mean loss over ranks, and whether any of them wants to stop: one message of 16 bytes."""
    message = torch.stack([loss, torch.full_like(loss, stop)]).to(run.strategy.comm.control_device)
    with scope(CONTROL):
        run.strategy.comm.all_reduce(message).wait()
    mean_loss, num_stopping = (message / run.strategy.comm.world_size).tolist()
    return _Health(mean_loss, num_stopping > 0)


def _evaluate(run: Run, step: int) -> tuple[float, float | None]:
    """The validation loss of the weights, and of their moving average where there is one."""
    strategy = run.strategy
    loss = evaluate(strategy.model, run.eval_batches, strategy.comm, run.device)
    ema_loss = None
    if strategy.ema is not None:
        with strategy.ema.weights():
            ema_loss = evaluate(strategy.model, run.eval_batches, strategy.comm, run.device)
    _tell(run, lambda observer: observer.on_eval(step, loss, ema_loss))
    if run.comm:
        run.comm.drain()  # an evaluation's traffic is no step's
        run.comm.exposed.take()
    return loss, ema_loss


def _is_due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def _step_seed(seed: int, step: int, rank: int) -> int:
    """Seeds dropout: another one for each step and rank, with nothing to save for a resumed run."""
    digest = hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _start_info(run: Run) -> dict[str, Any]:
    return {
        "step": run.first_step,
        "max_steps": run.schedule.max_steps,
        "world_size": run.strategy.comm.world_size,
        "device": str(run.device),
        "tokens_per_step": run.tokens_per_step,
        "num_params": sum(param.numel() for param in run.strategy.model.parameters()),
        "torch": torch.__version__,
        "kernels": dict(run.kernels),
    }


def _tell(run: Run, call: Callable[[Observer], None]) -> None:
    for observer in run.observers:
        call(observer)


def _complain(run: Run, record: StepRecord) -> None:
    if run.strategy.comm.rank == 0:
        print(
            f"error: step {record.step}: loss {record.loss} with gradient norm {record.grad_norm} is not finite"
            f"{'' if record.loss_scale is None else f' at a loss scale of {record.loss_scale:g}'}; "
            "lower lr, lengthen warmup_steps or set grad_clip, and resume from the last checkpoint",
            file=sys.stderr,
        )


@contextmanager
def _sigterm_noted() -> Generator[Callable[[], bool]]:
    """Inside, SIGTERM does not end the process; the function that is handed out tells whether it came."""
    noted = threading.Event()

    def note(signum: int, frame: FrameType | None) -> None:
        noted.set()

    if threading.current_thread() is not threading.main_thread():
        yield noted.is_set  # Python runs signal handlers in the main thread alone
        return
    before = signal.signal(signal.SIGTERM, note)
    try:
        yield noted.is_set
    finally:
        signal.signal(signal.SIGTERM, before)
