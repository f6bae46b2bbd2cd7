"""The conformance matrix: every strategy x optimizer x world size x feature, held against one process.

    python benchmarks/claims/conformance.py
    python benchmarks/claims/conformance.py --strategies zero3 fsdp2 --optimizers AdamW --markdown m.md --json m.json
    python benchmarks/claims/conformance.py --strategies "zero3, node copy" --keep docs/conformance.json

Writes Markdown and JSON; with ``--keep`` cells that are not trained now stay as they are in that file. What a cell is,
and what it is compared with, stands in `tests/equivalence/cells.py`, and the gloo processes that train it are those of
the tests (`tests/support/ranks.py`). Exit status 1 where a strategy of ours differs by more than `TOLERANCE` or fails.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import torch

from zeroshard.comm import Communicator

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
from equivalence.cells import (
    FEATURES,
    NUM_STEPS,
    OPTIMIZERS,
    OURS,
    PUBLISHED,
    WORLD_SIZES,
    BuildError,
    Cell,
    State,
    cells,
    difference,
    one_process,
    train,
)
from ranks import GlooRanks, RankError

TOLERANCE = 1e-5  # rounding stays far below, a mistake does not
# Muon orthogonalises in bfloat16, where another last bit may be 2^-8 of a direction at the next step.
ROUNDS_COARSELY = frozenset({"Muon"})
SHOWN = tuple(name for name, feature in FEATURES.items() if not feature.form)
MAX_TEXT = 200


@dataclass(frozen=True)
class Result:
    """A cell of the table.

    Attributes:
        outcome: ``exact``; ``differs``; ``refused`` before it trained, or in the words of one process; ``fails`` while
            it trains.
        difference: largest absolute difference of any weight on any rank, the larger of the next two; 0.0 where exact.
        on_grid: where sums of gradients are exact in every order, after the first step that shows a difference.
        ordinary: on ordinary gradients, after the last step.
        reason: why there is no difference.
    """

    strategy: str
    optimizer: str
    world_size: int
    feature: str
    outcome: str
    difference: float | None = None
    on_grid: float | None = None
    ordinary: float | None = None
    reason: str = ""

    @property
    def is_right(self) -> bool:
        """Whether it trains right or says before it begins that it will not."""
        if self.outcome == "differs":
            counts = self.on_grid if self.optimizer in ROUNDS_COARSELY else self.difference
            return counts is not None and counts <= TOLERANCE
        return self.outcome in ("exact", "refused")


@dataclass(frozen=True)
class Failure:
    """What a rank, or one process, raised."""

    outcome: str
    reason: str


# -- cells ---------------------------------------------------------------------------------------------------------


def outcome_on_rank(comm: Communicator, cell: Cell, on_grid: bool, each_step: bool) -> list[State] | str:
    """The weights of a cell, or why the strategy refuses it; what it raises while it trains ends all ranks."""
    try:
        states = train(comm, cell, on_grid=on_grid, each_step=each_step)
    except BuildError as error:
        return _in_words(error.__cause__ or error)
    except Exception as error:
        raise RuntimeError(f"WORDS {_in_words(error)}") from error
    # Ranks that have issued other collectives than their peers find out here, not in the next cell.
    numbers = torch.full((3,), float(comm.rank))
    comm.all_reduce(numbers).wait()
    if numbers.tolist() != [comm.world_size * (comm.world_size - 1) / 2] * 3:
        raise RuntimeError("WORDS ranks are out of step: this message met another one")
    return states


def _in_words(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {_short(lines[0]) if lines else 'no message'}"


def _short(text: str) -> str:
    """Without places in a source, ports, memory addresses and sizes, which are others each time."""
    text = re.sub(r"\[?127\.0\.0\.1\]?:\d+|0x[0-9a-f]+", "...", text)
    text = re.sub(r"\[[^\[\]]*\.cc:\d+\] |\S+ <= \S+ \d+ vs \d+\. ", "", text)
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT].rpartition(" ")[0] + " ..."


def measure(ranks: GlooRanks, cell: Cell) -> Result:
    """Train a cell where sums are exact and, where it is not equal there, twice more to see by how much."""
    found: list[float] = []
    for on_grid, each_step in ((True, False), (True, True), (False, False)):
        try:
            by_rank = ranks.run(outcome_on_rank, cell, on_grid, each_step)
            failure = next((Failure("refused", each) for each in by_rank if isinstance(each, str)), None)
        except RankError as error:
            told = re.findall(r"WORDS (.*)", str(error))
            failure = Failure("fails", told[-1] if told else str(error).splitlines()[-1])
        expected = _expected(cell, on_grid, each_step)
        if failure is not None:
            outcome, reason = failure.outcome, failure.reason
            if isinstance(expected, Failure) and expected.reason == reason:
                outcome, reason = "refused", f"as in one process: {reason}"
            return Result(**asdict(cell), outcome=outcome, reason=reason)
        if isinstance(expected, Failure):
            reason = f"it trains where one process raises {expected.reason}"
            return Result(**asdict(cell), outcome="fails", reason=reason)
        found.append(max(difference(states, expected) for states in by_rank))
        if found == [0.0]:
            return Result(**asdict(cell), outcome="exact", difference=0.0)
    return Result(**asdict(cell), outcome="differs", difference=max(found[1:]), on_grid=found[1], ordinary=found[2])


@lru_cache(maxsize=64)
def _expected(cell: Cell, on_grid: bool, each_step: bool) -> list[State] | Failure:
    try:
        return one_process(cell, on_grid=on_grid, each_step=each_step)
    except Exception as error:  # noqa: BLE001 -- then nothing can be said of the cell
        return Failure("fails", _in_words(error))


def measure_all(chosen: Sequence[Cell]) -> list[Result]:
    """All cells, on ranks that live on from one to the next, and are replaced where a cell has ended them."""
    torch.set_num_threads(1)
    results: list[Result] = []
    ranks: GlooRanks | None = None
    begin = time.perf_counter()
    for cell in chosen:
        if ranks is None or ranks.world_size != cell.world_size or not ranks.alive:
            if ranks is not None:
                ranks.kill()
            ranks = GlooRanks(cell.world_size)
        results.append(measure(ranks, cell))
        if len(results) % 100 == 0 or len(results) == len(chosen):
            print(f"{len(results)} of {len(chosen)} cells, {time.perf_counter() - begin:.0f} s", flush=True)
    if ranks is not None and ranks.alive:
        ranks.close()
    return results


# -- tables --------------------------------------------------------------------------------------------------------


class Reasons:
    """Numbers for the reasons, which are too long for a cell."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def number(self, text: str) -> int:
        """The text's place in the list, from 1."""
        if text not in self.texts:
            self.texts.append(text)
        return self.texts.index(text) + 1


