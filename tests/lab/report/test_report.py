"""`zeroshard report`: what is on the page, what is said of folders that are not whole, and what it costs."""

import json
import math
import re
import sys
from html.parser import HTMLParser
from importlib import util
from pathlib import Path

import pytest

from run_folders import FACTORS, LINK, write_run, write_sweep
from zeroshard.cli import main
from zeroshard.lab.report.entries import gather
from zeroshard.lab.report.figures import figures_of
from zeroshard.lab.report.page import render
from zeroshard.lab.report.run_figures import smoothed
from zeroshard.lab.report.table import table_of

pytest.importorskip("matplotlib", reason="the extra `report` is not installed")

from zeroshard.lab.report.png import slant


def _page(folder: Path) -> str:
    """Without plotly.js."""
    whole = (folder / "report.html").read_text()
    start = whole.index('<script type="application/gzip"')
    return whole[:start] + whole[whole.index("</script>", start) :]


def _drawings(folder: Path) -> list[dict]:
    found = re.search(r'id="drawings">(.*?)</script>', _page(folder), re.DOTALL)
    assert found is not None
    return json.loads(found.group(1))


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """A sweep of three bandwidths and four stages, two repeats each, and its report."""
    folder = write_sweep(tmp_path_factory.mktemp("sweep") / "study", repeats=2)
    assert main(["report", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def figures(sweep):
    """The figures of the sweep, by name."""
    return {figure.name: figure for figure in figures_of(gather([sweep]))[0]}


def test_a_sweep_has_every_figure_on_the_page_and_as_png(sweep):
    names = sorted(path.stem for path in (sweep / "figures").glob("*.png"))
    expected = ["communication", "loss", "memory", "predicted-peak", "predicted-step", "throughput"]
    assert names == sorted(expected)
    assert all((sweep / "figures" / f"{name}.png").read_bytes()[:4] == b"\x89PNG" for name in names)
    assert len(_drawings(sweep)) == len(names)
    assert "Not drawn" not in _page(sweep)


def test_throughput_has_a_line_for_each_stage_and_a_place_for_each_bandwidth(figures):
    figure = figures["throughput"]
    assert [series.name for series in figure.series] == list(FACTORS)
    assert figure.x.log
    assert list(figure.x.ticks.values()) == ["100 Mbit/s", "1 Gbit/s", "10 Gbit/s"]
    assert all(series.x == (1.25e7, 1.25e8, 1.25e9) for series in figure.series)
    for series in figure.series:
        assert all(low < y < high for low, y, high in zip(series.low, series.y, series.high, strict=True))
    assert len({series.colour for series in figure.series}) == len({series.marker for series in figure.series}) == 4


def test_further_validation_sets_are_in_the_figure_of_losses_and_in_the_table(tmp_path):
    write_run(tmp_path / "run", named={"maths": 1.5, "<b>code": 2.5})
    (figure,) = [each for each in figures_of(gather([tmp_path]))[0] if each.name == "loss"]
    points = {series.name.partition(" (")[2]: series.y for series in figure.series if series.marker}
    assert points == {"validation)": (4.0,), "val_loss/maths)": (1.5,), "val_loss/<b>code)": (2.5,)}
    assert main(["report", str(tmp_path)]) == 0
    assert "4.0000, maths 1.5000, &lt;b&gt;code 2.5000" in _page(tmp_path)


def test_the_table_has_medians_and_what_they_lie_between(sweep):
    page = _page(sweep)
    spread = r"<td>[\d.,]+ <span>\([\d.,]+ to [\d.,]+\)</span></td>"
    row = r"<td>[0-9a-f]{6}</td><td>zero\d</td><td>100 Mbit/s</td>" + spread
    assert len(re.findall(row, page)) == 4
    assert page.count("<td>gpt2-demo 1 M</td><td>4</td><td>2 done</td>") == 12
    assert ">1.08<" in page  # measured over predicted
    assert "torch" in page
    assert "2.13.0" in page


def test_communication_is_what_computation_waited_for(figures):
    figure = figures["communication"]
    assert [series.name for series in figure.series] == list(FACTORS)
    for series in figure.series:
        assert list(series.y) == sorted(series.y, reverse=True)  # a faster link is waited for less


def test_memory_stacks_to_what_a_rank_holds_beside_its_plan(figures):
    figure = figures["memory"]
    assert list(figure.x.ticks.values()) == list(FACTORS)
    for hatched in (False, True):
        bars = [series for series in figure.series if series.mark == "bar" and series.hatched is hatched]
        tops = [bars[-1].base[i] + bars[-1].y[i] for i in range(4)]
        assert tops == pytest.approx([n / 2**20 for n in (16e6, 10e6, 7e6, 4e6)])


def test_curves_of_the_same_bits_are_one(figures):
    figure = figures["loss"]
    assert [series.name for series in figure.series if not series.marker] == ["zero0, 100 Mbit/s"]
    assert figure.caption.startswith("Equal to zero0, 100 Mbit/s to the bit, and under its curve: ")
    assert figure.caption.endswith(" and 5 more.")
    assert figure.curves


@pytest.mark.redundant
def test_runs_of_one_strategy_have_colours_and_names_of_their_own(tmp_path):
    for place, rate in enumerate((0.1, 0.2, 0.3, 0.4)):
        write_run(tmp_path / f"run{place}", lr=rate)
    contents = gather([tmp_path])
    (figure,) = [each for each in figures_of(contents)[0] if each.name == "loss"]
    curves = [series for series in figure.series if not series.marker]
    assert [series.name for series in curves] == [f"run{place}: lr 0.{place + 1}" for place in range(4)]
    assert len({series.colour for series in curves}) == 4
    assert table_of(contents.entries).apart == "They differ in lr (0.1, 0.2, 0.3, 0.4)."
    assert main(["report", str(tmp_path)]) == 0
    assert "They differ in lr (0.1, 0.2, 0.3, 0.4)." in _page(tmp_path)


def test_a_long_curve_is_smoothed_before_what_was_measured():
    points = [(step, 4.0 + (-1) ** step) for step in range(1, 601)]
    shown = smoothed(points)
    assert [step for step, _ in shown] == [step for step, _ in points]
    assert all(abs(loss - 4.0) < 0.1 for _, loss in shown[60:-60])
    line = [(step, 5.0 - step / 100) for step in range(600)]
    assert all(abs(loss - line[step][1]) < 0.01 for step, loss in smoothed(line))  # it does not lag, nor at its ends
    assert smoothed(points[:20]) == points[:20]
    assert math.isnan(smoothed([*points, (601, math.nan), (602, 4.0)])[600][1])
    assert math.isfinite(smoothed([*points, (601, math.nan), (602, 4.0)])[601][1])


def test_the_page_asks_nobody_for_anything(sweep):
    page = _page(sweep)
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:)""", page)
    assert "default-src 'none'" in page


def test_damage_is_listed_and_breaks_nothing(tmp_path):
    write_run(tmp_path / "good")
    torn = write_run(tmp_path / "torn")
    (torn / "summary.json").unlink()
    with (torn / "metrics.jsonl").open("a") as log:
        log.write('{"event": "st')
    binary = write_run(tmp_path / "binary")
    (binary / "config.toml").write_bytes(b"\xff\x00")
    strange = write_run(tmp_path / "strange")
    (strange / "summary.json").write_text(
        '{"status": "ok", "plan": {"memory_bytes": 3, "peak_bytes": [1], "step_s": {"predicted": "x"}},'
        ' "memory_peak": 7}'
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "run.lock").touch()
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    page = _page(tmp_path / "out")
    assert "Folders that are not whole (3)" in page
    assert "unfinished: metrics.jsonl: the last line is half-written" in page
    assert "damaged: config.toml: does not parse" in page
    assert "there is no config.toml: no run has begun here" in page


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"cases": 4}', b'{"cases": [{"name": "../.."}, 1]}', b"\xff"])
def test_a_damaged_sweep_is_listed(tmp_path, damage):
    folder = write_sweep(tmp_path / "sweep", bandwidths=("1Gbit/s",))
    (folder / "sweep.json").write_bytes(damage)
    material = gather([folder])
    assert {notice.kind for notice in material.notices} == {"folder"}
    figures, missing = figures_of(material)
    assert (figures, len(missing)) == ([], 5)
    assert "Folders that are not whole" in render(material, figures, missing, [])


@pytest.mark.redundant
def test_what_is_not_drawn_is_said(tmp_path):
    write_run(tmp_path / "run")
    assert main(["report", str(tmp_path / "run")]) == 0
    page = _page(tmp_path / "run")
    assert "Predicted against measured: no run has a prediction" in page


def test_points_that_are_not_comparable_are_hollow_and_say_why(tmp_path):
    folder = write_sweep(tmp_path / "sweep")
    victim = next(folder.glob("cases/*/0/metrics.jsonl"))
    lines = victim.read_text().splitlines()
    start = json.loads(lines[0])
    lines[0] = json.dumps({**start, "link": {**start["link"], "comparable": False, "why_not_comparable": "12 % slow"}})
    victim.write_text("\n".join(lines) + "\n")
    figures, _ = figures_of(gather([folder]))
    throughput = next(figure for figure in figures if figure.name == "throughput")
    assert sum(hollow for series in throughput.series for hollow in series.hollow) == 1
    page = render(gather([folder]), figures, [], [])
    assert "Not comparable (1)" in page
    assert "12 % slow" in page


ATTACKS = (
    "<script>alert(1)<script>",
    "<img src=x onerror=alert(1)>",
    "x' onclick=alert(1) \"><a href=javascript:alert(1)>",
    "<!--<title><b>",
    r"$\frac{1}{0}$ {{7*7}} %{x} _hidden",
)


class _Tags(HTMLParser):
    """Every tag with its attributes, and the text between them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[object] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, attrs))

    def handle_data(self, data):
        self.texts.append(data)


