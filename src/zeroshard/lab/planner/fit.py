"""`plan --fit`: pulls levers until the job fits, the cheapest in time first, then lets go of those that are not needed.

The levers change nothing that is trained (`zeroshard.lab.planner.levers`). Each set of them is planned as
`zeroshard plan` with its flags would be, at every stage and micro-batch that was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from zeroshard.columns import columns
from zeroshard.errors import UserError
from zeroshard.lab.planner.advice import GIB, describe
from zeroshard.lab.planner.config import PlanConfig
from zeroshard.lab.planner.levers import levers, off_the_device
from zeroshard.lab.planner.plan_rows import Plan, Row
from zeroshard.lab.planner.planner import Planner
from zeroshard.lab.planner.show import seconds
from zeroshard.train.config.config import merge
from zeroshard.train.config.sections import SHORTHANDS
from zeroshard.train.config.validate import nested, validate


class Tried(NamedTuple):
    """A set of levers, and the plan with them.

    Attributes:
        flags: those that pull them, beside what was given.
        config: the settings with them.
        plan: of these settings.
    """

    flags: tuple[str, ...]
    config: PlanConfig
    plan: Plan

    @property
    def row(self) -> Row:
        """The recommended row; if none fits, the one that needs least."""
        return self.plan.best or min(self.plan.rows, key=lambda row: row.needed_bytes)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        row = self.row
        found: dict[str, Any] = {"flags": list(self.flags), "fits": row.fits, "needed_bytes": row.needed_bytes}
        return found | {"stage": row.stage, "step_s": row.timing.step_s, "tokens_per_s": row.tokens_per_s}


def fitted(config: PlanConfig, planner: Planner, plan_of: Callable[[PlanConfig], Plan]) -> list[Tried]:
    """What was tried, in order; the last one that fits has the fewest levers.

    Args:
        config: the settings as they were given.
        planner: their planner.
        plan_of: plans settings.
    """
    tried = [Tried((), config, plan_of(config))]
    if tried[0].plan.fits:
        return tried
    pulled: list[str] = []
    for lever in (*levers(planner), *off_the_device(planner)):
        with suppress(UserError):  # a lever that these settings do not go with: it would be refused as a flag
            tried.append(_with(config, [*pulled, lever.flag], plan_of))
            pulled.append(lever.flag)
        if tried[-1].plan.fits:
            break
    if not tried[-1].plan.fits:
        return tried
    for flag in reversed(pulled[:-1]):
        fewer = [each for each in pulled if each != flag]
        if _by_name(fewer) == _by_name(pulled):  # a later lever is of the same flag
            pulled = fewer
            continue
        with suppress(UserError):  # another lever needs this one
            without = _with(config, fewer, plan_of)
            tried.append(without)
            pulled = fewer if without.plan.fits else pulled
    return tried


def chosen(tried: Sequence[Tried]) -> Tried:
    """The last of them that fits; if none does, the one that needs least."""
    fitting = [each for each in tried if each.plan.fits]
    return fitting[-1] if fitting else min(tried, key=lambda each: each.row.needed_bytes)


def levers_in_words(tried: Sequence[Tried]) -> str:
    """The sets in a table, and which is taken."""
    plan, best = tried[0].plan, chosen(tried)
    cells = [("with", "memory", "step", "tokens/s", "fits", "at")]
    for place, each in enumerate(tried):
        row = each.row
        gib, rate = f"{row.needed_bytes / GIB:,.1f} GiB", f"{row.tokens_per_s:,.0f}"
        cells.append(
            (
                " ".join(each.flags) if place else "what is given",
                *(gib, seconds(row.timing.step_s), rate, "yes" if row.fits else "no"),
                describe(row, plan.num_gpus),
            )
        )
    lines = [f"{plan.workload.name} on {plan.num_gpus:,} x {plan.device.name}: what makes it fit", ""]
    lines += columns(cells, right=(1, 2, 3))
    with_these = " ".join(best.flags) or "what is given"
    said = f"It fits with {with_these}." if best.plan.fits else "None of these is enough."
    return "\n".join([*lines, "", said])


def _by_name(flags: Sequence[str]) -> dict[str, str]:
    """Values by flag; a later one replaces an earlier one."""
    return dict(flag.split(" ", 1) for flag in flags)


def _with(config: PlanConfig, flags: Sequence[str], plan_of: Callable[[PlanConfig], Plan]) -> Tried:
    by_name = _by_name(flags)
    values: dict[tuple[str, ...], Any] = {}
    for flag, value in by_name.items():
        name = flag.removeprefix("--").replace("-", "_")
        values[tuple(name.split(".")) if name not in SHORTHANDS else (name, SHORTHANDS[name])] = value
    changed = validate(PlanConfig, merge(config.model_dump(exclude_unset=True), nested(values)))
    return Tried(tuple(f"{flag} {value}" for flag, value in by_name.items()), changed, plan_of(changed))
