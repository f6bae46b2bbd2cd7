"""Agreement between ranks at start-up: on the outcome of rank 0's work, and on settings, code, data and model.

Rank 0 alone prepares data and creates the run folder. If that failed on rank 0 only, the others would wait in their
next collective for a rank that is gone. So rank 0 sends them its error, and every rank raises it (`first_rank_does`).

Ranks with different learning rates, commits or copies of the data would train without any error, to a meaningless
result. So these facts are compared before anything depends on them, and every rank raises the first difference from
rank 0. Settings and versions are compared through the store at which ranks connect (`agree_at`), because settings
decide which communicator is used. Data and model are compared by collectives (`agree_on`).
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from zeroshard.comm import CONTROL, Communicator, PeerError, scope
from zeroshard.errors import FirstRankStorageError, UserError, is_of_storage
from zeroshard.train.config.validate import by_dotted_name
from zeroshard.zero.tensor_broadcast import send_bytes

OWN_TO_A_RANK = frozenset({"nproc", "port", "rdzv_endpoint", "data.dir"})  # settings that may differ between machines
MEETING_S = 100.0  # how long ranks wait for the next rank to connect
HEARING_S = 10.0  # how long rank 0 keeps the store alive so that others can read why they are refused
STILL_AT_IT_S = 30.0  # interval at which rank 0 tells the others that it is still working
_STORAGE = "storage"  # sent in place of the advice if the failure was that of a disk or folder
START_ALIKE = "start every rank with the same"


def first_rank_does(comm: Communicator, work: Callable[[], object]) -> None:
    """Run ``work`` on rank 0 while the others wait, however long it takes; collective.

    ``work`` must not issue collectives.

    Raises:
        UserError: ``work`` raised it on rank 0; every rank raises the same error.
        OSError: ``work`` raised it on rank 0; if a disk or folder failed, other ranks raise `FirstRankStorageError`.
        Exception: on rank 0 any other exception of ``work``; on other ranks a RuntimeError with its text.
    """
    failure: Exception | None = None
    if comm.rank == 0:
        with _others_wait_on(comm):
            try:
                work()
            except Exception as error:  # noqa: BLE001 -- raised again below, once the others know
                failure = error
    while _is_at_it(comm, False):  # ends with the call in which rank 0 has finished
        pass
    words = _send(comm, json.dumps(_describe(failure)) if failure else "")
    if failure is not None:
        raise failure
    if words:
        field, what, todo = json.loads(words)
        if field:
            raise UserError(field, what, todo)
        if todo == _STORAGE:
            raise FirstRankStorageError(f"rank 0 failed: {what}")
        raise RuntimeError(f"rank 0 failed: {what}")


def _describe(failure: Exception) -> tuple[str, str, str]:
    if isinstance(failure, UserError):
        return failure.field, failure.what, failure.todo
    of_storage = isinstance(failure, OSError) and is_of_storage(failure)
    return "", f"{type(failure).__name__}: {failure}", _STORAGE if of_storage else ""


@contextmanager
def _others_wait_on(comm: Communicator) -> Generator[None]:
    """On rank 0: inside this block a background thread regularly tells the other ranks that rank 0 still works.

    Without it the other ranks would take rank 0 for lost after some minutes, and preparing tokens may take hours.
    """
    is_done = threading.Event()

    def tell() -> None:
        with suppress(PeerError):  # a lost rank is reported again by the collective after the work
            while not is_done.wait(STILL_AT_IT_S):
                _is_at_it(comm, True)

    thread = threading.Thread(target=tell, name="still-at-it", daemon=True)
    if comm.world_size > 1:
        thread.start()
    try:
        yield
    finally:
        is_done.set()
        if comm.world_size > 1:
            thread.join()


def _is_at_it(comm: Communicator, at_it: bool) -> bool:
    """Whether any rank passed ``at_it`` as true, that is, is still working. Collective."""
    message = torch.tensor([int(at_it)], device=comm.control_device)
    with scope(CONTROL):
        comm.all_reduce(message, op="max").wait()
    return bool(message)


def _send(comm: Communicator, text: str) -> str:
    """Return rank 0's ``text`` on every rank; collective."""
    return send_text(comm, text, src=0)


def send_text(comm: Communicator, text: str, src: int) -> str:
    """Return rank ``src``'s ``text`` on every rank; collective."""
    return send_bytes(comm, text.encode(), src).decode()


def gather_bytes(comm: Communicator, mine: bytes) -> list[bytes]:
    """Return every rank's bytes, which may differ in length, in the order of ranks; collective."""
    if comm.world_size == 1:
        return [mine]
    device = comm.control_device
    lengths = torch.empty(comm.world_size, dtype=torch.int64, device=device)
    with scope(CONTROL):
        comm.all_gather(lengths, torch.tensor([len(mine)], device=device)).wait()
        longest = max(int(lengths.max()), 1)
        padded = torch.frombuffer(bytearray(mine.ljust(longest, b"\0")), dtype=torch.uint8).to(device)  # [longest]
        gathered = torch.empty(comm.world_size * longest, dtype=torch.uint8, device=device)
        comm.all_gather(gathered, padded).wait()
    rows = gathered.cpu().view(comm.world_size, longest).numpy()
    return [row[:length].tobytes() for row, length in zip(rows, lengths.tolist(), strict=True)]


