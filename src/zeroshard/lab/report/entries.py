"""The contents of a report: entries, one for each configuration that ran, and the warnings about them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from zeroshard.host.errors import UserError
from zeroshard.lab.report.figure import bandwidth_in_words
from zeroshard.lab.run_folders import RunResult, find_runs, locks_held, read_run
from zeroshard.lab.sweep.cases import CHANGES_NO_RESULT, in_words
from zeroshard.lab.sweep.results import SWEEP, CaseResult, read_sweep
from zeroshard.settings.sizes import parse_bandwidth
from zeroshard.settings.tables import TrackConfig
from zeroshard.settings.validate import by_dotted_name
from zeroshard.train.config.config import TrainConfig

STRATEGIES = ("zero0", "zero1", "zero2", "zero3", "ddp", "zero1-torch", "fsdp2")  # in the order of figures
OF_LINKS = ("link.bandwidth",)
# Settings in which runs may differ and still be repeats of one configuration, because they change no result.
_ASIDE = (*CHANGES_NO_RESULT, "profile.trace_steps", "profile.memory", "plan.enforce", "plan.device")
_ASIDE += tuple(f"track.{name}" for name in TrackConfig.model_fields)


@dataclass(frozen=True)
class Entry:
    """A configuration with its runs."""

    label: str  # name in figures and tables: the settings in ``apart`` in words, or names of run folders
    case: CaseResult  # its runs and failures
    apart: Mapping[str, Any]  # the settings in which it differs from other entries, by dotted name

    @cached_property
    def first(self) -> RunResult | None:
        """The run that represents the entry: the first that ended successfully, else the first with steps, or None."""
        runs = [*self.case.done, *(run for run in self.case.runs if run.steps)]
        return runs[0] if runs else None

    @property
    def strategy(self) -> str:
        """The name of the strategy; empty if it is not known."""
        return str(self.setting("strategy", ""))

    @property
    def bytes_per_s(self) -> float:
        """The requested bandwidth of its links; infinite if they were not throttled, NaN if it cannot be read."""
        return _bandwidth_of(self.setting("link.bandwidth", ""))

    @property
    def world_size(self) -> int:
        """Number of ranks; 0 if it is not known."""
        found = self.first.start.get("world_size") if self.first else None
        found = found or self.setting("nproc", 0)
        return found if isinstance(found, int) else 0

    @property
    def is_comparable(self) -> bool:
        """Whether its links had the bandwidth and the latency that were requested, according to the runs' probes."""
        return not self.case.why_not_comparable

    @property
    def exposed_s(self) -> float:
        """Seconds of the median step for which rank 0 waited for communication; NaN if not known."""
        found = self.case.exposed_s
        return found.median if found else math.nan

    def setting(self, name: str, default: Any = None) -> Any:
        """A setting by its dotted name, from the configuration of its runs or else from its axes."""
        for run in self.case.runs:
            if run.config:
                return run.setting(name, default)
        return flat(self.case.axes).get(name, default)

    def rest(self, *without: str) -> str:
        """The settings in which it differs from other entries, in words, without those in ``without``."""
        return words_of({name: value for name, value in self.apart.items() if name not in without})


@dataclass(frozen=True)
class Notice:
    """A warning that a reader of the report needs."""

    # ``comparable``: results that cannot be compared with others; ``failed``: attempts without a result; ``folder``: a
    # folder that is damaged or incomplete; ``plan``: a run that differs from its plan
    kind: Literal["comparable", "failed", "folder", "plan"]
    about: str  # the entry or the folder that it concerns
    line: str  # the warning's text


@dataclass(frozen=True)
class ReportContents:
    """All contents of a report."""

    title: str  # title of the page
    entries: tuple[Entry, ...]  # entries of sweeps in the order of the folders, then those of single runs
    notices: tuple[Notice, ...]  # warnings about entries, worst first, then those about sweeps

    @property
    def only_run(self) -> RunResult | None:
        """The run of a report that is about one run and has nothing to compare it with; None of any other report."""
        runs = list(self.runs)
        alone = len(runs) == len(self.entries) == 1 and not self.entries[0].case.axes
        return runs[0] if alone and runs[0].steps else None

    @property
    def runs(self) -> Iterator[RunResult]:
        """The runs of all entries."""
        return (run for entry in self.entries for run in entry.case.runs)


def gather(folders: Sequence[str | Path]) -> ReportContents:
    """Read everything in ``folders``, each a run, a sweep, or a folder of either.

    Raises:
        UserError: one of them is not a folder, or there is no run in any.
    """
    entries: list[Entry] = []
    notices: list[Notice] = []
    loose: list[Path] = []
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise UserError("runs", f"{folder} is not a folder", "give the folder of a run or of a sweep")
        sweeps = _find_sweeps(folder)
        for each in sweeps:
            found = read_sweep(each)
            entries += entries_of_cases(found.cases)
            notices += [Notice("folder", str(each), line) for line in found.problems]
        inside = [run for run in find_runs(folder) if not any(run.is_relative_to(each) for each in sweeps)]
        loose += inside or ([] if sweeps else [folder])
    held = locks_held()
    entries += entries_of_runs([read_run(folder, held) for folder in dict.fromkeys(loose)])
    if not notices and not any(_is_something(entry) for entry in entries):
        raise UserError("runs", f"there is no run in {', '.join(map(str, folders))}", "give the folder of a run")
    notices = [*_notices(entries), *notices]
    title = ", ".join(Path(folder).resolve().name for folder in folders[:3]) + (" ..." if len(folders) > 3 else "")
    return ReportContents(title, tuple(entries), tuple(notices))


