"""Choose the backend of an operation: plain PyTorch (the reference) or our Triton kernels.

The choice is explicit. It is the argument ``kernels=`` of each function and module; if that is None, the choice of the
surrounding `use_kernels`; without one, ``"auto"``: Triton on a CUDA device if it is installed, else the reference. In
code that `torch.compile` compiles, ``"auto"`` is the reference for operations that the compiler fuses with their
neighbours, which a node of ours would prevent (`Operation.fused_by_compiler`). A backend that was requested by name is
used, or an error is raised. A call inside a recomputed block (activation checkpointing) runs again on a thread of
autograd, which does not see `use_kernels`: pass the argument there, as the models do.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

import torch

from zeroshard.host.errors import UserError
from zeroshard.kernels.launch import HAS_TRITON, INTERPRETED, is_compiled, is_traced

Backend = Literal["reference", "triton"]
Choice = Literal["auto", "reference", "triton"]
CHOICES: tuple[Choice, ...] = get_args(Choice)


@dataclass(frozen=True, slots=True)
class Operation:
    """A row of `OPERATIONS`.

    Attributes:
        name: of the operation, in runs and reports.
        fused_by_compiler: whether ``auto`` leaves it to `torch.compile`, in code that this compiles.
    """

    name: str
    fused_by_compiler: bool = False


# A new operation is one file in this folder and one row here.
OPERATIONS: dict[str, Operation] = {
    "layer_norm": Operation("LayerNorm", fused_by_compiler=True),
    "rms_norm": Operation("RMSNorm", fused_by_compiler=True),
    "rope": Operation("RoPE", fused_by_compiler=True),
    "swiglu": Operation("SwiGLU", fused_by_compiler=True),
    "cross_entropy": Operation("CrossEntropy"),
    "linear_cross_entropy": Operation("LinearCrossEntropy"),
    "adamw8bit": Operation("AdamW8bit"),
    "block_formats": Operation("BlockFormats"),
    "carry_written": Operation("CarryWritten"),
}

_log = logging.getLogger("zeroshard.kernels")
_choice: ContextVar[Choice] = ContextVar("kernels", default="auto")


@contextmanager
def use_kernels(choice: Choice) -> Generator[None]:
    """Choose the backend of calls in this block, on this thread, whose ``kernels`` argument is None.

    Raises:
        ValueError: there is no such choice.
    """
    check_choice(choice)
    token = _choice.set(choice)
    try:
        yield
    finally:
        _choice.reset(token)


def check_choice(choice: str) -> None:
    """Raise UserError, a ValueError, if ``choice`` is not one of `CHOICES`."""
    if choice not in CHOICES:
        raise UserError("kernels", f"{choice!r} is unknown", f"choose {', '.join(CHOICES)}")


def asked_for(kernels: Choice | None) -> Choice:
    """Return ``kernels``, or if it is None the choice of the surrounding `use_kernels` (``"auto"`` without one)."""
    return _choice.get() if kernels is None else kernels


def choose(operation: str, device: torch.device, kernels: Choice | None = None) -> Backend:
    """Return the backend of ``operation`` for tensors on ``device``.

    Args:
        operation: a key of `OPERATIONS`.
        kernels: the caller's choice; None: that of `use_kernels`, or ``"auto"`` without one.

    Raises:
        UserError: a ValueError; the backend that was requested by name is not available, or there is no such choice.
    """
    choice = asked_for(kernels)
    if choice == "reference" or (is_compiled() and left_to_compiler(operation, choice)):
        return "reference"
    if is_traced():
        return "triton"
    if choice == "auto":
        if HAS_TRITON and device.type == "cuda":
            return "triton"
        if not torch.compiler.is_compiling():
            _say_once(device.type)
        return "reference"
    check_choice(choice)
    if not HAS_TRITON:
        raise UserError("kernels", "triton was asked for and is not installed", "pip install triton, or use auto")
    if device.type != "cuda" and not (INTERPRETED and device.type == "cpu"):
        what = f"triton was asked for and the tensors are on {device.type}"
        raise UserError("kernels", what, "move them to a CUDA device, or use auto or reference")
    return "triton"


def left_to_compiler(operation: str, kernels: Choice | None) -> bool:
    """Whether `torch.compile` computes ``operation`` of code that it compiles: `Operation.fused_by_compiler`."""
    return asked_for(kernels) == "auto" and operation in OPERATIONS and OPERATIONS[operation].fused_by_compiler


def describe(
    device: torch.device, kernels: Choice | None = None, operations: Iterable[str] | None = None
) -> dict[str, Backend]:
    """Return the backend of each of ``operations`` (None: all) on ``device``, by display name such as ``LayerNorm``.

    Raises:
        UserError: as `choose`; or there is no such operation.
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
        _log.warning("kernels: Triton is not installed; PyTorch's own operations are used (pip install triton)")
    else:
        _log.info("kernels: no CUDA device; PyTorch's own operations are used")
