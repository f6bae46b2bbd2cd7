"""Imports only point down, and one file alone reads the environment."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import zeroshard

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "zeroshard"
ENVIRONMENT = {"environ", "environb", "getenv", "putenv", "unsetenv"}


def test_every_import_points_down():
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


SETTERS = [
    "launch/forked.py",  # gives a forked rank an environment of its own
    "data/pool.py",  # tells the tokenizers of its own worker processes to use one thread
    "process.py",  # tells torch, malloc and Triton what nobody has told them yet
]


def test_one_file_alone_reads_the_environment():
    readers = [
        path.relative_to(PACKAGE).as_posix()
        for path in sorted(PACKAGE.rglob("*.py"))
        if any(
            (isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT)
            or (isinstance(node, ast.ImportFrom) and node.module == "os" and {n.name for n in node.names} & ENVIRONMENT)
            for node in ast.walk(ast.parse(path.read_text()))
        )
    ]
    assert readers == sorted(["launch/launch.py", *SETTERS])


@pytest.mark.parametrize("name", [name for name in zeroshard.__all__ if name != "__version__"])
def test_every_public_name_is_there(name):
    assert getattr(zeroshard, name) is not None
    assert name in dir(zeroshard)


def test_a_name_that_is_not_public_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        zeroshard.Nothing  # noqa: B018
