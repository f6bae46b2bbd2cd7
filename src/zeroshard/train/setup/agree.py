"""Ranks that were started differently: they compare settings, code, data and model before anything depends on them.

Ranks with different learning rates, commits or copies of the data would train without any error, to a meaningless
result. So every rank raises the first difference from rank 0. Settings and versions are compared through the store at
which ranks connect (`zeroshard.comm.rendezvous`), data and model by collectives (`agree_on`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from torch import nn

import zeroshard
from zeroshard.comm import Communicator
from zeroshard.comm.agree import first_other
from zeroshard.comm.rendezvous import as_json, first_difference
from zeroshard.host.errors import UserError
from zeroshard.settings.validate import by_dotted_name

OWN_TO_A_RANK = frozenset({"nproc", "port", "rdzv_endpoint", "data.dir"})  # settings that may differ between machines


def agree_on(comm: Communicator, facts: Mapping[str, object]) -> None:
    """Check that every rank has the same ``facts`` as rank 0; collective.

    Raises:
        UserError: a rank has different facts; its field is the first fact that differs. The same on every rank.
    """
    found = first_other(comm, as_json(facts))
    if found is not None:
        rank, first, other = found
        differs = first_difference(first, other, rank)
        assert differs is not None
        raise UserError(*differs)


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


@cache
def _hash_of_files(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]
