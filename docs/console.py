"""Runs commands and draws what they print as it stands on a terminal: `python docs/console.py`.

It writes images/console.svg, the picture in the README. The commands are run as they stand, so the picture shows what
this version prints, and the speed of the machine that drew it.
"""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

TARGET = Path(__file__).parent / "images" / "console.svg"
WIDTH = 104  # columns
COMMANDS = (
    "zeroshard train --strategy zero2 --nproc 2 --max-steps 300 --log-interval 100 --out runs/first",
    "zeroshard generate runs/first --prompt 'class ' --max-new-tokens 60 --temperature 0.5",
)


def picture(commands: tuple[str, ...], folder: Path) -> str:
    """Run ``commands`` in ``folder`` and return what a terminal shows of them, as SVG."""
    console = Console(width=WIDTH, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for command in commands:
        console.print(Text.assemble(("$ ", "green"), (command, "bold")))
        words = [sys.executable, "-m", *shlex.split(command)]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
        for line in done.stdout.rstrip().splitlines():
            console.print(Text(line), soft_wrap=False)
        console.print()
    svg = console.export_svg(title="zeroshard")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.S)  # a page that shows it asks nobody for fonts


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        TARGET.write_text(picture(COMMANDS, Path(folder)), encoding="utf-8")
