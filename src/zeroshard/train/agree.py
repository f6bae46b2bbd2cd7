"""Ranks that start together agree: on what rank 0 did for all of them, and on what each was started with.

Preparing data or making the run folder is rank 0's work. Were its failure its own, the others would wait in the
next collective for a rank that is gone; so they learn of it, word by word, and end as it does.

Ranks with another learning rate, another commit or another copy of the data train without complaint, and the result
is nobody's. So facts are compared before anything depends on them, the settings at the store where ranks meet, since
they decide which communicator there is; the first rank and field that differ from rank 0's are named on every rank.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from zeroshard.comm import CONTROL, Communicator, scope
from zeroshard.errors import UserError
from zeroshard.train.validate import by_dotted_name
from zeroshard.zero.carry import send_bytes

OWN_TO_A_RANK = frozenset({"nproc", "port", "rdzv_endpoint", "data.dir"})  # settings that may differ between machines
HEARING_S = 10.0  # that rank 0 waits for others to hear why they are refused
START_ALIKE = "start every rank with the same"


def first_rank_does(comm: Communicator, work: Callable[[], object]) -> None:
    """Run ``work`` on rank 0 while the others wait; collective.

    Raises:
        UserError: ``work`` raised it on rank 0; every rank raises the same one.
        Exception: on rank 0 whatever else ``work`` raised; on the others a RuntimeError that says so.
    """
    failure: Exception | None = None
    if comm.rank == 0:
        try:
            work()
        except Exception as error:  # noqa: BLE001 -- raised again below, once the others know
            failure = error
    words = _send(comm, json.dumps(_describe(failure)) if failure else "")
    if failure is not None:
        raise failure
    if words:
        field, what, todo = json.loads(words)
        if field:
            raise UserError(field, what, todo)
        raise RuntimeError(f"rank 0 failed: {what}")


def _describe(failure: Exception) -> tuple[str, str, str]:
    if isinstance(failure, UserError):
        return failure.field, failure.what, failure.todo
    return "", f"{type(failure).__name__}: {failure}", ""


def _send(comm: Communicator, text: str) -> str:
    """Rank 0's ``text`` on every rank."""
    return send_text(comm, text, src=0)


def send_text(comm: Communicator, text: str, src: int) -> str:
    """Rank ``src``'s ``text`` on every rank; collective."""
    return send_bytes(comm, text.encode(), src).decode()


def agree_on(comm: Communicator, facts: Mapping[str, object]) -> None:
    """See that every rank has rank 0's ``facts``; collective.

    Raises:
        UserError: some rank has not; its field is the first fact that differs. The same on every rank.
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
    """See that every rank has rank 0's ``facts`` where there is but a store as yet; every rank calls it once.

    A rank reads rank 0's facts alone, so that the store serves thousands of ranks.

    Raises:
        UserError: as `agree_on`.
    """
    own = _as_json(facts)
    if rank == 0:
        store.set("facts", own)
    difference = _first_difference(store.get("facts").decode(), own, rank)
    store.set(f"differs/{rank}", json.dumps(difference))
    if rank == 0:
        found = (json.loads(store.get(f"differs/{other}")) for other in range(world_size))
        store.set("verdict", json.dumps(next((each for each in found if each), None)))
    verdict = json.loads(store.get("verdict"))
    store.add("heard", 1)
    if verdict is None:
        return
    deadline = time.monotonic() + HEARING_S
    while rank == 0 and store.add("heard", 0) < world_size and time.monotonic() < deadline:
        time.sleep(0.01)  # the store may go with rank 0
    _refuse(verdict)


def code_version() -> str:
    """The package's version and what its files hold: two ranks with one answer run the same code."""
    return f"{zeroshard.__version__} ({_hash_of_files(Path(zeroshard.__file__).parent)})"


def start_facts(config: Mapping[str, object]) -> dict[str, object]:
    """What ranks must have in common before they have a communicator: settings, code, torch."""
    settings = {name: value for name, value in by_dotted_name(config).items() if name not in OWN_TO_A_RANK}
    return {**settings, "code version": code_version(), "torch version": str(torch.__version__)}


def model_facts(model: nn.Module) -> dict[str, object]:
    """Each parameter's and buffer's dtype, shape and training, by name."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {f"model {name}": f"{t.dtype} {list(t.shape)} {'' if t.requires_grad else 'fixed'}" for name, t in tensors}


def _first_difference(first: str, other: str, rank: int) -> tuple[str, str] | None:
    """``(field, what is wrong)`` of the first fact that ``rank`` has otherwise than rank 0; None where none is."""
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
