"""Runs commands on a terminal and draws what stands there at their end: `python docs/console.py`, in some ten minutes.

It writes images/console.svg, the picture in the README. The commands are run as they stand, so the picture shows what
this version prints, and the speed of the machine that drew it.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from zeroshard.train.records.console import ERASE

TARGET = Path(__file__).parent / "images" / "console.svg"
WIDTH = 104  # columns
COMMANDS = (
    "zeroshard train --config configs/demo.toml --max-steps 3000 --log-interval 1000 --eval-interval 1000",
    "zeroshard generate runs/demo --prompt 'If the' --temperature 0.5 --top-p 0.9 --max-new-tokens 120",
)


def picture(commands: tuple[str, ...], folder: Path) -> str:
    """Run ``commands`` in ``folder`` and return what a terminal shows of them, as SVG."""
    console = Console(width=WIDTH, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for command in commands:
        console.print(Text.assemble(("$ ", "green"), (command, "bold")))
        for line in on_terminal([sys.executable, "-m", *shlex.split(command)], folder).rstrip().splitlines():
            console.print(Text(line), soft_wrap=False)
        console.print()
    svg = console.export_svg(title="zeroshard")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.S)  # a page that shows it asks nobody for fonts


def on_terminal(words: list[str], folder: Path) -> str:
    """Run a command in ``folder`` and return the lines of its standard output, without those that others replaced."""
    ours, its = os.openpty()
    with subprocess.Popen(words, cwd=folder, stdout=its, env=os.environ | {"COLUMNS": str(WIDTH)}) as process:
        os.close(its)
        printed = b""
        with contextlib.suppress(OSError):  # as Linux ends such a file
            while more := os.read(ours, 1 << 16):
                printed += more
    os.close(ours)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, words)
    lines = printed.decode().replace("\r\n", "\n").split("\n")
    return "\n".join(line.rpartition(ERASE)[2] for line in lines)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(Path(__file__).parents[1] / "configs", Path(folder) / "configs")
        TARGET.write_text(picture(COMMANDS, Path(folder)), encoding="utf-8")
