"""``zeroshard import-config``: convert DeepSpeed's settings to ours, and report what each of them became.

    zeroshard import-config deepspeed ds_config.json > run.toml

It prints TOML for `zeroshard train --config`, below a table in comments: each key of DeepSpeed, what it became, and
why. What is ignored is printed on stderr too. What the file leaves out has DeepSpeed's defaults (of its engine,
optimizers and schedulers) and not ours. A value of ``auto`` is the caller's there, and has our default.

The keys: https://www.deepspeed.ai/docs/config-json/
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from zeroshard.host.columns import columns
from zeroshard.host.errors import ExitStatus, UserError, shown
from zeroshard.host.regular_files import read_text
from zeroshard.settings.sizes import LARGEST
from zeroshard.settings.validate import by_dotted_name, nested, refuse_unusable, validate
from zeroshard.train.config.config import TrainConfig

# Settings of ours; or these and a remark, if they mean something else; or only the reason why a key has no effect here.
Became = Mapping[str, Any] | tuple[Mapping[str, Any], str] | str
Becomes = str | Callable[[Any, Mapping[str, Any]], Became]  # our key, or a function of the value and all settings
Kind = tuple[Callable[[Any], bool], str]  # which values a key takes, and their name


def is_number(value: Any) -> bool:
    """Whether ``value`` is a number of at least 0 that fits into 64 bits."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < LARGEST


def is_count(value: Any) -> bool:
    """Whether ``value`` is such a number without a fraction."""
    return is_number(value) and value == int(value)


COUNT: Kind = is_count, "a whole number of at least 0"
NUMBER: Kind = is_number, "a number of at least 0"
SWITCH: Kind = lambda value: isinstance(value, int) and value in (0, 1), "true or false"
TEXT: Kind = lambda value: isinstance(value, str), "text"


class Row(NamedTuple):
    """A line of the table: a key of DeepSpeed's, and the keys of ours that it set; ``why`` may be empty.

    ``fate`` is ``mapped``, ``ignored``, or ``default`` if it was left out and the value is DeepSpeed's.
    """

    key: str
    value: Any
    fate: str
    ours: str
    why: str


@dataclass
class Migration:
    """Our settings by dotted name, which are filled in key by key, and the table of how they came about."""

    source: str
    ours: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def add(self, key: str, value: Any, found: Became, *, is_default: bool = False) -> None:
        """Set and record what ``key`` became."""
        ours, why = ({}, found) if isinstance(found, str) else found if isinstance(found, tuple) else (found, "")
        self.ours |= ours
        fate = "default" if is_default else "ignored" if isinstance(found, str) else "mapped"
        self.rows.append(Row(key, value, fate, ", ".join(ours), why))

    @property
    def values(self) -> dict[str, Any]:
        """Our settings as nested tables."""
        return nested({tuple(name.split(".")): value for name, value in self.ours.items()})

    def lines(self) -> list[str]:
        """Return lines for the console about what has no effect here, one for each reason; the table says it too."""
        keys: dict[str, list[str]] = {}
        for row in self.rows:
            if row.fate == "ignored":
                keys.setdefault(row.why, []).append(row.key)
        return [f"ignored: {', '.join(names)} ({why})" for why, names in keys.items()]

    def config(self) -> TrainConfig:
        """Return the configuration of a run with these settings; raises UserError if values contradict each other."""
        return validate(TrainConfig, self.values)

    def text(self) -> str:
        """Return the table, in comments, and the settings as TOML."""
        cells = [("", "theirs", "value", "ours", "")]
        cells += [(row.fate, row.key, shown(row.value, 40), row.ours, row.why) for row in self.rows]
        table = "\n".join(f"# {line}".rstrip() for line in columns(cells))
        return f"# From {self.source}, by `zeroshard import-config`.\n#\n{table}\n\n{tomli_w.dumps(self.values)}"


def require_kind(key: str, value: Any, kind: Kind) -> None:
    """Raise UserError if ``value`` is not of ``kind``."""
    fits, name = kind
    if not fits(value):
        raise UserError(key, f"{shown(value, 80)} is not {name}", f"give {name}")


