"""The page: one HTML file with everything in it, plotly.js too: it opens offline and asks nobody for anything.

plotly.js is the largest part by far: 4.8 MB, of which the page carries the compressed 2 MB once. A browser without
``DecompressionStream`` (older than 2023) shows the tables and says where the same figures are as PNGs.
"""

from __future__ import annotations

import gzip
import json
import math
from base64 import b64encode
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from zeroshard.lab.report.entries import Material, Notice
from zeroshard.lab.report.figure import Figure
from zeroshard.lab.report.interactive import CONFIG, as_plotly
from zeroshard.lab.report.table import table_of

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
        num_entries=len(material.entries),
        table=table_of(material.entries),
        notices=by_kind(material.notices),
        figures=figures,
        missing=missing,
        environment=environment,
        drawings=_script([{**as_plotly(figure), "curves": figure.curves} for figure in figures]),
        config=_script({**CONFIG, "responsive": True}),
        plotly=Markup(packed(plotly_js())),
    )


def plotly_js() -> str:
    """plotly.js, whole, as plotly's own package has it."""
    return resources.files("plotly").joinpath("package_data/plotly.min.js").read_text(encoding="utf-8")


def packed(script: str) -> str:
    """``script`` compressed (RFC 1952) and in base64; the page's own script inflates it."""
    return b64encode(gzip.compress(script.encode(), compresslevel=9, mtime=0)).decode("ascii")


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