def _cell_text(results: Iterable[Result], reasons: Reasons) -> str:
    """What one place of a table says: one text where all world sizes agree, else one for each."""
    texts = []
    for result in results:
        text = result.outcome
        if result.outcome == "differs":
            text = f"{result.difference:.1e}"
        elif result.reason:
            text += f" [{reasons.number(result.reason)}](#reasons)"
        texts.append(text if result.is_right else f"**{text}**")
    return texts[0] if len(set(texts)) == 1 else " / ".join(texts)


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    rows = [head, ["---"] * len(head), *lines]
    return [f"| {' | '.join(row)} |" for row in rows]


def _summary(results: Sequence[Result]) -> str:
    counts = Counter(result.outcome for result in results)
    parts = [f"{counts['exact']} exact"] if counts["exact"] else []
    if counts["differs"]:
        parts.append(f"{counts['differs']} to {max(result.difference or 0.0 for result in results):.0e}")
    parts += [f"{counts[outcome]} {verb}" for outcome, verb in _OTHERS.items() if counts[outcome]]
    return ", ".join(parts) if all(result.is_right for result in results) else f"**{', '.join(parts)}**"


_OTHERS = {"refused": "refused", "fails": "fail"}


ABOUT = """\
# Conformance

Does every strategy train to the same weights as one process? The tables below have {num_cells} cells. In each cell a
model trains {num_steps} steps on {worlds} gloo ranks (processes on one CPU), and its weights are compared with those
of one process. `python benchmarks/claims/conformance.py` wrote this page with torch {torch} and Python {python} in
{wall_s:.0f} s{kept}; `conformance.json` beside it has the same numbers and more.

**The reference** is one process with unsharded tensors and torch's own optimizer. It runs each rank's rows through the
same model, adds the gradients rank after rank, and divides by the number of ranks. Clipping scales by a norm that is
computed in float64.

**exact**: after the last step every weight on every rank has the reference's bits (`torch.equal`). Ranks may add
gradients in any order, and divide before or after they add, and each of these rounds differently. So for this
comparison the model rounds its own gradients to multiples of 3/128 below 2, whose sum and mean are the same in every
order.

**A number**: those bits differ, and this is the largest absolute difference of any weight. It is the larger of two
differences: on ordinary gradients, which are not rounded, after the last step; and on the rounded ones, after the first
step that shows a difference. Weights are about 0.4, and move by about 0.01 a step. A number above {tolerance:.0e} is
more than rounding, and is **bold**. Muon orthogonalises in bfloat16, so a different last bit may become 2^-8 of a
direction one step later. For Muon, therefore, only the first step that shows a difference decides whether the number
is bold.

**refused**: the strategy raises an error that says why before it trains, or it fails with the same error as one
process. **fails**: the strategy raises an error while it trains, or a rank of it ends. Numbers in brackets are reasons,
listed at the end. If a cell differs between world sizes, it reads {places}.

Optimizers have these settings: {settings}. Muon takes matrices only, so in its cells all other parameters are frozen.
LBFGS is given a closure. SparseAdam takes no dense gradients, in one process either.

In bf16, `ddp`, `zero1-torch` and `ddp + ShardedOptimizer` compute under autocast, and the others with bf16 weights.
Each is compared with a reference that computes in the same way. Frozen weights are left out of this comparison,
because strategies may keep them in either dtype. If parameters are unused, DDP has `find_unused_parameters` set.

Three columns send fewer bytes. `zero2, bf16 weights` sends weights in bfloat16, and its reference rounds its matrices
at each use. `zero3, node copy`, on 4 ranks, gathers weights for backward among two of them. In `zero1, local steps`
each rank is a replica with steps of its own. Its reference has a model and an optimizer for each rank. Every second
step it applies torch's SGD with Nesterov momentum to the mean of their changes, which adds in another order than the
engine's outer optimizer.

Two things round differently than in one process. A norm is a sum, so clipping scales by a different last bit. A fused
kernel treats the last elements of a tensor, which fill no vector, differently from those in its middle. So slices of
a tensor get other last bits than the unsharded tensor (`ddp + ShardedOptimizer` keeps tensors unsharded).

## Summary

A cell counts the outcomes of all optimizers and world sizes; "3 to 6e-08" means that 3 differ, by at most 6e-08.

"""


