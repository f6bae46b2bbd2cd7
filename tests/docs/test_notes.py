"""Each `[Note: ...]` that is referred to is there, where the reference says it is, and each note has a reader."""

import re
from collections import defaultdict
from pathlib import Path

from pages import ROOT

_NOTE = r"\[Note: ([^\]]+)\]"
_BEGINS = re.compile("^" + _NOTE, re.MULTILINE)  # at the margin of a module's docstring
_NAMED = re.compile(_NOTE + r"(?: in `([\w./]+)`)?")
# The history of the project refers to notes that were.
_FILES = [
    *(file for folder in ("src", "tests", "benchmarks", "examples") for file in (ROOT / folder).rglob("*.py")),
    *(page for page in (ROOT / "docs").rglob("*.md") if page.name != "log.md"),
]


def _module_path(where: str) -> str:
    """The end of the path of the file that a reference names: `flat_params`, `zeroshard.lab.plan`, `loop/step.py`."""
    path = where.removesuffix(".py").replace(".", "/")
    return f"/{path}.py"


def _notes_and_references() -> tuple[dict[str, list[Path]], list[tuple[Path, str, str]]]:
    notes: defaultdict[str, list[Path]] = defaultdict(list)  # by name: the files that have one
    references: list[tuple[Path, str, str]] = []  # file, note, the module that it names or ""
    for file in _FILES:
        if file == Path(__file__):
            continue
        text = file.read_text(encoding="utf-8")
        for name in _BEGINS.findall(text):
            notes[name].append(file)
        joined = re.sub(r"\s*\n\s*(?:# )?", " ", _BEGINS.sub("", text))
        references += [(file, name, where) for name, where in _NAMED.findall(joined)]
    return notes, references


def test_every_reference_leads_to_a_note_and_every_note_has_a_reader():
    notes, references = _notes_and_references()
    lost, read = [], set()
    for file, name, where in references:
        found = [f for f in notes[name] if (str(f).endswith(_module_path(where)) if where else f == file)]
        read |= {(name, each) for each in found}
        if len(found) != 1:
            lost.append(f"{file.relative_to(ROOT)}: [Note: {name}]" + (f" in `{where}`" if where else ""))
    assert not lost
    unread = [(name, file) for name, files in notes.items() for file in files if (name, file) not in read]
    assert not [f"{file.relative_to(ROOT)}: [Note: {name}]" for name, file in unread]
