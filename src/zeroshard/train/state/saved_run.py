"""What a run leaves in its checkpoints beside tensors, read with types and ranges checked.

A checkpoint's ``extra`` may hold anything that JSON can. A run that goes on computes with some of it, so that part is
checked first; what is not there is not compared.
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
    """The ``extra`` of a run's checkpoint.

    Raises:
        UserError: it is no complete checkpoint, or one of these facts is of another type or out of its range.
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