def markdown(results: Sequence[Result], wall_s: float, num_kept: int) -> str:
    """The document: what is compared, a summary, a table for each feature, the reasons."""
    strategies = [name for name in PUBLISHED if any(result.strategy == name for result in results)]
    features = [name for name in SHOWN if any(result.feature == name for result in results)]
    optimizers = [name for name in OPTIMIZERS if any(result.optimizer == name for result in results)]
    world_sizes = sorted({result.world_size for result in results})
    reasons = Reasons()
    settings = "; ".join(
        f"{name} {', '.join(f'{key}={value}' for key, value in OPTIMIZERS[name][1].items())}" for name in optimizers
    )
    about = ABOUT.format(
        num_cells=len(results),
        num_steps=NUM_STEPS,
        worlds=", ".join(str(world_size) for world_size in world_sizes),
        places=" / ".join(f"{world_size} ranks" for world_size in WORLD_SIZES),
        wall_s=wall_s,
        kept=f" ({num_kept} cells are of an earlier run)" if num_kept else "",
        torch=torch.__version__.partition("+")[0],
        python=platform.python_version(),
        tolerance=TOLERANCE,
        settings=settings,
    )
    text = about.splitlines()
    by_place: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        by_place.setdefault((result.strategy, result.feature, result.optimizer), []).append(result)
    text += _table(
        ["feature", *strategies],
        [
            [
                feature,
                *(_summary([r for r in results if (r.strategy, r.feature) == (name, feature)]) for name in strategies),
            ]
            for feature in features
        ],
    )
    for feature in features:
        text += ["", f"## {feature}", "", f"{FEATURES[feature].about[0].upper()}{FEATURES[feature].about[1:]}.", ""]
        text += _table(
            ["optimizer", *strategies],
            [
                [optimizer, *(_cell_text(by_place.get((name, feature, optimizer), []), reasons) for name in strategies)]
                for optimizer in optimizers
            ],
        )
    text += ["", "## Reasons", ""]
    text += [f"{number}. {_escaped(reason)}" for number, reason in enumerate(reasons.texts, 1)]
    return "\n".join(text) + "\n"


