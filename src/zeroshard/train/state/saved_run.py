"""Reads what a run saved in a checkpoint's ``extra`` (everything but tensors), with types and ranges checked.

``extra`` may contain any JSON. A resumed run computes with some of its values, so types and ranges of those are checked
first. A missing value is not an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from zeroshard import checkpoint
from zeroshard.errors import UserError

_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Facts(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class _Position(_Facts):
    tokens: _Count = 0
    tokens_per_step: _Count = 0


class _Guard(_Facts):
    num_skipped: _Count
    not_finite_in_a_row: _Count
    spikes_in_a_row: _Count
    losses: list[_Finite]


class _Scaler(_Facts):
    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    num_since_overflow: _Count
    num_skipped: _Count


class _Best(_Facts):
    step: _Count | None
    loss: _Finite | None
    num_worse: _Count


class _Config(_Facts):
    strategy: str = ""
    model: dict[str, Any] = {}


class _SavedRun(_Facts):
    config: _Config = _Config()
    position: _Position = _Position()
    data_sha256: str = ""
    guard: _Guard | None = None
    loss_scaler: _Scaler | None = None
    best: _Best | None = None


def saved_run(path: Path) -> Mapping[str, Any]:
    """Return the ``extra`` of a run's checkpoint.

    Raises:
        UserError: the checkpoint is incomplete, or a value in ``extra`` has a wrong type or is out of range.
    """
    extra = checkpoint.read_manifest(path).extra
    try:
        _SavedRun.model_validate(extra)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in ("extra", *first["loc"]))
        what = f"{path} says {where} is {ascii(first['input'])[:60]} ({first['msg']})"
        raise UserError("resume", what, "take a checkpoint that `zeroshard train` wrote") from None
    return extra
