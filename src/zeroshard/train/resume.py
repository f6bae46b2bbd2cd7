"""Going on with a run: from which checkpoint, and with what changed since it was saved.

How a run is spread over ranks may change freely; that is what the format is for. What would make another model of the
weights or put the run into other data is refused. The rest of the configuration may change too, and is told in a line.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zeroshard import checkpoint
from zeroshard.comm import Communicator
from zeroshard.errors import UserError
from zeroshard.models.presets import model_config
from zeroshard.train.assemble import model_overrides
from zeroshard.train.config import ModelConfig
from zeroshard.train.validate import by_dotted_name

# Changes nothing that is learned, or is compared as another number: tokens_per_step, the resolved model, the data.
FREE = frozenset(
    {
        *("strategy", "shard_size", "reshard_after_forward", "comm", "nproc", "nnodes", "device", "out", "resume"),
        *("port", "rdzv_endpoint", "max_restarts", "step_timeout_s"),
        *("micro_batch_size", "grad_accum_steps", "global_batch_size", "kernels", "fused"),
        *("compile", "compile_backend", "eval_interval", "eval_batches", "log_interval"),
        *("checkpoint_interval", "checkpoint_async", "keep_checkpoints", "keep_every"),
        *("track.to", "track.project", "track.name", "track.mode"),
        *("data.dir", "data.path", "model.activation_checkpointing"),
    }
)
REFUSED = frozenset({"optimizer"})


def choose(comm: Communicator, resume: str, folder: Path) -> Path | None:
    """The checkpoint to start from, complete and verified; None to start afresh. Collective.

    Args:
        comm: the ranks; the first one says what was passed over.
        resume: ``none``, ``auto`` for the newest good one in ``folder``, or a checkpoint.
        folder: the run's checkpoints.

    Raises:
        UserError: a checkpoint was named and there is none, or every complete one in ``folder`` is damaged.
    """
    if resume == "none":
        return None
    if resume != "auto":
        path = Path(resume)
        try:
            checkpoint.open_manifest(path)
        except UserError as error:
            raise UserError("resume", f"{error.field} {error.what}", error.todo) from None
        return path
    choice = checkpoint.newest_valid(comm, folder)
    for passed_over in choice.passed_over:
        _say(comm, f"resume: passed over {passed_over.path}: {passed_over.why}")
    damaged = [passed_over for passed_over in choice.passed_over if passed_over.complete]
    if choice.path is None and damaged:
        what = f"every checkpoint in {folder} is damaged, the newest because {damaged[0].why}"
        raise UserError("resume", what, "restore one from a copy, or start anew with another --out")
    return choice.path


def check_changes(
    saved: Mapping[str, Any], config: Mapping[str, Any], tokens_per_step: int, data_sha256: str
) -> list[str]:
    """What has changed since a checkpoint was saved, a line each; empty where nothing that matters has.

    Args:
        saved: the checkpoint's ``extra``; what it does not say is not compared.
        config: the configuration now, as JSON holds it.
        tokens_per_step: now, of all ranks together.
        data_sha256: of the prepared tokens now.

    Raises:
        UserError: the model, the optimizer or the data are others.
    """
    before, now = by_dotted_name(saved.get("config", {})), by_dotted_name(config)
    if before:
        _check_model(saved["config"]["model"], config["model"])
    old_data = saved.get("data_sha256")
    if old_data and old_data != data_sha256:
        named = next((key for key in before if key.startswith("data.") and before[key] != now.get(key)), "data")
        what = f"the prepared tokens are not those that the checkpoint was trained on ({data_sha256[:8]}, "
        raise UserError(named, f"{what}were {old_data[:8]})", "restore the data, or start another run on these")
    lines: list[str] = []
    for key, value in before.items():
        elsewhere = key.startswith(("model.", "data.", "profile.", "plan.", "link.")) and key != "data.document_mask"
        if key in FREE or elsewhere or key not in now or now[key] == value:
            continue
        if key in REFUSED:
            raise UserError(key, f"the checkpoint was saved with {value}, now it is {now[key]}", f"use {value}")
        lines.append(f"{key} was {value}, now it is {now[key]}")
    old_tokens = saved.get("position", {}).get("tokens_per_step", tokens_per_step)
    if old_tokens != tokens_per_step:
        lines.append(
            f"a step had {old_tokens} tokens, now it has {tokens_per_step}: data go on at another place of their order"
        )
    return lines


def _check_model(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise UserError where two ``model`` tables are two models; a preset and its values spelled out are one."""
    resolved = []
    for table in (before, now):
        overrides = model_overrides(ModelConfig.model_validate(table))
        overrides.pop("activation_checkpointing", None)
        resolved.append({"name": table["name"], **vars(model_config(table["name"], overrides=overrides))})
    old, new = resolved
    for key in [key for key in old if key != "name"] + ["name"]:
        if old.get(key) != new.get(key) and not (key == "name" and old.keys() == new.keys()):
            raise UserError(
                f"model.{key}",
                f"the checkpoint's model has {old.get(key)}, this one {new.get(key)}",
                f"use {old.get(key)}, or start another run",
            )


def say_start(comm: Communicator, path: Path, changes: list[str]) -> None:
    """Rank 0: which checkpoint the run goes on from, who wrote it, and what has changed since."""
    manifest = checkpoint.read_manifest(path)
    strategy = manifest.extra.get("config", {}).get("strategy", "saved")
    ranks = f"{manifest.world_size} rank{'s' if manifest.world_size > 1 else ''}"
    _say(comm, f"resume: step {manifest.step} from {path} ({strategy} on {ranks})")
    for line in changes:
        _say(comm, f"resume: {line}")


def leave_branch(folder: Path, step: int) -> None:
    """Set aside what ``folder`` has of steps after ``step``: a run that goes on from there is another one.

    Else the newest of them would be what is kept, and what a restart takes.
    """
    moved = checkpoint.set_aside(folder, step)
    if moved:
        names = ", ".join(path.name for path in moved)
        print(f"resume: later checkpoints in {folder} were set aside: {names}", file=sys.stderr, flush=True)


def _say(comm: Communicator, line: str) -> None:
    if comm.rank == 0:
        print(line, file=sys.stderr, flush=True)
