"""Turn raw values into a checked configuration, and a pydantic ValidationError into a one-line UserError.

The error names the dotted field as the user wrote it (``data.max_tokens``), the value, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from zeroshard.host.errors import UserError, nearest_name, shortened, shown
from zeroshard.settings.sizes import LARGEST

ConfigT = TypeVar("ConfigT", bound=BaseModel)

# choices of versions before, by their settings
LEFT = {
    ("optimizer", "muon8bit"): "use muon, or adamw8bit",
    ("strategy", "auto"): "name a stage, as zero2; train --fit raises it until the run fits",
}
# Settings of other trainers (nanoGPT, transformers, peft, torchtitan, Lightning) whose names are not similar to ours.
NAMES_OF_OTHERS = {
    **dict.fromkeys(("learning_rate", "max_lr"), "lr"),
    **dict.fromkeys(("batch_size", "per_device_train_batch_size", "device_batch_size"), "micro_batch_size"),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches"), "grad_accum_steps"),
    **dict.fromkeys(("block_size", "max_seq_length", "context_length"), "seq_len"),
    **dict.fromkeys(("max_iters", "steps", "num_steps", "num_iterations"), "max_steps"),
    **dict.fromkeys(("output_dir", "out_dir", "save_dir"), "out"),
    **dict.fromkeys(("save_steps", "save_interval"), "checkpoint_interval"),
    **dict.fromkeys(("nproc_per_node", "num_gpus", "devices", "num_processes"), "nproc"),
    **dict.fromkeys(("max_grad_norm", "gradient_clip_val", "clip_grad"), "grad_clip"),
    **dict.fromkeys(("eval_steps", "val_check_interval"), "eval_interval"),
    **dict.fromkeys(("precision", "bf16", "fp16"), "dtype"),
    **dict.fromkeys(("gradient_checkpointing", "ac_mode"), "model.activation_checkpointing"),
    **dict.fromkeys(("model.tiles", "mlp_tiles", "tiled_mlp"), "tiles"),
    "warmup_iters": "warmup_steps",
    **dict.fromkeys(("trust_remote_code", "trust_code"), "model.trust_remote_code"),
    **dict.fromkeys(("packing", "packed", "sample_packing", "dataset.packed"), "data.packing"),
    **dict.fromkeys(("load_weights", "pretrained", "init_weights"), "init_from"),
    **dict.fromkeys(("lora_rank", "lora_r", "lora.r"), "lora.rank"),
    **dict.fromkeys(("lora_alpha", "lora.lora_alpha"), "lora.alpha"),
    **dict.fromkeys(("lora_dropout", "lora.lora_dropout"), "lora.dropout"),
    **dict.fromkeys(("lora_target_modules", "lora.target_modules", "target_modules"), "lora.targets"),
}


def validate(kind: type[ConfigT], raw: Mapping[str, Any]) -> ConfigT:
    """Return ``raw`` as a checked configuration; numbers and booleans may be strings, as flags pass them.

    Raises:
        UserError: a value is wrong; names the dotted field, what is wrong, and what to do.
    """
    refuse_unusable(raw)
    try:
        found = kind.model_validate(raw)
    except ValidationError as error:
        raise _explain(kind, error) from None
    refuse_unusable(found.model_dump())  # again: a number may have been a string before
    return found


def refuse_unusable(raw: object, name: str = "") -> None:
    """Raise UserError for strings that are not valid text (see `no_text`) and integers beyond 64 bits in ``raw``.

    ``raw`` is searched at any depth. The checks of single settings do not catch these values, and they would fail only
    much later, far from the configuration.
    """
    if isinstance(raw, Mapping):
        for key, value in raw.items():
            if isinstance(key, str) and no_text(key):
                raise UserError(ascii(key)[1:-1], no_text(key), "remove it")
            refuse_unusable(value, f"{name}.{key}" if name else str(key))
    elif isinstance(raw, list | tuple):
        for value in raw:
            refuse_unusable(value, name)
    elif isinstance(raw, str) and no_text(raw):
        raise UserError(name, f"{shortened(ascii(raw), 80)} {no_text(raw)}", "give text")
    elif isinstance(raw, int) and abs(raw) >= LARGEST:
        raise UserError(name, f"a number of {raw.bit_length()} bits does not fit into 64", "give a smaller one")


def no_text(word: str) -> str:
    """Say why ``word`` is not valid text (a NUL character, or bytes that were not UTF-8); "" if it is valid."""
    if "\0" in word:
        return "holds a NUL character"
    return "is not UTF-8" if any("\ud800" <= letter <= "\udfff" for letter in word) else ""


def fields_by_name(kind: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """Return every setting of a configuration class by its dotted name: ``lr``, ``data.max_tokens``."""
    found: dict[str, FieldInfo] = {}
    for name, field in kind.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            found |= fields_by_name(inner, f"{prefix}{name}.")
        else:
            found[prefix + name] = field
    return found


def by_path(table: Mapping[str, Any], start: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Flatten nested tables: ``{"data": {"dir": 1}}`` becomes ``{("data", "dir"): 1}``."""
    found: dict[tuple[str, ...], Any] = {}
    for key, value in table.items():
        found |= by_path(value, (*start, key)) if isinstance(value, Mapping) else {(*start, key): value}
    return found


