"""Remake the screenshots of docs/images: reports, in Debian's Chromium.

python docs/screenshots.py            of a sweep whose numbers a formula made (tests/support/run_folders.py)
python docs/screenshots.py SWEEP      of one that ran
python docs/screenshots.py --trackio  the page of trackio for docs/how-to/watch-a-run.md, of two sweeps that it runs
"""

from __future__ import annotations

import argparse
import io
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from run_folders import write_sweep

IMAGES = Path(__file__).parent / "images"
CHROMIUM, ARGS = "/usr/bin/chromium", ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
HEIGHTS = {1280: 1500, 400: 1500}  # pixels, by width
SCHEMES = ("light", "dark")
MOST_BYTES = 150_000
PAGES = ("report.md", "how-to/watch-a-run.md")
SHOWN = "".join((Path(__file__).parent / page).read_text(encoding="utf-8") for page in PAGES)
PLOT_ORDER = "train/loss,val/loss,speed/tokens_per_s,speed/*,exposed/*,memory/*"
SWEEPS = (
    ["--out", "sweeps/stages", "--axes.strategy", "zero0", "zero1", "zero2", "zero3"],
    ["--out", "sweeps/wires", "--base.strategy", "zero2", "--axes.wire.weights", "bfloat16", "int8"],
)
TRACKED = [
    *("--base.track", "trackio", "--base.data", "synthetic", "--base.nproc", "2", "--base.max-steps", "40"),
    *("--base.warmup-steps", "4", "--base.eval-interval", "10", "--base.eval-rows", "8"),
    *("--base.model.n-layer", "2", "--base.seq-len", "64"),
]
ZEROSHARD = (sys.executable, "-m", "zeroshard")


def main() -> None:
    """Write every screenshot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, nargs="?", help="folder of a finished sweep")
    parser.add_argument("--trackio", action="store_true", help="the page of trackio alone")
    parser.add_argument("--chromium", default=CHROMIUM, help=f"program to open pages with ({CHROMIUM})")
    asked = parser.parse_args()
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as root:
        if asked.trackio:
            shoot_trackio(Path(root), asked.chromium)
            return
        sweep = asked.sweep or write_sweep(Path(root) / "example", repeats=2)
        make(sweep, Path(root) / "out", one_run(Path(root) / "first"), asked.chromium)


def one_run(out: Path) -> Path:
    """A short run on two ranks, with its report."""
    words = ["--strategy", "zero2", "--nproc", "2", "--max-steps", "150", "--eval-interval", "25", "--eval-rows", "32"]
    subprocess.run([*ZEROSHARD, "train", *words, "--lr", "3e-3", "--out", str(out)], cwd=out.parent, check=True)
    subprocess.run([*ZEROSHARD, "report", str(out)], check=True)
    return out


def make(sweep: Path, out: Path, run: Path, chromium: str) -> None:
    """All of them, of ``sweep`` and ``run``; the report of the sweep goes to ``out``."""
    with sync_playwright() as tools:
        subprocess.run([*ZEROSHARD, "report", str(sweep), "--out", str(out)], check=True)
        browser = tools.chromium.launch(executable_path=chromium, args=ARGS)
        for width, height in HEIGHTS.items():
            for scheme in SCHEMES:
                page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
                page.set_default_timeout(120_000)
                where = f"{'dark-' if scheme == 'dark' else ''}{width}"
                shoot_report(page, out, where)
                page.goto((run / "report.html").as_uri())
                page.locator(".main-svg").first.wait_for()
                shoot(page, f"report-one-run-{where}")
        browser.close()


def shoot_report(page: Page, out: Path, where: str) -> None:
    """The report in ``out``."""
    page.goto((out / "report.html").as_uri())
    page.locator(".main-svg").first.wait_for()
    page.get_by_role("heading", name="Results").scroll_into_view_if_needed()
    shoot(page, f"report-{where}")


def shoot_trackio(root: Path, chromium: str) -> None:
    """The page that `trackio show` serves of two tracked sweeps, grouped by sweep."""
    environment = os.environ | {"TRACKIO_DIR": str(root / "trackio"), "TRACKIO_PLOT_ORDER": PLOT_ORDER}
    for words in SWEEPS:
        command = [*ZEROSHARD, "sweep", *words, *TRACKED]
        subprocess.run(command, cwd=root, env=environment, check=True)
    show = ["trackio", "show", "--project", "zeroshard", "--host", "127.0.0.1"]
    with (
        subprocess.Popen(show, env=environment, stdout=subprocess.PIPE, text=True) as child,
        sync_playwright() as tools,
    ):
        assert child.stdout is not None
        address = next(found[0] for line in child.stdout if (found := re.search(r"http://[^/?]+", line)))
        page = tools.chromium.launch(executable_path=chromium, args=ARGS).new_page(
            viewport={"width": 1600, "height": 2230}, device_scale_factor=0.7
        )
        page.goto(f"{address}/?project=zeroshard&smoothing=5&metric_filter=loss%7Ctokens_per_s%7Cexposed%7Cmemory")
        page.get_by_label("Group by").click()
        page.locator(".group-by-row li").filter(has_text=re.compile(r"\bGroup$")).click()
        page.get_by_text("Show section headers").click()
        page.wait_for_timeout(3000)
        shoot(page, "trackio")
        child.send_signal(signal.SIGINT)


def shoot(page: Page, name: str) -> None:
    """What is to be seen now, in as few colours as keep the file small; only where the page of the docs shows it."""
    if f"images/{name}.png" not in SHOWN:
        return
    image = (
        Image.open(io.BytesIO(page.screenshot()))
        .convert("RGB")
        .quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    )
    path = IMAGES / f"{name}.png"
    image.save(path, optimize=True)
    assert path.stat().st_size < MOST_BYTES, f"{path} has {path.stat().st_size} bytes"


if __name__ == "__main__":
    main()
