"""Assigns whole tensors to owner ranks, and packs them into buckets that their owners broadcast. Pure arithmetic.

Owners: largest tensor first, each to the rank that owns the fewest bytes so far
(`zeroshard.zero.whole_tensors.balance`).

Buckets: an owner's tensors are packed, in their order, into buckets of at most ``bucket_bytes``; a tensor of that size
or more has a bucket of its own. The buckets of all owners alternate:

    owner 0, first | owner 1, first | owner 2, first | owner 0, second | owner 1, second | ...

so that every rank can update its second bucket while the first ones are in flight.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from zeroshard.zero.whole_tensors.balance import largest_first


@dataclass(frozen=True, slots=True)
class Bucket:
    """The tensors of one broadcast: of one owner, on one device, by their indices."""

    owner: int
    members: tuple[int, ...]


def assign(num_bytes: Sequence[int], trained: Sequence[bool], loads: list[int]) -> list[int]:
    """Return the owner of each tensor. Frozen ones are assigned last: without state, they must not affect its balance.

    Args:
        num_bytes: bytes of each tensor.
        trained: whether each tensor will have a gradient.
        loads: bytes that each rank owns already; those of its new tensors are added in place.
    """
    owners = [0] * len(num_bytes)
    for wanted in (True, False):
        some = [index for index, each in enumerate(trained) if each is wanted]
        for index, owner in zip(some, largest_first([num_bytes[index] for index in some], loads), strict=True):
            owners[index] = owner
    return owners


def pack(
    moved: Sequence[int],
    owners: Sequence[int],
    num_bytes: Sequence[int],
    devices: Sequence[Hashable],
    bucket_bytes: int,
    world_size: int,
) -> list[Bucket]:
    """Return the buckets for the tensors with the indices ``moved``, in the order in which they are broadcast.

    ``owners``, ``num_bytes`` and ``devices`` are those of all tensors, by index.
    """
    by_owner: list[list[list[int]]] = [[] for _ in range(world_size)]
    filling: dict[tuple[int, Hashable], tuple[list[int], int]] = {}
    for index in moved:
        place = owners[index], devices[index]
        if num_bytes[index] >= bucket_bytes:
            by_owner[owners[index]].append([index])
            continue
        bucket, size = filling.get(place, (None, 0))
        if bucket is None or size + num_bytes[index] > bucket_bytes:
            bucket, size = [], 0
            by_owner[owners[index]].append(bucket)
        bucket.append(index)
        filling[place] = bucket, size + num_bytes[index]
    rounds = zip_longest(*by_owner)
    return [Bucket(owner, tuple(bucket)) for row in rounds for owner, bucket in enumerate(row) if bucket is not None]
