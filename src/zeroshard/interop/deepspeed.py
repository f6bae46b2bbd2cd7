"""Convert DeepSpeed's JSON configuration to our settings: https://www.deepspeed.ai/docs/config-json/

What the file leaves out has DeepSpeed's defaults (of its engine, optimizers and schedulers) and not ours. A value of
``auto`` is the caller's there, and has our default.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import log2
from pathlib import Path
from typing import Any

from zeroshard.errors import UserError, shown
from zeroshard.interop.migration import Migration
from zeroshard.regular_files import read_text
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.config.sizes import LARGEST
from zeroshard.train.config.validate import by_dotted_name, refuse_unusable

_AUTO = "left to the caller there, and to its default here"
_NO_OFFLOAD = "states stay on the device; more ranks hold less each"
_LEFT_OUT = "the file leaves it out"
_LINEAR = "logarithmic there, linear here"
_HALF = ("bf16.enabled", "bfloat16.enabled", "fp16.enabled")
_OWN_RATES = ("WarmupLR", "WarmupDecayLR")  # schedulers that set the rate themselves, and not as a share of lr
_WARM_UPS = (*_OWN_RATES, "WarmupCosineLR")
_PEAK, _COS_MIN_RATIO = 1e-3, 1e-4  # defaults of their warmup_max_lr and cos_min_ratio
_BUCKETS = "a unit is a transformer block, gathered one ahead"
SAME = {
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_clipping": "grad_clip",
    "steps_per_print": "log_interval",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.total_num_steps": "max_steps",
    "fp16.loss_scale_window": "loss_scale_interval",
    "tensorboard.job_name": "track.name",
    "wandb.project": "track.project",
}


def read_deepspeed(words: Sequence[str]) -> Migration:
    """Convert ``FILE.json`` to our settings.

    Raises:
        UserError: there is no such file, it is not a JSON object, a value has the wrong type, or the optimizer is not
            available in the trainer.
    """
    if len(words) != 1:
        raise UserError("import-config", "deepspeed takes one file", "write import-config deepspeed FILE.json")
    path = Path(words[0])
    try:
        theirs = json.loads(read_text(path))
    except OSError as error:
        raise UserError(str(path), f"cannot be read ({error.strerror})", "give DeepSpeed's JSON file") from None
    except ValueError as error:
        raise UserError(str(path), f"is no JSON ({error})", "give DeepSpeed's JSON file") from None
    except RecursionError:
        raise UserError(str(path), "is nested too deeply", "give DeepSpeed's JSON file") from None
    if not isinstance(theirs, dict):
        raise UserError(str(path), "is not a JSON object", "give DeepSpeed's JSON file")
    refuse_unusable(theirs)
    flat = by_dotted_name(theirs)
    for key, value in flat.items():
        _require_type(key, value)
    to = Migration(f"DeepSpeed: {path}", values={"dtype": "float32"})  # DeepSpeed's dtype if the file sets none
    if any(flat.get(key) == "auto" for key in _HALF):
        to.set("dtype", TrainConfig.model_fields["dtype"].default)
    for key, value in flat.items():
        if value == "auto":
            to.ignore(key, value, _AUTO)
        elif key in SAME:
            to.map(key, value, {SAME[key]: value})
        elif key in _SPECIAL:
            _SPECIAL[key](key, value, flat, to)
        else:
            to.ignore(key, value, _why_ignored(key))
    _add_defaults(flat, to)
    _fit_steps(to)
    return to


def _add_defaults(flat: dict[str, Any], to: Migration) -> None:
    """Set what DeepSpeed does where the file says nothing."""
    if "zero_optimization.stage" not in flat:
        to.default("zero_optimization.stage", 0, {"strategy": "zero0"}, "no stage is given")
    if flat.get("fp16.enabled") is True and "fp16.loss_scale_window" not in flat:
        to.default("fp16.loss_scale_window", 1000, {"loss_scale_interval": 1000}, _LEFT_OUT)
    has_optimizer = "optimizer.type" in flat
    if has_optimizer:
        decay = 0.01 if flat.get("optimizer.params.torch_adam") and _name_of(flat, "optimizer") == "adamw" else 0.0
        for name, value, ours in (
            ("betas", [0.9, 0.999], {"beta1": 0.9, "beta2": 0.999}),
            ("weight_decay", decay, {"weight_decay": decay}),
        ):
            if f"optimizer.params.{name}" not in flat:
                to.default(f"optimizer.params.{name}", value, ours, _LEFT_OUT)
    if "gradient_clipping" not in flat:
        ours = {"grad_clip": 1.0} if has_optimizer else {}  # ours too, but not for ever
        to.default("gradient_clipping", 1.0, ours, "of its releases since 2026; in earlier ones 0, which is off")
    _add_schedule(flat, to)


def _add_schedule(flat: dict[str, Any], to: Migration) -> None:
    """Set the rate that DeepSpeed's scheduler, or its lack of one, comes to."""
    scheduler = str(flat.get("scheduler.type", ""))
    if scheduler in _WARM_UPS:
        if "scheduler.params.warmup_num_steps" not in flat:
            to.default("scheduler.params.warmup_num_steps", 1000, {"warmup_steps": 1000}, _LEFT_OUT)
        if "scheduler.params.warmup_type" not in flat:
            to.default("scheduler.params.warmup_type", "log", {}, _LINEAR)
    else:
        to.set("warmup_steps", 0)
    if scheduler in _OWN_RATES and "scheduler.params.warmup_max_lr" not in flat:
        why = f"{scheduler}'s default peak, whatever the optimizer's lr is"
        to.default("scheduler.params.warmup_max_lr", _PEAK, {"lr": _PEAK}, why)
    elif "optimizer.type" in flat and "optimizer.params.lr" not in flat and scheduler not in _OWN_RATES:
        to.default("optimizer.params.lr", 1e-3, {"lr": 1e-3}, _LEFT_OUT)
    if scheduler in _WARM_UPS and "lr" not in to.values:  # it is `auto`, and where it ends follows from it
        to.set("lr", TrainConfig.model_fields["lr"].default)
    if "lr" not in to.values:
        return
    ends = {"WarmupDecayLR": 0.0, "WarmupCosineLR": flat.get("scheduler.params.cos_min_ratio", _COS_MIN_RATIO)}
    ratio = ends.get(scheduler, 1.0)
    to.set("min_lr", to.values["lr"] * (ratio if _is_number(ratio) else _COS_MIN_RATIO))
    if scheduler == "WarmupCosineLR" and "scheduler.params.cos_min_ratio" not in flat:
        to.default("scheduler.params.cos_min_ratio", _COS_MIN_RATIO, {"min_lr": to.values["min_lr"]}, _LEFT_OUT)


