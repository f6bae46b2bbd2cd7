"""Only what has changed is sent, and what a page makes of it is what a page has that was opened just now."""

from __future__ import annotations

import json

import pytest

from run_folders import write_run, write_sweep

pytest.importorskip("dash", reason="the extra `dashboard` is not installed")

from dash import no_update

from zeroshard.lab.dashboard.app import make_app
from zeroshard.lab.dashboard.changes import Part
from zeroshard.lab.dashboard.request_validation import UPDATE


class Page:
    """A browser's page of runs: it asks as the clock ticks, and applies what it is sent."""

    def __init__(self, app):
        self._client = app.server.test_client()
        known = self._client.get("/_dash-dependencies").get_json()
        self._callback = next(each for each in known if "table.children" in each["output"])
        self.values = {("view-x", "value"): "step", ("view-smoothing", "value"): "0", ("view-scale", "value"): "linear"}

    def tick(self):
        """What was sent, by component and property."""
        spec = self._callback["output"].strip(".").split("...")
        body = {
            "output": self._callback["output"],
            "outputs": [dict(zip(("id", "property"), each.rsplit(".", 1), strict=True)) for each in spec],
            "changedPropIds": [],
        }
        for part in ("inputs", "state"):
            keys = [(each["id"], each["property"]) for each in self._callback[part]]
            body[part] = [{"id": i, "property": p, "value": self.values.get((i, p))} for i, p in keys]
        answer = self._client.post(UPDATE, json=body)
        if answer.status_code == 204:
            return {}
        sent = {(i, p): v for i, properties in answer.get_json()["response"].items() for p, v in properties.items()}
        for key, value in sent.items():
            is_patch = isinstance(value, dict) and "__dash_patch_update" in value
            self.values[key] = _applied(self.values[key], value["operations"]) if is_patch else value
        return sent


def _applied(value, operations):
    value = json.loads(json.dumps(value))
    for each in operations:
        assert each["operation"] == "Assign"
        *path, last = each["location"]
        place = value
        for step in path:
            place = place[step]
        place[last] = each["params"]["value"]
    return value


def _append(folder, step, **facts):
    line = {"event": "step", "step": step, "loss": 1.5, "grad_norm": 2.0, "lr": 1e-4, "step_s": 0.1}
    with (folder / "metrics.jsonl").open("a") as log:
        log.write(json.dumps({**line, "tokens": 64 * step, "tokens_per_s": 640.0, **facts}) + "\n")


@pytest.fixture
def root(tmp_path):
    """Some runs, and a sweep."""
    write_run(tmp_path / "a", num_steps=40)
    write_run(tmp_path / "b", num_steps=40)
    write_sweep(tmp_path / "study", bandwidths=("1Gbit/s",))
    return tmp_path


@pytest.mark.parametrize(
    "change",
    [
        lambda root: _append(root / "a", 41),
        lambda root: [_append(root / "a", 41), _append(root / "b", 41, memory_bytes={"params": 7})],
        lambda root: (root / "b" / "metrics.jsonl").unlink(),
        lambda root: (root / "b" / "config.toml").write_text("= 3"),
        lambda root: (root / "b" / "summary.json").unlink(),
        lambda root: write_run(root / "c", num_steps=40),
        lambda root: [each.unlink() for each in (root / "a").iterdir()],
    ],
    ids=["a step", "two runs", "no log", "damaged", "unfinished", "a new run", "a run is removed"],
)
def test_a_page_that_was_told_of_changes_is_as_one_that_was_opened_now(root, change):
    app = make_app(root)
    page = Page(app)
    page.tick()
    assert page.tick() == {}
    change(root)
    page.tick()
    fresh = Page(app)
    fresh.tick()
    assert page.values == fresh.values


def test_a_step_of_one_run_is_sent_as_its_row_and_its_lines(root):
    page = Page(make_app(root))
    page.tick()
    _append(root / "a", 41)
    sent = page.tick()
    (row,) = sent["table", "children"]["operations"]
    assert row["location"][-1] == 1  # behind the words of its group, the first of the single runs
    lines = [each["location"] for each in sent["graph-loss", "figure"]["operations"]]
    assert [each[0] for each in lines].count("data") == 2  # the curve and the validation losses of one run of six
    assert ("chosen", "options") not in sent
    assert ("summary", "children") not in sent


@pytest.mark.parametrize("sent", [None, 3, [], ["f"], ["other", "x", "y"], [["f"], 1, {}]])
def test_what_a_page_says_that_it_has_need_not_be_true(sent):
    part = Part(["f", "a", "b"], lambda: "whole", lambda patch, number: None)
    assert part.since(sent) == "whole"


def test_a_part_with_the_same_marks_is_not_sent():
    assert Part(["f", "a"], lambda: "whole").since(["f", "a"]) is no_update
    assert Part(["f", "a"], lambda: "whole").since(["f", "b"]) == "whole"