def test_what_is_in_a_name_is_text(tmp_path):
    tags = []
    for names in ([f"harmless{number}" for number in range(len(ATTACKS))], ATTACKS):
        root, out = tmp_path / f"runs{len(tags)}", tmp_path / f"out{len(tags)}"
        for number, name in enumerate(names):
            write_run(root / name, num_steps=4 + number, link={**LINK, "why_not_comparable": name})
            (root / name / "summary.json").write_text(json.dumps({"status": "ok", "plan": {"difference": name}}))
        assert main(["report", str(root), "--out", str(out)]) == 0
        found = _Tags(_page(out))
        tags.append(found.tags)
        assert set(names) <= set(found.texts)
        for drawing in _drawings(out):
            assert "<" not in json.dumps(drawing).replace("%{text}<br>", "")
    assert tags[0] == tags[1]


def test_runs_of_one_configuration_are_repeats(tmp_path):
    for name in ("a", "b"):
        write_run(tmp_path / name)
    write_run(tmp_path / "c", num_steps=7)
    entries = gather([tmp_path / name for name in "abc"]).entries
    assert [(entry.label, len(entry.case.runs), dict(entry.case.axes)) for entry in entries] == [
        ("a, b", 2, {"max_steps": 10}),
        ("c", 1, {"max_steps": 7}),
    ]


