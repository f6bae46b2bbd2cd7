"""The report of a bench: rows with their spread, and the table and the JSON file made of them."""

from __future__ import annotations

import json
import platform
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import torch

from zeroshard.host.columns import columns
from zeroshard.host.process import num_cpus

Row = dict[str, Any]  # serialisable as JSON: a `Spread` is stored as a dict


@dataclass(frozen=True)
class Spread:
    """The median of several measurements, and their quartiles."""

    # median, low, high: the second, first and third quartile
    median: float
    low: float
    high: float
    num: int  # number of measurements

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """The spread of ``values``, of which there must be at least one."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high, len(values))

    def inverse(self, amount: float) -> Spread:
        """The spread of ``amount / value``: turns times into rates, so ``low`` and ``high`` change places."""
        return Spread(amount / self.median, amount / self.high, amount / self.low, self.num)


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    key: str  # the key of its values in a row
    title: str  # its heading
    text: Callable[[Any], str] = str  # turns a value into text


@dataclass
class Report:
    """The results of a bench."""

    what: str  # the bench's name
    rows: list[Row]  # the measurements
    columns: Sequence[Column]  # the columns of the table
    facts: Row = field(default_factory=dict)  # settings and measurements that hold for all rows; part of the JSON file
    notes: Sequence[str] = ()  # lines below the table

    def text(self) -> str:
        """The table as plain text, with words aligned left and numbers aligned right, and the notes below it."""
        lines = [[column.title for column in self.columns]]
        for row in self.rows:
            values = ((column, row.get(column.key)) for column in self.columns)
            lines.append(["" if value is None else column.text(value) for column, value in values])
        words = [all(isinstance(row.get(c.key), str | None) for row in self.rows) for c in self.columns]
        numbers = [place for place, word in enumerate(words) if not word]
        return "\n".join([*columns(lines, right=numbers), *self.notes])

    def write(self, path: Path) -> None:
        """Write the facts, the rows and the environment as JSON."""
        content = {"what": self.what, "environment": environment(), **self.facts, "rows": self.rows}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def spread_of(values: Sequence[float]) -> dict[str, Any]:
    """The `Spread` of ``values`` as a dict, the form in which rows store it."""
    return asdict(Spread.of(values))


def milliseconds(seconds: Mapping[str, Any]) -> str:
    """Format the `Spread` of seconds, as rows store it, in milliseconds: ``12.345 (12.100-13.002)``."""
    median, low, high = (f"{seconds[key] * 1e3:.3f}" for key in ("median", "low", "high"))
    return f"{median} ({low}-{high})"


def environment() -> dict[str, Any]:
    """The versions and the hardware that results depend on."""
    on_gpu = torch.cuda.is_available()
    versions = {name: __import__(name).__version__ for name in ("torch", "triton") if find_spec(name)}
    return {
        **versions,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cpus": num_cpus(),
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        "num_gpus": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
    }


def _processor() -> str:
    """The processor's model name, as far as the system reports one."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def interleaved(
    calls: Mapping[str, Callable[[], float]], num_rounds: int, order: random.Random
) -> dict[str, list[float]]:
    """Call all of ``calls`` in each round, in a shuffled order; returns what each returned, round by round.

    If several ranks measure together, ``order`` must have the same seed on each, so that they shuffle alike.
    """
    seen: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(num_rounds):
        for name in order.sample(list(calls), len(calls)):
            seen[name].append(calls[name]())
    return seen
