"""Pulls levers until a job fits, the cheapest in time first, then lets go of those that are not needed: ``plan --fit``.

The levers change nothing that is trained (`zeroshard.lab.planner.levers`). Each set of them is planned as
`zeroshard plan` with its flags would be, at every stage and micro-batch that was asked for. What a plan advises where
nothing fits is found in the same way (`zeroshard.lab.planner.changes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from zeroshard.host.columns import columns
from zeroshard.host.errors import UserError
from zeroshard.lab.planner.advice import GIB, describe
from zeroshard.lab.planner.levers import Lever, levers, off_the_device
from zeroshard.lab.planner.plan_rows import Row
from zeroshard.lab.planner.planner import Planner
from zeroshard.lab.planner.show import seconds
from zeroshard.lab.planner.ways import Ways
from zeroshard.settings import rules
from zeroshard.settings.flags_given import path_of


@dataclass(frozen=True)
class Tried:
    """A set of levers, and what they make of the job.

    Attributes:
        flags: those that pull them, beside what was given.
        planner: the job with them.
        ways: the ways to run it.
    """

    flags: tuple[str, ...]
    planner: Planner
    ways: Ways

    @cached_property
    def fits(self) -> bool:
        """Whether any row fits, which is known before the rows are."""
        return self.ways.fit(self.planner)

    @cached_property
    def row(self) -> Row:
        """The recommended row; if none fits, the one that needs least."""
        return self.ways.best(self.planner)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        row = self.row
        found: dict[str, Any] = {"flags": list(self.flags), "fits": self.fits, "needed_bytes": row.needed_bytes}
        return found | {"stage": row.stage, "step_s": row.timing.step_s, "tokens_per_s": row.tokens_per_s}


def fitted(planner: Planner, ways: Ways) -> list[Tried]:
    """What was tried, in order; the last one that fits has the fewest levers.

    Raises:
        UserError: the job itself cannot be run in these ways.
    """
    tried = [Tried((), planner, ways)]
    if tried[0].fits:
        return tried
    pulled: list[Lever] = []
    for lever in every_lever(planner, ways):
        if (more := try_levers(planner, [*pulled, lever], ways)) is not None:
            tried.append(more)
            pulled.append(lever)
            if more.fits:
                break
    # Ranks that share sequences have further communicators, so all levers may need more than all but one.
    for lever in pulled if not tried[-1].fits else ():
        fewer = [each for each in pulled if each is not lever]
        without = try_levers(planner, fewer, ways)
        if without is not None and without.fits:
            tried.append(without)
            pulled = fewer
            break
    for lever in reversed(pulled[:-1] if tried[-1].fits else ()):
        fewer = [each for each in pulled if each is not lever]
        if flags_of(fewer) == flags_of(pulled):  # a later lever is of the same flag
            pulled = fewer
        elif (without := try_levers(planner, fewer, ways)) is not None:
            tried.append(without)
            pulled = fewer if without.fits else pulled
    return tried


def try_levers(planner: Planner, pulled: Sequence[Lever], ways: Ways) -> Tried | None:
    """The job with some levers; None if they do not go together or with its settings, which refuse such flags."""
    with suppress(UserError):
        return with_levers(planner, pulled, ways)
    return None


def every_lever(planner: Planner, ways: Ways) -> list[Lever]:
    """The levers of the job that go with these ways, in the order in which they are pulled.

    Where weights and states alone do not fit, no lever of activations is enough, and states leave first.
    """
    away = list(off_the_device(planner, files=ways.files) if ways.local_steps is None else ())
    found = [*levers(planner), *away] if ways.state_fits(planner) else [*away, *levers(planner)]
    return [lever for lever in found if path_of(lever.flag) not in ways.kept]


def with_levers(planner: Planner, pulled: Sequence[Lever], ways: Ways) -> Tried:
    """The job with some levers.

    Raises:
        UserError: it does not go with them.
    """
    job = planner
    for lever in pulled:
        job = lever.pull(job)
    ways.micro_batches(job)
    rules.check_cut(planner.workload.seq_len, job.workload.sequence_parallel)
    return Tried(flags_of(pulled), job, ways)


def flags_of(pulled: Sequence[Lever]) -> tuple[str, ...]:
    """The flags that pull these levers; of two that are one flag the later one counts."""
    by_name = dict(lever.flag.split(" ", 1) for lever in pulled)
    return tuple(f"{flag} {value}" for flag, value in by_name.items())


def chosen(tried: Sequence[Tried]) -> Tried:
    """The last of them that fits; if none does, the one that needs least, of a device before that of a host."""
    fitting = [each for each in tried if each.fits]
    return fitting[-1] if fitting else min(tried, key=lambda each: (each.row.fits_device, each.row.needed_bytes))


def levers_in_words(tried: Sequence[Tried]) -> str:
    """The sets in a table, and which is taken."""
    given, best = tried[0].planner, chosen(tried)
    num_gpus = given.cluster.world_size
    cells = [("with", "memory", "step", "tokens/s", "fits", "at")]
    for place, each in enumerate(tried):
        row = each.row
        gib, rate = f"{row.needed_bytes / GIB:,.1f} GiB", f"{row.tokens_per_s:,.0f}"
        cells.append(
            (
                " ".join(each.flags) if place else "what is given",
                *(gib, seconds(row.timing.step_s), rate, "yes" if each.fits else "no"),
                describe(row, num_gpus),
            )
        )
    lines = [f"{given.workload.name} on {num_gpus:,} x {given.device.name}: what makes it fit", ""]
    lines += columns(cells, right=(1, 2, 3))
    with_these = " ".join(best.flags) or "what is given"
    said = f"It fits with {with_these}." if best.fits else "None of these is enough."
    return "\n".join([*lines, "", said])