def _name_of(flat: dict[str, Any], what: str) -> str:
    return str(flat.get(f"{what}.type", "")).lower()


def _require_type(key: str, value: Any) -> None:
    """Raise UserError if a value is neither ``auto`` nor of DeepSpeed's type for the key; unknown keys take any."""
    if value == "auto" or key not in _TYPES:
        return
    fits, kind = _TYPES[key]
    if not fits(value):
        raise UserError(key, f"{shown(value, 80)} is not {kind}", f"give {kind}, as DeepSpeed takes it")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < LARGEST


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(_is_number(each) for each in value)


def _fit_steps(to: Migration) -> None:
    """Set ``max_steps`` if the file has none and the warm-up is long: our trainer must know the length of a run."""
    warmup = to.values.get("warmup_steps", 0)
    if "max_steps" not in to.values and warmup > 500:
        to.set("max_steps", 10 * warmup)


def _batch(key: str, value: Any, flat: dict[str, Any], to: Migration) -> None:
    if key == "train_batch_size":
        to.map(key, value, {"global_batch_size": value})
    elif isinstance(flat.get("train_batch_size"), int):
        to.map(key, value, {}, "follows from the global batch, the micro-batch and the ranks")
    else:
        to.map(key, value, {"grad_accum_steps": value})


def _stage(key: str, value: Any, flat: dict[str, Any], to: Migration) -> None:
    to.map(key, value, {"strategy": f"zero{value}"})


def _dtype(key: str, value: Any, flat: dict[str, Any], to: Migration) -> None:
    name = "bfloat16" if key.startswith(("bf16", "bfloat16")) else "float16"
    to.map(key, value, {"dtype": name} if value else {})


