"""Ranks that were given different things, or of which one failed: every rank hears of it, and raises.

A rank that fails alone, or that was given other arguments, would leave the others blocked in their next collective, or
train without any error to a meaningless result. So at the end of a phase ranks exchange a digest of what they were
given, or of the error that they met. If one differs, the texts behind the digests are sent, and all ranks raise
(`agreement`). Work that only rank 0 does is `first_rank_does`.

What may differ later, such as a learning rate, is compared in a message that ranks exchange anyway: a digest is added
to its bytes, of which ranks take the maximum (`both_ends`, `is_one`).

Every function here that takes a communicator is collective.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from itertools import zip_longest
from typing import NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor

from zeroshard.comm.base import Communicator, PeerError
from zeroshard.comm.labels import CONTROL, labelled
from zeroshard.host.errors import FirstRankStorageError, UserError, is_of_storage

DIGEST_BYTES = 7
STILL_AT_IT_S = 30.0  # interval at which rank 0 tells the others that it is still working
_KINDS: dict[str, type[Exception]] = {kind.__name__: kind for kind in (ConnectionError, OSError, TypeError, ValueError)}


def largest(comm: Communicator, number: int) -> int:
    """Return the maximum of the ranks' numbers; also acts as a barrier."""
    message = torch.tensor([number], device=comm.control_device)
    with labelled(CONTROL):
        comm.all_reduce(message, op="max").wait()
    return int(message)


def maxima(comm: Communicator, numbers: Sequence[int], dtype: torch.dtype = torch.uint8) -> list[int]:
    """Return the maximum over ranks of each number; every rank gives equally many, which fit into ``dtype``."""
    if comm.world_size == 1 or not numbers:
        return list(numbers)
    message = torch.tensor(numbers, dtype=dtype, device=comm.control_device)
    with labelled(CONTROL):
        comm.all_reduce(message, "max").wait()
    return message.tolist()


def of_first_rank(comm: Communicator, numbers: Sequence[int]) -> list[int]:
    """Return rank 0's numbers, of type int64; every rank gives equally many."""
    message = torch.tensor(numbers, dtype=torch.int64, device=comm.control_device)
    with labelled(CONTROL):
        comm.broadcast(message, src=0).wait()
    return message.tolist()


def by_rank(comm: Communicator, number: int) -> list[int]:
    """Return every rank's number, an int64, in the order of ranks."""
    found = torch.empty(comm.world_size, dtype=torch.int64, device=comm.control_device)
    with labelled(CONTROL):
        comm.all_gather(found, torch.tensor([number], device=comm.control_device)).wait()
    return found.tolist()


def send_bytes(comm: Communicator, content: bytes, src: int) -> bytes:
    """Return rank ``src``'s ``content`` on every rank; the argument of other ranks is ignored."""
    with labelled(CONTROL):
        size = torch.tensor([len(content)], device=comm.control_device)
        comm.broadcast(size, src).wait()
        num_bytes = int(size)
        if comm.rank == src:
            message = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0)
            message = message.to(comm.control_device)
        else:
            message = torch.empty(num_bytes, dtype=torch.uint8, device=comm.control_device)
        if num_bytes:
            comm.broadcast(message, src).wait()
    return content if comm.rank == src else message.cpu().numpy().tobytes()


def gather_bytes(comm: Communicator, mine: bytes) -> list[bytes]:
    """Return every rank's bytes, which may differ in length, in the order of ranks."""
    if comm.world_size == 1:
        return [mine]
    lengths = by_rank(comm, len(mine))
    longest = max(*lengths, 1)
    device = comm.control_device
    padded = torch.frombuffer(bytearray(mine.ljust(longest, b"\0")), dtype=torch.uint8).to(device)  # [longest]
    gathered = torch.empty(comm.world_size * longest, dtype=torch.uint8, device=device)
    with labelled(CONTROL):
        comm.all_gather(gathered, padded).wait()
    rows = gathered.cpu().view(comm.world_size, longest).numpy()
    return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]


def first_message(comm: Communicator, words: str | None) -> tuple[int, str] | None:
    """Return the lowest rank whose ``words`` is not None, with its text; None if no rank has any."""
    size = comm.world_size
    first = size - largest(comm, 0 if words is None else size - comm.rank)
    return None if first == size else (first, send_bytes(comm, (words or "").encode(), first).decode())


def first_other(comm: Communicator, own: str) -> tuple[int, str, str] | None:
    """Return the first rank whose text is not rank 0's, with rank 0's text and its own; None if all texts are equal."""
    if comm.world_size == 1 or isinstance(torch.empty(0), FakeTensor):  # fake tensors have no values to compare
        return None
    digests = by_rank(comm, int.from_bytes(blake2b(own.encode(), digest_size=8).digest(), "big", signed=True))
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is None:
        return None
    first, second = (send_bytes(comm, own.encode(), src).decode() for src in (0, other))
    return other, first, second


