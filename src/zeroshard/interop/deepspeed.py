"""Convert DeepSpeed's JSON configuration to our settings: https://www.deepspeed.ai/docs/config-json/

What the file leaves out has DeepSpeed's defaults (of its engine, optimizers and schedulers) and not ours. A value of
``auto`` is the caller's there, and has our default.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zeroshard.errors import UserError
from zeroshard.interop.migration import (
    COUNT,
    NUMBER,
    SWITCH,
    TEXT,
    Became,
    Becomes,
    Kind,
    Migration,
    became,
    is_count,
    is_number,
    require_kind,
)
from zeroshard.regular_files import read_text
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.config.validate import by_dotted_name, refuse_unusable

_ZERO, _OPTIM, _SCHED = "zero_optimization.", "optimizer.params.", "scheduler.params."
_RATE, _COS_MIN_RATIO = 1e-3, 1e-4  # defaults of their rates, and of cos_min_ratio
_OWN_RATES = ("WarmupLR", "WarmupDecayLR")  # schedulers that set the rate themselves, and not as a share of lr
_WARM_UPS = (*_OWN_RATES, "WarmupCosineLR")
_STAGE: Kind = lambda value: is_count(value) and value <= 3, "a stage, 0 to 3"
_PLACE: Kind = lambda value: value in ("none", "cpu", "nvme"), "none, cpu or nvme"
_POWER: Kind = lambda value: is_count(value) and value <= 62, "a whole number, 0 to 62"
_GROUP: Kind = lambda value: is_count(value) or value == -1, "a number of ranks, or -1 for none"
_PAIR: Kind = lambda value: isinstance(value, list) and len(value) == 2 and all(map(is_number, value)), "two numbers"


def read_deepspeed(words: Sequence[str]) -> Migration:
    """Convert ``FILE.json`` to our settings.

    Raises:
        UserError: there is no such file, it is not a JSON object, a value has the wrong type, or the optimizer is not
            available in the trainer.
    """
    if len(words) != 1:
        raise UserError("import-config", "deepspeed takes one file", "write import-config deepspeed FILE.json")
    given = by_dotted_name(_json_object(Path(words[0])))
    for key, value in given.items():
        if key in KEYS and value != "auto":
            require_kind(key, value, KEYS[key][0])
    theirs = _defaults(given) | given
    scheduler = theirs.get("scheduler.type")
    to = Migration(f"DeepSpeed: {words[0]}", {"dtype": "float32"})  # DeepSpeed's dtype if the file sets none
    if any(theirs.get(f"{name}.enabled") == "auto" for name in ("bf16", "bfloat16", "fp16")):
        to.ours["dtype"] = TrainConfig.model_fields["dtype"].default
    for key, value in theirs.items():
        found: Became = "there is nothing of the kind"
        if value == "auto":
            found = "left to the caller there, and to its default here"
        elif key.startswith(_SCHED) and scheduler not in _WARM_UPS:
            found = "its scheduler is not computed here"
        elif key in KEYS:
            found = became(value, theirs, KEYS[key][1])
        elif "offload" in key:
            found = "copies have as many threads and buffers as they need"
        elif key.startswith(_ZERO):
            found = "a unit is a transformer block, gathered one ahead"
        to.add(key, value, found, is_default=key not in given)
    _set_schedule(theirs, to)
    return to


def _json_object(path: Path) -> dict[str, Any]:
    todo = "give DeepSpeed's JSON file"
    try:
        found = json.loads(read_text(path))
    except OSError as error:
        raise UserError(str(path), f"cannot be read ({error.strerror})", todo) from None
    except (ValueError, RecursionError) as error:
        raise UserError(str(path), f"is no JSON ({error})", todo) from None
    if not isinstance(found, dict):
        raise UserError(str(path), "is not a JSON object", todo)
    refuse_unusable(found)
    return found


def _defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return DeepSpeed's values for keys that the file may leave out."""
    found: dict[str, Any] = {f"{_ZERO}stage": 0, "gradient_clipping": 1.0}
    if given.get("fp16.enabled") is True:
        found["fp16.loss_scale_window"] = 1000
    scheduler = given.get("scheduler.type")
    if "optimizer.type" in given:
        is_torch = bool(given.get("optimizer.params.torch_adam")) and str(given["optimizer.type"]).lower() == "adamw"
        found["optimizer.params.betas"] = [0.9, 0.999]
        found["optimizer.params.weight_decay"] = 0.01 if is_torch else 0.0
        if scheduler not in _OWN_RATES:
            found["optimizer.params.lr"] = _RATE
    if scheduler in _WARM_UPS:
        found |= {"scheduler.params.warmup_num_steps": 1000, "scheduler.params.warmup_type": "log"}
    if scheduler in _OWN_RATES:
        found["scheduler.params.warmup_max_lr"] = _RATE
    elif scheduler == "WarmupCosineLR":
        found["scheduler.params.cos_min_ratio"] = _COS_MIN_RATIO
    return found


