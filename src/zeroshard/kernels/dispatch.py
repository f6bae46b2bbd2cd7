"""Who serves an operation: plain PyTorch, our Triton kernels, or Liger-Kernel.

The choice is explicit. It is an argument of each function and module (``kernels=``); where that is None, what
`use_kernels` says around the call; else ``"auto"``: Triton on a CUDA device where it is installed, else the reference.
What was asked for by name is served or refused, never replaced. A call inside a recomputed block (activation
checkpointing) runs again on a thread of autograd's, which does not see `use_kernels`: give the argument there, as the
models do.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Literal, get_args

import torch

from zeroshard.errors import UserError
from zeroshard.kernels.launch import HAS_TRITON, INTERPRETED, is_traced

Backend = Literal["reference", "triton", "liger"]
Choice = Literal["auto", "reference", "triton", "liger"]
CHOICES: tuple[Choice, ...] = get_args(Choice)


@dataclass(frozen=True, slots=True)
class Operation:
    """A row of `OPERATIONS`.

    Attributes:
        name: as runs and reports show it.
        liger: whether Liger-Kernel has a form of it, which `zeroshard.kernels.liger` calls; where it has none,
            ``"liger"`` is served as ``"auto"`` is.
    """

    name: str
    liger: bool = False


# A new operation is one file in this folder and one row here.
OPERATIONS: dict[str, Operation] = {
    "layer_norm": Operation("LayerNorm", liger=True),
    "rms_norm": Operation("RMSNorm", liger=True),
    "rope": Operation("RoPE", liger=True),
    "swiglu": Operation("SwiGLU", liger=True),
    "geglu": Operation("GeGLU", liger=True),
    "cross_entropy": Operation("CrossEntropy", liger=True),
    "linear_cross_entropy": Operation("LinearCrossEntropy", liger=True),
    "adamw": Operation("AdamW"),
    "sum_of_squares": Operation("SumOfSquares"),
    "block_formats": Operation("BlockFormats"),
}

_log = logging.getLogger("zeroshard.kernels")
_choice: ContextVar[Choice] = ContextVar("kernels", default="auto")
_HAS_LIGER = find_spec("liger_kernel") is not None


@contextmanager
def use_kernels(choice: Choice) -> Generator[None]:
    """Calls in this block, on this thread, that do not say which kernels they want get these.

    Raises:
        ValueError: no such choice.
    """
    check_choice(choice)
    token = _choice.set(choice)
    try:
        yield
    finally:
        _choice.reset(token)


def check_choice(choice: str) -> None:
    """Raise UserError, a ValueError, where ``choice`` is none of `CHOICES`."""
    if choice not in CHOICES:
        raise UserError("kernels", f"{choice!r} is unknown", f"choose {', '.join(CHOICES)}")


def asked_for(kernels: Choice | None) -> Choice:
    """``kernels``; where it is None, what `use_kernels` says around the call."""
    return _choice.get() if kernels is None else kernels


def choose(operation: str, device: torch.device, kernels: Choice | None = None) -> Backend:
    """Who serves ``operation`` for tensors on ``device``.

    Args:
        operation: a key of `OPERATIONS`.
        device: of the tensors.
        kernels: None: as `use_kernels` says, else ``"auto"``.

    Raises:
        UserError: a ValueError; what was asked for by name cannot be had here, or there is no such choice.
    """
    choice = asked_for(kernels)
    if choice == "reference":
        return "reference"
    if is_traced():
        return "triton"
    if choice == "auto":
        if HAS_TRITON and device.type == "cuda":
            return "triton"
        if not torch.compiler.is_compiling():
            _say_once(device.type)
        return "reference"
    if choice == "triton":
        if not HAS_TRITON:
            raise UserError("kernels", "triton was asked for and is not installed", "pip install triton, or use auto")
        if device.type != "cuda" and not (INTERPRETED and device.type == "cpu"):
            what = f"triton was asked for and the tensors are on {device.type}"
            raise UserError("kernels", what, "move them to a CUDA device, or use auto or reference")
        return "triton"
    check_choice(choice)
    if not _operation(operation).liger:
        return choose(operation, device, "auto")
    if not _HAS_LIGER:
        raise UserError("kernels", "liger was asked for and is not installed", "pip install liger-kernel, or use auto")
    if device.type != "cuda":
        what = f"liger was asked for and the tensors are on {device.type}"
        raise UserError("kernels", what, "move them to a CUDA device, or use auto or reference")
    return "liger"


def describe(
    device: torch.device, kernels: Choice | None = None, operations: Iterable[str] | None = None
) -> dict[str, Backend]:
    """Who serves each of ``operations`` (None: all) on ``device``, by the operation's name as in ``LayerNorm``.

    Raises:
        UserError: as `choose`; no such operation.
    """
    wanted = OPERATIONS if operations is None else operations
    return {_operation(operation).name: choose(operation, device, kernels) for operation in wanted}


def _operation(name: str) -> Operation:
    if name not in OPERATIONS:
        raise UserError("kernels", f"there is no operation {name!r}", f"choose {', '.join(OPERATIONS)}, or add a row")
    return OPERATIONS[name]


@cache
def _say_once(device_type: str) -> None:
    if device_type == "cuda":
        _log.warning("kernels: Triton is not installed; PyTorch's own operations serve (pip install triton)")
    else:
        _log.info("kernels: no CUDA device; PyTorch's own operations serve")
