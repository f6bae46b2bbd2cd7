"""A notebook as a page of the documentation site: `python notebooks/as_page.py NOTEBOOK PAGE`.

Text stays as it is; code, what it printed and the pictures that it drew follow each other as in the notebook. Pictures
are written into ``figures/`` beside the page. Nothing runs: what is shown is what `notebooks/execute.py` stored.
"""

from __future__ import annotations

import argparse
import base64
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

INTRODUCTION = (
    "This page is the notebook `notebooks/zero.ipynb`, with what it printed. Open the notebook in Jupyter to change "
    "numbers, do the exercises and take the quiz."
)
NOT_RUN = "<!-- not run: tests/notebooks runs the notebook -->"
FIGURES = "figures"
_FOLDED = re.compile(r"<details><summary>(.*?)</summary>\n\n(.*?)\n\n</details>", re.S)


def page_of(notebook: dict[str, Any], name: str) -> tuple[str, dict[str, bytes]]:
    """The page's text, and the pictures by their file names.

    Args:
        notebook: as JSON.
        name: the pictures' names begin with it.
    """
    pictures: dict[str, bytes] = {}
    parts = [part for cell in notebook["cells"] for part in _parts(cell, name, pictures)]
    title, *rest = parts[0].split("\n\n")
    return "\n\n".join([title, INTRODUCTION, *rest, *parts[1:]]) + "\n", pictures


def _parts(cell: dict[str, Any], name: str, pictures: dict[str, bytes]) -> Iterator[str]:
    source = _text(cell["source"])
    if cell["cell_type"] == "markdown":
        yield _FOLDED.sub(_unfolded, source)
        return
    yield f"{NOT_RUN}\n```python\n{source}\n```"
    for output in cell["outputs"]:
        if output["output_type"] == "stream":
            yield f"```text\n{_text(output['text']).rstrip()}\n```"
        picture = output.get("data", {}).get("image/png")
        if picture:
            file = f"{name}-{len(pictures) + 1}.png"
            pictures[file] = base64.b64decode(_text(picture))
            yield f"![Drawn by the code above]({FIGURES}/{file})"


def _unfolded(found: re.Match[str]) -> str:
    """What a notebook folds up, as the site does."""
    return f'??? note "{found[1]}"\n\n' + textwrap.indent(found[2], "    ")


def _text(lines: str | list[str]) -> str:
    return lines if isinstance(lines, str) else "".join(lines)


def main() -> int:
    """Write the page and its pictures."""
    parser = argparse.ArgumentParser(description="Write a notebook as a page of the documentation site.")
    parser.add_argument("notebook", type=Path)
    parser.add_argument("page", type=Path)
    given = parser.parse_args()
    text, pictures = page_of(json.loads(given.notebook.read_text(encoding="utf-8")), given.page.stem)
    given.page.write_text(text, encoding="utf-8")
    for file, content in pictures.items():
        (given.page.parent / FIGURES / file).write_bytes(content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
