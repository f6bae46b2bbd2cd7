"""No files import each other in a circle, files are short, and one alone reads the environment."""

import ast
import functools
import graphlib
import re
from pathlib import Path

import pytest

import zeroshard

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "zeroshard"
ENVIRONMENT = {"environ", "environb", "getenv", "putenv", "unsetenv"}


@functools.cache
def trees():
    """Each file of the package, parsed once."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


def modules():
    """Each file of the package by its module's name."""
    found = {}
    for path in trees():
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if path.name == "__init__.py" else parts)] = path
    return found


def imported(path, known):
    """The modules among ``known`` that a file imports: at its head, inside functions and for types.

    A package's ``__init__`` names for types what it loads when it is first asked for; that is left out.
    """
    tree = trees()[path]
    names = set()
    for node in tree.body if path.name == "__init__.py" else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= inner if inner <= known else {*inner, str(node.module)}
    return names & known


def test_no_files_import_each_other_in_a_circle():
    files = modules()
    graph = {name: imported(path, files.keys()) - {name} for name, path in files.items()}
    circle: list[str] = []
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        circle = error.args[1]
    assert circle == [], " <- ".join(circle)


def test_the_files_that_answer_a_newcomers_questions_exist():
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.partition("questions, and where the answer is:")[2].partition("\n## ")[0]
    paths = re.findall(r"`([a-z_/]+\.py)`", table)
    assert len(paths) >= 11
    assert [path for path in paths if not (PACKAGE / path).is_file()] == []


def test_no_file_is_longer_than_six_hundred_lines():
    lines = {str(path.relative_to(PACKAGE)): len(path.read_text().splitlines()) for path in modules().values()}
    assert {path: num_lines for path, num_lines in lines.items() if num_lines > 600} == {}


SETTERS = [
    "host/launch/forked.py",  # gives a forked rank an environment of its own
    "data/pool.py",  # tells the tokenizers of its own worker processes to use one thread
    "host/process.py",  # tells torch, malloc and Triton what nobody has told them yet
]


def test_one_file_alone_reads_the_environment():
    readers = [
        path.relative_to(PACKAGE).as_posix()
        for path, tree in trees().items()
        if any(
            (isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT)
            or (isinstance(node, ast.ImportFrom) and node.module == "os" and {n.name for n in node.names} & ENVIRONMENT)
            for node in ast.walk(tree)
        )
    ]
    assert readers == sorted(["host/launch/environment.py", *SETTERS])


def test_every_public_name_is_there_and_another_is_an_attribute_error():
    assert all(getattr(zeroshard, name) is not None for name in zeroshard.__all__)
    assert set(zeroshard.__all__) <= set(dir(zeroshard))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        zeroshard.Nothing  # noqa: B018


# How far the name of a setting spreads: the most files that contain it. A setting that is handed on by name from one
# function to the next is a row here that grows; `settings/engine.py` says how it is handed on instead.
MOST_FILES = {"offload": 51, "sequence_parallel": 31, "reproducible": 34, "shard_size": 33}


def test_names_of_settings_do_not_spread():
    texts = [path.read_text(encoding="utf-8") for path in trees()]
    found = {name: sum(bool(re.search(rf"\b{name}\b", text)) for text in texts) for name in MOST_FILES}
    assert {name: count for name, count in found.items() if count > MOST_FILES[name]} == {}


def test_the_trainer_stays_within_its_lines():
    lines = [len(path.read_text(encoding="utf-8").splitlines()) for path in (PACKAGE / "train").rglob("*.py")]
    assert sum(lines) <= 8_270
