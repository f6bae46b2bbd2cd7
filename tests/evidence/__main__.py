"""What sees what: ``python -m evidence record|try|choose FOLDER``, in this order; ``make evidence`` runs all three.

A record of some tests is a folder outside of the repository. ``try`` goes on where it was stopped; with another seed it
asks whether the choice holds: how many of new mistakes does a test outside of it see that none in it sees.
"""

import argparse
import json
import random
import subprocess
import sys
from collections import Counter
from itertools import accumulate
from pathlib import Path

import pytest

from evidence import choice, mistakes, record, trials
from mutants.catalogue import ROOT

QUIET = ["-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]


def main(argv: list[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m evidence", description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    asked = verbs.add_parser("record", help="run tests; note their lines and costs")
    asked.add_argument("folder", type=Path)
    asked.add_argument("--costs", action="store_true", help="print what the dearest cost, and trace no lines")
    asked.add_argument("tests", nargs="+", help="as pytest takes them")
    asked = verbs.add_parser("join", help="make one record of several, of different tests")
    asked.add_argument("folder", type=Path)
    asked.add_argument("parts", nargs="+", type=Path)
    asked = verbs.add_parser("try", help="draw mistakes and find a test that sees each")
    asked.add_argument("folder", type=Path)
    asked.add_argument("--num", type=int, default=100, help="mistakes (default: 100)")
    asked.add_argument("--seed", type=int, default=1)
    asked.add_argument("--below", default="", help="only in files of the package whose names begin so: optim/")
    asked.add_argument(
        "--cpu-limit-s", type=float, default=30.0, help="of one mistake, by what its tests cost (default: 30)"
    )
    asked.add_argument("--share", default="0/1", help="0/2 or 1/2: every second one, for two processes")
    asked = verbs.add_parser("choose", help="say what a cover costs, and mark what is outside of it")
    asked.add_argument("folder", type=Path)
    asked.add_argument("--write", action="store_true", help="change the tests' files")
    asked.add_argument("--whole", action="store_true", help="whole functions too: only after a thousand mistakes")
    given = parser.parse_args(argv)
    folder = given.folder.resolve()
    if given.verb == "record":
        status = pytest.main([*QUIET, *given.tests], plugins=[record.Recorder(folder, lines=not given.costs)])
        record.combine(folder)
        return int(status) or (_dearest(folder) if given.costs else 0)
    if given.verb == "try":
        return _try(folder, given.num, given.seed, given.below, given.cpu_limit_s, given.share)
    if given.verb == "join":
        record.join(folder, given.parts)
        return 0
    return _choose(folder, given.write, given.whole)


def _dearest(folder: Path) -> int:
    costs = record.costs(folder)
    print(f"{len(costs)} tests that passed, {sum(costs.values()):.0f} s of the processor")
    for test in sorted(costs, key=lambda test: -costs[test])[:30]:
        print(f"{costs[test]:7.2f} {test}")
    return 0


def _rows(folder: Path) -> list[list]:
    path = folder / "mistakes.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _cover(folder: Path) -> tuple[dict[str, float], dict[tuple[str, int], set[str]], set[str]]:
    costs, lines = record.costs(folder), record.tests_of_lines(folder)
    needed = {test for *_, verdict, test, _ in _rows(folder) if verdict in (trials.SEEN, trials.HUNG)}
    return costs, lines, choice.cover(costs, lines.values(), needed | choice.promised(costs))


def _try(folder: Path, num: int, seed: int, below: str, cpu_limit_s: float, share: str) -> int:
    costs, lines, chosen = _cover(folder)
    chosen = choice.cautious(costs, lines.values(), chosen)
    tried = {(row[0], row[1]) for row in _rows(folder)}
    wanted = []
    for mistake in mistakes.drawn([line for line in lines if line[0].startswith(below)], num, seed):
        if (mistake.file, mistake.number) not in tried:
            tests = {test: costs[test] for test in lines[mistake.file, mistake.change.line] & costs.keys()}
            order = choice.likeliest(tests, mistake.file, chosen)
            sums = list(accumulate(costs[test] for test in order))
            num_tried = max(1, sum(seconds <= cpu_limit_s for seconds in sums))
            wanted.append((mistake, order[:num_tried], len(order[num_tried:])))
    random.Random(seed).shuffle(wanted)
    first, step = map(int, share.split("/"))
    wanted = wanted[first::step]
    plugin = trials.Trials(folder, wanted, costs)
    files = sorted({test.partition("::")[0] for _, tests, _ in wanted for test in tests})
    status = pytest.main([*QUIET, "-s", *files], plugins=[plugin])
    new = _rows(folder)[-len(wanted) :] if wanted else []
    seen = [row for row in new if row[4] in (trials.SEEN, trials.HUNG)]
    outside = [row for row in seen if row[5] not in chosen]
    print(
        f"{dict(Counter(row[4] for row in new))}; {len(outside)} of {len(seen)} by tests outside of the choice so far"
    )
    return int(status)


def _choose(folder: Path, write: bool, whole: bool) -> int:
    costs, lines, chosen = _cover(folder)
    of_cover = sum(costs[test] for test in chosen)
    print(f"{len(lines)} lines, {len(costs)} tests that passed, {sum(costs.values()):.0f} s of the processor")
    print(f"cover: {len(chosen)} tests, {of_cover:.0f} s")
    of_files = dict.fromkeys(sorted({test.partition("::")[0] for test in costs}), 0)
    for test in chosen:
        of_files[test.partition("::")[0]] += 1
    print("files without a test in the cover:", *[file for file, num in of_files.items() if num == 0], sep="\n  ")
    all_lines = lines.values()
    if whole:
        chosen = choice.cautious(costs, all_lines, chosen, choice.of_mutants(), choice.CHEAP_AFTER_A_THOUSAND_S)
    else:
        chosen = choice.cautious(costs, all_lines, chosen)
    seconds = sum(costs[test] for test in chosen)
    of_each = "of each function" + (" that a mutant names" if whole else "")
    print(f"with cheap ones, and one {of_each}: {len(chosen)} tests, {seconds:.0f} s")
    if write:
        saved = choice.mark(costs, chosen)
        subprocess.run([sys.executable, "-m", "ruff", "format", "-q", *saved], cwd=ROOT, check=True)
        for file, seconds in sorted(saved.items(), key=lambda each: -each[1]):
            print(f"{seconds:7.1f} s less in {file}")
        print(f"{sum(saved.values()):.0f} s less in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
