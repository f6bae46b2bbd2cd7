"""Convert nanoGPT's settings to ours: https://github.com/karpathy/nanoGPT

Its configurations are Python files whose assignments override the defaults of ``train.py``; so do flags
``--key=value``, and whatever comes later on the command line wins. Files are never executed, see
`zeroshard.interop.nanogpt_statements`. `zeroshard.interop.nanogpt_weights` imports weights.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zeroshard.data.character_meta import read_characters
from zeroshard.errors import UserError, shown
from zeroshard.interop.migration import Migration
from zeroshard.interop.nanogpt_statements import Unknown, read_assignments
from zeroshard.train.config.sizes import LARGEST
from zeroshard.train.config.validate import nearest

# Defaults of nanoGPT's train.py, in its order.
DEFAULTS: Mapping[str, Any] = {
    "out_dir": "out", "eval_interval": 2000, "log_interval": 1, "eval_iters": 200, "eval_only": False,
    "always_save_checkpoint": True, "init_from": "scratch", "wandb_log": False, "wandb_project": "owt",
    "wandb_run_name": "gpt2", "dataset": "openwebtext", "gradient_accumulation_steps": 40, "batch_size": 12,
    "block_size": 1024, "n_layer": 12, "n_head": 12, "n_embd": 768, "dropout": 0.0, "bias": False,
    "learning_rate": 6e-4, "max_iters": 600000, "weight_decay": 1e-1, "beta1": 0.9, "beta2": 0.95, "grad_clip": 1.0,
    "decay_lr": True, "warmup_iters": 2000, "lr_decay_iters": 600000, "min_lr": 6e-5, "backend": "nccl",
    "device": "cuda", "dtype": "bfloat16", "compile": True,
}  # fmt: skip
SAME = {
    "out_dir": "out",
    "eval_interval": "eval_interval",
    "log_interval": "log_interval",
    "n_layer": "model.n_layer",
    "n_head": "model.n_head",
    "n_embd": "model.n_embd",
    "dropout": "model.dropout",
    "bias": "model.bias",
    "learning_rate": "lr",
    "max_iters": "max_steps",
    "weight_decay": "weight_decay",
    "beta1": "beta1",
    "beta2": "beta2",
    "grad_clip": "grad_clip",
    "compile": "compile",
}
GPT2_IDS, PADDED_IDS = 50_257, 50_304  # ids of GPT-2's tokenizer, and nanoGPT's padded vocabulary for them


def read_nanogpt(words: Sequence[str]) -> Migration:
    """Convert ``[FILE.py] [--key=value ...]`` to our settings; a value that is not constant is recorded as ignored.

    Raises:
        UserError: a file is not Python, nanoGPT has no such key, a flag has no value, or a value has the wrong type.
    """
    given: dict[str, Any] = {}
    for word in words:
        if not word.startswith("--"):
            given |= read_assignments(Path(word), DEFAULTS, given)
            continue
        key, equals, text = word[2:].partition("=")
        if not equals:
            raise UserError(word, "has no value", f"write {word}=VALUE, as nanoGPT takes it")
        given[key] = _literal(text)
    for key, value in given.items():
        if key not in DEFAULTS:
            raise UserError(key, "nanoGPT has no such setting", nearest(key, DEFAULTS, "remove it"))
        _require_type(key, value)
    left_out = frozenset(DEFAULTS.keys() - given.keys())
    migration = Migration(" ".join(["nanoGPT:", *words]), left_out=left_out)
    _migrate({**DEFAULTS, **given}, migration)
    return migration


def _require_type(key: str, value: Any) -> None:
    """Raise UserError for a value of another type than its default's, if nanoGPT too would refuse it or fail."""
    default = DEFAULTS[key]
    fits = {
        bool: isinstance(value, int) and value in (0, 1),
        int: _is_number(value) and (isinstance(value, int) or value.is_integer()),
        float: _is_number(value),
        str: isinstance(value, str),
    }
    if isinstance(value, Unknown) or fits[type(default)]:
        return
    kind = {bool: "True or False", int: "a whole number", float: "a number", str: "text"}[type(default)]
    raise UserError(key, f"{shown(value, 80)} is not {kind}", f"give {kind}, as nanoGPT takes it")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def _migrate(theirs: dict[str, Any], to: Migration) -> None:
    to.set("model.name", "gpt2-124m")
    to.set("model.activation", "gelu")  # its model has nn.GELU()
    to.set("strategy", "zero2")
    to.set("seed", 1337)
    known = _Known(theirs)
    for key, value in theirs.items():
        if isinstance(value, Unknown):
            to.ignore(key, value.source, f"line {value.line} is no constant")
        elif key in SAME:
            to.map(key, value, {SAME[key]: value})
        else:
            try:
                _SPECIAL[key](key, value, known, to)
            except _NotConstantError as error:
                to.ignore(key, value, f"it goes with {error}, which is no constant")


def _batch(key: str, value: Any, theirs: dict[str, Any], to: Migration) -> None:
    if key == "batch_size":
        to.map(key, value, {"micro_batch_size": value})
        return
    rows = value * theirs["batch_size"]
    to.map(key, value, {"global_batch_size": rows}, f"{value} micro-batches of all ranks together")


def _block_size(key: str, value: Any, theirs: dict[str, Any], to: Migration) -> None:
    to.map(key, value, {"seq_len": value, "model.seq_len": value})


