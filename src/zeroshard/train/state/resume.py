"""Going on with a run: from which checkpoint, and with what changed since it was saved.

How a run is spread over ranks may change freely; that is what the format is for. What would make another model of the
weights or put the run into other data is refused. The rest of the configuration may change too, and is told in a line.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zeroshard import checkpoint
from zeroshard.comm import Communicator
from zeroshard.errors import UserError
from zeroshard.models.presets import model_config
from zeroshard.optim import learning_rate
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.config.sections import ModelConfig
from zeroshard.train.config.validate import by_dotted_name, validate
from zeroshard.train.records.trackers import forget_run
from zeroshard.train.setup.assemble import model_overrides

# Changes nothing that is learned, or is compared as another number: tokens_per_step, rows of an evaluation, the
# resolved model, the data.
FREE = frozenset(
    {
        *("strategy", "shard_size", "reshard_after_forward", "node_copy", "comm", "nproc", "nnodes", "device"),
        *("out", "resume"),
        *("port", "rdzv_endpoint", "max_restarts", "step_timeout_s"),
        *("micro_batch_size", "grad_accum_steps", "global_batch_size", "kernels", "fused"),
        *("accumulate", "prefetch"),
        *("compile", "compile_backend", "eval_interval", "eval_batches", "eval_rows", "log_interval"),
        *("checkpoint_interval", "checkpoint_async", "keep_checkpoints", "keep_every", "keep_best", "early_stop"),
        *("track.to", "track.project", "track.name", "track.mode", "track.group", "track.tags"),
        *("data.dir", "data.path", "model.activation_checkpointing", "init_from"),
    }
)
REFUSED = frozenset({"optimizer", "lora.rank", "lora.alpha", "lora.targets"})
# What a checkpoint from before there was a setting was saved with, of those that are refused.
_EARLIER = {"lora.rank": 0}


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
    saved: Mapping[str, Any],
    config: Mapping[str, Any],
    tokens_per_step: int,
    data_sha256: str,
    earlier_sha256: str = "",
) -> list[str]:
    """What has changed since a checkpoint was saved, a line each; empty where nothing that matters has.

    Args:
        saved: the checkpoint's ``extra``; what it does not say is not compared.
        config: the configuration now, as JSON holds it.
        tokens_per_step: now, of all ranks together.
        data_sha256: of the prepared tokens now.
        earlier_sha256: what an earlier version, which streamed other rows, said of the same text.

    Raises:
        UserError: the model, the optimizer or the data are others.
    """
    before, now = by_dotted_name(saved.get("config", {})), by_dotted_name(config)
    before = {**_EARLIER, **before} if before else before
    if "model" in saved.get("config", {}):
        check_model(saved["config"]["model"], config["model"])
    old_data = saved.get("data_sha256")
    if old_data and old_data == earlier_sha256:
        what = "an earlier version streamed this run: it held out other text, and took rows in another order"
        raise UserError("data.streaming", what, "finish it with that version, or start another run")
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
    lines += _other_rate(saved, config)
    rows, rows_now = _eval_rows(before), _eval_rows(now)
    if rows and rows_now and rows != rows_now:
        what = f"an evaluation had {rows} sequences, now it has {rows_now}: its losses are of another set"
        lines.append(f"{what}; --eval-rows {rows} keeps it")
    position = saved.get("position", {})
    old_tokens = position.get("tokens_per_step", tokens_per_step)
    if old_tokens != tokens_per_step:
        where = "with the next row of the stream" if position.get("stream") else "from another position in their order"
        line = f"a step had {old_tokens:,} tokens, now it has {tokens_per_step:,}: data continue {where}"
        lines.append(line + _same_step(old_tokens, tokens_per_step, config))
    return lines


def with_same_evaluation(saved: Mapping[str, Any], config: TrainConfig) -> TrainConfig:
    """``config`` with the checkpoint's number of sequences in an evaluation, unless it asks for another one.

    So another micro-batch evaluates on the same rows, and losses before and after are of one set.
    """
    before = by_dotted_name(saved.get("config", {}))
    rows = _eval_rows(before)
    if config.eval_rows or not rows or config.eval_batches != before.get("eval_batches"):
        return config
    return config.model_copy(update={"eval_rows": rows}) if rows != _eval_rows(config.model_dump()) else config


def _eval_rows(config: Mapping[str, Any]) -> int:
    """Sequences in an evaluation; 0 where the configuration does not say."""
    return config.get("eval_rows") or config.get("eval_batches", 0) * config.get("micro_batch_size", 0)


def schedule_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What `zeroshard.optim.learning_rate` takes, of a configuration or of one that an older version has saved."""
    steps = config.get("decay_steps") or config["max_steps"]
    known = {"lr", "min_lr", "warmup_steps"}
    table = config.get("optim", {})
    shape = {key: table[key] for key in ("decay", "decay_share") if key in table}
    return {**{key: config[key] for key in known}, **shape, "max_steps": steps}


def _other_rate(saved: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """What has become of the next step's learning rate, and what keeps it as it was; empty where it is the same."""
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


def _same_step(old_tokens: int, tokens_per_step: int, config: Mapping[str, Any]) -> str:
    """What to say so that a step has as many tokens as before; empty where more accumulation alone cannot do it."""
    if config["grad_accum_steps"] > 1 or config["global_batch_size"] or old_tokens % tokens_per_step:
        return ""
    return f"; --global-batch-size {old_tokens // config['seq_len']} keeps a step as it was"


def check_model(
    before: Mapping[str, Any], now: Mapping[str, Any], free: Sequence[str] = ("activation_checkpointing",)
) -> None:
    """Raise UserError where two ``model`` tables are two models; a preset and its values spelled out are one.

    ``free``: settings that may differ.
    """
    resolved = []
    for table in (before, now):
        model = validate(ModelConfig, table)
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
    """Rank 0: which checkpoint the run goes on from, who wrote it, and what has changed since."""
    if comm.rank:
        return
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
        forget_run(folder.parent)


def _say(comm: Communicator, line: str) -> None:
    if comm.rank == 0:
        print(line, file=sys.stderr, flush=True)