def _set_schedule(theirs: Mapping[str, Any], to: Migration) -> None:
    """Set the rates that follow from several keys, and the length of a run, which our trainer must know."""
    scheduler = theirs.get("scheduler.type")
    if scheduler not in _WARM_UPS:
        to.ours["warmup_steps"] = 0
    elif "lr" not in to.ours:  # it is `auto`, and where it ends follows from it
        to.ours["lr"] = TrainConfig.model_fields["lr"].default
    if "lr" in to.ours:
        ratio = theirs.get("scheduler.params.cos_min_ratio")
        ends = {"WarmupDecayLR": 0.0, "WarmupCosineLR": ratio if is_number(ratio) else _COS_MIN_RATIO}
        to.ours["min_lr"] = to.ours["lr"] * ends.get(str(scheduler), 1.0)
    warmup = to.ours.get("warmup_steps", 0)
    if "max_steps" not in to.ours and warmup > 500:
        to.ours["max_steps"] = 10 * warmup


def _accumulation(value: Any, theirs: Mapping[str, Any]) -> Became:
    if isinstance(theirs.get("train_batch_size"), int):
        return {}, "follows from the global batch, the micro-batch and the ranks"
    return {"grad_accum_steps": value}


def _optimizer(value: Any, theirs: Mapping[str, Any]) -> Became:
    name, ours = value.lower(), {"optimizer": "adamw"}
    if name not in ("adam", "adamw"):
        raise UserError(
            "optimizer.type", f"{value} is not in the trainer", "use AdamW, or zeroshard.Zero with your own"
        )
    is_decoupled = name == "adamw" or theirs.get("optimizer.params.adam_w_mode", True)
    return ours if is_decoupled else (ours, "changed: decay is decoupled from gradients")


def _scheduler(value: Any, theirs: Mapping[str, Any]) -> Became:
    known: dict[str, Became] = {
        "WarmupCosineLR": {},
        "WarmupDecayLR": ({}, "changed: decays along a cosine in place of a line"),
        "WarmupLR": ({}, "constant after warm-up: min_lr is lr"),
    }
    return known.get(value, "not computed here: the rate stays constant")


def _rate(value: Any, theirs: Mapping[str, Any]) -> Became:
    is_own = theirs.get("scheduler.type") in _OWN_RATES
    return "its scheduler sets the rate itself, up to its warmup_max_lr" if is_own else {"lr": value}


def _peak(value: Any, theirs: Mapping[str, Any]) -> Became:
    is_own = theirs["scheduler.type"] in _OWN_RATES
    why = "the peak, whatever the optimizer's lr is"
    return ({"lr": value}, why) if is_own else "its scheduler takes the optimizer's lr"


def _second_copy(value: Any, theirs: Mapping[str, Any]) -> Became:
    if value > 1 and theirs.get("zero_optimization.stage") != 3:
        return "below stage 3 weights are not sharded"
    return {"node_copy": value} if value > 1 else ({}, "off")


def _offload(value: Any, theirs: Mapping[str, Any]) -> Became:
    """The setting to which the places of optimizer states and weights come together."""
    states, weights = (theirs.get(f"{_ZERO}offload_{kind}.device", "none") for kind in ("optimizer", "param"))
    states = "cpu" if theirs.get(f"{_ZERO}cpu_offload") is True else states
    if states == weights == "none":
        return {}, "off"
    if states == "nvme":
        if weights == "nvme" and theirs.get(f"{_ZERO}stage") == 3:
            return {"offload.state": "disk-all"}, "changed: gradients go to the file too"
        ours = {"offload.state": "disk"}
        return ours if weights == "none" else (ours, "changed: weights stay on the device, gradients on the host")
    ours = {"offload.state": "all" if weights != "none" and theirs.get(f"{_ZERO}stage") == 3 else "optimizer"}
    return (ours, "changed: weights to memory of the host") if weights == "nvme" else ours


def _folder(value: Any, theirs: Mapping[str, Any]) -> Became:
    is_used = theirs.get(f"{_ZERO}offload_optimizer.device") == "nvme"
    return {"offload.path": value} if is_used else "no optimizer state goes to a disk"


def _weights_folder(value: Any, theirs: Mapping[str, Any]) -> Became:
    if theirs.get(f"{_ZERO}offload_optimizer.device") != "nvme" or theirs.get(f"{_ZERO}stage") != 3:
        return "weights do not go to a disk"
    if theirs.get(f"{_ZERO}offload_optimizer.nvme_path", value) != value:
        return "one file of each rank has weights and states: see offload_optimizer.nvme_path"
    return {"offload.path": value}


def _share(value: Any, theirs: Mapping[str, Any]) -> Became:
    if theirs.get(f"{_ZERO}offload_optimizer.device", "none") == "none":
        return "no optimizer state is offloaded"
    return {"offload.fraction": f"{value:g}"} if 0 < value <= 1 else "no share of the elements"


