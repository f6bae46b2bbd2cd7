"""The page of one run: configuration, environment, plan against actual, checkpoints, and the stacks of a hang."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dash import dcc, html

from zeroshard.lab.dashboard.labelled import control, scrolling
from zeroshard.lab.metrics_log import NAMED
from zeroshard.lab.planner.show import size
from zeroshard.lab.report.entries import flat
from zeroshard.lab.run_folders import RunResult, validation_sets
from zeroshard.regular_files import read_text

STACKS = "stacks"
MOST_STACK_BYTES = 1 << 20  # a rank's larger file is not read
MOST_STACKS = 16  # ranks whose stacks are shown
_ENVIRONMENT = (
    *("torch", "device", "world_size", "tokens_per_step", "num_params", "kernels"),
    *("command", "host", "commit", "version"),
)


def page() -> html.Div:
    """The elements of the page, still empty."""
    return html.Div(
        [
            control("Run", dcc.Dropdown(id="one-run", placeholder="the latest")),
            html.Div(id="run-details", **{"aria-live": "polite"}),
        ]
    )


def details(name: str, run: RunResult, plan_rows: Sequence[Any]) -> list[Any]:
    """All details of ``run``; ``plan_rows``: rows of the table of its planned and measured values."""
    return [
        html.H2(name),
        html.P([html.Span(run.state, className=f"state {run.state}"), f" {'; '.join(run.problems)}"]),
        *_section("Plan against actual", [html.Table(list(plan_rows))]),
        *_section("Validation losses", [_validation(run)]),
        *_section("Environment", [_pairs(_environment(run))]),
        *_section("Checkpoints", [_checkpoints(run)]),
        *_section("Stacks of a hang", _stacks(run.folder)),
        *_section("Configuration", [_pairs(flat(run.config, only_tables=False).items())]),
    ]


def differences(runs: Mapping[str, RunResult]) -> list[Any]:
    """A table of the settings in which ``runs`` differ, one column a run."""
    configs = {name: flat(run.config, only_tables=False) for name, run in runs.items() if run.config}
    settings = list(dict.fromkeys(setting for config in configs.values() for setting in config))
    differing = [
        setting
        for setting in settings
        if setting != "out" and len({str(config.get(setting)) for config in configs.values()}) > 1
    ]
    if not differing:
        return [html.Tbody(html.Tr(html.Td("The runs that are shown have the same settings.")))]
    head = html.Tr([html.Th("setting", scope="col"), *(html.Th(name, scope="col") for name in configs)])
    rows = [
        html.Tr([html.Th(setting, scope="row"), *(html.Td(_value(config, setting)) for config in configs.values())])
        for setting in differing
    ]
    return [html.Thead(head), html.Tbody(rows)]


def _value(config: Mapping[str, Any], setting: str) -> str:
    return str(config[setting]) if setting in config else "not set"


def _section(title: str, children: list[Any]) -> list[Any]:
    return [html.H3(title), scrolling(children, title)]


def _pairs(facts: Iterable[tuple[str, Any]]) -> Any:
    rows = [
        html.Tr([html.Th(str(name), scope="row"), html.Td("(empty)" if value in ("", (), []) else str(value))])
        for name, value in facts
    ]
    return html.Table(html.Tbody(rows), className="pairs") if rows else html.P("None is recorded.", className="quiet")


def _environment(run: RunResult) -> list[tuple[str, Any]]:
    known: list[tuple[str, Any]] = [
        (name.replace("_", " "), _in_words(run.start[name])) for name in _ENVIRONMENT if run.start.get(name)
    ]
    if run.link is not None:
        known.append(("link", f"{run.link.mode}; {run.link.why_not_comparable or 'as fast as it was asked for'}"))
    return known


def _in_words(value: Any) -> str:
    """Format a value: ``445,952``; a table: ``LayerNorm reference, AdamW torch fused``."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)


def _validation(run: RunResult) -> Any:
    """A table with the last and the lowest loss of the run's own validation set and of each further set."""
    if not run.evaluations:
        return html.P("None was measured.", className="quiet")
    of_set = {"val_loss": [(each.loss, each.step) for each in run.evaluations]}
    if any(math.isfinite(each.ema_loss) for each in run.evaluations):
        of_set["ema_val_loss"] = [(each.ema_loss, each.step) for each in run.evaluations]
    for name in validation_sets(run):
        of_set[NAMED + name] = [(each.named.get(name, math.nan), each.step) for each in run.evaluations]
    rows = []
    for name, losses in of_set.items():
        finite = [each for each in losses if math.isfinite(each[0])]
        said = [f"{loss:.4f} (step {step})" for loss, step in (finite[-1], min(finite))] if finite else ["NaN", "NaN"]
        rows.append(html.Tr([html.Th(name, scope="row"), *(html.Td(each) for each in said)]))
    head = html.Tr([html.Th(title, scope="col") for title in ("set", "last", "lowest")])
    return html.Table([html.Thead(head), html.Tbody(rows)])


def _checkpoints(run: RunResult) -> Any:
    if not run.checkpoints:
        return html.P("None was saved.", className="quiet")
    head = html.Tr([html.Th(title, scope="col") for title in ("step", "file", "size", "seconds", "result")])
    return html.Table([html.Thead(head), html.Tbody([_checkpoint(each) for each in run.checkpoints])])


def _checkpoint(facts: Mapping[str, Any]) -> Any:
    num_bytes, seconds = facts.get("bytes"), facts.get("seconds")
    cells = [
        str(facts.get("step")),
        Path(str(facts.get("path", ""))).name,
        size(num_bytes) if isinstance(num_bytes, int) else "not recorded",
        f"{seconds:.2f}" if isinstance(seconds, int | float) and math.isfinite(seconds) else "not recorded",
        str(facts.get("error") or "saved"),
    ]
    return html.Tr([html.Td(cell) for cell in cells])


def _stacks(folder: Path) -> list[Any]:
    """The stacks of each rank; symbolic links are not followed, and only regular files are read."""
    root = folder / STACKS
    if root.is_symlink() or not root.is_dir():
        return [html.P("No step has hung.", className="quiet")]
    paths = sorted(path for path in root.glob("rank-*.txt") if not path.is_symlink())
    return [
        html.Details([html.Summary(path.name), html.Pre(_stack(path), tabIndex=0)]) for path in paths[:MOST_STACKS]
    ] + ([html.P(f"{len(paths) - MOST_STACKS} more lie in {STACKS}/.")] if len(paths) > MOST_STACKS else [])


def _stack(path: Path) -> str:
    try:
        return read_text(path, MOST_STACK_BYTES)
    except (OSError, ValueError) as error:
        return f"cannot be read ({error})"