_ZERO, _OPTIM, _SCHED = "zero_optimization.", "optimizer.params.", "scheduler.params."
_RATE, _COS_MIN_RATIO = 1e-3, 1e-4  # defaults of their rates, and of cos_min_ratio
_DECAYS = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}  # by scheduler
_OWN_RATES = ("WarmupLR", "WarmupDecayLR")  # schedulers that set the rate themselves, and not as a share of lr
_BY_HAND = ("zero_hpz_partition_size", "mics_shard_size", "zero_quantized_weights", "zero_quantized_gradients")
_STAGE: Kind = lambda value: is_count(value) and value <= 3, "a stage, 0 to 3"
_PLACE: Kind = lambda value: value in ("none", "cpu", "nvme"), "none, cpu or nvme"
_STEPS: Kind = lambda value: is_count(value) and value > 0, "a whole number above 0"
_WARMUP: Kind = lambda value: value in ("log", "linear"), "log or linear"
_POWER: Kind = lambda value: is_count(value) and value <= 62, "a whole number, 0 to 62"
_PAIR: Kind = lambda value: isinstance(value, list) and len(value) == 2 and all(map(is_number, value)), "two numbers"


def run_import_config(words: Sequence[str]) -> int:
    """Convert the settings in ``deepspeed FILE.json``, print the result, and return the exit status.

    Raises:
        UserError: as `read_deepspeed`; or values contradict each other.
    """
    if len(words) != 2 or words[0] != "deepspeed":
        what = "it takes the word deepspeed and one file"
        raise UserError("import-config", what, "write import-config deepspeed FILE.json")
    migration = read_deepspeed(Path(words[1]))
    migration.config()
    print(migration.text(), end="")
    for line in migration.lines():
        print(line, file=sys.stderr)
    return int(ExitStatus.OK)


def read_deepspeed(path: Path) -> Migration:
    """Convert DeepSpeed's file to our settings.

    Raises:
        UserError: there is no such file, it is not a JSON object, a value has the wrong type, or the trainer does not
            compute the same: the optimizer's update, or the rate at each step.
    """
    given = by_dotted_name(_json_object(path))
    for key, value in given.items():
        if key in KEYS and value != "auto":
            require_kind(key, value, KEYS[key][0])
    theirs = _defaults(given) | given
    to = Migration(f"DeepSpeed: {path}", {"dtype": "float32"})  # DeepSpeed's dtype if the file sets none
    if any(theirs.get(f"{name}.enabled") == "auto" for name in ("bf16", "bfloat16", "fp16")):
        to.ours["dtype"] = TrainConfig.model_fields["dtype"].default
    for key, value in theirs.items():
        found: Became = "there is nothing of the kind"
        if value == "auto":
            found = "left to the caller there, and to its default here"
        elif key in KEYS:
            becomes = KEYS[key][1]
            found = {becomes: value} if isinstance(becomes, str) else becomes(value, theirs)
        elif "offload" in key:
            found = "copies have as many threads and buffers as they need"
        elif key.removeprefix(_ZERO) in _BY_HAND:
            found = "set it by hand: docs/from-deepspeed.md says how"
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
    if scheduler in _DECAYS:
        found |= {"scheduler.params.warmup_num_steps": 1000, "scheduler.params.warmup_type": "log"}
    if scheduler == "WarmupDecayLR" or (scheduler == "WarmupLR" and given.get(f"{_OPTIM}lr", _RATE) == _RATE):
        found["scheduler.params.warmup_max_lr"] = _RATE
    elif scheduler == "WarmupCosineLR":
        found["scheduler.params.cos_min_ratio"] = _COS_MIN_RATIO
    return found


