"""Renders the page: one HTML file that includes everything, plotly.js too, opens offline and requests nothing.

plotly.js is by far the largest part. The page includes its basic bundle (traces ``scatter``, ``bar`` and ``pie``),
which is stored compressed in third_party/: 0.4 MB, where the full plotly.js has 1.5. A browser without
``DecompressionStream`` (older than 2023) shows the tables, and says where the figures are as PNGs.

To update the bundle: run ``npm pack plotly.js-basic-dist-min@VERSION``, then ``gzip -9n`` on its plotly-basic.min.js,
copy its LICENSE, and change the version and the checksum here.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from zeroshard.lab.report.entries import Notice, ReportContents
from zeroshard.lab.report.figure import Figure
from zeroshard.lab.report.interactive import CONFIG, as_plotly
from zeroshard.lab.report.single_run import header_of
from zeroshard.lab.report.table import table_of
from zeroshard.train.records.log_files import finite_or_null

PLOTLY_JS = "4.1.1"  # the version of the bundle
PLOTLY_JS_SHA256 = "99784e3abfb07b142a15e521a439e6d9addceadb3f79553fd24c72774f0649ba"  # uncompressed, as in npm
_ABOUT = {
    "comparable": "Not comparable",
    "plan": "Differs from its plan",
    "failed": "Failed",
    "folder": "Folders that are not whole",
}


def render(
    material: ReportContents, figures: Sequence[Figure], missing: Sequence[str], environment: Sequence[tuple[str, str]]
) -> str:
    """The page as HTML text.

    Args:
        material: the entries and notices that it shows.
        figures: the figures to draw, in order.
        missing: a line for each kind of figure that is missing, with the reason.
        environment: (name, value) pairs of the environment of the runs.
    """
    templates = Environment(
        loader=PackageLoader("zeroshard.lab.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    drawings = [{**as_plotly(figure), "curves": figure.curves} for figure in figures]
    return templates.get_template("page.html.j2").render(
        title=material.title,
        header=header_of(material.only_run) if material.only_run else [],
        num_entries=len(material.entries),
        table=table_of(material.entries),
        notices=by_kind(material.notices),
        figures=figures,
        missing=missing,
        environment=environment,
        drawings=_script(drawings),
        config=_script(CONFIG),
        plotly=Markup(b64encode(plotly_js()).decode("ascii")),
    )


def plotly_js() -> bytes:
    """The basic bundle of plotly.js, compressed (RFC 1952); the page's own script inflates it."""
    return resources.files("zeroshard.lab.report").joinpath("third_party/plotly-basic.min.js.gz").read_bytes()


def by_kind(notices: Sequence[Notice]) -> Mapping[str, list[Notice]]:
    """Group notices under the headings of their kinds, which are in the order of their first notice."""
    found: dict[str, list[Notice]] = {}
    for notice in notices:
        found.setdefault(_ABOUT[notice.kind], []).append(notice)
    return found


def _script(values: Any) -> Markup:
    """JSON that is safe inside a script element: it is escaped so that no text in it can end the element."""
    text = json.dumps(finite_or_null(values), allow_nan=False)
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return Markup(text)