def entries_of_cases(cases: Sequence[CaseResult]) -> list[Entry]:
    """The entries of a sweep's cases; an axis with a single value is left out of ``apart``."""
    axes = [flat(case.axes) for case in cases]
    names = list(dict.fromkeys(name for each in axes for name in each))
    differing = {name for name in names if len({str(each.get(name)) for each in axes}) > 1}
    entries = []
    for case, each in zip(cases, axes, strict=True):
        apart = {name: value for name, value in each.items() if name in differing}
        label = words_of(apart) or words_of(each) or in_words(case.axes) or case.name
        entries.append(Entry(label, case, apart))
    return entries


def entries_of_runs(runs: Sequence[RunResult]) -> list[Entry]:
    """Group runs by configuration into entries; an entry's axes are the settings in which configurations differ."""
    configs = {run.folder: by_dotted_name(run.config) for run in runs}
    for config in configs.values():
        for name in _ASIDE:
            config.pop(name, None)
    groups: dict[str, list[RunResult]] = {}
    for run in runs:
        config = configs[run.folder]
        key = json.dumps(config, sort_keys=True, default=str) if config else str(run.folder)
        groups.setdefault(key, []).append(run)
    known = [configs[group[0].folder] for group in groups.values() if configs[group[0].folder]]
    names = list(dict.fromkeys(name for config in known for name in config))
    differing = [name for name in names if len({str(config.get(name)) for config in known}) > 1]
    entries = []
    for group in groups.values():
        config = configs[group[0].folder]
        axes = {name: config[name] for name in differing if name in config}
        label = ", ".join(dict.fromkeys(run.folder.resolve().name for run in group))
        entries.append(Entry(label, CaseResult(label, axes, tuple(group), ()), axes))
    return _told_apart(entries)


def words_of(settings: Mapping[str, Any]) -> str:
    """Format settings: ``zero2, 1 Gbit/s, model.n_layer 4``; strategy and link bandwidth come without their names."""
    rest = dict(settings)
    words = [str(rest.pop("strategy"))] if "strategy" in rest else []
    if isinstance(rest.get("link.bandwidth"), str):
        words.append(bandwidth_in_words(_bandwidth_of(rest.pop("link.bandwidth"))))
    return ", ".join([*words, *(in_words({name: value}) for name, value in rest.items())])


def flat(axes: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a case's axes by dotted name; an axis of tables with a name of the user's own loses that name."""
    found: dict[str, Any] = {}
    for name, value in axes.items():
        own_name = isinstance(value, Mapping) and name not in TrainConfig.model_fields
        found |= by_dotted_name(value if own_name else {name: value})
    return found


def plan_of(run: RunResult | None) -> Mapping[str, Any]:
    """Predicted and measured quantities, as stored in ``summary.json``; empty if the run has no plan."""
    found = run.summary.get("plan") if run else None
    return found if isinstance(found, Mapping) else {}


def pair_of(run: RunResult | None, name: str) -> tuple[float, float]:
    """Predicted and measured ``step_s`` or ``peak_bytes``; NaN for one that is not known."""
    found = plan_of(run).get(name)
    if not isinstance(found, Mapping):
        return math.nan, math.nan
    return _finite(found.get("predicted")), _finite(found.get("measured"))


def _bandwidth_of(asked: Any) -> float:
    try:
        return parse_bandwidth("link.bandwidth", str(asked)) if asked else math.inf
    except UserError:
        return math.nan


def _finite(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else math.nan


def _find_sweeps(folder: Path) -> list[Path]:
    found = []
    for inner, folders, names in os.walk(folder):
        if SWEEP in names:
            found.append(Path(inner))
            folders.clear()
    return sorted(found)


def _is_something(entry: Entry) -> bool:
    """Whether an entry has axes, failures, or the files of a run."""
    if entry.case.axes or entry.case.failures:
        return True
    return any(find_runs(run.folder) for run in entry.case.runs)


def _told_apart(entries: Sequence[Entry]) -> list[Entry]:
    """Replace labels that occur more than once by the path of the run folder."""
    labels = [entry.label for entry in entries]
    return [
        replace(entry, label=str(entry.case.runs[0].folder)) if labels.count(entry.label) > 1 else entry
        for entry in entries
    ]


def _notices(entries: Iterable[Entry]) -> list[Notice]:
    found: list[Notice] = []
    environments: dict[str, list[str]] = {}
    for entry in entries:
        case = entry.case
        found += [Notice("comparable", entry.label, why) for why in dict.fromkeys(case.why_not_comparable)]
        found += [Notice("failed", entry.label, line) for line in dict.fromkeys(case.failures)]
        for run in case.runs:
            if run.state in ("damaged", "unfinished") or run.problems:
                line = "; ".join(run.problems) or "killed, or its machine went down: it has not ended"
                found.append(Notice("folder", f"{run.folder}", f"{run.state}: {line}"))
            elif run.state == "failed":
                found.append(Notice("failed", entry.label, f"{run.folder.name} ended with {run.summary.get('status')}"))
            difference = plan_of(run).get("difference")
            if difference:
                found.append(Notice("plan", entry.label, f"{run.folder.name} differs from its plan: {difference}"))
        if entry.first is not None:
            where = ", ".join(f"{name} {entry.first.start.get(name)}" for name in ("torch", "device"))
            environments.setdefault(where, []).append(entry.label)
    if len(environments) > 1:
        line = "; ".join(f"{len(labels)} with {where}" for where, labels in environments.items())
        found.insert(0, Notice("comparable", "environments", f"these runs did not have the same: {line}"))
    order = ("comparable", "plan", "failed", "folder")
    return sorted(found, key=lambda notice: order.index(notice.kind))
