"""The mutants as data: each is one mistake in one file of the package, and the tests that must see it.

They are written in the TOML files beside this one, a file for each folder of ``src/zeroshard``::

    [[mutant]]
    name = "weight-decay-on-norms"
    file = "optim/groups.py"                      # under src/zeroshard
    old = "MIN_DECAYED_NDIM = 2"                  # stands there exactly once
    new = "MIN_DECAYED_NDIM = 1"
    tests = ["tests/optim/test_groups.py"]        # pytest's node ids; one of these tests fails
    breaks = "Vectors decay too."

Where a short ``old`` occurs more than once, ``after`` is a text that occurs once, from which ``old`` is looked for.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
PACKAGE = Path("src") / "zeroshard"


@dataclass(frozen=True)
class Mutant:
    """One mistake.

    Attributes:
        name: short, and no other mutant's.
        file: that is changed, under ``src/zeroshard``.
        old: text in that file.
        new: what stands there instead.
        tests: node ids, as pytest takes them; at least one of these tests fails.
        breaks: what is wrong then, in a sentence.
        after: text that occurs once, from which ``old`` is looked for; "": ``old`` itself occurs once.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    breaks: str
    after: str = ""

    @property
    def path(self) -> Path:
        """Of the file, from the repository's root."""
        return PACKAGE / self.file

    def applied(self, source: str) -> str:
        """``source`` with the mistake in it.

        Raises:
            ValueError: the text to change is not there, or more than once.
        """
        start = 0
        if self.after:
            if (count := source.count(self.after)) != 1:
                raise ValueError(f"{self.name}: {self.after!r} occurs {count} times in {self.file}, not once")
            start = source.index(self.after)
        count = source.count(self.old, start)
        if count == 0 or (count > 1 and not self.after):
            raise ValueError(f"{self.name}: {self.old!r} occurs {count} times in {self.file}, not once")
        place = source.index(self.old, start)
        return source[:place] + self.new + source[place + len(self.old) :]


def catalogue(folder: Path = FOLDER) -> list[Mutant]:
    """All mutants, in the order of files and in each as written.

    Raises:
        ValueError: an entry lacks something or has too much, or two have one name.
    """
    found: dict[str, Mutant] = {}
    for path in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]:
            try:
                mutant = Mutant(**{**entry, "tests": tuple(entry["tests"])})
            except (KeyError, TypeError) as error:
                raise ValueError(f"{path.name}: {entry.get('name', entry)}: {error}") from None
            if mutant.name in found:
                raise ValueError(f"{path.name}: two mutants are called {mutant.name}")
            found[mutant.name] = mutant
    return list(found.values())