def _data(key: str, value: Any, theirs: dict[str, Any], to: Migration) -> None:
    meta = Path("data", str(value), "meta.pkl")
    if meta.is_file():
        read_characters(meta)  # raises UserError if the file cannot be used
        ours = {"data.source": "bin", "data.path": [str(meta.parent)], "data.tokenizer": f"json:{meta}"}
        to.map(key, value, ours, "its train.bin and val.bin, with the characters of its meta.pkl")
    elif value == "openwebtext":
        ours = {"data.source": value, "data.tokenizer": "gpt2", "data.val_fraction": 0.0005}
        to.map(key, value, {**ours, "model.vocab_size": PADDED_IDS}, "the validation documents differ from nanoGPT's")
    elif value == "shakespeare_char":
        ours = {"data.source": "tinyshakespeare", "data.tokenizer": "bytes"}
        to.map(key, value, ours, "256 bytes in place of 65 characters; the text is ASCII", same=False)
    elif value == "shakespeare":
        ours = {"data.source": "tinyshakespeare", "data.tokenizer": "gpt2", "model.vocab_size": PADDED_IDS}
        to.map(key, value, ours)
    else:
        ours = {"data.source": "bin", "data.path": [f"data/{value}"], "data.tokenizer": "gpt2"}
        why = "its train.bin and val.bin; ids of another tokenizer: data.tokenizer none"
        to.map(key, value, {**ours, "model.vocab_size": PADDED_IDS}, why)


def _eval_iters(key: str, value: Any, theirs: dict[str, Any], to: Migration) -> None:
    try:
        ours = {"eval_rows": value * theirs["batch_size"]}
    except _NotConstantError:
        ours = {"eval_batches": value}
    to.map(key, value, ours, "sequences of validation alone, spread over it, the same each time", same=False)


def _checkpoints(key: str, value: Any, theirs: dict[str, Any], to: Migration) -> None:
    why = "saved whether validation improved or not; the newest is kept"
    ours = {"checkpoint_interval": theirs["eval_interval"], "keep_checkpoints": 1}
    to.map(key, value, ours, why, same=bool(value))


def _init(key: str, value: Any, theirs: dict[str, Any], to: Migration) -> None:
    if value == "scratch":
        to.map(key, value, {"resume": "none"})
    elif value == "resume":
        to.map(key, value, {"resume": "auto"}, "zeroshard import OUT_DIR/ckpt.pt RUN makes a run of its weights")
    else:
        to.ignore(key, value, "zeroshard import FOLDER RUN makes a run of a Hugging Face folder")


def _wandb(key: str, value: Any, theirs: dict[str, Any], to: Migration) -> None:
    if key == "wandb_log":
        to.map(key, value, {"track.to": ["wandb"] if value else []})
    else:
        to.map(key, value, {"track.project" if key == "wandb_project" else "track.name": value})


def _schedule(key: str, value: Any, theirs: dict[str, Any], to: Migration) -> None:
    if not theirs["decay_lr"]:
        ours = {"warmup_steps": 0, "min_lr": theirs["learning_rate"]}
        if key == "decay_lr":
            to.map(key, value, ours, "the learning rate stays as it is")
        else:
            to.ignore(key, value, "decay_lr is off")
    elif key == "decay_lr":
        to.map(key, value, {}, "a cosine, as there")
    elif key == "warmup_iters":
        steps = min(value, theirs["max_iters"])
        to.map(key, value, {"warmup_steps": steps}, same=steps == value)
    elif key == "min_lr":
        to.map(key, value, {"min_lr": value})
    elif value == theirs["max_iters"]:
        to.map(key, value, {}, "decays until max_steps")
    else:
        steps = max(value, to.values.get("warmup_steps", 0), 1)
        to.map(key, value, {"decay_steps": steps}, "" if steps == value else "not before warm-up", same=steps == value)


def _device(key: str, value: Any, theirs: dict[str, Any], to: Migration) -> None:
    kind = str(value).partition(":")[0]
    ours = kind if kind in ("cpu", "cuda") else "auto"
    to.map(key, value, {"device": ours}, same=ours == value)


def _dtype(key: str, value: Any, theirs: dict[str, Any], to: Migration) -> None:
    if str(theirs["device"]).partition(":")[0] == "cpu":
        to.map(key, value, {"dtype": "float32"}, "nanoGPT computes in float32 on a CPU, whatever dtype says")
    else:
        to.map(key, value, {"dtype": value})


def _eval_only(key: str, value: Any, theirs: dict[str, Any], to: Migration) -> None:
    to.ignore(key, value, "zeroshard eval RUN")


def _backend(key: str, value: Any, theirs: dict[str, Any], to: Migration) -> None:
    to.ignore(key, value, "NCCL on GPUs, else the fastest there is; --comm names another")


_SPECIAL: dict[str, Callable[[str, Any, dict[str, Any], Migration], None]] = {
    "batch_size": _batch,
    "gradient_accumulation_steps": _batch,
    "block_size": _block_size,
    "dataset": _data,
    "eval_iters": _eval_iters,
    "always_save_checkpoint": _checkpoints,
    "init_from": _init,
    **dict.fromkeys(("wandb_log", "wandb_project", "wandb_run_name"), _wandb),
    **dict.fromkeys(("decay_lr", "warmup_iters", "lr_decay_iters", "min_lr"), _schedule),
    "device": _device,
    "dtype": _dtype,
    "eval_only": _eval_only,
    "backend": _backend,
}


class _NotConstantError(Exception):
    """The setting of this name was read, and its value is not a constant."""


class _Known(dict[str, Any]):
    """nanoGPT's settings; reading one whose value is not a constant raises `_NotConstantError`."""

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if isinstance(value, Unknown):
            raise _NotConstantError(key)
        return value


def _literal(text: str) -> Any:
    """Parse a flag's value as nanoGPT does: a Python literal, else text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return text
