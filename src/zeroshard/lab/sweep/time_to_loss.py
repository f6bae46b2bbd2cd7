"""The time to a target loss without a full training run for every link: the runs that a sweep makes, and the result.

The result of a step does not depend on the bandwidth, and stages 1, 2 and 3 give bit-identical results. So the sweep
trains each remedy to the end once, without throttling: this run gives the *curve*, loss by step. On each link, each
stage takes only the first few steps of the same run: they give the *seconds per step*. Then

    seconds to the target = steps until the curve's validation loss is at most the target x seconds per step

The timed steps have losses too. They must equal the curve's to the bit; if they do not, the row says so. The seconds
include no evaluations, no checkpoints and no start of a run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zeroshard.errors import UserError
from zeroshard.lab.run_folders import WARM_UP_STEPS, RunResult, Spread, scaled
from zeroshard.lab.sweep.cases import REMEDY, Case, SweepConfig, case_name
from zeroshard.lab.sweep.results import CaseResult, SweepResult
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.config.sections import LinkConfig

SHARE_OF_STEPS = 0.8  # the default target: the first remedy's loss after this share of its steps
SAME_BITS = ("zero1", "zero2", "zero3")  # bit-identical losses, under any wire format and with local steps
_NOT_OF_CURVES = ("link", "strategy", "node_copy")  # settings that the loss does not depend on, at these stages


def with_curves(cases: Sequence[Case], timed_steps: int) -> list[Case]:
    """The runs that give the time to a loss of each of ``cases``: curves first, then a few steps of each case.

    Args:
        cases: the cases as they would be trained to the end.
        timed_steps: steps to time, at least; with local steps rounded up to whole rounds.

    Raises:
        UserError: a case evaluates only at its end, so that its curve would have one point.
    """
    curves: dict[str, Case] = {}
    timed: list[Case] = []
    for case in cases:
        if case.config is None:
            timed.append(case)
            continue
        if not case.config.eval_interval:
            what = "0 evaluates at the end alone, and a curve needs validation losses on its way"
            raise UserError("base.eval_interval", what, "give steps between evaluations, as 25")
        key = case_name(_without(case.config, SAME_BITS[0]))
        if key not in curves:
            config = _without(case.config, case.config.strategy)
            axes = {k: v for k, v in case.axes.items() if k.partition(".")[0] not in _NOT_OF_CURVES}
            curves[key] = Case(case_name(config), axes, config, curve=case_name(config))
        config = _first_steps(case.config, timed_steps)
        timed.append(Case(case_name(config), case.axes, config, curve=curves[key].name))
    return [*curves.values(), *timed]


def _without(config: TrainConfig, strategy: str) -> TrainConfig:
    """``config`` without throttling; if its stage is one of `SAME_BITS`, with ``strategy`` instead."""
    changes: dict[str, Any] = {"link": LinkConfig().model_dump()}
    if config.strategy in SAME_BITS:
        changes |= {"strategy": strategy, "node_copy": 0}
    return TrainConfig.model_validate({**config.model_dump(), **changes})


def _first_steps(config: TrainConfig, timed_steps: int) -> TrainConfig:
    """The first steps of ``config``, with the same learning rates, and without evaluations on the way."""
    every = config.replicas.every
    changes = {
        "max_steps": WARM_UP_STEPS + -(-timed_steps // every) * every,
        "decay_steps": config.decay_steps or config.max_steps,
        "eval_interval": 0,
        "eval_batches": 0,
        "eval_rows": 1,
        "early_stop": 0,
        "checkpoint_interval": 0,
    }
    return TrainConfig.model_validate({**config.model_dump(), **changes})


@dataclass(frozen=True)
class Timed:
    """A stage with a remedy on a link, and when it reaches the target.

    Attributes:
        case: the case whose steps were timed.
        curve: the case that was trained to the end for it; None if that run did not end successfully.
        losses: the curve's evaluations, as (step, validation loss), without the one before the first step.
        steps: steps until the first evaluation at or below the target; None if the target was never reached.
        bytes_per_step: bytes that rank 0 gave to collectives in a step, an all-reduce counted twice; NaN: not counted.
        differs: how the timed steps' losses differ from the curve's; empty if they are bit-identical.
    """

    case: CaseResult
    curve: CaseResult | None
    losses: tuple[tuple[int, float], ...]
    steps: int | None
    bytes_per_step: float
    differs: str

    @property
    def num_steps(self) -> int:
        """Steps of the curve until its last evaluation; 0 if there is no evaluation."""
        return self.losses[-1][0] if self.losses else 0

    @property
    def seconds(self) -> Spread | None:
        """Seconds to the target; None if it was never reached or no step was timed."""
        return None if self.steps is None else scaled(self.case.step_s, self.steps)

    @property
    def remedy(self) -> str:
        """The name of the remedy; empty in a sweep without remedies."""
        return str(self.case.axes.get(REMEDY, ""))

    @property
    def fate(self) -> str:
        """``reached after 600 steps``, ``not reached in 768 steps``, or ``its curve is not known``."""
        if not self.losses:
            return "its curve is not known"
        return (
            f"not reached in {self.num_steps:,} steps" if self.steps is None else f"reached after {self.steps:,} steps"
        )


@dataclass(frozen=True)
class TimesToLoss:
    """The times to a loss of a sweep.

    Attributes:
        target: the validation loss to reach, in nats per token; NaN if there is no curve to take it from.
        why: how ``target`` was chosen, or why there is none.
        first: the remedy that others are compared with; empty in a sweep without remedies.
        rows: the cases whose steps were timed, in the order of the sweep.
    """

    target: float
    why: str
    first: str
    rows: tuple[Timed, ...]


def times_to_loss(found: SweepResult) -> TimesToLoss | None:
    """The time to the target of each case whose steps were timed; None if the sweep did not ask for times to a loss."""
    curves = {case.name: case for case in found.cases if case.is_curve}
    if not curves:
        return None
    target, why = _target(found.facts, list(curves.values()))
    rows = []
    for case in found.cases:
        if not case.curve or case.is_curve or not case.done:
            continue
        curve = curves.get(case.curve)
        run = curve.done[0] if curve and curve.done else None
        losses = _losses(run)
        steps = next((step for step, loss in losses if loss <= target), None)
        differs = _differs(case.done, run) if run else ""
        rows.append(Timed(case, curve if run else None, losses, steps, _bytes_per_step(case.done[0]), differs))
    first = next(iter(curves.values()))
    return TimesToLoss(target, why, str(first.axes.get(REMEDY, "")), tuple(rows))


def _target(facts: Mapping[str, Any], curves: Sequence[CaseResult]) -> tuple[float, str]:
    asked = facts.get("target_loss")
    if isinstance(asked, int | float) and asked > 0:
        return float(asked), "as asked for"
    losses = _losses(curves[0].done[0]) if curves[0].done else ()
    name = str(curves[0].axes.get(REMEDY) or "the first curve")
    for step, loss in losses:
        if step >= SHARE_OF_STEPS * losses[-1][0]:
            return loss, f"what {name} has after {step:,} of {losses[-1][0]:,} steps"
    return math.nan, f"{name} has not ended well, whose loss would be the target"


def _losses(run: RunResult | None) -> tuple[tuple[int, float], ...]:
    return tuple((each.step, each.loss) for each in run.evaluations if each.step) if run else ()


def _differs(runs: Sequence[RunResult], curve: RunResult) -> str:
    """The first step whose loss in a timed run is not that of the curve, in words; empty if there is none."""
    known = {step.step: step.loss for step in curve.steps}
    steps = [step.step for run in runs for step in run.steps if step.loss != known.get(step.step, step.loss)]
    return f"from step {min(steps)} on its losses are not those of its curve" if steps else ""


def _bytes_per_step(run: RunResult) -> float:
    """Mean over whole rounds without warm-up steps; an all-reduce counts twice, as a ring sends its bytes twice."""
    steps = [step for steps in run.rounds for step in steps]
    sent = [sum(num * (2 if op == "all_reduce" else 1) for op, num in step.comm_bytes.items()) for step in steps]
    return sum(sent) / len(sent) if sent and any(step.comm_bytes for step in run.steps) else math.nan


def first_of(times: TimesToLoss, row: Timed) -> Timed | None:
    """The row to compare ``row`` with: the same axes with the sweep's first remedy; None if that was not timed."""
    others = {**row.case.axes, REMEDY: times.first}
    return next((each for each in times.rows if {**each.case.axes, REMEDY: each.remedy} == others), None)


def sweep_cases(sweep: SweepConfig, cases: Sequence[Case]) -> list[Case]:
    """The runs of ``sweep``: its cases, or, if it asks for times to a loss, their curves and first steps."""
    return with_curves(cases, sweep.timed_steps) if sweep.time_to_loss else [*cases]