def _scale_power(key: str, value: Any, flat: dict[str, Any], to: Migration) -> None:
    to.map(key, value, {"loss_scale": float(2**value)})


def _loss_scale(key: str, value: Any, flat: dict[str, Any], to: Migration) -> None:
    if value:
        why = f"2^{log2(value):g} is where it starts; it moves with overflows"
        to.map(key, value, {"loss_scale": float(value)}, why, same=False)
    else:
        to.map(key, value, {}, "dynamic, as there")


def _optimizer(key: str, value: Any, flat: dict[str, Any], to: Migration) -> None:
    if value.lower() not in ("adam", "adamw"):
        raise UserError(
            "optimizer.type", f"{value} is not in the trainer", "use AdamW, or zeroshard.Zero with your own"
        )
    same = value.lower() == "adamw" or flat.get("optimizer.params.adam_w_mode", True)
    to.map(key, value, {"optimizer": "adamw"}, "" if same else "decay is decoupled from gradients", same=bool(same))


def _betas(key: str, value: Any, flat: dict[str, Any], to: Migration) -> None:
    to.map(key, value, {"beta1": value[0], "beta2": value[1]})


def _eps(key: str, value: Any, flat: dict[str, Any], to: Migration) -> None:
    to.map(key, value, {}, "" if value == 1e-8 else "1e-8, as torch has it", same=value == 1e-8)


def _lr(key: str, value: Any, flat: dict[str, Any], to: Migration) -> None:
    scheduler = flat.get("scheduler.type")
    if scheduler in _OWN_RATES:
        to.ignore(key, value, f"{scheduler} sets the rate itself, up to its warmup_max_lr")
    else:
        to.map(key, value, {"lr": value})


def _scheduler(key: str, value: Any, flat: dict[str, Any], to: Migration) -> None:
    if value == "WarmupCosineLR":
        to.map(key, value, {})
    elif value == "WarmupDecayLR":
        to.map(key, value, {}, "decays along a cosine in place of a line", same=False)
    elif value == "WarmupLR":
        to.map(key, value, {}, "constant after warm-up: min_lr is lr")
    else:
        to.ignore(key, value, "not computed here: the rate stays constant")


def _warm_up(key: str, value: Any, flat: dict[str, Any], to: Migration) -> None:
    if flat.get("scheduler.type") not in _WARM_UPS:
        to.ignore(key, value, "its scheduler is not computed here")
    elif key.endswith("num_steps"):
        to.map(key, value, {"warmup_steps": value})
    elif key.endswith("type"):
        to.map(key, value, {}, "" if value == "linear" else _LINEAR, same=value == "linear")
    elif not value:
        to.map(key, value, {}, "from 0, as here")
    else:
        to.ignore(key, value, "warm-up begins at 0")


def _max_lr(key: str, value: Any, flat: dict[str, Any], to: Migration) -> None:
    if flat.get("scheduler.type") in _OWN_RATES:
        to.map(key, value, {"lr": value})
    else:
        to.ignore(key, value, "its scheduler takes the optimizer's lr")


def _cos_min_ratio(key: str, value: Any, flat: dict[str, Any], to: Migration) -> None:
    to.map(key, value, {}, "min_lr, as a share of lr")


def _track(key: str, value: Any, flat: dict[str, Any], to: Migration) -> None:
    names = to.values.get("track", {}).get("to", [])
    to.map(key, value, {"track.to": [*names, key.partition(".")[0]]} if value else {})


def _recompute(key: str, value: Any, flat: dict[str, Any], to: Migration) -> None:
    why = "each block's inputs are kept; they are not shared out to ranks"
    to.map(key, value, {"model.activation_checkpointing": "full"} if value else {}, why, same=not value)


def _second_copy(key: str, value: Any, flat: dict[str, Any], to: Migration) -> None:
    if value > 1 and flat.get("zero_optimization.stage") != 3:
        to.ignore(key, value, "below stage 3 weights are not sharded")
    else:
        to.map(key, value, {"node_copy": value} if value > 1 else {}, "" if value > 1 else "off")


def _groups(key: str, value: Any, flat: dict[str, Any], to: Migration) -> None:
    to.map(key, value, {"shard_size": value} if value > 0 else {}, "" if value > 0 else "off")


