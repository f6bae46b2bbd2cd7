"""The list of mutants fits the sources and tests that it names; whether these see them, `make mutants` finds out."""

import ast
import re

import pytest

from mutants.catalogue import FOLDER, ROOT, catalogue

MUTANTS = catalogue()


def test_each_changes_one_place_of_a_file_which_can_still_be_read():
    wrong = []
    for mutant in MUTANTS:
        try:
            source = (ROOT / mutant.path).read_text(encoding="utf-8")
            changed = mutant.applied(source)
            if mutant.path.suffix == ".py":  # loops in C++ are read when they are compiled
                ast.parse(changed)
            assert changed != source
        except (OSError, ValueError, SyntaxError, AssertionError) as error:
            wrong.append(f"{mutant.name}: {error!r}")
    assert wrong == []


def test_the_tests_that_are_named_are_there():
    named = {test for mutant in MUTANTS for test in mutant.tests}
    missing = []
    for node in sorted(named):
        path, *function = node.split("[")[0].split("::")
        source = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).is_file() else ""
        if not source or any(not re.search(rf"^ *(def|class) {name}\b", source, re.MULTILINE) for name in function):
            missing.append(node)
    assert missing == []


def test_each_says_what_it_breaks_and_entries_that_are_wrong_are_named(tmp_path):
    assert all(path.read_text(encoding="utf-8").isascii() for path in FOLDER.glob("*.toml"))
    assert all(mutant.tests and mutant.breaks.endswith(".") for mutant in MUTANTS)
    assert all(re.fullmatch(r"[a-z0-9-]+", mutant.name) for mutant in MUTANTS)
    entry = '[[mutant]]\nname = "n"\nfile = "f"\nold = "o"\nnew = ""\ntests = ["t"]\nbreaks = "It."\n'
    (tmp_path / "a.toml").write_text(entry)
    assert [mutant.name for mutant in catalogue(tmp_path)] == ["n"]
    (tmp_path / "b.toml").write_text(entry)
    with pytest.raises(ValueError, match=r"b\.toml: two mutants are called n"):
        catalogue(tmp_path)
    (tmp_path / "b.toml").write_text(entry.replace('name = "n"', 'name = "o"\nolder = "p"'))
    with pytest.raises(ValueError, match=r"b\.toml: o: .*older"):
        catalogue(tmp_path)