def agree_on(comm: Communicator, facts: Mapping[str, object]) -> None:
    """Check that every rank has the same ``facts`` as rank 0; collective.

    Raises:
        UserError: a rank has different facts; its field is the first fact that differs. The same on every rank.
    """
    own = _as_json(facts)
    digest = int.from_bytes(hashlib.sha256(own.encode()).digest()[:8], "big", signed=True)
    digests = torch.empty(comm.world_size, dtype=torch.int64, device=comm.control_device)
    with scope(CONTROL):
        comm.all_gather(digests, torch.tensor([digest], device=comm.control_device)).wait()
    others = [rank for rank, other in enumerate(digests.tolist()) if other != digests[0].item()]
    if others:
        first, other = (send_text(comm, own, src=rank) for rank in (0, others[0]))
        _refuse(_first_difference(first, other, others[0]))


def agree_at(store: dist.Store, rank: int, world_size: int, facts: Mapping[str, object]) -> None:
    """Check that every rank has the same ``facts`` as rank 0, through a store, before there is a communicator.

    Every rank calls it once. Each rank reads only rank 0's facts, so that the store can serve thousands of ranks.

    Raises:
        UserError: as `agree_on`.
        PeerError: some ranks have not connected, and none has for `MEETING_S`; every rank names the missing ones.
    """
    own = _as_json(facts)
    if rank == 0:
        store.set("facts", own)
    if not _came(store, "facts"):
        raise PeerError(_missing([0], world_size))
    difference = _first_difference(store.get("facts").decode(), own, rank)
    store.set(f"differs/{rank}", json.dumps(difference))
    if rank == 0:
        store.set("verdict", json.dumps(_verdict(store, world_size)))
    verdict = json.loads(store.get("verdict"))
    store.add("heard", 1)
    if verdict is None:
        return
    missing = verdict if isinstance(verdict, str) else ""
    deadline = time.monotonic() + HEARING_S
    num_here = world_size - (missing.count(",") + 1 if missing else 0)
    while rank == 0 and store.add("heard", 0) < num_here and time.monotonic() < deadline:
        time.sleep(0.01)  # rank 0 may host the store, so let the others read the verdict before it ends
    if missing:
        raise PeerError(_missing([int(other) for other in missing.split(",")], world_size))
    _refuse(verdict)


def _verdict(store: dist.Store, world_size: int) -> tuple[str, str] | str | None:
    """On rank 0: return the first difference that a rank found, or the ranks that are missing as ``3,7``; else None."""
    first: tuple[str, str] | None = None
    for other in range(world_size):
        if not _came(store, f"differs/{other}"):
            return ",".join(str(rank) for rank in range(world_size) if not store.check([f"differs/{rank}"]))
        first = first or json.loads(store.get(f"differs/{other}"))
    return first


def _came(store: dist.Store, key: str) -> bool:
    """Wait for a key of the store; returns whether it was set within `MEETING_S` from now."""
    deadline, pause_s = time.monotonic() + MEETING_S, 0.001
    while not store.check([key]):
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.1)
    return True


def _missing(ranks: Sequence[int], world_size: int) -> str:
    named = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {named} of {world_size} did not join the rendezvous, and none has for {MEETING_S:g} s"


def code_version() -> str:
    """The package's version and a hash of its source files: ranks with equal values run the same code."""
    return f"{zeroshard.__version__} ({_hash_of_files(Path(zeroshard.__file__).parent)})"


def start_facts(config: Mapping[str, object]) -> dict[str, object]:
    """Facts that ranks must have in common before they have a communicator: settings, code version, torch version."""
    settings = {name: value for name, value in by_dotted_name(config).items() if name not in OWN_TO_A_RANK}
    return {**settings, "code version": code_version(), "torch version": str(torch.__version__)}


def model_facts(model: nn.Module) -> dict[str, object]:
    """The dtype and shape of each parameter and buffer, and whether it is frozen, by name."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {f"model {name}": f"{t.dtype} {list(t.shape)} {'' if t.requires_grad else 'fixed'}" for name, t in tensors}


def _first_difference(first: str, other: str, rank: int) -> tuple[str, str] | None:
    """Compare ``rank``'s facts with rank 0's: ``(field, what is wrong)`` of the first difference, None if equal.

    ``first``, ``other``: facts of rank 0 and of ``rank``, as JSON.
    """
    theirs, ours = json.loads(first), json.loads(other)
    for field in {**theirs, **ours}:
        if theirs.get(field, "nothing") != ours.get(field, "nothing"):
            has = [repr(facts.get(field, "nothing")) for facts in (ours, theirs)]
            return field, f"rank {rank} has {has[0]}, rank 0 has {has[1]}"
    return None


def _refuse(difference: tuple[str, str] | None) -> None:
    assert difference is not None
    field, what = difference
    kind = next((kind for kind in ("code version", "torch version", "data", "model") if field.startswith(kind)), "")
    raise UserError(field, what, f"{START_ALIKE} {kind or 'settings'}")


def _as_json(facts: Mapping[str, object]) -> str:
    return json.dumps(facts, default=str)


@cache
def _hash_of_files(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]
