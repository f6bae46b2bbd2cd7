"""The page: one HTML file with everything in it, plotly.js too: it opens offline and asks nobody for anything."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from zeroshard.lab.planner.show import size
from zeroshard.lab.report.entries import OF_LINKS, Entry, Material, Notice, pair_of
from zeroshard.lab.report.figure import Figure, bandwidth_in_words
from zeroshard.lab.report.interactive import CONFIG, as_plotly
from zeroshard.lab.run_folders import Spread
from zeroshard.lab.sweep.cases import in_words

_NAME_DIGITS = 6
_ABOUT = {
    "comparable": "Not comparable",
    "plan": "Differs from its plan",
    "failed": "Failed",
    "folder": "Folders that are not whole",
}


def render(
    material: Material, figures: Sequence[Figure], missing: Sequence[str], environment: Sequence[tuple[str, str]]
) -> str:
    """The page's text.

    Args:
        material: what it is about.
        figures: to draw, in order.
        missing: figures that are not there, and why, a line each.
        environment: what the numbers hold for, by name.
    """
    templates = Environment(
        loader=PackageLoader("zeroshard.lab.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return templates.get_template("page.html.j2").render(
        title=material.title,
        rows=[row_of(entry) for entry in material.entries],
        notices=by_kind(material.notices),
        figures=figures,
        missing=missing,
        environment=environment,
        drawings=_script([as_plotly(figure) for figure in figures]),
        config=_script({**CONFIG, "responsive": True}),
        plotly=Markup(plotly_js()),
    )


def plotly_js() -> str:
    """plotly.js, whole, as plotly's own package has it."""
    return resources.files("plotly").joinpath("package_data/plotly.min.js").read_text(encoding="utf-8")


def row_of(entry: Entry) -> dict[str, Any]:
    """An entry in the table: text by column."""
    case, run = entry.case, entry.first
    step, exposed = case.step_s, case.exposed_s
    planned_s, measured_s = pair_of(run, "step_s")
    peak = run.peak_bytes if run else 0
    states = [each.state for each in case.runs]
    states += ["failed"] * (len(case.failures) if not states else 0)
    state = ", ".join(f"{states.count(name)} {name}" if len(states) > 1 else name for name in dict.fromkeys(states))
    bandwidth = entry.bytes_per_s
    return {
        "label": _name_of(entry),
        "strategy": entry.strategy,
        "ranks": str(entry.world_size or ""),
        "bandwidth": "" if math.isnan(bandwidth) else bandwidth_in_words(bandwidth),
        "state": state or "not run",
        "step": between(step, 1e3, ",.1f"),
        "tokens": between(case.tokens_per_s, 1.0, ",.0f"),
        "exposed": f"{exposed.median / step.median:.0%}" if exposed and step and step.median else "",
        "peak": size(peak) if peak else "",
        "predicted": f"{measured_s / planned_s:.2f}" if planned_s > 0 and measured_s > 0 else "",
        "loss": f"{run.steps[-1].loss:.4f}" if run and run.steps else "",
        "doubtful": not entry.is_comparable,
    }


def _name_of(entry: Entry) -> str:
    """Of a sweep's case the beginning of its folder's name, and what sets it apart beside what has a column."""
    if entry.label != in_words(entry.apart):
        return entry.label
    return f"{entry.case.name[:_NAME_DIGITS]}  {entry.rest('strategy', *OF_LINKS)}".strip()


def between(found: Spread | None, scale: float, form: str) -> str:
    """``12.3``, or with the lowest and the highest of several ``12.3 (11.9 to 14.0)``."""
    if found is None:
        return ""
    middle = f"{found.median * scale:{form}}"
    return f"{middle} ({found.low * scale:{form}} to {found.high * scale:{form}})" if found.count > 1 else middle


def by_kind(notices: Sequence[Notice]) -> Mapping[str, list[Notice]]:
    """Notices under their headings, those that matter most first."""
    found: dict[str, list[Notice]] = {}
    for notice in notices:
        found.setdefault(_ABOUT[notice.kind], []).append(notice)
    return found


def _script(values: Any) -> Markup:
    """JSON that may stand inside a script element: nothing in it can end one."""
    text = json.dumps(_finite(values), allow_nan=False)
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return Markup(text)


def _finite(values: Any) -> Any:
    if isinstance(values, Mapping):
        return {key: _finite(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [_finite(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values
