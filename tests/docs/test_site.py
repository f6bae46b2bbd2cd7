"""The site is built without a warning, knows each page, and asks nobody outside for anything."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import zeroshard
from pages import ROOT

CONFIG = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """It is built in a copy of what it is made of; a dead link fails the build, as any warning does."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copy(ROOT / "zensical.toml", folder)
    for part in ("docs", "src"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    command = [Path(sys.executable).with_name("zensical"), "build", "--strict", "--clean"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "griffe" not in done.stdout + done.stderr, "a docstring that cannot be read"
    return folder / "site"


def _pages_of(nav):
    for entry in nav:
        for target in entry.values():
            if isinstance(target, list):
                yield from _pages_of(target)
            else:
                yield target


def test_the_menu_names_every_page():
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert set(_pages_of(CONFIG["nav"])) == pages


def test_every_page_is_built_and_loads_nothing_from_outside(site):
    pages = list(site.rglob("index.html"))
    assert len(pages) == len(list(_pages_of(CONFIG["nav"])))
    for page in pages:
        loaded = re.findall(r'<(?:script|img|link)[^>]+(?:src|href)="?(https?:[^"\s>]+)', page.read_text())
        assert [url for url in loaded if "rel=canonical" not in url] == [], page


def test_the_reference_has_every_public_name_with_its_arguments(site):
    text = (site / "api" / "library" / "index.html").read_text()
    for name in set(zeroshard.__all__) - {"__version__", "Communicator"}:
        assert re.search(rf'id="zeroshard[\w.]*\.{name}"', text), name
    assert "reshard_after_forward" in text
    assert "Communicator" in (site / "api" / "communicators" / "index.html").read_text()