def nested(values: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """Return the tables that `by_path` has flattened."""
    found: dict[str, Any] = {}
    for (*tables, key), value in values.items():
        table = found
        for name in tables:
            table = table.setdefault(name, {})
        table[key] = value
    return found


def by_dotted_name(table: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten nested tables into dotted names: ``{"data": {"dir": 1}}`` becomes ``{"data.dir": 1}``."""
    return {".".join(map(str, path)): value for path, value in by_path(table).items()}


def nearest(name: str, known: Iterable[str], otherwise: str) -> str:
    """Suggest the name in ``known`` that is most similar to ``name``; return ``otherwise`` if none is similar."""
    known = list(known)
    close = nearest_name(name, known, cutoff=0.6)
    if close is None:  # the user wrote `max_tokens` and meant `data.max_tokens`
        last_part = name.rpartition(".")[2].lstrip("-")
        close = next((other for other in known if other.rpartition(".")[2] == last_part), None)
    return otherwise if close is None else f"did you mean {close}?"


def _explain(kind: type[BaseModel], error: ValidationError) -> UserError:
    """Turn the first of pydantic's errors into a UserError; an unknown key goes first, as it often causes the rest."""
    complaints = sorted(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
    first = complaints[0]
    value, limits = first["input"], first.get("ctx", {})
    if isinstance(limits.get("error"), UserError):
        return limits["error"]
    field = ".".join(part for part in first["loc"] if isinstance(part, str))  # drops indices into lists
    if first["type"] == "extra_forbidden":
        names = fields_by_name(kind)
        if isinstance(value, Mapping):  # a table of others: its key says more
            field = next((name for name in by_dotted_name({field: value}) if name in NAMES_OF_OTHERS), field)
        known = NAMES_OF_OTHERS.get(field, "")
        todo = f"here it is {known}" if known in names else nearest(field, names, "remove it")
        return UserError(field, "there is no such key", todo)
    if first["type"] == "literal_error":
        choices = limits["expected"].replace("'", "").replace(" or ", ", ")
        if isinstance(value, str) and (field, value) in LEFT:
            return UserError(field, f"{value} has left", LEFT[field, value])
        return UserError(field, f"{shown(value)} is not a choice", f"choose one of {choices}")
    what, todo = _WORDS.get(first["type"], ("{value} cannot be used", "see --help"))
    said = shortened(value) if first["type"] in _OF_NUMBERS else shown(value)
    return UserError(field, what.format(value=said, **limits), todo.format(**limits))


_OF_NUMBERS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number")
# pydantic's error type -> (what is wrong, what to do)
_WORDS = {
    "missing": ("is missing", "give a value"),
    "greater_than": ("{value} is not above {gt:g}", "give a number above {gt:g}"),
    "greater_than_equal": ("{value} is below {ge:g}", "give {ge:g} or more"),
    "less_than": ("{value} is not below {lt:g}", "give a number below {lt:g}"),
    "less_than_equal": ("{value} is above {le:g}", "give {le:g} or less"),
    "finite_number": ("{value} is not a finite number", "give a finite number"),
    "int_parsing": ("{value} is not a whole number", "give a whole number"),
    "int_type": ("{value} is not a whole number", "give a whole number"),
    "int_from_float": ("{value} is not a whole number", "give a whole number"),
    "float_parsing": ("{value} is not a number", "give a number"),
    "float_type": ("{value} is not a number", "give a number"),
    "bool_parsing": ("{value} is neither true nor false", "give true or false"),
    "bool_type": ("{value} is neither true nor false", "give true or false"),
    "string_type": ("{value} is not text", "put it in quotes"),
    "string_too_short": ("is empty", "give a name"),
    "tuple_type": ("{value} is not a list", "give a list"),
    "model_type": ("{value} is not a table", "give a table, or a name in quotes"),
}
