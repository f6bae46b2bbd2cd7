"""Checks that ranks which build the same object together were given the same arguments, and raises on all if not.

Without the check, a rank that was given other parameters, or whose constructor raised, would leave the other ranks
blocked in a collective.

Ranks with different optimizers or learning rates train without any error. At stage 0 their weights drift apart; above
it each rank's part of the weights is trained in another way. So optimizers are described too (`described`).

What may differ later, such as a learning rate, is compared in a message that ranks exchange anyway: a digest is added
to its bytes, of which ranks take the maximum (`both_ends`, `is_one`).
"""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from hashlib import blake2b, sha256
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer

from zeroshard.comm import CONTROL, Communicator, scope
from zeroshard.zero.tensor_broadcast import send_bytes

DIGEST_BYTES = 7
# How an update is computed, not what it computes: ranks on different devices may choose differently.
_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
_PLAIN = (bool, int, float, complex, str, type(None))
_ERRORS: dict[str, type[Exception]] = {"TypeError": TypeError, "ValueError": ValueError}


@contextmanager
def agreement(
    comm: Communicator, what: str = "params", todo: str = "give every rank the same parameters in the same order"
) -> Generator[list[str]]:
    """At the end of this block compare the descriptions that each rank has appended to the list. Collective.

    Args:
        comm: all ranks.
        what: the argument that is described.
        todo: advice, for the error, to a user who has given ranks different arguments.

    Raises:
        Exception: the error that the block raised on this rank; else that of the first rank on which it raised (a
            TypeError or ValueError as such, another one as a RuntimeError), with that rank's number.
        ValueError: ranks have appended different descriptions; it names the first that differs.
    """
    described: list[str] = []
    try:
        yield described
    except Exception as error:
        _exchange(comm, described, error, what, todo)
        raise
    _exchange(comm, described, None, what, todo)


def require_same(comm: Communicator, agreed: Sequence[int], lines: Iterable[str]) -> None:
    """Raise ValueError on every rank if ranks have different digests, and optimizers that differ. Collective.

    Args:
        comm: all ranks.
        agreed: the maxima of `both_ends` over ranks.
        lines: describe this rank's optimizers.
    """
    if not is_one(agreed):
        with agreement(comm, "optimizer", "give every rank the same optimizer and settings") as told:
            told += lines


def _exchange(comm: Communicator, described: list[str], error: Exception | None, what: str, todo: str) -> None:
    if comm.world_size == 1 or isinstance(torch.empty(0), FakeTensor):  # fake tensors have no values to compare
        return
    failed, count, digest = _gather(comm, [error is not None, len(described), _digest("\n".join(described))])
    if error is not None:
        send_bytes(comm, f"{type(error).__name__}\n{error}".encode(), failed.index(1))
        return
    if any(failed):
        first = failed.index(1)
        name, _, text = send_bytes(comm, b"", first).decode().partition("\n")
        raise _ERRORS.get(name, RuntimeError)(f"rank {first}: {text}")
    for rank, other in enumerate(zip(count, digest, strict=True)):
        if other != (count[0], digest[0]):
            ours, theirs = _first_difference(comm, described, rank)
            raise ValueError(f"{what}: rank 0 has {ours}, rank {rank} has {theirs}; {todo}")


def _first_difference(comm: Communicator, described: list[str], rank: int) -> tuple[str, str]:
    """Return the first descriptions in which rank 0 and ``rank`` differ. Collective, for all ranks."""
    lists = [send_bytes(comm, "\n".join(described).encode(), r).decode().split("\n") for r in (0, rank)]
    return next((ours, theirs) for ours, theirs in zip_longest(*lists, fillvalue="nothing more") if ours != theirs)


def _gather(comm: Communicator, numbers: list[int]) -> list[list[int]]:
    """All-gather ``numbers``: return for each of them a list of its values by rank. Collective."""
    own = torch.tensor(numbers, dtype=torch.int64, device=comm.control_device)
    found = torch.empty(comm.world_size * len(numbers), dtype=torch.int64, device=comm.control_device)
    with scope(CONTROL):
        comm.all_gather(found, own).wait()
    return found.view(comm.world_size, len(numbers)).T.tolist()


def _digest(text: str) -> int:
    return int.from_bytes(sha256(text.encode()).digest()[:8], "big", signed=True)


def digest_of(content: bytes) -> bytes:
    """Return a digest of `DIGEST_BYTES`."""
    return blake2b(content, digest_size=DIGEST_BYTES).digest()


def both_ends(digest: bytes) -> list[int]:
    """Return bytes whose maxima over ranks give the largest and the smallest value of each byte of a digest."""
    return [*digest, *(255 - byte for byte in digest)]


def is_one(agreed: Sequence[int]) -> bool:
    """Return whether all ranks had the same digest; ``agreed``: the maxima of `both_ends`."""
    half = len(agreed) // 2
    return all(high == 255 - low for high, low in zip(agreed[:half], agreed[half:], strict=True))


def described(optimizer: Optimizer, num_params: Iterable[int]) -> list[str]:
    """Describe an optimizer in lines, one for each setting of each param group; the same on ranks that do alike.

    Only what the class's constructor takes is a setting: an optimizer may count steps in its groups too.

    Args:
        optimizer: any optimizer.
        num_params: how many of the model's parameters are in each group, over all ranks.
    """
    kind = type(optimizer)
    name, lines = f"{kind.__module__}.{kind.__qualname__}", []
    for index, (group, count) in enumerate(zip(optimizer.param_groups, num_params, strict=False)):
        lines.append(f"{name}, group {index} of {count} parameters")
        settings = sorted((_settings(kind) or {*optimizer.defaults}) & group.keys() - _IMPLEMENTATION)
        lines += [f"{name}, group {index}, {key} = {_value(group[key])}" for key in settings]
    return lines


@cache
def _settings(kind: type[Optimizer]) -> frozenset[str]:
    """The settings that a class's constructor names; empty if it takes any."""
    taken = inspect.signature(kind).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values()):
        return frozenset()
    return frozenset(taken) - {"params"}


def _value(value: Any) -> str:
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Tensor):  # on a device the host would have to wait for its value
        return repr(value.item()) if value.numel() == 1 and value.device.type == "cpu" else f"a tensor {value.shape}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_value(each)}" for key, each in value.items())
    if isinstance(value, Sequence):
        return f"({', '.join(map(_value, value))})"
    return type(value).__name__
