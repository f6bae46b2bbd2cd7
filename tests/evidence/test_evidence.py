"""Lines, costs and seen mistakes of a small room, and the choice that they lead to."""

import ast
import re
import sys

import pytest

import forked
from evidence import choice, mistakes
from mutants.catalogue import ROOT

ROOM = """
import subprocess
import sys

import forked
from zeroshard.zero.whole_tensors.balance import largest_first


def test_equal_sizes_are_shared_out():
    assert largest_first([2, 2], [0, 0]) == [0, 1]


def test_each_owner_is_told(): # runs the same lines
    assert largest_first([2, 2], [0, 0])[1] == 1


def test_in_a_program():
    home = "zeroshard.zero.whole_tensors.balance"
    code = f"from {home} import largest_first; assert largest_first([1, 1], [0, 3], alignment=4) == [0, 1]"
    assert forked.run([sys.executable, "-c", code]).returncode == 0
"""

PATHS = [str(ROOT / "tests"), str(ROOT / "tests" / "support")]
PROGRAM = f"import sys; sys.path[:0] = {PATHS}; from evidence.__main__ import main; sys.exit(main())"

SOURCE = '''
def drawn(x: int, y=3):
    """Text."""
    if x < 4 and not y:
        raise ValueError(f"{x + 1} is wrong")
    shift(x, y)
    return x.clone() + 1.5

@triton.jit
def kernel(x):
    return x + 1

LIMIT = 7
'''


def test_each_operator_changes_what_it_names_and_no_message_default_or_kernel():
    found = [str(change) for change in mistakes.changes(ast.parse(SOURCE))]
    assert sorted(found) == sorted(
        [
            "negated: x < 4 and (not y) -> not (x < 4 and (not y))",
            "term dropped: x < 4 and (not y) -> not y",
            "term dropped: x < 4 and (not y) -> x < 4",
            "turned: x < 4 -> x >= 4",
            "shifted: x < 4 -> x <= 4",
            "constant: 4 -> 5",
            "negated: not y -> y",
            "statement dropped: raise ValueError(f'{x + 1} is wrong')",
            "statement dropped: shift(x, y)",
            "arguments swapped: shift(x, y) -> shift(y, x)",
            "term dropped: x.clone() + 1.5 -> x.clone()",
            "left out: x.clone() -> x",
            "constant: 1.5 -> 2.5",
        ]
    )


def test_a_cover_has_what_is_needed_and_the_cheapest_of_the_rest():
    lines = [{"cheap", "dear"}, {"dear"}, {"early", "late"}, {"late", "also"}, {"skipped"}]
    costs = {"cheap": 0.1, "dear": 9.0, "early": 0.1, "late": 0.2, "also": 1.0, "needed": 5.0}
    assert choice.cover(costs, lines, {"needed"}) == {"needed", "dear", "late"}


def test_what_is_near_and_cheap_is_tried_first_and_one_test_stays_of_a_function_that_is_named():
    costs = {
        "tests/a/test_far.py::test": 0.1,
        "tests/zero/test_near.py::test": 0.2,
        "tests/zero/test_near.py::test_2": 9,
    }
    near, far = choice.likeliest(costs, "zero/near.py", ()), choice.likeliest(costs, "lab/other.py", ())
    assert [near[0], far[0]] == ["tests/zero/test_near.py::test", "tests/a/test_far.py::test"]
    of_two = {"f[1]": 3.0, "f[2]": 2.0, "g": 1.0, "cheap": 0.01}
    assert choice.cautious(of_two, [{"f[1]", "g"}], (), functions={"f"}, cheap_s=0.02) == {"f[1]", "cheap"}


