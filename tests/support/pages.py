"""README and the pages of docs/ as data: their code blocks, what they are marked with, and the commands in them.

A block in ``sh`` stands below a comment that no reader sees, and that says what the tests do with it::

    <!-- run -->                      all of it runs, in one folder for the page
    <!-- run: status 2 -->            and ends with that exit status
    <!-- not run: needs a cluster --> it does not, for that reason; its commands are parsed all the same

What it prints may stand below it, in a block of ``text``: the same lines, if numbers and paddings are left out, and
any lines where ``...`` stands.

A block in ``python`` runs, in one namespace for the page, unless it is marked as not run.
"""

import logging
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^(?:<!-- (?P<mark>[^\n]*?) -->\n)?```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A fenced block: its ``mark`` is empty where it has none, ``line`` that of its fence."""

    page: Path
    line: int
    language: str
    mark: str
    code: str
    shown: str = ""  # what the page says that it prints

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def status(self) -> int:
        found = re.fullmatch(r"run: status (\d+)", self.mark)
        return int(found[1]) if found else 0

    @property
    def commands(self) -> list[list[str]]:
        """The words after `zeroshard`, of each time that a line calls it."""
        lines = self.code.replace("\\\n", " ").splitlines()
        found = []
        for line in lines:
            line = line.removeprefix("$ ")
            match = re.match(r"(?:.*?-m )?zeroshard (.*)", line)
            if match:
                words = shlex.split(match[1], comments=True)
                stops = [index for index, word in enumerate(words) if word in ("|", ">", "&", "&&", "2>&1")]
                found.append(words[: stops[0]] if stops else words)
        return found


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = list(_BLOCK.finditer(text))
    return [
        Block(
            page,
            text.count("\n", 0, block.start()) + 1,
            block["language"],
            block["mark"] or "",
            block["code"],
            below["code"]
            if below and below["language"] == "text" and not text[block.end() : below.start()].strip()
            else "",
        )
        for block, below in zip_longest(found, found[1:])
    ]


def prints(output: str, shown: str) -> bool:
    """Whether ``output`` is what a page has ``shown``, but for numbers, paddings and what ``...`` leaves out."""

    def plain(text: str) -> str:
        return re.sub(r"\d[\d,.:]*", "#", re.sub(r" +", " ", text))

    lines = (r"(?:.*\n)*" if line == "..." else re.escape(plain(line)) + r"\n" for line in shown.splitlines())
    return re.fullmatch("".join(lines), plain(output)) is not None


def python_of(page: Path) -> list[Block]:
    """Its blocks that run."""
    return [block for block in blocks_of(page) if block.language == "python" and not block.mark.startswith("not run: ")]


def run_python(page: Path) -> None:
    """Run them one after the other."""
    shown: dict[str, object] = {"__name__": "page"}
    with _logging_as_it_was():
        for block in python_of(page):
            # What this file imports from __future__ is not the page's.
            exec(compile("\n" * block.line + block.code, block.page, "exec", dont_inherit=True), shown)


@contextmanager
def _logging_as_it_was() -> Iterator[None]:
    """A page may set levels and handlers; the tests that follow in this process do not hear of it."""
    root = logging.getLogger()
    handlers = root.handlers[:]
    before = {logger: logger.level for logger in [root, *_loggers()]}
    try:
        yield
    finally:
        root.handlers[:] = handlers
        for logger in [root, *_loggers()]:
            # Ours are born without a level; what a library gives its own when it is imported is not the page's.
            if logger in before or logger.name.startswith("zeroshard"):
                logger.setLevel(before.get(logger, logging.NOTSET))


def _loggers() -> list[logging.Logger]:
    return [found for found in logging.root.manager.loggerDict.values() if isinstance(found, logging.Logger)]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
