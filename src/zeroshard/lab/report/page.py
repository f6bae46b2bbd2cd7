"""The page: one HTML file with everything in it, plotly.js too: it opens offline and asks nobody for anything.

plotly.js is the largest part by far. The page carries its basic bundle (traces ``scatter``, ``bar`` and ``pie``), which
lies compressed in third_party/: 0.4 MB where the whole of it has 1.5. A browser without ``DecompressionStream`` (older
than 2023) shows the tables and says where the same figures are as PNGs.

To renew the bundle: ``npm pack plotly.js-basic-dist-min@VERSION``, then ``gzip -9n`` of its plotly-basic.min.js, its
LICENSE, and here its version and checksum.
"""

from __future__ import annotations

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
from zeroshard.lab.report.time_figures import time_table

PLOTLY_JS = "4.1.1"  # the version of the bundle
PLOTLY_JS_SHA256 = "99784e3abfb07b142a15e521a439e6d9addceadb3f79553fd24c72774f0649ba"  # of it as npm has it
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
        tables=[
            *(("Time to a loss", time_table(times)) for times in material.times if math.isfinite(times.target)),
            ("Results", table_of(material.entries)),
        ],
        notices=by_kind(material.notices),
        figures=figures,
        missing=missing,
        environment=environment,
        drawings=_script([{**as_plotly(figure), "curves": figure.curves} for figure in figures]),
        config=_script({**CONFIG, "responsive": True}),
        plotly=Markup(b64encode(plotly_js()).decode("ascii")),
    )


def plotly_js() -> bytes:
    """The basic bundle of plotly.js, compressed (RFC 1952); the page's own script inflates it."""
    return resources.files("zeroshard.lab.report").joinpath("third_party/plotly-basic.min.js.gz").read_bytes()


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
