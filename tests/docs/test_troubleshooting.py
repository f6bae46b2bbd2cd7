"""docs/troubleshooting.md quotes messages that are in the sources, and no message leaves its reader alone."""

import ast
import re

import pytest

from pages import ROOT

SOURCES = ROOT / "src" / "zeroshard"
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
HOLE = "…"
ROWS = [line for line in PAGE.splitlines() if line.startswith("| `")]
QUOTED = [text for row in ROWS for text in re.findall(r"`([^`]+)`", row.split(" | ")[0])]
REFUSALS = {"ValueError", "TypeError", "RuntimeError", "PeerError", "ImportError"}
# Says which values there may be: "decay: 2 is outside [0, 1)".
SAYS_WHAT_MAY_BE = re.compile(
    r"\b(?:is|are|was) (?:not|no|outside|below|above|neither|unknown|before|called|there|listed)\b|\bmust\b"
)
# Their errors reach a user inside a UserError ("is damaged: ..."), or as a note in a report.
WRAPPED = ("checkpoint/manifest", "checkpoint/reshard", "checkpoint/stream", "lab/metrics_log", "host/regular_files")
# What these hold is written somewhere else.
PASSED_ON = {HOLE, f"{HOLE} (rank {HOLE}, {HOLE})", f"{HOLE}; {HOLE}", f"step: {HOLE}", "it contradicts itself"}


def _text(node):
    """A literal with ``…`` for what it inserts; None for what is no literal."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else HOLE for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (_text(node.left) or HOLE) + (_text(node.right) or HOLE)
    return None


@pytest.fixture(scope="module")
def trees():
    paths = sorted(SOURCES.rglob("*.py"))
    return {path.relative_to(SOURCES).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def _holds(literals, quoted):
    """Whether the words of ``quoted`` stand on a line of ``literals``, in order, whatever is inserted between them."""
    pattern = ".*".join(re.escape(part.strip()) for part in quoted.split(HOLE) if part.strip())
    return re.search(pattern, literals) is not None


def test_a_quoted_message_is_one_of_the_sources(trees):
    # Every literal of the sources, one to a line: a search through one text takes no time.
    found = (_text(node) for tree in trees.values() for node in ast.walk(tree))
    texts = "\n".join(text.replace("\n", " ") for text in found if text)
    assert len(QUOTED) > 50
    assert [quoted for quoted in QUOTED if len(quoted.replace(HOLE, "").strip()) <= 6] == [], "too short to find"
    assert [quoted for quoted in QUOTED if not _holds(texts, quoted)] == []


def _refusals(trees):
    """File, line and text of each error that is raised with a literal."""
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                kind = getattr(node.exc.func, "id", "")
                text = _text(node.exc.args[0])
                if kind in REFUSALS and text and not name.startswith(WRAPPED) and text not in PASSED_ON:
                    yield f"{name}:{node.lineno}", text


def test_each_message_says_what_to_do_or_what_may_be_or_is_on_the_page(trees):
    found = dict(_refusals(trees))
    assert len(found) > 150
    unexplained = {
        place: text
        for place, text in found.items()
        if "; " not in text and not SAYS_WHAT_MAY_BE.search(text) and not any(_holds(text, quoted) for quoted in QUOTED)
    }
    assert unexplained == {}


def test_each_user_error_says_what_to_do(trees):
    """Its third part: a literal that is not empty, or something computed."""
    calls = [
        (f"{name}:{node.lineno}", node)
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "UserError"
    ]
    assert len(calls) > 200
    copies = [node for _, node in calls if isinstance(node.args[0], ast.Starred)]  # of one that ranks have told
    assert len(copies) == 4
    assert [
        place for place, node in calls if node not in copies and (len(node.args) != 3 or _text(node.args[2]) == "")
    ] == []


def test_each_exit_status_is_on_the_page():
    from zeroshard.host.errors import ExitStatus

    rows = PAGE.partition("## The run ends")[2].partition("\n## ")[0]
    numbers = {int(number) for row in re.findall(r"^\| ([\d, ]+) \|", rows, re.M) for number in row.split(", ")}
    assert numbers == {int(status) for status in ExitStatus} - {0}
