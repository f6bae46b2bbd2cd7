"""A cover: the cheapest tests that run every line and see every mistake that all of them run and see; and where a
reader finds it: tests outside are marked `redundant` in their files.
"""

import ast
import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Set

from mutants.catalogue import ROOT, catalogue

MARK = "pytest.mark.redundant"
# What a test costs beside what its functions do: to collect it, to set it up, to tell of it.
FIXED_S = 0.01
# A mark is something to read: it must save so many seconds, more where a mutant names the function, as its mutants are
# then to be made again, and name so few combinations that stay.
WORTH_S, WORTH_OF_A_MUTANT_S, MOST_NAMED = 0.2, 0.7, 12
CHEAP_S, CHEAP_AFTER_A_THOUSAND_S = 0.1, 0.02
# What is promised outside: documents, refusals, layers, budgets; tables of which each row is a promise of its own.
PROMISED = ("tests/docs/", "tests/budgets/", "tests/mutants/", "tests/test_", "tests/train/test_plan_contract.py")
PROMISED += ("tests/train/test_hugging_face.py::test_each_architecture", "tests/train/test_saving.py::test_which_")
PROMISED += ("tests/lab/test_published.py", "tests/lab/test_accounting.py", "tests/cli/", "tests/packaging/")
PROMISED += ("tests/notebooks/",)
# Processes that are killed, whose lines no record has; kernels that are compiled, of which Python's lines say nothing.
PROMISED += ("tests/faults/", "tests/kernels/test_compiles.py")


def cover(costs: Mapping[str, float], lines: Iterable[Collection[str]], needed: Collection[str]) -> set[str]:
    """Of tests, by their costs, few that run every line, given as the tests that run it; ``needed`` are among them."""
    of_set: dict[frozenset[str], int] = defaultdict(int)
    for tests in lines:
        of_set[frozenset(test for test in tests if test in costs)] += 1
    of_set.pop(frozenset(), None)
    by_test: dict[str, set[frozenset[str]]] = defaultdict(set)
    for tests in of_set:
        for test in tests:
            by_test[test].add(tests)
    chosen = {test for test in needed if test in costs}
    left = {tests for tests in of_set if chosen.isdisjoint(tests)}
    while left:
        best = max(
            {test for tests in left for test in tests},
            key=lambda test: (sum(of_set[each] for each in by_test[test] & left) / (costs[test] + FIXED_S), test),
        )
        chosen.add(best)
        left -= by_test[best]
    # what came early may be of no use beside what came later
    times: dict[frozenset[str], int] = {tests: len(chosen & tests) for tests in of_set}
    for test in sorted(chosen - set(needed), key=lambda test: (-costs[test], test)):
        if all(times[tests] > 1 for tests in by_test[test]):
            chosen.remove(test)
            for tests in by_test[test]:
                times[tests] -= 1
    return chosen


def promised(tests: Iterable[str]) -> set[str]:
    """Of these tests those that something outside of the tests names: pages, mutants, and whole folders.

    A mutant that names a function asks for one of its combinations, whichever sees it: ``make mutants`` says whether
    those that stay do.
    """
    by_mutants = {test for mutant in catalogue() for test in mutant.tests if "::" in test}
    named = {test for test in by_mutants if "[" in test}
    for page in [*(ROOT / "docs").rglob("*.md"), ROOT / "tests" / "docs" / "promises.toml", ROOT / "README.md"]:
        found = re.findall(r"tests/[\w/]+\.py::\w+(?:\[[^\]\s]+\])?", page.read_text(encoding="utf-8"))
        named |= {test for test in found if test not in by_mutants}
    return {test for test in tests if test.startswith(PROMISED) or not named.isdisjoint((test, test.partition("[")[0]))}


def of_mutants() -> set[str]:
    """The functions, and whole files, that mutants name."""
    return {test.partition("[")[0] for mutant in catalogue() for test in mutant.tests}