def _set_schedule(theirs: Mapping[str, Any], to: Migration) -> None:
    """Set the rates that follow from several keys, and the length of a run, which our trainer must know."""
    scheduler = theirs.get("scheduler.type")
    if scheduler not in _DECAYS:
        to.ours["warmup_steps"] = 0
    elif "lr" not in to.ours:  # it is `auto`, and where it begins and ends follows from it
        to.ours["lr"] = TrainConfig.model_fields["lr"].default
    if "lr" in to.ours:
        lr, shares = to.ours["lr"], {"WarmupCosineLR": ("warmup_min_ratio", "cos_min_ratio")}.get(str(scheduler))
        begin, end = (_number(theirs, name) for name in shares or ("warmup_min_lr", "warmup_min_lr"))
        if scheduler in _DECAYS:
            to.ours["optim.warmup_lr"] = lr * begin if shares else begin
        else:
            to.ours["optim.decay"] = "constant"
        decays = scheduler in ("WarmupDecayLR", "WarmupCosineLR")
        to.ours["min_lr"] = (lr * end if shares else end) if decays else lr
    warmup = to.ours.get("warmup_steps", 0)
    if "max_steps" not in to.ours and warmup > 500:
        to.ours["max_steps"] = 10 * warmup


def _number(theirs: Mapping[str, Any], name: str) -> float:
    value = theirs.get(f"{_SCHED}{name}", 0.0)
    return value if is_number(value) else _COS_MIN_RATIO if name == "cos_min_ratio" else 0.0  # it is `auto`


def _accumulation(value: Any, theirs: Mapping[str, Any]) -> Became:
    if isinstance(theirs.get("train_batch_size"), int):
        return {}, "follows from the global batch, the micro-batch and the ranks"
    return {"grad_accum_steps": value}


def _optimizer(value: Any, theirs: Mapping[str, Any]) -> Became:
    name, decay = value.lower(), theirs.get("optimizer.params.weight_decay")
    if name not in ("adam", "adamw"):
        raise UserError(
            "optimizer.type", f"{value} is not in the trainer", "use AdamW, or zeroshard.Zero with your own"
        )
    if name == "adam" and not theirs.get("optimizer.params.adam_w_mode", True) and decay:
        what = f"with it false, a weight_decay of {decay} is added to gradients, and the trainer decays weights"
        raise UserError("optimizer.params.adam_w_mode", what, "use AdamW, or zeroshard.Zero with torch.optim.Adam")
    return {"optimizer": "adamw"}


def _as_adamw(key: str, usual: bool) -> Callable[[Any, Mapping[str, Any]], Became]:
    """A switch of their Adam that changes the update, unless it is as usual."""

    def became(value: Any, theirs: Mapping[str, Any]) -> Became:
        if bool(value) != usual:
            todo = "leave it out, or use zeroshard.Zero with your own optimizer"
            raise UserError(f"{_OPTIM}{key}", f"the trainer's AdamW has not {str(bool(value)).lower()} there", todo)
        return {}, "as here"

    return became


def _scheduler(value: Any, theirs: Mapping[str, Any]) -> Became:
    if value not in _DECAYS:
        todo = f"use {', '.join(_DECAYS)}, or zeroshard.Zero and a scheduler of your own"
        raise UserError("scheduler.type", f"{value} is not in the trainer", todo)
    if value != "WarmupLR" and f"{_SCHED}total_num_steps" not in theirs:
        raise UserError(f"{_SCHED}total_num_steps", f"{value} has none", "give it, as DeepSpeed asks for it")
    own, lr = f"{_SCHED}warmup_max_lr", theirs.get(f"{_OPTIM}lr", _RATE)
    if value == "WarmupLR" and own not in theirs and lr != _RATE:
        what = f"left out, it is {_RATE} in some releases of DeepSpeed, and the optimizer's lr of {lr} in others"
        raise UserError(own, what, "give it")
    kind = "linear" if theirs.get(f"{_SCHED}warmup_type") == "linear" else "log"
    return {"optim.decay": _DECAYS[value], "optim.warmup": f"deepspeed-{kind}"}, "the same rate at each step"


def _rate(value: Any, theirs: Mapping[str, Any]) -> Became:
    is_own = theirs.get("scheduler.type") in _OWN_RATES
    return "its scheduler sets the rate itself, up to its warmup_max_lr" if is_own else {"lr": value}


