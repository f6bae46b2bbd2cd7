"""The command `zeroshard report`: reads folders and writes the page and the figures."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path

import zeroshard
from zeroshard.host.errors import ExitStatus, UserError
from zeroshard.host.regular_files import write_inside
from zeroshard.lab.report.entries import ReportContents, gather
from zeroshard.lab.report.figures import figures_of

NEEDED = ("matplotlib", "jinja2")  # packages of the extra `report`


def run_report(folders: Sequence[str], out: str = "") -> int:
    """Write ``report.html`` and ``figures/*.png``.

    Args:
        folders: folders of runs, of sweeps, or of either.
        out: the folder to write into; empty: ``folders[0]`` if there is only one, else ``report``.

    Raises:
        UserError: there is no run, or the extra `report` is not installed.
        OSError: a file cannot be written.
    """
    absent = [name for name in NEEDED if find_spec(name) is None]
    if absent:
        raise UserError("report", f"needs {', '.join(absent)}, not installed here", 'pip install "zeroshard[report]"')
    if not folders:
        raise UserError("runs", "none is given", "write zeroshard report RUN..., or the folder of a sweep")
    material = gather(folders)
    target = Path(out or (folders[0] if len(folders) == 1 else "report"))
    page, names = write_report(material, target)
    counts = {"configuration": material.entries, "figure": names, "warning": material.notices}
    print(", ".join(f"{len(each)} {what}{'s' * (len(each) != 1)}" for what, each in counts.items()) + f": {page}")
    return ExitStatus.OK


def write_report(material: ReportContents, target: Path) -> tuple[Path, list[str]]:
    """Write the page and its figures into ``target``; returns the page's path and the figures' file names."""
    from zeroshard.lab.report.page import render
    from zeroshard.lab.report.png import draw

    figures, missing = figures_of(material)
    target.mkdir(parents=True, exist_ok=True)
    names = [f"{figure.name}.png" for figure in figures]
    for figure, name in zip(figures, names, strict=True):
        draw(figure, png := BytesIO())
        write_inside(target, Path("figures", name), png.getvalue())
    page = target / "report.html"
    write_inside(target, page.name, render(material, figures, missing, environment_of(material)))
    return page, names


def environment_of(material: ReportContents) -> list[tuple[str, str]]:
    """(name, value) pairs: the environment that the runs recorded, each value once, and the versions of the report."""
    from zeroshard.lab.report.page import PLOTLY_JS

    found: dict[str, dict[str, None]] = {}
    for run in material.runs:
        for name in ("torch", "device", "world_size", "kernels"):
            value = run.start.get(name)
            if value not in (None, "", {}):
                words = ", ".join(f"{k}: {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
                found.setdefault(name.replace("_", " "), {})[words] = None
        if run.link is not None:
            found.setdefault("links", {})[run.link.mode] = None
    rows = [(name, "; ".join(values)) for name, values in found.items()]
    made_by = [f"zeroshard {zeroshard.__version__}", f"python {platform.python_version()}"]
    made_by += [*(f"{name} {metadata.version(name)}" for name in NEEDED), f"plotly.js {PLOTLY_JS}"]
    rows.append(("report made with", ", ".join(made_by)))
    rows.append(("report made on", f"{platform.platform()}, {os.cpu_count()} CPUs"))
    return rows