def test_marks_are_written_above_functions_in_place_of_earlier_ones_and_others_stay():
    text = (
        "import pytest\n\n\n@pytest.mark.redundant\ndef test_now():\n    pass\n\n\n"
        '@pytest.mark.parametrize("x", [1, 2])\n@pytest.mark.redundant(\n    but=["2"],\n)\n'
        "def test_some(x):\n    pass\n\n\n"
        "class TestOf:\n    def test_in(self):\n        pass\n\n\n"
        "@pytest.mark.redundant\ndef test_elsewhere():\n    pass\n"
    )
    marks = {"test_some": '@pytest.mark.redundant(but=["1"])', "TestOf.test_in": "@pytest.mark.redundant"}
    new = choice.marked(text, marks)
    assert new == (
        "import pytest\n\n\n@pytest.mark.redundant\ndef test_now():\n    pass\n\n\n"
        '@pytest.mark.redundant(but=["1"])\n@pytest.mark.parametrize("x", [1, 2])\ndef test_some(x):\n    pass\n\n\n'
        "class TestOf:\n    @pytest.mark.redundant\n    def test_in(self):\n        pass\n\n\n"
        "@pytest.mark.redundant\ndef test_elsewhere():\n    pass\n"
    )


def test_a_room_is_recorded_tried_and_chosen_from(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:anyio")
    (tmp_path / "test_room.py").write_text(ROOM)
    folder = str(tmp_path / "record")

    def evidence(*words):
        done = forked.run([sys.executable, "-c", PROGRAM, *words], cwd=tmp_path, capture_output=True, text=True)
        return done.stdout + done.stderr

    costs = evidence("record", "--costs", f"{folder}-costs", str(tmp_path))
    assert "3 tests that passed, " in costs
    assert "test_room.py::test_in_a_program\n" in costs
    assert not (tmp_path / "record-costs" / "lines.sqlite").exists()
    assert "3 passed" in evidence("record", f"{folder}-part", str(tmp_path))
    evidence("join", folder, f"{folder}-part")
    tried = evidence("try", folder, "--num", "40", "--below", "zero/whole_tensors/balance.py").splitlines()
    assert any(
        "seen     zero/whole_tensors/balance.py:23" in line and line.endswith("test_in_a_program") for line in tried
    ), tried
    assert "; 0 of " in tried[-1]
    assert "cover: 1 tests" in evidence("choose", folder)  # what it alone runs, and what the others see


LEFT_OUT = """
import pytest
pytestmark = pytest.mark.parametrize("x", [1, 2, 3])
@pytest.mark.redundant(but=["1"])
def test_some(x): ...
@pytest.mark.redundant
def test_all(x): ...
"""


@pytest.fixture
def told(tmp_path):
    """What pytest prints of a folder, given some words."""
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = .\nmarkers =\n  redundant\n  soak\n  slow\n")

    def run(*words):
        code = f"import sys; sys.path[:0] = {PATHS}; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
        command = [sys.executable, "-c", code, "-p", "soak", *words]
        return forked.run(command, cwd=tmp_path, capture_output=True, text=True).stdout

    return run


def test_a_part_is_of_what_is_left_out_is_named_and_another_word_has_another(tmp_path, told):
    test = f"{LEFT_OUT}def test_not(x): ...\n@pytest.mark.soak\n@pytest.mark.slow\ndef test_long(x): ...\n"
    for number in range(60):
        (tmp_path / f"test_room{number}.py").write_text(test)

    def part(word):
        printed = told("--part", word)
        named = re.findall(r"^  test_room(\d+)\.py::(\w+)\[(\d)\]$", printed, re.MULTILINE)
        assert f"{len(named)} tests are the part {word} of `make soak`:" in printed
        return named

    first = part("a")
    left_out = {("test_some", 2), ("test_some", 3), ("test_all", 1), ("test_all", 2), ("test_all", 3)}
    assert {(test, int(number)) for _, test, number in first} <= left_out
    assert len(first) == 4 * len({file for file, *_ in first}) > 0
    assert part("a") == first
    assert {file for file, *_ in part("b")} != {file for file, *_ in first}


def test_what_is_redundant_is_left_out_counted_and_never_lost_by_a_new_name(tmp_path, told):
    test = LEFT_OUT
    (tmp_path / "test_room.py").write_text(test)
    assert "1 tests passed, in 0:0" in (quick := told())
    assert "`make soak` would add 5, and longer runs of some; it has not run here." in quick
    assert "6 tests passed" in told("--soak")
    assert "the last one here ran 6 in 0:0" in told()
    (tmp_path / "test_room.py").write_text(test.replace('["1"]', '["7"]'))
    assert "redundant(but=...) names no combination of its parameters: ['7']" in told()
