"""A pairwise cover: of many combinations, few in which every two values of two axes still meet.

A mistake mostly needs one value or two to show (Kuhn, Wallace and Gallo 2004, "Software fault interactions and
implications for software testing": 70 to 97 % of the faults they looked at). So `make test` runs a cover of each large
product and `make soak` all of it; `tests/support/soak.py` chooses.

Greedy, and deterministic: the combination with most pairs that nobody has yet comes next, the first of those that
have equally many.
"""

from collections.abc import Hashable, Sequence
from itertools import combinations

Combination = tuple[Hashable, ...]  # one value of each axis


def pairs_of(combination: Combination) -> set[tuple[tuple[int, Hashable], ...]]:
    """Its values in pairs, each value with the number of its axis; the values alone where there is one axis."""
    values = list(enumerate(combination))
    return set(combinations(values, min(2, len(values))))


def cover(combinations_: Sequence[Combination]) -> list[int]:
    """Places, ascending, of combinations that together have every pair that all of them have.

    What is left out of the product beforehand stays out: only pairs that occur are asked for.
    """
    pairs = [pairs_of(combination) for combination in combinations_]
    missing = set[tuple[tuple[int, Hashable], ...]]().union(*pairs)
    gains = [len(found) for found in pairs]  # at most so many are new: what was taken meanwhile only lessens them
    chosen = []
    while missing:
        best, most = 0, 0
        for place, found in enumerate(pairs):
            if gains[place] > most:
                gains[place] = len(found & missing)
                if gains[place] > most:
                    best, most = place, gains[place]
        chosen.append(best)
        missing -= pairs[best]
    return sorted(chosen)