@contextmanager
def agreement(
    comm: Communicator,
    what: str = "params",
    todo: str = "give every rank the same parameters in the same order",
    *,
    phase: str = "",
) -> Generator[list[str]]:
    """At the end of this block compare the descriptions that each rank has appended to the list.

    Args:
        what: the argument that is described.
        todo: advice, for the error, to a user who has given ranks different arguments.
        phase: what the block does, for the error of a rank on which it did not fail.

    Raises:
        Exception: the error that the block raised on this rank; else that of another rank, with its number (OSError,
            TypeError and ValueError as such, a UserError unchanged, others as RuntimeError).
        ValueError: ranks have appended different descriptions; it names the first that differs.
    """
    lines: list[str] = []
    try:
        yield lines
    except PeerError:  # the others have lost a peer too
        raise
    except Exception as error:
        with suppress(PeerError):  # a peer that is lost does not hide this rank's own error
            first_other(comm, json.dumps(_described(error)))
        raise
    found = first_other(comm, json.dumps(lines))
    if found is None:
        return
    rank, *texts = found
    ours, theirs = map(json.loads, texts)
    for failed, told in ((0, ours), (rank, theirs)):
        if isinstance(told, dict):
            _raise(told, f"{{}} (rank {failed}, {phase})" if phase else f"rank {failed}: {{}}")
    one, other = next(pair for pair in zip_longest(ours, theirs, fillvalue="nothing more") if pair[0] != pair[1])
    raise ValueError(f"{what}: rank 0 has {one}, rank {rank} has {other}; {todo}")


def first_rank_does(comm: Communicator, work: Callable[[], object]) -> None:
    """Run ``work``, which must not issue collectives, on rank 0 while the others wait, however long it takes.

    Raises:
        UserError: ``work`` raised it on rank 0; every rank raises the same error.
        OSError: ``work`` raised it on rank 0; if a disk or folder failed, other ranks raise `FirstRankStorageError`.
        Exception: on rank 0 any other exception of ``work``; on other ranks one with its text.
    """
    failure: Exception | None = None
    if comm.rank == 0:
        with _others_wait_on(comm):
            try:
                work()
            except Exception as error:  # noqa: BLE001 -- raised again below, once the others know
                failure = error
    try:
        while largest(comm, 0):  # ends with the call in which rank 0 has finished
            pass
        told = send_bytes(comm, json.dumps(_described(failure)).encode() if failure else b"", 0)
    finally:  # a peer that is lost does not hide rank 0's own error
        if failure is not None:
            raise failure
    if told:
        _raise(json.loads(told), "rank 0 failed: {}", FirstRankStorageError)


@contextmanager
def _others_wait_on(comm: Communicator) -> Generator[None]:
    """On rank 0: inside this block a background thread regularly tells the other ranks that rank 0 still works.

    Without it the other ranks would take rank 0 for lost after some minutes, and preparing tokens may take hours.
    """
    is_done = threading.Event()

    def tell() -> None:
        with suppress(PeerError):  # a lost rank is reported again by the collective after the work
            while not is_done.wait(STILL_AT_IT_S):
                largest(comm, 1)

    thread = threading.Thread(target=tell, name="still-at-it", daemon=True)
    if comm.world_size > 1:
        thread.start()
    try:
        yield
    finally:
        is_done.set()
        if comm.world_size > 1:
            thread.join()


def _described(error: Exception) -> dict[str, list[str]]:
    """Return what other ranks are told about an error: its kind, and its arguments."""
    if isinstance(error, UserError):
        return {"UserError": [error.field, error.what, error.todo]}
    if isinstance(error, OSError):  # one of the network, or of a process's limits, is told apart
        return {"OSError" if is_of_storage(error) else "ConnectionError": [str(error)]}
    kind = next((name for name, kind in _KINDS.items() if isinstance(error, kind)), "RuntimeError")
    return {kind: [str(error)]}


def _raise(told: dict[str, list[str]], form: str, of_storage: type[OSError] = OSError) -> NoReturn:
    """Raise what `_described` describes, with its text in ``form``."""
    ((kind, words),) = told.items()
    if kind == "UserError":
        raise UserError(*words)
    raise (of_storage if kind == "OSError" else _KINDS.get(kind, RuntimeError))(form.format(*words))


# -- digests in messages that are exchanged anyway ---------------------------------------------------------------------


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


def require_same(comm: Communicator, agreed: Sequence[int], lines: Iterable[str]) -> None:
    """Raise ValueError on every rank if ranks have different digests, and optimizers that differ.

    Args:
        agreed: the maxima of `both_ends` over ranks.
        lines: describe this rank's optimizers.
    """
    if not is_one(agreed):
        with agreement(comm, "optimizer", "give every rank the same optimizer and settings") as told:
            told += lines
