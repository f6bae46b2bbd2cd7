"""The notebook on ZeRO runs from top to bottom, shows what it showed, and knows right answers from wrong ones."""

import base64
import copy
import importlib.util
import json
import re
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell

import forked

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
PATH = NOTEBOOKS / "zero.ipynb"
NUM_EXERCISES = 6
CHECKS = {5: "check_interval(interval)", 6: "check_stage_one(stage_one_step)"}
WRONG = {
    1: "answer_1 = 1.56 * 4",
    2: "answer_2 = 16 / 8",
    3: "answer_3 = 2",
    4: "answer_4 = 0.75",
    5: "def interval(numel, world_size, rank):\n    return rank * (numel // world_size), numel",
    6: "def stage_one_step(comm, flat_weights, flat_grads, lr):\n    flat_weights -= lr * flat_grads",
}


def _script(name):
    spec = importlib.util.spec_from_file_location(name, NOTEBOOKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _execute(notebook):
    script = _script("execute")
    forked.start_server()
    script.PYTHON = forked.PYTHON
    return script.execute(notebook, NOTEBOOKS)


def _said(cell):
    """What a code cell has printed."""
    return "".join(output.text for output in cell.get("outputs", []) if output.output_type == "stream")


def _pictures(cell):
    return [output.data["image/png"] for output in cell.get("outputs", []) if "image/png" in output.get("data", {})]


@pytest.fixture(scope="module")
def stored():
    return nbformat.read(PATH, as_version=4)


@pytest.fixture(scope="module")
def solutions(stored):
    """The code that is folded up below each exercise."""
    text = "\n".join(cell.source for cell in stored.cells if cell.cell_type == "markdown")
    return re.findall(r"<summary>Solution</summary>.*?```python\n(.*?)```", text, re.S)


@pytest.fixture(scope="module")
def executed(stored, solutions, made_once):
    """The notebook as it is, then wrong answers, then the solutions, then the quiz; one kernel for all."""
    folder = made_once("notebook", lambda folder: nbformat.write(_executed(stored, solutions), folder / PATH.name))
    return nbformat.read(folder / PATH.name, as_version=4)


def _executed(stored, solutions):
    notebook = copy.deepcopy(stored)
    by_exercise = {}  # the cell that checks it
    for cell in notebook.cells:
        found = re.search(r"^answer_(\d) = None", cell.source, re.M)
        if found:
            by_exercise[int(found[1])] = cell.source.split("\n", 1)[1]
    by_exercise |= CHECKS
    assert sorted(by_exercise) == list(range(1, NUM_EXERCISES + 1))
    for number, answer in WRONG.items():
        notebook.cells.append(new_code_cell(f"{answer}\n{by_exercise[number]}", metadata={"wrong": number}))
    for number, answer in enumerate(solutions, start=1):
        notebook.cells.append(new_code_cell(f"{answer}\n{by_exercise[number]}", metadata={"solves": number}))
    ask = "for number, (_, choices, _, _) in enumerate(QUESTIONS, start=1):\n"
    ask += "    print(sum(bool(quiz(number, letter)) for letter in choices))"
    notebook.cells.append(new_code_cell(ask, metadata={"quiz": True}))
    return _execute(notebook)


@pytest.mark.slow
def test_it_shows_what_is_stored(stored, executed):
    for before, after in zip(stored.cells, executed.cells, strict=False):
        assert _said(before) == _said(after), before.source
        assert len(_pictures(before)) == len(_pictures(after))
    assert sum(len(_pictures(cell)) for cell in stored.cells) == 5


def test_what_it_claims_came_out_true(executed):
    said = "\n".join(map(_said, executed.cells[: len(executed.cells)]))
    assert said.count("the same\n") == 4  # measured bytes are the predicted ones, at each stage
    assert "to the last bit: True" in said
    assert said.count("message by message: True") == 4
    assert "False" not in said


def test_its_solutions_are_right_and_other_answers_are_not(executed, solutions):
    assert len(solutions) == NUM_EXERCISES
    for cell in executed.cells:
        if "solves" in cell.metadata:
            assert _said(cell) == "right\n", cell.source
        if "wrong" in cell.metadata:
            assert _said(cell).startswith("not yet: "), cell.source


def test_each_question_of_the_quiz_has_one_right_choice(executed):
    counts = [line for line in _said(executed.cells[-1]).splitlines() if line.isdigit()]
    assert counts == ["1"] * 6


def test_it_installs_the_package_where_it_is_missing(stored):
    first = next(cell for cell in stored.cells if cell.cell_type == "code")
    assert 'find_spec("zeroshard") is None' in first.source
    assert "%pip install" in first.source
    assert stored.metadata.kernelspec.name == "python3"  # what Colab has


def test_its_outputs_are_small_and_name_no_place_of_this_machine(stored):
    assert PATH.stat().st_size < 250_000
    for cell in stored.cells:
        assert all(len(base64.b64decode(picture)) < 40_000 for picture in _pictures(cell))
        assert not re.search(r"/(home|root|tmp|work|Users)/", _said(cell))


def test_the_page_of_the_documentation_shows_what_the_notebook_does():
    page = NOTEBOOKS.parent / "docs" / "notebook.md"
    text, pictures = _script("as_page").page_of(json.loads(PATH.read_text(encoding="utf-8")), page.stem)
    assert page.read_text(encoding="utf-8") == text, "write it again: make notebooks"
    assert {path.name for path in (page.parent / "figures").glob("notebook-*")} == set(pictures)
    assert all((page.parent / "figures" / name).read_bytes() == content for name, content in pictures.items())
    assert text.count('??? note "Solution"') == NUM_EXERCISES
