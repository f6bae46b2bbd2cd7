"""Convert nanoGPT's settings to ours: https://github.com/karpathy/nanoGPT

Its configurations are Python files whose assignments override the defaults of ``train.py``; so do flags
``--key=value``, and whatever comes later on the command line wins. Files are never executed: assignments of constants
and arithmetic are read (``gradient_accumulation_steps = 5 * 8``); any other statement that may set a key is refused.
`zeroshard.interop.nanogpt_weights` imports weights.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
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
    Migration,
    became,
    is_number,
    require_kind,
)
from zeroshard.regular_files import read_text
from zeroshard.train.config.validate import nearest

GPT2_IDS, PADDED_IDS = 50_257, 50_304  # ids of GPT-2's tokenizer, and nanoGPT's padded vocabulary for them
_OPERATIONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
_KINDS = {bool: SWITCH, int: COUNT, float: NUMBER, str: TEXT}  # by the type of the default
_WORDS = ("out_dir", "wandb_project", "wandb_run_name")  # decide nothing in a run, so their values may be unknown


def read_nanogpt(words: Sequence[str]) -> Migration:
    """Convert ``[FILE.py] [--key=value ...]`` to our settings.

    Raises:
        UserError: a file is not Python or sets a key in another way than by a constant, nanoGPT has no such key, a flag
            has no value, or a value has the wrong type.
    """
    given: dict[str, Any] = {}
    for word in words:
        if not word.startswith("--"):
            given |= _assigned(Path(word))
            continue
        key, equals, text = word[2:].partition("=")
        if not equals:
            raise UserError(word, "has no value", f"write {word}=VALUE, as nanoGPT takes it")
        try:
            given[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            given[key] = text  # as nanoGPT reads a flag
    for key, value in given.items():
        if key not in SETTINGS:
            raise UserError(key, "nanoGPT has no such setting", nearest(key, SETTINGS, "remove it"))
        if value is not None or key not in _WORDS:
            require_kind(key, value, _KINDS[type(SETTINGS[key][0])])
    to = Migration(" ".join(["nanoGPT:", *words]))
    to.ours |= {"model.name": "gpt2-124m", "model.activation": "gelu", "strategy": "zero2", "seed": 1337}
    theirs = _DEFAULTS | given
    for key, (_, becomes) in SETTINGS.items():
        found = "its value is no constant" if theirs[key] is None else became(theirs[key], theirs, becomes)
        to.add(key, theirs[key], found, is_default=key not in given)
    return to


def _assigned(path: Path) -> dict[str, Any]:
    """Return what a file assigns; None where one of `_WORDS` is no constant."""
    todo = "give one of nanoGPT's config files"
    try:
        statements = ast.parse(read_text(path)).body
    except OSError as error:
        raise UserError(str(path), f"cannot be read ({error.strerror})", todo) from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two: it is nested too deeply
        raise UserError(str(path), f"is no Python ({error or type(error).__name__})", todo) from None
    found: dict[str, Any] = {}
    for statement in statements:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=expression):
                try:
                    found[name] = _value(expression)
                except (ArithmeticError, TypeError, ValueError, RecursionError):
                    if name not in _WORDS:
                        raise _refusal(path, statement, f"the value of {name} is no constant") from None
                    found[name] = None
            case ast.Import() | ast.Expr(value=ast.Constant()):
                pass
            case _:
                raise _refusal(path, statement, "it is no assignment KEY = VALUE, and may set anything")
    return found


def _refusal(path: Path, statement: ast.stmt, why: str) -> UserError:
    return UserError(str(path), f"line {statement.lineno}: {why}", "write KEY = VALUE, or give --KEY=VALUE")


def _value(node: ast.expr) -> Any:
    """Return the value of a constant, or of products and so on of numbers; raise ValueError for anything else."""
    match node:
        case ast.Constant(value=bool() | int() | float() | str()):
            return node.value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            both = [_value(left), _value(right)]
            if all(map(is_number, both)):  # text could be multiplied to any length
                return _OPERATIONS[type(op)](*both)
    raise ValueError


def _data(value: Any, theirs: Mapping[str, Any]) -> Became:
    padded = {"data.tokenizer": "gpt2", "model.vocab_size": PADDED_IDS}
    files = {"data.source": "bin", "data.path": [f"data/{value}"]}
    if Path("data", value, "meta.pkl").is_file():
        return files | {"data.tokenizer": "none"}, "its train.bin and val.bin; characters in a pickle are not read"
    if value == "openwebtext":
        ours = {"data.source": value, "data.val_fraction": 0.0005}
        return ours | padded, "the validation documents differ from nanoGPT's"
    if value == "shakespeare_char":
        ours = {"data.source": "tinyshakespeare", "data.tokenizer": "bytes"}
        return ours, "changed: 256 bytes in place of 65 characters; the text is ASCII"
    if value == "shakespeare":
        return {"data.source": "tinyshakespeare"} | padded
    return files | padded, "its train.bin and val.bin; ids of another tokenizer: data.tokenizer none"


def _rows(value: Any, theirs: Mapping[str, Any]) -> Became:
    rows = value * theirs["batch_size"]
    return {"global_batch_size": rows}, f"{value} micro-batches of all ranks together"


def _eval_rows(value: Any, theirs: Mapping[str, Any]) -> Became:
    rows = value * theirs["batch_size"]
    return {"eval_rows": rows}, "changed: sequences of validation alone, spread over it, the same each time"


def _checkpoints(value: Any, theirs: Mapping[str, Any]) -> Became:
    why = "saved whether validation improved or not; the newest is kept"
    return {"checkpoint_interval": theirs["eval_interval"], "keep_checkpoints": 1}, why


def _init(value: Any, theirs: Mapping[str, Any]) -> Became:
    if value in ("scratch", "resume"):
        ours = {"resume": "none" if value == "scratch" else "auto"}
        return ours, "zeroshard import OUT_DIR/ckpt.pt RUN makes a run of nanoGPT's weights"
    return "zeroshard import FOLDER RUN makes a run of a Hugging Face folder"


def _decay(value: Any, theirs: Mapping[str, Any]) -> Became:
    if value:
        return {}, "a cosine, as there"
    return {"warmup_steps": 0, "min_lr": theirs["learning_rate"]}, "the learning rate stays as it is"


def _warmup_steps(value: Any, theirs: Mapping[str, Any]) -> Became:
    return {"warmup_steps": min(value, theirs["max_iters"])} if theirs["decay_lr"] else _NO_DECAY


def _decay_steps(value: Any, theirs: Mapping[str, Any]) -> Became:
    if not theirs["decay_lr"]:
        return _NO_DECAY
    if value == theirs["max_iters"]:
        return {}, "decays until max_steps"
    return {"decay_steps": max(value, min(theirs["warmup_iters"], theirs["max_iters"]), 1)}


def _dtype(value: Any, theirs: Mapping[str, Any]) -> Became:
    if theirs["device"].startswith("cpu"):
        return {"dtype": "float32"}, "nanoGPT computes in float32 on a CPU, whatever dtype says"
    return {"dtype": value}


_NO_DECAY = "decay_lr is off"
_BACKEND = "NCCL on GPUs, else the fastest there is; --comm names another"
# nanoGPT's settings with the defaults of its train.py, in its order, and what each becomes.
SETTINGS: dict[str, tuple[Any, Becomes]] = {
    "out_dir": ("out", "out"),
    "eval_interval": (2000, "eval_interval"),
    "log_interval": (1, "log_interval"),
    "eval_iters": (200, _eval_rows),
    "eval_only": (False, lambda value, _: "zeroshard eval RUN"),
    "always_save_checkpoint": (True, _checkpoints),
    "init_from": ("scratch", _init),
    "wandb_log": (False, lambda value, _: {"track.to": ["wandb"] if value else []}),
    "wandb_project": ("owt", "track.project"),
    "wandb_run_name": ("gpt2", "track.name"),
    "dataset": ("openwebtext", _data),
    "gradient_accumulation_steps": (40, _rows),
    "batch_size": (12, "micro_batch_size"),
    "block_size": (1024, lambda value, _: {"seq_len": value, "model.seq_len": value}),
    "n_layer": (12, "model.n_layer"),
    "n_head": (12, "model.n_head"),
    "n_embd": (768, "model.n_embd"),
    "dropout": (0.0, "model.dropout"),
    "bias": (False, "model.bias"),
    "learning_rate": (6e-4, "lr"),
    "max_iters": (600_000, "max_steps"),
    "weight_decay": (1e-1, "weight_decay"),
    "beta1": (0.9, "beta1"),
    "beta2": (0.95, "beta2"),
    "grad_clip": (1.0, "grad_clip"),
    "decay_lr": (True, _decay),
    "warmup_iters": (2000, _warmup_steps),
    "lr_decay_iters": (600_000, _decay_steps),
    "min_lr": (6e-5, lambda value, theirs: {"min_lr": value} if theirs["decay_lr"] else _NO_DECAY),
    "backend": ("nccl", lambda value, _: _BACKEND),
    "device": ("cuda", lambda value, _: {"device": value if value in ("cpu", "cuda") else "auto"}),
    "dtype": ("bfloat16", _dtype),
    "compile": (True, "compile"),
}
_DEFAULTS = {key: default for key, (default, _) in SETTINGS.items()}