def cautious(
    costs: Mapping[str, float],
    lines: Iterable[Collection[str]],
    chosen: Collection[str],
    functions: Set[str] | None = None,
    cheap_s: float = CHEAP_S,
) -> set[str]:
    """``chosen``, all tests that are cheap, and of each function that then has none, or of these and those of these
    files, the one that runs most lines.

    While few mistakes were tried, what a function alone asserts may be seen by no mistake that was drawn; of its
    combinations of parameters that is less likely.
    """
    num_lines = Counter(test for tests in lines for test in tests)
    found = {*chosen, *(test for test, seconds in costs.items() if seconds < cheap_s)}
    have = {test.partition("[")[0] for test in found}
    for test in sorted(costs, key=lambda test: (-num_lines[test], costs[test], test)):
        function = test.partition("[")[0]
        named = functions is None or not functions.isdisjoint((function, function.partition("::")[0]))
        if named and function not in have:
            have.add(function)
            found.add(test)
    return found


def likeliest(costs: Mapping[str, float], source: str, chosen: Collection[str]) -> list[str]:
    """These tests in the order in which they see a mistake of a source soonest: cheap ones, of a file or a folder that
    has its name, and ``chosen`` ones."""
    folder, _, name = source.removesuffix(".py").rpartition("/")

    def cost(test: str) -> float:
        file = test.partition("::")[0]
        near = (4 if name in file else 1) * (2 if f"tests/{folder}/" in file else 1) * (2 if test in chosen else 1)
        return (costs[test] + 0.05) / near

    return sorted(costs, key=lambda test: (cost(test), test))


def mark(costs: Mapping[str, float], chosen: Collection[str]) -> dict[str, float]:
    """Write into the tests' files which are not chosen; by file the seconds that this saves."""
    saved: dict[str, float] = {}
    of_mutant = of_mutants()
    of_file: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for test in costs:
        file, _, name = test.partition("::")
        of_file[file][name.partition("[")[0].replace("::", ".")].append(test)
    for file, functions in of_file.items():
        path = ROOT / file
        text = path.read_text(encoding="utf-8")
        marks = {}
        for name, tests in functions.items():
            kept = [test for test in tests if test in chosen]
            seconds = sum(costs[test] + FIXED_S for test in tests if test not in chosen)
            worth = WORTH_S if of_mutant.isdisjoint((file, tests[0].partition("[")[0])) else WORTH_OF_A_MUTANT_S
            if len(kept) < len(tests) and len(kept) <= MOST_NAMED and seconds >= worth * max(1, len(kept)):
                ids = [test.partition("[")[2].removesuffix("]") for test in kept]
                marks[name] = f"@{MARK}" + (f"(but={json.dumps(ids, ensure_ascii=False)})" if ids else "")
                saved[file] = saved.get(file, 0.0) + seconds
        new = marked(text, marks)
        if new != text:
            path.write_text(new, encoding="utf-8")
    return saved


def marked(text: str, marks: Mapping[str, str]) -> str:
    """A file of tests with these marks, by its functions, in place of earlier ones.

    Other earlier ones stay: what they leave out was not recorded, so nothing is known of it.
    """
    lines = text.splitlines()
    functions = []
    for node in ast.parse(text).body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        owner = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        functions += [(f"{owner}{each.name}", each) for each in inner if isinstance(each, ast.FunctionDef)]
    for name, node in sorted(functions, key=lambda each: -each[1].lineno):
        if name not in marks:
            continue
        for decorator in reversed(node.decorator_list):
            if ast.unparse(decorator).startswith(MARK):
                del lines[decorator.lineno - 1 : decorator.end_lineno]
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        lines.insert(first - 1, " " * node.col_offset + marks[name])
    new = "\n".join(lines) + "\n"
    if marks and not re.search(r"^import pytest$", new, re.MULTILINE):
        imports = [node for node in ast.parse(new).body if isinstance(node, (ast.Import, ast.ImportFrom))]
        place = next(node.lineno for node in imports if getattr(node, "module", None) != "__future__")
        lines = new.splitlines()
        new = "\n".join([*lines[: place - 1], "import pytest", *lines[place - 1 :]]) + "\n"
    return new
