"""A pairwise cover: of many combinations, few in which every two values of two axes still meet.

A mistake mostly needs one value or two to show (Kuhn, Wallace and Gallo 2004, "Software fault interactions and
implications for software testing": 70 to 97 % of the faults they looked at). So `make test` runs a cover of each large
product and `make soak` all of it; `tests/support/soak.py` chooses.

Greedy, and deterministic: the combination with most pairs that nobody has yet comes next, the first of those that
have equally many.
"""

import functools
import operator
from collections.abc import Collection, Hashable, Iterable, Sequence
from itertools import combinations

Combination = tuple[Hashable, ...]  # one value of each axis


def cover(combinations_: Sequence[Combination], paired: Collection[int] | None = None) -> list[int]:
    """Places, ascending, of combinations that together have every pair that all of them have.

    What is left out of the product beforehand stays out: only pairs that occur are asked for. ``paired``: axes whose
    values are to meet each other's; of each other axis every value is asked for once, and of combinations that are
    equally good the next is one whose pairs, and then whose values, have come least. None: all axes.
    """
    values: dict[tuple[int, Hashable], int] = {}
    bits: dict[tuple[int, ...], int] = {}  # of each pair, in the order in which they come
    rows, found = [], []  # of each combination its values; as bits what is asked for, and pairs that are better new

    def mask(pairs: Iterable[tuple[int, ...]]) -> int:
        return sum(bits.setdefault(pair, 1 << len(bits)) for pair in pairs)

    for combination in combinations_:
        row = [values.setdefault(value, len(values)) for value in enumerate(combination)]
        rows.append(row)
        every = mask(combinations(row, min(2, len(row))))  # the values alone where there is one axis
        if paired is None:
            found.append((every, 0))
            continue
        meet = mask(combinations([row[axis] for axis in paired], min(2, len(paired))))
        found.append((meet | mask((value,) for axis, value in enumerate(row) if axis not in paired), every))
    new, asked = (1 << len(bits)) - 1, functools.reduce(operator.or_, (asked for asked, _ in found), 0)
    used = [0] * len(values)
    # At most so good: what was taken meanwhile only lessens it.
    gains = [(asked.bit_count(), pairs.bit_count(), 0) for asked, pairs in found]
    chosen = []
    while asked & new:
        best, most = 0, (0, 0, 0)
        for place, gain in enumerate(gains):
            if gain > most:
                wanted, pairs = found[place]
                often = 0 if paired is None else sum(used[value] for value in rows[place])
                gains[place] = gain = ((wanted & asked & new).bit_count(), (pairs & new).bit_count(), -often)
                if gain > most:
                    best, most = place, gain
        chosen.append(best)
        new &= ~(found[best][0] | found[best][1])
        for value in rows[best]:
            used[value] += 1
    return sorted(chosen)
