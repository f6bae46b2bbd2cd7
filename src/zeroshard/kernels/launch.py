"""What every Triton kernel here needs around it: Triton itself or its absence, rows, sizes, and torch.compile.

Triton is optional: where it is not installed ``triton`` and ``tl`` are None, `jit` leaves a function as it is, and
`zeroshard.kernels.dispatch` never chooses it. Triton decides when a kernel is *decorated* whether it will be compiled
or interpreted, so ``TRITON_INTERPRET=1`` must be set before this package is imported.

[Note: Launchers]
    A launcher is a plain function that is given all inputs and all outputs, launches kernels and returns nothing. In
    eager mode it is called as it stands (a custom operator would cost 35 us a call); under `torch.compile` it is one
    opaque node that writes to the named outputs, so the compiler neither traces Triton's code nor breaks its graph.

[Note: Bits]
    Tile shapes are functions of sizes and dtypes alone, never of a timing, and no kernel adds with atomics: the same
    inputs on the same kind of device give the same bits. The number of persistent programs, and with it the order in
    which partial weight gradients are added, depends on the number of multiprocessors.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor


def _optional(name: str) -> Any:
    """A module of Triton's; None where it is not installed: not every platform has it, torch's CPU build neither."""
    return import_module(name) if find_spec("triton") is not None else None


triton = _optional("triton")
tl = _optional("triton.language")

HAS_TRITON = triton is not None
INTERPRETED = HAS_TRITON and bool(triton.knobs.runtime.interpret)
INTERPRETED_PROGRAMS = 3  # where "multiprocessors" are a loop in Python: enough for every path of a persistent kernel

Launcher = Callable[..., None]
Traced = Callable[[str, tuple[Any, ...]], None]
_traced: ContextVar[Traced | None] = ContextVar("traced", default=None)


@contextmanager
def traced(instead: Traced) -> Generator[None]:
    """Calls in this block, on this thread, do on tensors without values what they would do on a GPU that has Triton.

    They allocate what they would; ``instead`` of a launch is called with the launcher's name and its arguments.
    """
    token = _traced.set(instead)
    try:
        yield
    finally:
        _traced.reset(token)


def is_traced() -> bool:
    """Whether this is inside `traced`."""
    return not torch.compiler.is_compiling() and _traced.get() is not None  # the compiler cannot read such a variable


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit`, or the function itself where there is no Triton."""
    return triton.jit(function) if HAS_TRITON else function


def opaque(name: str, *writes: str) -> Callable[[Launcher], Launcher]:
    """Make a launcher one node of a compiled graph; see [Note: Launchers].

    Args:
        name: of that node, ``zeroshard::name``.
        writes: names of the tensors that the launcher writes to.
    """

    def decorate(launcher: Launcher) -> Launcher:
        """``launcher`` in eager mode; under `torch.compile` its node, inside `traced` what stands in for it."""
        launch = on_its_device(launcher)
        operator = torch.library.custom_op(f"zeroshard::{name}", launch, mutates_args=writes)
        operator.register_fake(lambda *args, **kwargs: None)

        @wraps(launcher)
        def call(*args: Any) -> None:
            if torch.compiler.is_compiling():
                operator(*args)
            elif (instead := _traced.get()) is not None:
                instead(name, args)
            else:
                launch(*args)

        return call

    return decorate


def on_its_device(launcher: Launcher) -> Launcher:
    """``launcher`` on the device of its first CUDA tensor."""

    @wraps(launcher)
    def launch(*args: Any) -> None:
        with device_of(*args):
            launcher(*args)

    return launch


def device_of(*args: Any) -> AbstractContextManager[Any]:
    """A block in which the first CUDA tensor's device is the current one: Triton launches on whichever is."""
    device = next((each.device for each in args if isinstance(each, Tensor) and each.is_cuda), None)
    if device is None or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def accumulator(dtype: torch.dtype) -> Any:
    """The Triton dtype that sums are taken in: fp32, and fp64 for fp64."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """As `accumulator`, for torch."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rows_of(tensor: Tensor) -> Tensor:
    """``[rows, width]`` with neighbours in a row next to each other in memory: a view where there is one, else a copy.

    Args:
        tensor: ``[..., width]``, width >= 1, any strides.
    """
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least ``number`` >= 1."""
    return 1 << (number - 1).bit_length()


def num_multiprocessors(device: torch.device) -> int:
    """How many programs of a persistent kernel run side by side, at one a multiprocessor."""
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS
    return _num_multiprocessors(device)


@cache
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
