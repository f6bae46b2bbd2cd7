"""One optimizer step: forward and backward over the micro-batches, clip, one small collective to agree, update.

All randomness of a step is a pure function of (seed, step, rank), so a resumed run has no random state to restore.

[Note: Reproducible]
    With exact sums (the same bits on any number of ranks), randomness is instead a function of (seed, step,
    micro-batch), where micro-batches are counted over all ranks. The mean loss is the exact sum of all micro-batches'
    losses, rounded once, divided by their number. In float16 the rounding of a gradient depends on the factor of its
    loss, so each loss is divided by the same number as on one rank.

[Note: The one read]
    On a GPU the host waits for the device once per step, after backward and before the update. It reads the mean loss,
    the gradient norm and the requests to stop, which were summed over ranks on the device. The host needs them at that
    point to decide whether to take the step. The decision determines the update, the optimizer's step counts, the
    moving average, the next learning rate, an outer step, and the collectives that the plan expects. Reading
    the values one step later for the log would therefore save no wait.
"""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Callable
from math import inf
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from zeroshard.comm import CONTROL, labelled
from zeroshard.data.base import as_arguments
from zeroshard.host.errors import ExitStatus
from zeroshard.models.config import inputs_wait_on_host
from zeroshard.models.inputs_on_host import CATEGORY, slot_bytes
from zeroshard.train.loop.run import Run
from zeroshard.train.loop.stopping import agreed_stop, as_numbers
from zeroshard.train.loop.validation_loss import sum_in_any_order
from zeroshard.train.records.records import StepRecord, Update


def take_step(run: Run, step: int, stop_wanted: Callable[[], int]) -> tuple[StepRecord, ExitStatus]:
    """Run one optimizer step, number ``step`` from 0; all ranks skip its update together if `run.guard` says so.

    A skipped step uses up its data, but not its learning rate: the schedule counts only the steps that were taken.

    Returns:
        The step's record, the same on every rank except for times and memory (with local steps: on every rank of a
        replica), and the status to stop with, OK to continue.
    """
    strategy, schedule, scaler, guard = run.strategy, run.schedule, run.scaler, run.guard
    start, span = perf_counter(), run.clock.span
    torch.manual_seed(step_seed(schedule.seed, step, strategy.comm.rank))
    loss_scale = scaler.scale if scaler else None
    lr = run.learning_rate(step - guard.num_skipped)
    for group in strategy.optimizer.param_groups:
        group["lr"] = lr
    losses = backward(run, step)
    finite = scaler.unscale_(strategy.optimizer) if scaler else True
    # Every record has the norm, so compute it without clipping too: with the limit infinity nothing is clipped.
    with span("clip"):
        norm = strategy.clip_grad_norm_(schedule.grad_clip or inf) if finite else torch.full_like(losses[0], inf)
    loss, grad_norm, stop = _agree(run, losses, norm, stop_wanted())
    verdict = guard.judge(loss, grad_norm, overflow=not finite)
    if verdict == "taken":
        with span("update"):
            strategy.optimizer.step()
    if scaler:
        scaler.update()
    memory_bytes = strategy.memory_bytes()  # here weights, gradients and optimizer states all exist
    settings: Any = getattr(strategy.model, "config", None)
    # Slots belong to the process: those of another model that is still here are no part of this run.
    if inputs_wait_on_host(getattr(settings, "activation_checkpointing", "none")):
        memory_bytes = {**memory_bytes, CATEGORY: slot_bytes()}
    strategy.optimizer.zero_grad()
    taken = verdict == "taken"
    update = Update(step + 1, loss, memory_bytes, taken, stop)
    run.tell(lambda each: each.on_update(update))
    step_s, comm = perf_counter() - start, run.comm
    record = StepRecord(
        step=step + 1,
        loss=loss,
        grad_norm=grad_norm,
        lr=lr,
        tokens=run.tokens_at(step + 1),
        memory_bytes=memory_bytes,
        comm=comm.totals() if comm else {},
        skipped=not taken,
        why_skipped="" if taken else verdict,
        num_skipped=guard.num_skipped,
        loss_scale=loss_scale,
        exposed_s=comm.exposed.take_seconds() if comm and comm.world_size > 1 else {},
        spans_s=run.clock.take_seconds(),
        outer_step=update.outer_step,
        **run.speed.of_step(step_s, run.tokens_per_step, strategy.comm.world_size),
    )
    if comm:
        comm.drain()
    return record, update.stop


