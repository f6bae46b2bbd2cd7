"""Compares the steps of a run with its plan (`zeroshard.train.records.plan_contract`), and may end the run by it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch

from zeroshard.comm import CONTROL, buffer_bytes, labelled
from zeroshard.host.errors import ExitStatus
from zeroshard.train.loop.measures import Measures
from zeroshard.train.loop.run import Run
from zeroshard.train.records.plan_contract import Contract
from zeroshard.train.records.records import Callback, StepRecord, Update


class HeldToPlan(Callback):
    """Compares each step of ``run`` with ``contract``; the summary has the plan beside what ``measures`` found."""

    def __init__(self, contract: Contract, run: Run, measures: Measures) -> None:
        self._contract, self._run, self._measures = contract, run, measures
        self._step_s: list[float] = []

    def on_update(self, update: Update) -> None:
        """Compare the step's collectives, an outer step's too, and its memory with the plan."""
        outer, comm = self._run.local_steps, self._run.comm
        fragments = [] if outer is None else outer.settings.fragments_at(outer.num_steps)
        sent = comm.records if comm else ()
        self._contract.compare(update.step, sent, update.memory_bytes, taken=update.taken, fragments=fragments)

    def on_step(self, record: StepRecord) -> None:
        """End the run if any rank's step differed and the plan is enforced. Collective."""
        if self._contract.enforce and not self._run.progress.failed and self._broken():
            self._run.progress.status = ExitStatus.CHECK_FAILED
        if not self._run.progress.failed:
            self._step_s.append(record.step_s)

    def on_eval(self, step: int, losses: Mapping[str, float]) -> None:
        """Leave the next step out: it does not directly follow one that was taken."""
        self._contract.interrupt()

    def before_end(self, summary: dict[str, Any]) -> None:
        """Add the plan beside the measured values."""
        settled = self._step_s[1:] or self._step_s  # leave out the first step, which warms up
        step_s = median(settled) if settled else None
        comm_bytes = buffer_bytes(self._run.strategy.comm)
        summary["plan"] = self._contract.report(self._measures.peak_bytes, step_s, comm_bytes)

    def _broken(self) -> bool:
        """Whether any rank's step differed from its plan; the first such rank prints the difference. Collective."""
        comm, difference = self._run.together, self._contract.difference
        first = torch.tensor([comm.rank if difference else comm.world_size], device=comm.control_device)
        with labelled(CONTROL):
            comm.all_reduce(first, "min").wait()
        if int(first) == comm.rank:
            print(f"error: plan: rank {comm.rank}, {difference}", file=sys.stderr, flush=True)
        return int(first) < comm.world_size
