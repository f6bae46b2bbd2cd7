"""Answers ``plan --ask longest-sequence``: the longest sequence that fits, as given and with each lever, and what
sets that limit.

Memory is nearly a straight line in the number of tokens, with corners where tiles and chunks change in number. So the
search goes along the line through the two nearest lengths that it has planned. Its answer was planned itself, and so
was the next longer length, which does not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt
from typing import Any

from zeroshard.host.columns import columns
from zeroshard.host.errors import UserError
from zeroshard.lab.planner.advice import GIB
from zeroshard.lab.planner.inverse import Answer
from zeroshard.lab.planner.levers import levers, off_the_device
from zeroshard.lab.planner.plan_rows import Row
from zeroshard.lab.planner.planner import Planner

COARSE = 128  # tokens of a rank: lengths are multiples of it, if so many fit
MOST_TOKENS = 2**27  # of a rank, at which the search stops
FIRST = 64  # multiples of `COARSE` that are tried first
ACTIVATIONS = ("activations", "temporaries")


@dataclass(frozen=True)
class Longest:
    """The longest sequence of one way to run.

    Attributes:
        levers: the flags that were added to the job as it was given.
        tokens: of a sequence; 0: none fits.
        row: the plan at this length; None if none fits.
        parts: bytes by purpose at this length, the limit first: what the next levers would free, and the rest.
        ends: what else sets the limit; empty: memory does.
    """

    levers: tuple[str, ...]
    tokens: int
    row: Row | None
    parts: dict[str, int]
    ends: str = ""

    @property
    def limit(self) -> str:
        """What sets the limit, in words."""
        if self.ends:
            return self.ends
        name, num_bytes = next(iter(self.parts.items()))
        return f"{name} ({num_bytes / GIB:,.1f} GiB)"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        found: dict[str, Any] = {"levers": list(self.levers), "tokens": self.tokens, "limit": None, "parts": self.parts}
        if self.row is not None:
            found |= {"limit": self.ends or next(iter(self.parts))}
            found |= {"needed_bytes": self.row.needed_bytes, "peak_in": self.row.step.peak.where}
            found |= {"step_s": self.row.timing.step_s, "tokens_per_s": self.row.tokens_per_s}
        return found


def longest_sequence(planner: Planner, stage: int, micro_batch: int) -> Answer:
    """The longest sequences at ``stage``; the value is that of the job as it was given.

    Args:
        planner: the planner of one of our language models.
        stage: the ZeRO stage.
        micro_batch: sequences of a rank, or of the ranks that share them, in one forward.
    """
    planner = planner.on(global_batch=None)
    found = [_longest(planner, (), stage, micro_batch)]
    flags: list[str] = []
    job = planner
    for lever in (*levers(planner), *off_the_device(planner)):
        if found[-1].ends:
            break
        job = lever.pull(job)
        name = lever.flag.partition(" ")[0]
        flags = [*(flag for flag in flags if flag.partition(" ")[0] != name), lever.flag]
        found.append(_longest(job, tuple(flags), stage, micro_batch))
    given = found[0]
    return Answer(
        given.tokens or None,
        "tokens",
        _in_words(planner, stage, micro_batch, found),
        tuple(each.as_dict() for each in found),
    )


def _longest(planner: Planner, flags: tuple[str, ...], stage: int, micro_batch: int) -> Longest:
    share = planner.workload.sequence_parallel
    rows: dict[int, Row | None] = {}

    def row(tokens: int) -> Row | None:
        """The plan of sequences of so many tokens; None if the model takes none."""
        if tokens not in rows:
            rows[tokens] = _row(planner, tokens, stage, micro_batch)
        return rows[tokens]

    for unit in (COARSE * share, share):
        most = MOST_TOKENS // COARSE if unit > share else COARSE  # the first number that is not tried
        if unit == share and _left(planner, row(share))[0] < 0:
            break
        num = _most_multiples(lambda num, unit=unit: _left(planner, row(num * unit)), most - 1)
        if num:
            tokens = num * unit
            ends = "the end of this search" if num == most - 1 else ""
            ends = ends or ("the model's table of positions" if row(tokens + unit) is None else "")
            at = row(tokens)
            assert at is not None
            parts = {} if ends else _parts(planner, at, tokens, stage, micro_batch)
            return Longest(flags, tokens, at, parts, ends=ends)
    return Longest(flags, 0, None, _parts_of_states(row(share)))


def _row(planner: Planner, tokens: int, stage: int, micro_batch: int) -> Row | None:
    try:
        return planner.on(workload=planner.workload.changed(seq_len=tokens)).row(stage, micro_batch)
    except UserError:  # GPT-2's table of positions ends before that
        return None
    except RuntimeError as error:  # torch says so of a size that 64 bits do not hold
        if "overflow" not in str(error):
            raise
        return None


def _left(planner: Planner, row: Row | None) -> tuple[float, float]:
    """Bytes that are left beside those that must stay free, and bytes of activations; minus infinity without a plan."""
    if row is None:
        return float("-inf"), 0.0
    num_bytes = sum(row.step.peak.by_category.get(name, 0) for name in ACTIVATIONS)
    return planner.left_bytes(row.needed_bytes), num_bytes


def _most_multiples(left: Callable[[int], tuple[float, float]], most: int) -> int:
    """The largest number up to ``most`` that fits, where the next one does not; 0 if none does.

    Args:
        left: bytes that are left at a number, not negative where it fits, and bytes that may grow with it.
        most: where to stop.
    """
    low, high, guess = 0, most + 1, min(FIRST, most)
    fit: list[tuple[int, float]] = []  # what was left at numbers that fit, and at those that do not
    over: list[tuple[int, float]] = []
    while high - low > 1:
        found, grows = left(guess)
        wide = high / max(low, 1)
        low, high = (guess, high) if found >= 0 else (low, guess)
        if found == float("-inf"):
            guess = (low + high) // 2
            continue
        (fit if found >= 0 else over).append((guess, found))
        if over and high / max(low, 1) > max(wide**0.75, 1.5):  # on a flat piece before a corner
            guess = isqrt(max(low, 1) * high)
        else:
            # two lengths that do not fit are behind the last corner
            points = over[-2:] if len(over) > 1 else [*fit[-1:], *over] if over else fit[-2:]
            guess = _zero(points) or guess + int(found // max(grows / guess, 1.0))
        guess = min(max(guess, low + 1), high - 1)
    return low


def _zero(points: list[tuple[int, float]]) -> int | None:
    """Where the line through two points reaches zero, rounded down; None if it does not fall, or it is one point."""
    if len(points) < 2:
        return None
    (first, at_first), (second, at_second) = points
    slope = (at_first - at_second) / (second - first)
    return first + int(at_first // slope) if slope > 0 else None


def _parts(planner: Planner, row: Row, tokens: int, stage: int, micro_batch: int) -> dict[str, int]:
    """Bytes by purpose: what each further lever would free at this length, training state, and what is left."""
    now, parts = row, {}
    for lever in levers(planner):
        planner, share = lever.pull(planner), planner.workload.sequence_parallel
        if planner.workload.sequence_parallel != share:
            break  # it frees all the others' bytes by its number, and is the last one
        after = _row(planner, tokens, stage, micro_batch)
        if after is None:
            continue
        parts[lever.frees] = max(now.needed_bytes - after.needed_bytes, 0)
        now = after
    by_category = now.step.peak.by_category
    left = sum(by_category.get(name, 0) for name in ACTIVATIONS)
    states = sum(by_category.values()) - left
    in_block = ".".join(now.step.peak.where.split(" of ")[-1].split(".")[:-1]) == "blocks"
    parts["training state"] = states
    parts["attention and other tensors of a block" if in_block else "embedding, hidden states and logits"] = left
    parts["the process (context, collectives, fragments)"] = now.needed_bytes - states - left
    return dict(sorted(parts.items(), key=lambda part: -part[1]))


def _parts_of_states(row: Row | None) -> dict[str, int]:
    if row is None:
        return {"nothing": 0}
    peak = row.step.peak.by_category
    return {"training state": sum(n for name, n in peak.items() if name not in ACTIVATIONS)}


def _in_words(planner: Planner, stage: int, micro_batch: int, found: list[Longest]) -> str:
    workload, cluster = planner.workload, planner.cluster
    where = f"{cluster.world_size:,} x {planner.device.name}"
    where += f", stage {stage}" if planner.stages_differ else ""
    share = workload.sequence_parallel
    by = f", each shared by {share} GPUs" if share > 1 else " of each GPU" if cluster.world_size > 1 else ""
    sequences = "sequence" if micro_batch == 1 else f"{micro_batch} sequences"
    head = ("with", "tokens", "step", "tokens/s", "limited by")
    cells = [head]
    for place, each in enumerate(found):
        name = "as given" if not place else f"and {each.levers[-1]}"
        if each.row is None:
            cells.append((name, "none", "", "", each.limit))
            continue
        step_s, rate = each.row.timing.step_s, each.row.tokens_per_s
        cells.append((name, f"{each.tokens:,}", f"{step_s:,.3g} s", f"{rate:,.0f}", each.limit))
    lines = [f"{workload.name} on {where}: the longest {sequences}{by} that fits", ""]
    lines += columns(cells, right=(1, 2, 3))
    best = max(found, key=lambda each: each.tokens)
    if not best.tokens:
        return "\n".join([*lines, "", f"No sequence fits: {best.limit} alone is too large."])
    with_all = " ".join(best.levers) or "what is given"
    return "\n".join([*lines, "", f"With {with_all}: {best.tokens:,} tokens, limited by {best.limit}."])
