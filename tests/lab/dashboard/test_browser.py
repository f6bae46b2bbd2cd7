"""The dashboard and a report in Chromium: a run appears while it trains, the planner answers, nobody else is asked."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path

import pytest

import forked
from run_folders import write_run, write_sweep
from zeroshard.cli import main

CHROMIUM = Path("/usr/bin/chromium")
pytestmark = [
    pytest.mark.skipif(find_spec("dash") is None, reason="the extra `dashboard` is not installed"),
    pytest.mark.skipif(find_spec("playwright") is None, reason="playwright is not installed"),
    pytest.mark.skipif(not CHROMIUM.is_file(), reason=f"there is no {CHROMIUM}"),
    pytest.mark.slow,
]
ATTACK = "<img src=x onerror=alert(1)>"


class Browser:
    """Pages in Chromium, and everything that they complain of or ask for."""

    def __init__(self, context):
        self._context = context
        self.complaints: list[str] = []
        self.requests: set[str] = set()

    def open(self, url, width):
        page = self._context.new_page()
        page.set_viewport_size({"width": width, "height": 900})
        page.on("console", lambda message: self._heard(message.type, message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: self.complaints.append(f"dialog {dialog.message}"))
        page.on("request", lambda request: self.requests.add(re.match(r"[^:]+:(//[^/]*)?", request.url).group()))
        page.set_default_timeout(120_000)
        page.goto(url)
        return page

    def _heard(self, kind, text):
        if kind in ("error", "warning"):
            self.complaints.append(text)


@pytest.fixture(scope="module")
def chromium():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as tools:
        args = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        chromium = tools.chromium.launch(executable_path=str(CHROMIUM), args=args)
        yield chromium
        chromium.close()


@pytest.fixture
def browser(chromium):
    """Pages of this test alone."""
    context = chromium.new_context()
    yield Browser(context)
    context.close()


@pytest.fixture
def dashboard(tmp_path):
    """Its address, over an empty folder ``runs``."""
    (tmp_path / "runs").mkdir()
    command = [sys.executable, "-m", "zeroshard", "dashboard", str(tmp_path / "runs"), "--port", "0"]
    child = forked.Popen(command, stdout=subprocess.PIPE, text=True)
    yield child.stdout.readline().split("  ")[0]
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=600)


def _fits(page):
    return page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_a_run_appears_while_it_trains_and_the_planner_answers(browser, dashboard, tiny_config, tmp_path):
    wide, narrow = browser.open(dashboard, 1280), browser.open(dashboard, 400)
    wide.get_by_text("no run yet").wait_for()
    config = tiny_config(max_steps=100_000, eval_interval=0, checkpoint_interval=0, out=str(tmp_path / "runs" / ATTACK))
    from zeroshard.train.config.toml import dump_toml

    (tmp_path / "run.toml").write_text(dump_toml(config))
    command = [sys.executable, "-m", "zeroshard", "train", "--config", str(tmp_path / "run.toml")]
    child = forked.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        for page in (wide, narrow):
            page.locator("td", has_text=ATTACK).first.wait_for()
            page.locator(".state.running").first.wait_for()
            page.locator("#graph-loss .scatterlayer path").first.wait_for()
            assert _fits(page)
        step = wide.locator("#table tbody td").nth(2)
        before = step.inner_text()
        wide.wait_for_function(
            "before => document.querySelectorAll('#table tbody td')[2].innerText != before", arg=before
        )
    finally:
        child.kill()
        child.wait()
    wide.locator(".state.unfinished").first.wait_for()

    for page in (wide, narrow):
        page.locator(".tab", has_text="Planner").click()
        page.locator(".advice").wait_for()
        assert _fits(page)
    before = wide.locator(".advice").inner_text()
    wide.locator("#plan-model").click()
    wide.get_by_role("option", name="gpt2-124m", exact=True).click()
    wide.locator("#answer p", has_text="gpt2-124m: 124M").wait_for()
    assert wide.locator(".advice").inner_text() != before
    assert _fits(wide)
    assert browser.complaints == []
    assert browser.requests <= {dashboard, "data:", "blob:" + dashboard, "blob:"}


_NAMED = ("button", "checkbox", "combobox", "link", "radio", "region", "slider", "tab", "textbox")


def _nameless(page):
    """What the keyboard can reach or a screen reader offers, without a name."""
    nodes = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    shown = [node for node in nodes if not node["ignored"] and node["role"]["value"] in _NAMED]
    assert len(shown) > 5
    return [node["role"]["value"] for node in shown if not node["name"]["value"].strip()]


def test_the_keyboard_reaches_every_page_and_what_is_there_has_a_name(browser, tmp_path, chromium):
    write_run(tmp_path / "runs" / "a")
    command = [sys.executable, "-m", "zeroshard", "dashboard", str(tmp_path / "runs"), "--port", "0"]
    child = forked.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        page = browser.open(child.stdout.readline().split("  ")[0], 1280)
        page.locator("#table td").first.wait_for()
        assert _nameless(page) == []
        for name in ("chosen", "view-x"):
            assert page.locator(f"[role=group]:has(#{name})").get_attribute("aria-label")
        page.keyboard.press("Tab")
        page.keyboard.press("ArrowRight")
        page.locator("#run-details h2").wait_for()
        assert _nameless(page) == []
        page.keyboard.press("ArrowRight")
        page.locator("#plan-model").wait_for()
        assert _nameless(page) == []
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == "plan-model"
    finally:
        child.send_signal(signal.SIGINT)
        child.communicate(timeout=60)


def test_no_button_of_a_figure_sends_it_anywhere(browser, tmp_path):
    write_run(tmp_path / "run")
    assert main(["report", str(tmp_path / "run")]) == 0
    page = browser.open((tmp_path / "run" / "report.html").as_uri(), 1280)
    page.locator("#figure-0 .modebar-btn").first.wait_for(state="attached")
    names = page.locator(".modebar-btn").evaluate_all("buttons => buttons.map(each => each.ariaLabel)")
    assert not [name for name in names if "Share" in name or "Edit" in name]
    assert _nameless(page) == []


def test_a_report_opens_offline_without_a_complaint(browser, tmp_path):
    folder = write_sweep(tmp_path / "sweep", repeats=2, trace=True)
    write_run(tmp_path / "sweep2" / ATTACK)
    assert main(["report", str(folder), str(tmp_path / "sweep2"), "--out", str(tmp_path / "out")]) == 0
    for width in (1280, 400):
        page = browser.open((tmp_path / "out" / "report.html").as_uri(), width)
        page.locator("#figure-0 .main-svg").first.wait_for()
        assert page.locator(".main-svg").count() >= 10
        assert page.locator("td", has_text=ATTACK).count() == 1
        assert _fits(page)
    assert browser.complaints == []
    assert browser.requests <= {"file://", "data:", "blob:"}


def test_figures_of_a_report_keep_their_place_when_the_window_or_the_colours_change(browser, tmp_path):
    assert main(["report", str(write_run(tmp_path / "run")), "--out", str(tmp_path / "out")]) == 0
    page = browser.open((tmp_path / "out" / "report.html").as_uri(), 1280)
    for width in (1280, 900, 400, 900, 1280):
        page.set_viewport_size({"width": width, "height": 900})
        page.locator("#theme").click()
        page.wait_for_function(_SETTLED)
        places = page.locator("figure").evaluate_all("all => all.map(each => each.getBoundingClientRect().toJSON())")
        assert len(places) >= 5
        for place, other in combinations(places, 2):
            apart = place["bottom"] <= other["top"] or other["bottom"] <= place["top"]
            assert apart or place["right"] <= other["left"] or other["right"] <= place["left"]
        assert _fits(page)
    assert browser.complaints == []


# Every figure is drawn as wide as its column, and its element is as high as its drawing.
_SETTLED = """() => [...document.querySelectorAll("[id^=figure-]")].every(each => {
    const drawn = each.querySelector(".main-svg")?.getBoundingClientRect();
    return drawn && drawn.width === each.clientWidth && drawn.height === each.clientHeight && drawn.height > 300;
})"""