def _quantised(key: str, value: Any, flat: dict[str, Any], to: Migration) -> None:
    if not value:
        to.map(key, value, {}, "off")
    elif not flat.get("zero_optimization.stage"):
        to.ignore(key, value, "at stage 0 no rank owns a shard to send or sum")
    elif key.endswith("weights"):
        to.map(key, value, {"wire.weights": "int8"})
    else:
        why = "with several GPUs in a node give their number as --wire.node-size"
        to.map(key, value, {"wire.grads": "int4"}, why, same=False)


_SPECIAL: dict[str, Callable[[str, Any, dict[str, Any], Migration], None]] = {
    "train_batch_size": _batch,
    "gradient_accumulation_steps": _batch,
    "zero_optimization.stage": _stage,
    "zero_optimization.zero_hpz_partition_size": _second_copy,
    "zero_optimization.mics_shard_size": _groups,
    "zero_optimization.zero_quantized_weights": _quantised,
    "zero_optimization.zero_quantized_gradients": _quantised,
    **dict.fromkeys(("bf16.enabled", "bfloat16.enabled", "fp16.enabled"), _dtype),
    "fp16.initial_scale_power": _scale_power,
    "fp16.loss_scale": _loss_scale,
    "optimizer.type": _optimizer,
    "optimizer.params.lr": _lr,
    "optimizer.params.betas": _betas,
    "optimizer.params.eps": _eps,
    "scheduler.type": _scheduler,
    "scheduler.params.warmup_max_lr": _max_lr,
    "scheduler.params.cos_min_ratio": _cos_min_ratio,
    **dict.fromkeys(
        (f"scheduler.params.warmup_{name}" for name in ("num_steps", "type", "min_lr", "min_ratio")), _warm_up
    ),
    **dict.fromkeys(("tensorboard.enabled", "wandb.enabled"), _track),
    "activation_checkpointing.partition_activations": _recompute,
}


_COUNT, _NUMBER, _SWITCH, _NAME = (
    (_is_count, "a whole number of at least 0"),
    (_is_number, "a number of at least 0"),
    (lambda value: isinstance(value, bool), "true or false"),
    (lambda value: isinstance(value, str), "text"),
)
_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        (
            *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "steps_per_print"),
            *("scheduler.params.total_num_steps", "scheduler.params.warmup_num_steps", "fp16.loss_scale_window"),
            "zero_optimization.zero_hpz_partition_size",
        ),
        _COUNT,
    ),
    **dict.fromkeys(
        (
            *("gradient_clipping", "optimizer.params.lr", "optimizer.params.weight_decay", "optimizer.params.eps"),
            *("scheduler.params.warmup_max_lr", "scheduler.params.warmup_min_lr", "scheduler.params.warmup_min_ratio"),
            *("scheduler.params.cos_min_ratio", "fp16.loss_scale"),
        ),
        _NUMBER,
    ),
    **dict.fromkeys(
        (
            *("bf16.enabled", "bfloat16.enabled", "fp16.enabled", "tensorboard.enabled", "wandb.enabled"),
            *("activation_checkpointing.partition_activations", "optimizer.params.adam_w_mode"),
            *("zero_optimization.zero_quantized_weights", "zero_optimization.zero_quantized_gradients"),
        ),
        _SWITCH,
    ),
    **dict.fromkeys(("optimizer.type", "scheduler.type", "scheduler.params.warmup_type"), _NAME),
    **dict.fromkeys(("tensorboard.job_name", "wandb.project"), _NAME),
    "zero_optimization.mics_shard_size": (
        lambda value: _is_count(value) or value == -1,
        "a number of ranks, or -1 for none",
    ),
    "zero_optimization.stage": (lambda value: _is_count(value) and value <= 3, "a stage, 0 to 3"),
    "fp16.initial_scale_power": (lambda value: _is_count(value) and value <= 62, "a whole number, 0 to 62"),
    "optimizer.params.betas": (_is_pair, "a list of two numbers"),
}


def _why_ignored(key: str) -> str:
    if "offload" in key:
        return _NO_OFFLOAD
    if key.startswith("zero_optimization."):
        return _BUCKETS
    return "there is nothing of the kind"