def backward(run: Run, step: int) -> Tensor:
    """Forward and backward over this rank's micro-batches; returns their (weighted) losses [num_micro] in fp64."""
    num_micro, comm = run.schedule.grad_accum_steps, run.strategy.comm
    # The losses stay on the device: reading them would make the host wait.
    losses = torch.zeros(num_micro, dtype=torch.float64, device=run.device)
    span = run.clock.span
    for micro_step in range(num_micro):
        if run.schedule.exact_sums:  # each micro-batch has its seed, whoever computes it
            torch.manual_seed(step_seed(run.schedule.seed, step, micro_step * comm.world_size + comm.rank))
        with span("data"):
            tokens_BT, targets_BT, *positions = (moved(x, run.device) for x in run.corpus.batches(step, micro_step))
        with run.strategy.micro_batch(last=micro_step == num_micro - 1):
            with span("forward"):
                loss = run.strategy.model(tokens_BT, targets_BT, **as_arguments(positions))
                if run.corpus.loss_weight is not None:
                    loss = loss * run.corpus.loss_weight(step, micro_step).to(loss)
            with span("backward"):
                loss_share = loss / num_micro
                if run.scaler:
                    loss_share = run.scaler.scale_loss(loss_share / run.scaler.divided_by)
                loss_share.backward()
        losses[micro_step] = loss.detach()
        del loss, loss_share  # after backward too their graph keeps inputs of recomputed blocks
    return losses


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy ``tensor`` to ``device``; to a GPU asynchronously from pinned memory, so that the host does not wait."""
    fetched = device.type == "cuda" and tensor.device.type == "cpu"
    return (tensor.pin_memory() if fetched else tensor).to(device, non_blocking=True)


def _agree(run: Run, losses: Tensor, grad_norm: Tensor, stop: int) -> tuple[float, float, ExitStatus]:
    """Return the mean loss over the ranks that take this step together, the gradient norm, and whether and why to stop.

    This is one all-reduce of 24 bytes; with exact sums an all-gather of every micro-batch's loss. All ranks
    already have the norm, which is read together with the result: [Note: The one read].
    """
    preempted = stop == signal.SIGUSR1
    others = {0: ExitStatus.OK, signal.SIGINT: ExitStatus.INTERRUPTED}
    wish = ExitStatus.PREEMPTED if preempted else others.get(stop, ExitStatus.TERMINATED)
    wishes = torch.tensor(as_numbers(wish), dtype=losses.dtype)
    comm, norm = run.together, grad_norm.detach().to(losses).view(1)
    if run.schedule.exact_sums:
        own = torch.cat([moved(wishes, losses.device), losses])
        report = own.new_empty(comm.world_size, own.numel())
        with labelled(CONTROL):
            comm.all_gather(report.view(-1), own).wait()
        *values, norm = torch.cat([report.view(-1), norm]).tolist()
        rows = [values[start : start + len(own)] for start in range(0, len(values), len(own))]
        wanted = [sum(row[place] for row in rows) for place in (0, 1)]
        all_losses = [loss for row in rows for loss in row[2:]]
        mean_loss = sum_in_any_order(all_losses) / len(all_losses)
    else:
        report = torch.cat([losses.mean().view(1), moved(wishes, losses.device), norm])
        with labelled(CONTROL):
            comm.all_reduce(report[:3]).wait()
        *sums, norm = report.tolist()
        mean_loss, wanted = sums[0] / comm.world_size, sums[1:]
    return mean_loss, norm, agreed_stop(*wanted)


def step_seed(seed: int, step: int, rank: int) -> int:
    """Seed of dropout: different for each step and rank, and a pure function of them, so nothing needs to be saved."""
    digest = hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