def _quantized(value: Any, theirs: Mapping[str, Any], ours: Mapping[str, Any], why: str) -> Became:
    if value and not theirs.get("zero_optimization.stage"):
        return "at stage 0 no rank owns a shard to send or sum"
    return (ours, why) if value else ({}, "off")


_CLIPPING = "1 is the default of its releases since 2026; in earlier ones 0, which is off"
_RECOMPUTED = "changed: each block's inputs are kept; they are not shared out to ranks"
_PINNED = "what crosses the bus is page-locked on a GPU"
_NODE_SIZE = "changed: with several GPUs in a node give their number as --wire.node-size"
KEYS: dict[str, tuple[Kind, Becomes]] = {
    "train_batch_size": (COUNT, "global_batch_size"),
    "train_micro_batch_size_per_gpu": (COUNT, "micro_batch_size"),
    "gradient_accumulation_steps": (COUNT, _accumulation),
    "sequence_parallel_size": (COUNT, "sequence_parallel"),
    "gradient_clipping": (NUMBER, lambda value, _: ({"grad_clip": value}, _CLIPPING)),
    "steps_per_print": (COUNT, "log_interval"),
    "bf16.enabled": (SWITCH, lambda value, _: {"dtype": "bfloat16"} if value else {}),
    "bfloat16.enabled": (SWITCH, lambda value, _: {"dtype": "bfloat16"} if value else {}),
    "fp16.enabled": (SWITCH, lambda value, _: {"dtype": "float16"} if value else {}),
    "fp16.loss_scale": (NUMBER, lambda value, _: ({"loss_scale": float(value)} if value else {}, "dynamic")),
    "fp16.initial_scale_power": (_POWER, lambda value, _: {"loss_scale": float(2**value)}),
    "fp16.loss_scale_window": (COUNT, "loss_scale_interval"),
    f"{_ZERO}stage": (_STAGE, lambda value, _: {"strategy": f"zero{int(value)}"}),
    f"{_ZERO}zero_hpz_partition_size": (COUNT, _second_copy),
    f"{_ZERO}mics_shard_size": (_GROUP, lambda value, _: {"shard_size": value} if value > 0 else ({}, "off")),
    f"{_ZERO}zero_quantized_weights": (SWITCH, lambda *both: _quantized(*both, {"wire.weights": "int8"}, "")),
    f"{_ZERO}zero_quantized_gradients": (SWITCH, lambda *both: _quantized(*both, {"wire.grads": "int4"}, _NODE_SIZE)),
    f"{_ZERO}cpu_offload": (SWITCH, _offload),
    f"{_ZERO}offload_optimizer.device": (_PLACE, _offload),
    f"{_ZERO}offload_optimizer.ratio": (NUMBER, _share),
    f"{_ZERO}offload_optimizer.nvme_path": (TEXT, _folder),
    f"{_ZERO}offload_optimizer.pin_memory": (SWITCH, lambda value, _: ({}, _PINNED)),
    f"{_ZERO}offload_param.device": (_PLACE, _offload),
    f"{_ZERO}offload_param.nvme_path": (TEXT, _weights_folder),
    f"{_ZERO}offload_param.pin_memory": (SWITCH, lambda value, _: ({}, _PINNED)),
    "optimizer.type": (TEXT, _optimizer),
    f"{_OPTIM}lr": (NUMBER, _rate),
    f"{_OPTIM}betas": (_PAIR, lambda value, _: {"beta1": value[0], "beta2": value[1]}),
    f"{_OPTIM}eps": (NUMBER, lambda value, _: ({}, "as here") if value == 1e-8 else "1e-8 here, as torch has it"),
    f"{_OPTIM}weight_decay": (NUMBER, "weight_decay"),
    "scheduler.type": (TEXT, _scheduler),
    f"{_SCHED}total_num_steps": (COUNT, "max_steps"),
    f"{_SCHED}warmup_num_steps": (COUNT, "warmup_steps"),
    f"{_SCHED}warmup_type": (TEXT, lambda value, _: ({}, "linear here")),
    f"{_SCHED}warmup_min_lr": (NUMBER, lambda value, _: "warm-up begins at 0" if value else {}),
    f"{_SCHED}warmup_max_lr": (NUMBER, _peak),
    f"{_SCHED}cos_min_ratio": (NUMBER, lambda value, _: ({}, "min_lr, as a share of lr")),
    "activation_checkpointing.partition_activations": (
        SWITCH,
        lambda value, _: ({"model.activation_checkpointing": "full"}, _RECOMPUTED) if value else {},
    ),
    "wandb.enabled": (SWITCH, lambda value, _: {"track.to": ["wandb"]} if value else {}),
    "wandb.project": (TEXT, "track.project"),
}
