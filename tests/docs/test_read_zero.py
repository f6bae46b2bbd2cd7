"""The page to read the core by: each file has its place, names in it exist, programs print what it says."""

import importlib
import io
import re
from contextlib import redirect_stdout
from functools import reduce

import pytest

from pages import ROOT, blocks_of

PAGE = ROOT / "docs" / "read-zero.md"
CORE = ROOT / "src" / "zeroshard" / "zero" / "core"
SECTIONS = re.findall(r"^## \d+\. (.*?)\n(.*?)(?=^## |\Z)", PAGE.read_text(encoding="utf-8"), re.M | re.S)


def _files(heading):
    return heading.split(", ")


def test_the_page_is_read_in_an_afternoon():
    assert len(PAGE.read_text(encoding="utf-8").splitlines()) <= 178


def test_every_file_of_the_core_has_its_place():
    named = [name for heading, _ in SECTIONS for name in _files(heading)]
    assert sorted(named) == sorted(path.name for path in CORE.glob("*.py") if path.name != "__init__.py")


@pytest.mark.parametrize(("heading", "text"), SECTIONS, ids=[heading for heading, _ in SECTIONS])
def test_what_a_section_points_at_is_in_its_files(heading, text):
    modules = [importlib.import_module(f"zeroshard.zero.core.{name.removesuffix('.py')}") for name in _files(heading)]
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    names = re.findall(r"`([A-Za-z_]\w*(?:\.\w+)*)`", prose)
    assert names, "it points at nothing"
    for name in names:
        assert any(_has(module, name.split(".")) for module in modules), name


def _has(module, path):
    try:
        reduce(getattr, path, module)
    except AttributeError:
        return False
    return True


def test_every_program_prints_what_the_page_says():
    shown: dict[str, object] = {"__name__": "page"}
    for block in blocks_of(PAGE):
        lines = block.code.splitlines()
        expected = [line.removeprefix("# ") for line in lines if line.startswith("# ")]
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile("\n" * block.line + block.code, PAGE, "exec", dont_inherit=True), shown)
        assert printed.getvalue().splitlines() == expected, block.name
