"""Resuming a run: chooses the checkpoint, and checks which settings have changed since it was saved.

Strategy, number of ranks and other settings of how a step is computed may change freely: the checkpoint format does not
depend on them. A change of the model, the optimizer or the data is refused. Any other change is allowed and reported in
a line.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from zeroshard import checkpoint
from zeroshard.comm import Communicator
from zeroshard.comm.agree import first_rank_does
from zeroshard.host.columns import printable
from zeroshard.host.errors import UserError
from zeroshard.models.hugging_face.folder import is_hugging_face
from zeroshard.models.presets import model_config
from zeroshard.optim import learning_rate
from zeroshard.settings.base import OnResume
from zeroshard.settings.frozen_base import BaseConfig
from zeroshard.settings.optimizer import same_rule
from zeroshard.settings.validate import by_dotted_name, validate
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.config.model_section import ModelConfig
from zeroshard.train.config.named_code import names_code
from zeroshard.train.loop.outer_steps import other_replicas, own_guard
from zeroshard.train.loop.run import Run
from zeroshard.train.records.trackers import forget_run
from zeroshard.train.setup.assemble import model_overrides
from zeroshard.train.state.folders import checkpoint_folder
from zeroshard.train.state.saved_run import saved_run

_NO_BASE = BaseConfig().model_dump(mode="json")  # what runs had before there was such a section


def choose(comm: Communicator, resume: str, folder: Path) -> Path | None:
    """Choose the checkpoint to resume from; None: start a new run. Collective.

    ``resume``: ``none``, ``auto`` for the newest undamaged checkpoint in ``folder``, which is verified here, or the
    path of a checkpoint, which only has to be complete; loading verifies it.

    Raises:
        UserError: the named checkpoint does not exist or is incomplete, or every complete one in ``folder`` is damaged.
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


def load(path: Path, run: Run, config: TrainConfig, comm: Communicator) -> Mapping[str, Any]:
    """Load the checkpoint at ``path`` into ``run``, after checking which settings have changed. Collective.

    Returns:
        What the checkpoint says of its run.

    Raises:
        UserError: the checkpoint is of another model, optimizer or data, or cannot be read.
    """
    saved = saved_run(path)
    now = config.model_dump(mode="json")
    changes = check_changes(saved, now, run.tokens_per_step, run.corpus.sha256)
    run.best.load_state_dict(saved.get("best") or run.best.state_dict())
    world_before = checkpoint.read_manifest(path).world_size
    changes += other_replicas(saved.get("config", {}), world_before, now, comm.world_size)
    first_step = _load_state(path, run, verified=config.resume == "auto")
    position = saved.get("position", {})
    run.corpus.restore_position(position.get("stream"), first_step)
    say_start(comm, path, changes)
    # Of `--resume auto` these are the ones that were passed over, which must not count as checkpoints that are kept.
    first_rank_does(comm, partial(leave_branch, checkpoint_folder(run.folder), first_step))
    run.progress.first_step = first_step
    run.progress.first_token = position.get("tokens", first_step * run.tokens_per_step)
    return saved


def _load_state(path: Path, run: Run, *, verified: bool) -> int:
    """Load weights, optimizer and what judges steps; returns the number of steps completed. Collective."""
    try:
        # The optimizer keeps the configuration's settings; changes of them are reported by `check_changes`.
        saved = checkpoint.load(path, run.strategy, verified=verified, settings=False)
        if run.scaler is not None and saved.get("loss_scaler"):
            run.scaler.load_state_dict(saved["loss_scaler"])
        run.guard.load_state_dict(own_guard(saved, run.local_steps) or run.guard.state_dict())
        return int(saved["step"])
    except UserError:
        raise
    except ValueError as error:
        todo = "resume with the model and optimizer that the checkpoint was saved with"
        raise UserError("resume", f"{path}: {error}", todo) from None


def check_changes(
    saved: Mapping[str, Any], config: Mapping[str, Any], tokens_per_step: int, data_sha256: str
) -> list[str]:
    """Return a line for each relevant change since a checkpoint was saved; empty if there is none.

    ``saved`` is the checkpoint's ``extra``, and facts that it does not have are not compared; the others are of now.

    Raises:
        UserError: the model, the optimizer, the adapters or the data have changed.
    """
    before, now = by_dotted_name({"base": _NO_BASE, **saved.get("config", {})}), by_dotted_name(config)
    if "model" in saved.get("config", {}):
        check_model(saved["config"]["model"], config["model"])
    old_data = saved.get("data_sha256")
    if old_data and old_data != data_sha256:
        named = next((key for key in before if key.startswith("data.") and before[key] != now.get(key)), "data")
        what = f"the prepared tokens are not those that the checkpoint was trained on ({data_sha256[:8]}, "
        raise UserError(named, f"{what}were {old_data[:8]})", "restore the data, or start another run on these")
    lines: list[str] = []
    for key, value in before.items():
        policy = TrainConfig.on_resume(key)
        if policy is OnResume.FREE or key not in now or now[key] == value:
            continue
        if policy is OnResume.FIXED and not (key == "optimizer" and same_rule(value, now[key])):
            raise UserError(key, f"the checkpoint was saved with {value}, now it is {now[key]}", f"use {value}")
        lines.append(f"{key} was {value}, now it is {now[key]}")
    lines += _other_rate(saved, config)
    rows, rows_now = before.get("eval_rows"), now.get("eval_rows")
    if rows and rows_now and rows != rows_now:
        what = f"an evaluation had {rows} sequences, now it has {rows_now}: its losses are of another set"
        lines.append(f"{what}; --eval-rows {rows} keeps it")
    position = saved.get("position", {})
    old_tokens = position.get("tokens_per_step", tokens_per_step)
    if old_tokens != tokens_per_step:
        where = "with the next row of the stream" if position.get("stream") else "from another position in their order"
        lines.append(f"a step had {old_tokens:,} tokens, now it has {tokens_per_step:,}: data continue {where}")
    return lines