def _peak(value: Any, theirs: Mapping[str, Any]) -> Became:
    is_own = theirs.get("scheduler.type") in _OWN_RATES
    why = "the peak, whatever the optimizer's lr is"
    return ({"lr": value}, why) if is_own else "its scheduler takes the optimizer's lr"


def _total(value: Any, theirs: Mapping[str, Any]) -> Became:
    used = theirs.get("scheduler.type") in ("WarmupDecayLR", "WarmupCosineLR")
    return {"max_steps": value} if used else "its scheduler takes none"


def _of_the_rate(schedulers: Sequence[str], what: str) -> Callable[[Any, Mapping[str, Any]], Became]:
    """A setting of some schedulers, of which a rate is made once lr is known."""
    return lambda _, theirs: ({}, what) if theirs.get("scheduler.type") in schedulers else "its scheduler takes none"


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


_SAVED = "checkpoints stay sharded; `zeroshard export` writes the unsharded weights of any of them"
_CLIPPING = "1 is the default of its releases since 2026; in earlier ones 0, which is off"
_RECOMPUTED = "changed: each block's inputs are kept; they are not shared out to ranks"
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
    f"{_ZERO}cpu_offload": (SWITCH, _offload),
    f"{_ZERO}offload_optimizer.device": (_PLACE, _offload),
    f"{_ZERO}offload_optimizer.ratio": (NUMBER, _share),
    f"{_ZERO}offload_optimizer.nvme_path": (TEXT, _folder),
    f"{_ZERO}offload_param.device": (_PLACE, _offload),
    f"{_ZERO}offload_param.nvme_path": (TEXT, _weights_folder),
    f"{_ZERO}stage3_gather_16bit_weights_on_model_save": (SWITCH, lambda value, _: ({}, _SAVED)),
    f"{_ZERO}stage3_gather_fp16_weights_on_model_save": (SWITCH, lambda value, _: ({}, _SAVED)),
    "optimizer.type": (TEXT, _optimizer),
    f"{_OPTIM}lr": (NUMBER, _rate),
    f"{_OPTIM}betas": (_PAIR, lambda value, _: {"beta1": value[0], "beta2": value[1]}),
    f"{_OPTIM}eps": (NUMBER, "optim.eps"),
    f"{_OPTIM}adam_w_mode": (SWITCH, lambda value, _: ({}, "decay is decoupled from gradients")),
    f"{_OPTIM}amsgrad": (SWITCH, _as_adamw("amsgrad", False)),
    f"{_OPTIM}bias_correction": (SWITCH, _as_adamw("bias_correction", True)),
    f"{_OPTIM}weight_decay": (NUMBER, "weight_decay"),
    "scheduler.type": (TEXT, _scheduler),
    f"{_SCHED}total_num_steps": (_STEPS, _total),
    f"{_SCHED}warmup_num_steps": (_STEPS, "warmup_steps"),
    f"{_SCHED}warmup_type": (_WARMUP, lambda value, _: ({}, "optim.warmup")),
    f"{_SCHED}warmup_min_lr": (NUMBER, _of_the_rate(_OWN_RATES, "optim.warmup_lr")),
    f"{_SCHED}warmup_min_ratio": (NUMBER, _of_the_rate(("WarmupCosineLR",), "optim.warmup_lr, as a share of lr")),
    f"{_SCHED}warmup_max_lr": (NUMBER, _peak),
    f"{_SCHED}cos_min_ratio": (NUMBER, _of_the_rate(("WarmupCosineLR",), "min_lr, as a share of lr")),
    "activation_checkpointing.partition_activations": (
        SWITCH,
        lambda value, _: ({"model.activation_checkpointing": "full"}, _RECOMPUTED) if value else {},
    ),
    "wandb.enabled": (SWITCH, lambda value, _: {"track.to": ["wandb"]} if value else {}),
    "wandb.project": (TEXT, "track.project"),
}