_opened: list[str] | None = None


def _note(event, args):
    if event == "open" and args[1] and _opened is not None:  # a mode: `open`, and not the `os.open` below it
        _opened.append(str(args[0]))


def test_each_file_of_a_run_is_read_once(tmp_path, monkeypatch):
    folder = write_sweep(tmp_path / "sweep", repeats=2)
    sys.addaudithook(_note)  # for the rest of the process, where it then hears nothing
    monkeypatch.setattr(sys.modules[__name__], "_opened", opened := [])
    material = gather([folder])
    figures_of(material)
    inside = [name for name in opened if "/cases/" in name and not name.endswith("failed.json")]
    assert len(inside) == len(set(inside)) == 3 * 24
    assert opened.count("/proc/locks") <= 2


def test_without_the_extra_there_is_one_line(tmp_path, monkeypatch, capsys):
    missing = "jinja2"
    write_run(tmp_path / "run")
    find = util.find_spec
    monkeypatch.setattr("zeroshard.lab.report.command.find_spec", lambda name: None if name == missing else find(name))
    assert main(["report", str(tmp_path / "run")]) == 2
    line = f'error: report: needs {missing}, not installed here; pip install "zeroshard[report]"\n'
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["nowhere"], "runs: there is no folder nowhere; give the folder of a run or of a sweep"),
        (["."], "runs: there is no run in .; give the folder of a run"),
        ([], "runs: none is given; write zeroshard report RUN..., or the folder of a sweep"),
        (["--ouT", "x"], "--ouT: there is no such flag; did you mean --out?"),
    ],
)
def test_what_cannot_be_reported_is_one_line(tmp_path, monkeypatch, capsys, words, line):
    monkeypatch.chdir(tmp_path)
    assert main(["report", *words]) == 2
    assert capsys.readouterr().err == f"error: {line}\n"


def test_a_folder_that_cannot_be_written_is_a_storage_error(tmp_path):
    write_run(tmp_path / "run")
    (tmp_path / "file").touch()
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "file")]) == 5


def test_labels_under_a_plot_do_not_cover_each_other():
    assert (slant(["zero3"] * 4), slant(["zero3, x 16"] * 14)) == (0, 25)
