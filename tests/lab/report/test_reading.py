"""What a report tells its reader: how many runs are behind a figure, what was not measured."""

import gzip
import hashlib
import shutil

import pytest

from run_folders import write_run, write_sweep

pytest.importorskip("jinja2", reason="the extra `report` is not installed")

from zeroshard.lab.report.entries import gather
from zeroshard.lab.report.figures import figures_of
from zeroshard.lab.report.interactive import as_plotly
from zeroshard.lab.report.page import PLOTLY_JS, PLOTLY_JS_SHA256, plotly_js, render
from zeroshard.lab.report.table import table_of


@pytest.mark.parametrize(
    ("repeats", "lost", "note"),
    [
        (1, False, "One run each: do not conclude from small differences."),
        (2, False, "Whiskers: from the lowest to the highest repeat."),
        (2, True, "Whiskers: lowest to highest repeat. 1 of 12 ran once: do not conclude from those."),
    ],
)
def test_a_figure_says_how_many_runs_are_behind_it(tmp_path, repeats, lost, note):
    sweep = write_sweep(tmp_path / "sweep", repeats=repeats)
    if lost:
        shutil.rmtree(next(sweep.glob("**/config.toml")).parent)
    figures, _ = figures_of(gather([sweep]))
    assert next(figure for figure in figures if figure.name == "throughput").caption.endswith(note)


def test_a_strategy_has_one_colour_in_every_figure(tmp_path):
    figures, _ = figures_of(gather([write_sweep(tmp_path / "sweep")]))
    colours: dict[str, set[str]] = {}
    for figure in figures:
        for series in figure.series:
            for strategy in ("zero0", "zero1", "zero2", "zero3"):
                if series.name in (strategy, f"{strategy} exposed", f"{strategy} total") or (
                    figure.name == "loss" and series.name.startswith(f"{strategy}, ") and not series.marker
                ):
                    colours.setdefault(strategy, set()).add(series.colour)
    assert [len(found) for found in colours.values()] == [1, 1, 1, 1]


def test_columns_without_a_value_are_named_and_left_out(tmp_path):
    write_run(tmp_path / "a")
    table = table_of(gather([tmp_path]).entries)
    assert "model" in table.titles
    assert "peak of rank 0" not in table.titles
    assert all(all(row) for row in table.rows)
    assert table.without.startswith("Not measured in any run: peak of rank 0 (--profile.memory records it)")


def test_the_page_is_small_dark_where_asked_and_can_smooth_its_curves(tmp_path):
    write_run(tmp_path / "a")
    material = gather([tmp_path])
    figures, missing = figures_of(material)
    page = render(material, figures, missing, [])
    assert len(page) < 1_000_000
    for words in ("prefers-color-scheme: dark", 'id="theme"', "data-smooth=", "data-log=", "DecompressionStream"):
        assert words in page


def test_the_bundle_is_the_one_that_npm_has_and_can_draw_every_figure(tmp_path):
    script = gzip.decompress(plotly_js())
    assert hashlib.sha256(script).hexdigest() == PLOTLY_JS_SHA256
    assert f"plotly.js (basic - minified) v{PLOTLY_JS}".encode() in script[:100]
    figures, _ = figures_of(gather([write_sweep(tmp_path / "sweep")]))
    traces = {trace["type"] for figure in figures for trace in as_plotly(figure)["data"]}
    assert traces == {"scatter", "bar"}  # what is in the bundle
