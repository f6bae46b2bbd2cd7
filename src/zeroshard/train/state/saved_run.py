"""Reads what a run saved in a checkpoint's ``extra`` (everything but tensors), with types and ranges checked.

``extra`` may contain any JSON. A resumed run computes with its values, so they are checked first: the configuration by
the class that checks a file (`TrainConfig`), everything else by the classes below. A missing value is not an error.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from zeroshard import checkpoint
from zeroshard.checkpoint.manifest import MANIFEST
from zeroshard.host.columns import printable
from zeroshard.host.errors import UserError
from zeroshard.host.regular_files import json_of, read_text
from zeroshard.optim.loss_scale import SMALLEST_SCALE
from zeroshard.settings.validate import by_path, nested, validate
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.records.log_files import SUMMARY

_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]
_MISSING: Any = None  # a default, which is not validated: what is missing is allowed, and null is not
_TODO = "take a checkpoint that `zeroshard train` wrote"


class _Facts(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class _Position(_Facts):
    step: _Count = 0
    tokens: _Count = 0
    tokens_per_step: _Count = 0
    stream: dict[str, Any] = {}


class _Guard(_Facts):
    num_skipped: _Count
    not_finite_in_a_row: _Count


class _Scaler(_Facts):
    scale: Annotated[float, Field(ge=SMALLEST_SCALE, allow_inf_nan=False)]
    num_since_overflow: _Count
    num_skipped: _Count


class _Best(_Facts):
    step: _Count | None
    loss: _Finite | None

    @model_validator(mode="after")
    def _one_with_the_other(self) -> Self:
        if (self.step is None) != (self.loss is None):
            raise ValueError("one of step and loss is missing; give both")
        return self


class _SavedRun(_Facts):
    config: dict[str, Any] = {}
    position: _Position = _Position()
    data_sha256: str = ""
    guard: _Guard = _MISSING
    guards: list[_Guard] = []
    loss_scaler: _Scaler = _MISSING
    best: _Best = _MISSING


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in ``folder``, or None; print which newer ones it passes over, and why.

    Also printed: that the run trained on after it, and its last state was lost.
    """
    for found in checkpoint.find(folder):
        if found.complete:
            ended_at = _lost_step(folder.parent, found.step)
            if ended_at:
                line = f"warning: {folder.parent} trained to step {ended_at}, whose state is lost: this is step"
                print(printable(f"{line} {found.step}"), file=sys.stderr, flush=True)
            return found.path
        line = f"warning: passed over {found.path}: it is not complete (no {MANIFEST})"
        print(printable(line), file=sys.stderr, flush=True)
    return None


def _lost_step(run: Path, newest: int) -> int:
    """The step at which a run ended whose last checkpoint is of step ``newest``; 0 if that is the same, or unknown."""
    try:
        summary = json_of(read_text(run / SUMMARY, follow=False))
        ended_at, saved_at = summary["step"], summary["last_checkpoint_step"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    return ended_at if isinstance(ended_at, int) and saved_at == newest < ended_at else 0


def saved_run(path: Path) -> Mapping[str, Any]:
    """Return the ``extra`` of a run's checkpoint; its ``config`` has the settings that this version knows.

    Raises:
        UserError: the checkpoint is incomplete, or a value in ``extra`` has a wrong type or is out of range.
    """
    manifest = checkpoint.read_manifest(path)
    try:
        found = _SavedRun.model_validate(manifest.extra)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in ("extra", *first["loc"]))
        what = f"{path} says {where} is {ascii(first['input'])[:60]} ({first['msg']})"
        raise UserError("resume", what, _TODO) from None
    skipped = found.guard.num_skipped if found.guard else 0
    if "step" in found.position.model_fields_set and found.position.step != manifest.step:
        what = f"{path} says extra.position.step is {found.position.step}, and it is of step {manifest.step}"
        raise UserError("resume", what, _TODO)
    if skipped > manifest.step:
        what = f"{path} says extra.guard.num_skipped is {skipped}, and it is of step {manifest.step}"
        raise UserError("resume", what, _TODO)
    return {**manifest.extra, **({"config": _settings(path, found.config)} if found.config else {})}


def _settings(path: Path, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the run's settings, checked as those of a file; those that another version had are left out."""
    try:
        known = _known(saved, TrainConfig)
        checked = validate(TrainConfig, known).model_dump(mode="json")
    except UserError as error:
        what = f"{path} says extra.config.{error.field} is wrong: {error.what}"
        raise UserError("resume", what, _TODO) from None
    given = by_path(known)  # and no defaults of this version, which are not what the run had
    return nested({path: value for path, value in by_path(checked).items() if path in given})


def _known(saved: Mapping[str, Any], kind: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in filter(saved.__contains__, kind.model_fields):
        value, inner = saved[name], kind.model_fields[name].annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            if not isinstance(value, Mapping):
                raise UserError(prefix + name, f"{ascii(value)[:60]} is not a table", _TODO)
            value = _known(value, inner, f"{prefix}{name}.")
        found[name] = value
    return found
