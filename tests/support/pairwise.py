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


def cover(combinations_: Sequence[Combination]) -> list[int]:
    """Places, ascending, of combinations that together have every pair that all of them have.

    What is left out of the product beforehand stays out: only pairs that occur are asked for.
    """
    values: dict[tuple[int, Hashable], int] = {}
    bits: dict[tuple[int, ...], int] = {}  # of each pair, in the order in which they come
    found = []  # the pairs of each combination, as bits
    for combination in combinations_:
        row = [values.setdefault(value, len(values)) for value in enumerate(combination)]
        mask = 0
        for pair in combinations(row, min(2, len(row))):  # the values alone where there is one axis
            if pair not in bits:
                bits[pair] = 1 << len(bits)
            mask |= bits[pair]
        found.append(mask)
    missing = (1 << len(bits)) - 1
    gains = [mask.bit_count() for mask in found]  # at most so many are new: what was taken meanwhile only lessens them
    chosen = []
    while missing:
        best, most = 0, 0
        for place, gain in enumerate(gains):
            if gain > most:
                gains[place] = gain = (found[place] & missing).bit_count()
                if gain > most:
                    best, most = place, gain
        chosen.append(best)
        missing &= ~found[best]
    return sorted(chosen)
