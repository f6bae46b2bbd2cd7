"""Ranks that were started differently: they compare settings, code, data and model before anything depends on them.

Ranks with different learning rates, commits or copies of the data would train without any error, to a meaningless
result. So every rank raises the first difference from rank 0. Settings and versions are compared through the store at
which ranks connect (`agree_at`), because settings decide which communicator is used. Data and model are compared by
collectives (`agree_on`).
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from zeroshard.comm import Communicator, PeerError
from zeroshard.comm.agree import first_other
from zeroshard.errors import UserError
from zeroshard.train.config.validate import by_dotted_name

OWN_TO_A_RANK = frozenset({"nproc", "port", "rdzv_endpoint", "data.dir"})  # settings that may differ between machines
RENDEZVOUS_S = 100.0  # how long ranks wait for the next rank to connect
HEARING_S = 10.0  # how long rank 0 keeps the store alive so that others can read why they are refused
START_ALIKE = "start every rank with the same"


def agree_on(comm: Communicator, facts: Mapping[str, object]) -> None:
    """Check that every rank has the same ``facts`` as rank 0; collective.

    Raises:
        UserError: a rank has different facts; its field is the first fact that differs. The same on every rank.
    """
    found = first_other(comm, _as_json(facts))
    if found is not None:
        rank, first, other = found
        _refuse(_first_difference(first, other, rank))


def agree_at(store: dist.Store, rank: int, world_size: int, facts: Mapping[str, object]) -> None:
    """Check that every rank has the same ``facts`` as rank 0, through a store, before there is a communicator.

    Every rank calls it once. Each rank reads only rank 0's facts, so that the store can serve thousands of ranks.

    Raises:
        UserError: as `agree_on`.
        PeerError: some ranks have not connected, and none has for `RENDEZVOUS_S`; every rank names the missing ones.
    """
    own = _as_json(facts)
    if rank == 0:
        store.set("facts", own)
    if not _came(store, "facts"):
        raise PeerError(_missing([0], world_size))
    difference = _first_difference(store.get("facts").decode(), own, rank)
    store.set(f"differs/{rank}", json.dumps(difference))
    if rank == 0:
        everyone = range(world_size)
        is_here = all(_came(store, f"differs/{other}") for other in everyone)
        missing = [] if is_here else [other for other in everyone if not store.check([f"differs/{other}"])]
        differences = (json.loads(store.get(f"differs/{other}")) for other in (everyone if is_here else ()))
        store.set("verdict", json.dumps([missing, next(filter(None, differences), None)]))
    missing, found = json.loads(store.get("verdict"))
    store.add("heard", 1)
    if not missing and found is None:
        return
    deadline, num_here = time.monotonic() + HEARING_S, world_size - len(missing)
    while rank == 0 and store.add("heard", 0) < num_here and time.monotonic() < deadline:
        time.sleep(0.01)  # rank 0 may host the store, so let the others read the verdict before it ends
    if missing:
        raise PeerError(_missing(missing, world_size))
    _refuse(found)


def _came(store: dist.Store, key: str) -> bool:
    """Wait for a key of the store; returns whether it was set within `RENDEZVOUS_S` from now."""
    deadline, pause_s = time.monotonic() + RENDEZVOUS_S, 0.001
    while not store.check([key]):
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.1)
    return True


def _missing(ranks: Sequence[int], world_size: int) -> str:
    named = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {named} of {world_size} did not join the rendezvous, and none has for {RENDEZVOUS_S:g} s"


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