def _escaped(text: str) -> str:
    return "".join(f"\\{char}" if char in "*_<>[]`" else char for char in text)


def _with_kept(results: Sequence[Result], kept: Path | None) -> tuple[list[Result], int]:
    """Results in the order of all cells, and how many of them are from the file."""
    found = {} if kept is None else {_cell_of(each): each for each in _read(kept)}
    new = {_cell_of(each): each for each in results}
    ordered = [(found | new)[cell] for cell in cells(PUBLISHED) if cell in new or cell in found]
    return ordered, len(ordered) - len(new)


def _read(path: Path) -> list[Result]:
    return [Result(**each) for each in json.loads(path.read_text())["cells"]]


def _cell_of(result: Result) -> Cell:
    return Cell(result.strategy, result.optimizer, result.world_size, result.feature)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field, choices in (("strategies", PUBLISHED), ("optimizers", OPTIMIZERS), ("features", SHOWN)):
        parser.add_argument(f"--{field}", nargs="+", choices=choices, default=list(choices))
    worlds = [*WORLD_SIZES, 4]
    parser.add_argument("--worlds", nargs="+", type=int, choices=worlds, default=worlds)
    parser.add_argument("--markdown", type=Path, default=Path("docs/conformance.md"))
    parser.add_argument("--json", type=Path, default=Path("docs/conformance.json"))
    parser.add_argument("--keep", type=Path, help="a JSON of before: cells that are not trained now are taken from it")
    args = parser.parse_args()
    chosen = [
        cell
        for cell in cells(args.strategies)
        if cell.optimizer in args.optimizers and cell.feature in args.features and cell.world_size in args.worlds
    ]
    begin = time.perf_counter()
    results = measure_all(chosen)
    wall_s = time.perf_counter() - begin
    results, num_kept = _with_kept(results, args.keep)
    args.markdown.write_text(markdown(results, wall_s, num_kept))
    about = {"torch": torch.__version__, "python": platform.python_version(), "wall_s": round(wall_s, 1)}
    lines = ",\n".join(f"  {json.dumps(asdict(result))}" for result in results)
    args.json.write_text(f'{{"about": {json.dumps(about)}, "cells": [\n{lines}\n]}}\n')
    wrong = [result for result in results if result.strategy in OURS and not result.is_right]
    for result in wrong:
        print(f"{result}", file=sys.stderr)
    print(f"{args.markdown} and {args.json}: {len(results)} cells, {wall_s:.0f} s, {len(wrong)} of ours are wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
