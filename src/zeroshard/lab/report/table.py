"""The table of results: a row for each configuration; empty columns are left out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zeroshard.lab.planner.show import size
from zeroshard.lab.report.entries import OF_LINKS, Entry, pair_of, words_of
from zeroshard.lab.report.figure import bandwidth_in_words
from zeroshard.lab.run_folders import RunResult

NOT_MEASURED = "not measured"
_NAME_DIGITS = 6
MOST_VALUES = 8
_TITLES = {
    "label": "run",
    "strategy": "strategy",
    "bandwidth": "link",
    "step": "step, ms",
    "tokens": "tokens/s",
    "exposed": "exposed",
    "peak": "peak of rank 0",
    "predicted": "step / predicted",
    "loss": "last loss",
    "val_loss": "val_loss",
    "model": "model",
    "ranks": "ranks",
    "state": "state",
}
_NEEDS = {"peak": "--profile.memory", "predicted": "--plan.device FILE"}  # flags that record what a column shows


@dataclass(frozen=True)
class Table:
    """A table: ``titles`` of columns, ``rows`` with a cell for each, and notes below it, empty if there is nothing."""

    titles: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    apart: str  # the settings in which rows differ
    without: str  # what no run has measured


def table_of(entries: Sequence[Entry]) -> Table:
    """The results of ``entries``; a column without any value is left out, and the note names it."""
    rows = [row_of(entry) for entry in entries]
    shown = [name for name in _TITLES if any(row[name] for row in rows)]
    absent = [name for name in _TITLES if name not in shown]
    words = [_TITLES[name] + (f" ({_NEEDS[name]} records it)" if name in _NEEDS else "") for name in absent]
    return Table(
        tuple(_TITLES[name] for name in shown),
        tuple(tuple(row[name] or NOT_MEASURED for name in shown) for row in rows),
        _differences(entries),
        f"Not measured in any run: {', '.join(words)}." if words else "",
    )


def _differences(entries: Sequence[Entry]) -> str:
    """Name each setting in which entries differ, with its first `MOST_VALUES` values."""
    found: dict[str, dict[str, None]] = {}
    for entry in entries:
        for name, value in entry.apart.items():
            found.setdefault(name, {})[" ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)] = (
                None
            )
    words = [
        f"{name} ({', '.join([*values][:MOST_VALUES])}{', ...' if len(values) > MOST_VALUES else ''})"
        for name, values in found.items()
    ]
    return f"They differ in {', '.join(words)}." if words else ""


def row_of(entry: Entry) -> dict[str, Any]:
    """The row of an entry: text by column."""
    case, run = entry.case, entry.first
    step, exposed = case.step_s, case.exposed_s
    planned_s, measured_s = pair_of(run, "step_s")
    peak = run.peak_bytes if run else 0
    states = [each.state for each in case.runs]
    states += ["failed"] * (len(case.failures) if not states else 0)
    state = ", ".join(f"{states.count(name)} {name}" if len(states) > 1 else name for name in dict.fromkeys(states))
    bandwidth = entry.bytes_per_s
    return {
        "label": _name_of(entry) + ("" if entry.is_comparable else " (not comparable)"),
        "model": _model(entry),
        "strategy": entry.strategy,
        "ranks": str(entry.world_size or ""),
        "bandwidth": "" if math.isnan(bandwidth) else bandwidth_in_words(bandwidth),
        "state": state or "not run",
        "step": step.text(1e3, ",.1f") if step else "",
        "tokens": case.tokens_per_s.text(1.0, ",.0f") if case.tokens_per_s else "",
        "exposed": f"{exposed.median / step.median:.0%}" if exposed and step and step.median else "",
        "peak": size(peak) if peak else "",
        "predicted": f"{measured_s / planned_s:.2f}" if planned_s > 0 and measured_s > 0 else "",
        "loss": f"{run.steps[-1].loss:.4f}" if run and run.steps else "",
        "val_loss": _validation_losses(run) if run else "",
    }


def _name_of(entry: Entry) -> str:
    """The name of a row: for a sweep's case the start of its hash and the settings that have no column of their own."""
    if entry.label != words_of(entry.apart):
        return entry.label
    return f"{entry.case.name[:_NAME_DIGITS]}  {entry.rest('strategy', *OF_LINKS)}".strip()


def _validation_losses(run: RunResult) -> str:
    """Format the losses of the last evaluation: ``2.0461``, or with further sets ``2.0461, maths 1.9012``."""
    if not run.evaluations:
        return ""
    last = run.evaluations[-1]
    own = [f"{last.loss:.4f}"] if math.isfinite(last.loss) else ["NaN"]
    return ", ".join(own + [f"{name} {value:.4f}" for name, value in last.named.items()])


def _model(entry: Entry) -> str:
    """The model's name, with the number of parameters if a run recorded it."""
    name = str(entry.setting("model.name", ""))
    numel = entry.first.start.get("num_params") if entry.first else None
    if not isinstance(numel, int) or numel <= 0:
        return name
    words = next(
        (f"{numel / n:.3g} {unit}" for n, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")) if numel >= n), ""
    )
    return f"{name} {words or numel}".strip()
