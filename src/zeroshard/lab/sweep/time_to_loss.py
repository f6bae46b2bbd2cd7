"""The time to a loss, without training once for every link: which runs a sweep makes, and what follows from them.

What a step computes does not depend on how fast its bytes travel, and stages 1, 2 and 3 have the same bits. So each
remedy is trained to the end once, on the network as it is: its *curve*, loss by step. On each link each stage takes a
few steps, the first ones of the same run: its *time of a step*. Then

    seconds to the target = steps until the curve's validation loss is at most the target x seconds of a step

The steps that are timed have losses too. They must be the curve's to the bit; where they are not, the row says so.
Evaluations, checkpoints and the start of a run are in no time here.
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

SHARE_OF_STEPS = 0.8  # of the first remedy's, after which its loss is the target where none is given
SAME_BITS = ("zero1", "zero2", "zero3")  # under any wire format and with local steps
_NOT_OF_CURVES = ("link", "strategy", "node_copy")  # settings that no loss depends on, at these stages


def with_curves(cases: Sequence[Case], timed_steps: int) -> list[Case]:
    """The runs by which the time to a loss is known for each of ``cases``: curves first, then few steps of each.

    Args:
        cases: as they would be trained to the end.
        timed_steps: to time at least; of local steps a whole number of rounds.

    Raises:
        UserError: nobody would evaluate before the end.
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
    """``config`` on the network as it is; of stages with the same bits, at ``strategy``."""
    changes: dict[str, Any] = {"link": LinkConfig().model_dump()}
    if config.strategy in SAME_BITS:
        changes |= {"strategy": strategy, "node_copy": 0}
    return TrainConfig.model_validate({**config.model_dump(), **changes})


def _first_steps(config: TrainConfig, timed_steps: int) -> TrainConfig:
    """The first steps of ``config``, with its learning rates and no evaluation before the end."""
    every = config.replicas.every
    changes = {
        "max_steps": WARM_UP_STEPS + -(-timed_steps // every) * every,
        "decay_steps": config.decay_steps or config.max_steps,
        "eval_interval": 0,
        "eval_batches": 1,
        "eval_rows": 0,
        "early_stop": 0,
        "checkpoint_interval": 0,
    }
    return TrainConfig.model_validate({**config.model_dump(), **changes})


@dataclass(frozen=True)
class Timed:
    """A stage with a remedy on a link, and when it has reached the target.

    Attributes:
        case: of which steps were timed.
        curve: that was trained to the end; None where it has not ended well.
        losses: the curve's evaluations, as (step, validation loss), without the one before the first step.
        steps: until the first evaluation at or below the target; None: it was never reached.
        bytes_per_step: that rank 0 gave to collectives in a step, an all-reduce counted twice; NaN: not counted.
        differs: what of the timed steps' losses is not the curve's; empty where they have the same bits.
    """

    case: CaseResult
    curve: CaseResult | None
    losses: tuple[tuple[int, float], ...]
    steps: int | None
    bytes_per_step: float
    differs: str

    @property
    def num_steps(self) -> int:
        """Of the curve, until its last evaluation; 0 where there is none."""
        return self.losses[-1][0] if self.losses else 0

    @property
    def seconds(self) -> Spread | None:
        """To the target; None where it was never reached or no step is known."""
        return None if self.steps is None else scaled(self.case.step_s, self.steps)

    @property
    def remedy(self) -> str:
        """By name; empty in a sweep without remedies."""
        return str(self.case.axes.get(REMEDY, ""))

    @property
    def fate(self) -> str:
        """``reached after 600 steps``, ``not reached in 768 steps``, or that its curve is not known."""
        if not self.losses:
            return "its curve is not known"
        return (
            f"not reached in {self.num_steps:,} steps" if self.steps is None else f"reached after {self.steps:,} steps"
        )


@dataclass(frozen=True)
class TimesToLoss:
    """What a sweep has found.

    Attributes:
        target: a validation loss in nats per token; NaN: there is no curve to take it from.
        why: it is that one.
        first: the remedy that others are compared with; empty in a sweep without remedies.
        rows: that have steps, in the order of the sweep.
    """

    target: float
    why: str
    first: str
    rows: tuple[Timed, ...]


def times_to_loss(found: SweepResult) -> TimesToLoss | None:
    """The time to the target of each case that has steps; None where the sweep did not look for it."""
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
    """From which step on losses of the timed runs are not the curve's."""
    known = {step.step: step.loss for step in curve.steps}
    steps = [step.step for run in runs for step in run.steps if step.loss != known.get(step.step, step.loss)]
    return f"from step {min(steps)} on its losses are not those of its curve" if steps else ""


def _bytes_per_step(run: RunResult) -> float:
    """The mean over whole rounds, without the steps that warm up; a ring sends what is all-reduced twice."""
    steps = [step for steps in run.rounds for step in steps]
    sent = [sum(num * (2 if op == "all_reduce" else 1) for op, num in step.comm_bytes.items()) for step in steps]
    return sum(sent) / len(sent) if sent and any(step.comm_bytes for step in run.steps) else math.nan


def first_of(times: TimesToLoss, row: Timed) -> Timed | None:
    """What ``row`` is compared with: the same axes with the first remedy of the sweep; None where that has no steps."""
    others = {**row.case.axes, REMEDY: times.first}
    return next((each for each in times.rows if {**each.case.axes, REMEDY: each.remedy} == others), None)


def sweep_cases(sweep: SweepConfig, cases: Sequence[Case]) -> list[Case]:
    """The runs of ``sweep``: its cases, or where it looks for times to a loss their curves and first steps."""
    return with_curves(cases, sweep.timed_steps) if sweep.time_to_loss else [*cases]
