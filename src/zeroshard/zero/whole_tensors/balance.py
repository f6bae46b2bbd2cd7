"""Owners of things of different sizes: the largest first, each to the owner that has least.

The fullest owner then has at most 4/3 of what it would have in the best assignment: Graham 1969, "Bounds on
Multiprocessing Timing Anomalies". Ranks that know the sizes need no communication to agree.
"""

from collections.abc import Sequence


def largest_first(sizes: Sequence[int], filled: list[int], ties: Sequence[int] = (), alignment: int = 1) -> list[int]:
    """Return the owner of each size; equal sizes are placed in their order.

    Args:
        sizes: of what is assigned.
        filled: what each owner has already; what it gets is added in place, rounded up to a multiple of ``alignment``.
        ties: decide between owners that have equally much, for the smallest; then the first of them.
        alignment: see ``filled``.
    """
    ties = ties or [0] * len(filled)
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owner = owners[index] = min(range(len(filled)), key=lambda each: (filled[each], ties[each]))
        filled[owner] += -(-sizes[index] // alignment) * alignment
    return owners