def schedule_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for `zeroshard.optim.learning_rate`."""
    steps = config.get("decay_steps") or config["max_steps"]
    known = {"lr", "min_lr", "warmup_steps"}
    table = config.get("optim", {})
    shape = {key: table[key] for key in ("decay", "decay_share", "warmup", "warmup_lr") if key in table}
    return {**{key: config[key] for key in known}, **shape, "max_steps": steps}


def _other_rate(saved: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Say how the next step's learning rate has changed, and which flag keeps the old one; empty if it is the same."""
    before = saved.get("config", {})
    if not {"lr", "min_lr", "warmup_steps", "max_steps"} <= before.keys():
        return []
    step = saved.get("position", {}).get("step", 0) - saved.get("guard", {}).get("num_skipped", 0)
    old, new = schedule_of(before), schedule_of(config)
    rates = [learning_rate(step, **each) for each in (old, new)]
    if rates[0] == rates[1]:
        return []
    line = f"the learning rate of step {step + 1} would have been {rates[0]:.3g}, now it is {rates[1]:.3g}"
    if {**new, "max_steps": old["max_steps"]} == {**new, **old}:
        line += f"; --decay-steps {old['max_steps']} keeps the earlier schedule, then min_lr"
    return [line]


def check_model(
    before: Mapping[str, Any], now: Mapping[str, Any], free: Sequence[str] = ("activation_checkpointing",)
) -> None:
    """Raise UserError if two ``model`` tables describe different models.

    The resolved values are compared, so a preset equals a table that spells out the preset's values. ``free``: names of
    settings that may differ. ``before`` may come from data: code that it names runs only if ``now`` names the same.
    """
    saved, asked = validate(ModelConfig, before), validate(ModelConfig, now)
    is_hf = is_hugging_face(saved.name)
    if saved.name != asked.name and (names_code("model.name", saved.name) or is_hf != is_hugging_face(asked.name)):
        what = f"the checkpoint's model has {saved.name}, this one {asked.name}"
        raise UserError("model.name", what, f"use {saved.name}, or start another run")
    if is_hf:
        name = asked.name if saved.config_json else saved.name  # the text decides, wherever the folder lies now
        trusted = asked.trust_remote_code and name == asked.name
        saved = saved.model_copy(update={"name": name, "trust_remote_code": trusted})
    resolved = []
    for model in (saved, asked):
        overrides = model_overrides(model)
        for name in free:
            overrides.pop(name, None)
        built = model_config(model.name, overrides=overrides)
        resolved.append({"name": model.name, **getattr(built, "architecture", vars(built))})
    old, new = resolved
    for key in [key for key in old if key != "name"] + ["name"]:
        if old.get(key) != new.get(key) and not (key == "name" and old.keys() == new.keys()):
            raise UserError(
                f"model.{key}",
                f"the checkpoint's model has {old.get(key)}, this one {new.get(key)}",
                f"use {old.get(key)}, or start another run",
            )


def say_start(comm: Communicator, path: Path, changes: list[str]) -> None:
    """Print on rank 0 which checkpoint the run resumes from, which strategy wrote it, and what has changed since."""
    manifest = checkpoint.read_manifest(path)
    strategy = manifest.extra.get("config", {}).get("strategy", "saved")
    ranks = f"{manifest.world_size} rank{'s' if manifest.world_size > 1 else ''}"
    _say(comm, f"resume: step {manifest.step} from {path} ({strategy} on {ranks})")
    for line in changes:
        _say(comm, f"resume: {line}")


def leave_branch(folder: Path, step: int) -> None:
    """Rename the checkpoints in ``folder`` of steps after ``step``, because the run now continues from there anew.

    Otherwise a restart would resume from the newest of the old ones, and ``keep_checkpoints`` would keep those.
    """
    moved = checkpoint.set_aside(folder, step)
    if moved:
        names = ", ".join(path.name for path in moved)
        print(f"resume: later checkpoints in {folder} were set aside: {names}", file=sys.stderr, flush=True)
        forget_run(folder.parent)


def _say(comm: Communicator, line: str) -> None:
    if comm.rank == 0:
        print(printable(line), file=sys.stderr, flush=True)
