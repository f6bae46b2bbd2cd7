"""Makes the `zeroshard train` command for the recommended row of a plan, if the trainer can run what was planned."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from zeroshard.host.errors import UserError
from zeroshard.lab.planner.config import PlanConfig
from zeroshard.lab.planner.plan_rows import Plan, Row
from zeroshard.models.hugging_face.folder import PREFIX, is_hugging_face
from zeroshard.settings.base import SHORTHANDS, Config
from zeroshard.settings.validate import nested, validate
from zeroshard.train.config.config import TrainConfig

SECTIONS = [name for name, field in PlanConfig.model_fields.items() if isinstance(field.default, Config)]
SETTINGS = (
    "tiles",
    "reproducible",
    "state_format",
    "matmul",
    "reduce_dtype",
    "accumulate",
    "prefetch",
    "kernels",
    "reshard_after_forward",
)  # the last one for stage 3 only
PORT = 29500

Settings = Iterator[tuple[str, Any]]  # by dotted name


def next_command(config: PlanConfig, plan: Plan) -> str | None:
    """The command for the recommended row; None if no row fits, or `zeroshard train` cannot run what was planned."""
    row, workload = plan.best, plan.workload
    per_node = plan.cluster.ranks_per_node
    alike = plan.num_gpus <= per_node or plan.num_gpus % per_node == 0  # all nodes are full
    there = alike and plan.device.device_type == "cuda"
    if row is None or not there or workload.autocast is not None:
        return None
    settings = dict(_settings(config, plan, row))
    try:
        validate(TrainConfig, nested({tuple(name.split(".")): value for name, value in settings.items()}))
    except UserError:  # an optimizer or a size that plans support and runs do not
        return None
    return shlex.join(["zeroshard", "train", *(word for each in settings.items() for word in _words(*each))])


def suggestion(config: PlanConfig, plan: Plan) -> list[str]:
    """Lines that show the command to the user; empty if there is none."""
    command = next_command(config, plan)
    if command is None:
        return []
    num_nodes = _num_nodes(plan)
    where = f" on each of {num_nodes:,} nodes, HOST one of them" if num_nodes > 1 else ""
    begun = f"; RUN is one whose weights the adapters change, or give --model {PREFIX}FOLDER" if _draws(config) else ""
    return ["", f"Start it{where}, with --data and --out of yours{begun}:", f"  {command}"]


def _draws(config: PlanConfig) -> bool:
    """Whether adapters would change weights that nobody has trained."""
    return config.lora.rank > 0 and not is_hugging_face(config.model.name)


def _num_nodes(plan: Plan) -> int:
    return -(-plan.num_gpus // plan.cluster.ranks_per_node)


def _settings(config: PlanConfig, plan: Plan, row: Row) -> Settings:
    for section in SECTIONS:
        for name, value in _given(getattr(config, section), f"{section}."):
            if _has(row, name):
                yield name, value
    if config.offload.on and config.offload.share == "auto" and row.offloaded.fraction < 1:
        yield "offload.fraction", row.offloaded.fraction
    if _draws(config):
        yield "init_from", "RUN"
    num_nodes = _num_nodes(plan)
    if not row.any_stage:
        yield "strategy", f"zero{row.stage}"
    if plan.num_gpus > 1:
        yield "nproc", plan.num_gpus // num_nodes
    if num_nodes > 1:
        yield from (("nnodes", str(num_nodes)), ("rdzv_endpoint", f"HOST:{PORT}"))
    if row.shard_size < plan.cluster.world_size:
        yield "shard_size", row.shard_size
    if row.node_copy:
        yield "node_copy", row.node_copy
    yield from (("seq_len", plan.workload.seq_len), ("micro_batch_size", row.micro_batch))
    share = plan.workload.sequence_parallel
    if share > 1:
        yield "sequence_parallel", share
    groups = plan.cluster.world_size // share
    num_micro = row.num_micro * groups // (config.reproducible or groups)
    if num_micro > 1:
        yield "grad_accum_steps", num_micro
    yield "dtype", plan.dtype
    optimizer = plan.workload.optimizer.partition(" in ")[0]  # the format of its states has a setting of its own
    if optimizer != "AdamW":
        yield "optimizer", {"FlashAdamW": "flash-adamw"}.get(optimizer, optimizer.lower())
    yield from _given(config, "", only=SETTINGS if row.stage == 3 else SETTINGS[:-1])
    if plan.software.impl == "compile" and not plan.software.by_default:
        yield "compile", True
    elif plan.software.impl != "compile" and not plan.software.left_uncompiled_with:
        yield "compile", "off"
    if config.impl == "eager" and config.kernels == "auto":
        yield "kernels", "reference"
    if config.document_mask:
        yield "data.document_mask", True
    if config.tokens:
        yield "max_steps", math.ceil(config.tokens / (row.step.tokens * plan.cluster.world_size))


def _has(row: Row, name: str) -> bool:
    """Whether the row uses that setting: stage 0 has no wire formats, and ``wire.node_size`` needs several nodes."""
    return bool(row.node_size) if name == "wire.node_size" else bool(row.stage) or not name.startswith("wire.")


def _given(settings: BaseModel, prefix: str, only: tuple[str, ...] = ()) -> Settings:
    """Yield the settings that are not at their defaults."""
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if (not only or name in only) and value != field.get_default(call_default_factory=True):
            yield f"{prefix}{name}", value


def _words(name: str, value: Any) -> list[str]:
    """The words of a setting on the command line."""
    section, _, leaf = name.rpartition(".")
    if SHORTHANDS.get(section) == leaf:
        return [f"--{section}", str(value)]
    start = f"--{section}." if section else "--"
    if isinstance(value, bool):
        return [f"{start}{'' if value else 'no-'}{leaf}".replace("_", "-")]
    flag = f"{start}{leaf}".replace("_", "-")
    return [flag, *map(str, value)] if isinstance(value, list | tuple) else [flag, str(value)]
