"""Support code of all Triton kernels here: the optional import of Triton, launchers, row views and tile sizes.

Triton is optional. If it is not installed, ``triton`` and ``tl`` are None, `jit` returns a function unchanged, and
`zeroshard.kernels.dispatch` chooses Triton only inside `traced`, where nothing is launched. Triton decides when a
kernel is *decorated* whether to compile or interpret it, so ``TRITON_INTERPRET=1`` must be set before this package is
imported.

[Note: Launchers]
    A launcher is a plain function that takes all inputs and all outputs, launches kernels and returns nothing. In eager
    mode it is called directly (a custom operator would cost 35 us per call). Under `torch.compile` it is one opaque
    node that writes to the named outputs, so the compiler neither traces Triton's code nor breaks its graph.

[Note: Bits]
    Tile shapes depend on sizes and dtypes alone, never on a timing, and no kernel adds with atomics: the same inputs on
    the same kind of device give the same bits. The number of persistent programs, and with it the order in which
    partial weight gradients are added, depends on the number of multiprocessors.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor


def _optional(name: str) -> Any:
    """Import a module of Triton; None if Triton is not installed, as on some platforms and with torch's CPU build."""
    return import_module(name) if find_spec("triton") is not None else None


triton = _optional("triton")
tl = _optional("triton.language")

HAS_TRITON = triton is not None
INTERPRETED = HAS_TRITON and bool(triton.knobs.runtime.interpret)
INTERPRETED_PROGRAMS = 3  # of a persistent kernel under Triton's interpreter: enough to reach every path of it

MOST_COMPILED = 256  # launches that a `PreparedKernel` remembers: of shapes, mostly
_UNCHANGED: AbstractContextManager[None] = nullcontext()

Launcher = Callable[..., None]
Traced = Callable[[str, tuple[Any, ...]], None]
_traced: ContextVar[Traced | None] = ContextVar("traced", default=None)
_as_compiled: ContextVar[bool] = ContextVar("as_compiled", default=False)


@contextmanager
def traced(instead: Traced, *, compiled: bool = False) -> Generator[None]:
    """In this block, on this thread, run operations on tensors without values as if on a GPU with Triton.

    They allocate the same tensors. Instead of a launch, ``instead`` is called with the launcher's name and arguments.
    ``compiled``: whether they are to be those of code that `torch.compile` compiles.
    """
    tokens = _traced.set(instead), _as_compiled.set(compiled)
    try:
        yield
    finally:
        _traced.reset(tokens[0])
        _as_compiled.reset(tokens[1])


def is_traced() -> bool:
    """Whether this code runs inside `traced`; False under `torch.compile`."""
    return not torch.compiler.is_compiling() and _traced.get() is not None  # the compiler cannot read a ContextVar


def is_compiled() -> bool:
    """Whether `torch.compile` compiles this code, or `traced` runs it as if it did."""
    return torch.compiler.is_compiling() or _as_compiled.get()


def jit(function: Callable[..., Any]) -> Any:
    """Apply `triton.jit`, or return the function unchanged if Triton is not installed."""
    return triton.jit(function) if HAS_TRITON else function


def opaque(name: str, *writes: str) -> Callable[[Launcher], Launcher]:
    """Make a launcher one opaque node of a compiled graph; see [Note: Launchers].

    Args:
        name: name of that node, which is ``zeroshard::name``.
        writes: names of the launcher's arguments that it writes to.
    """

    def decorate(launcher: Launcher) -> Launcher:
        """Wrap ``launcher``: `torch.compile` records its node, `traced` calls its substitute, eager mode calls it."""
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
    """Make ``launcher`` run with its first CUDA tensor's device as the current device."""

    @wraps(launcher)
    def launch(*args: Any) -> None:
        with device_of(*args):
            launcher(*args)

    return launch


def device_of(*args: Any) -> AbstractContextManager[Any]:
    """Return a context in which the first CUDA tensor's device is current: Triton launches on the current device."""
    for each in args:
        if isinstance(each, Tensor) and each.is_cuda:
            device = each.device
            return _UNCHANGED if device.index == torch.cuda.current_device() else torch.cuda.device(device)
    return _UNCHANGED


class PreparedKernel:
    """A kernel with its constants, for tensors of the same dtypes at every launch.

    For each launch Triton derives from all arguments which compiled kernel to use, which takes 20 us of the host. Here
    a dictionary remembers it, by the device and by what else Triton compiles for: whether addresses are multiples of
    16, and the values of the numbers. It is launched as in Triton's tutorial "Fused Softmax".
    """

    def __init__(self, kernel: Any, **constants: Any) -> None:
        """Remember the arguments of every launch.

        Args:
            kernel: a function under `jit`, whose parameters are tensors, then numbers, then constants.
            constants: all of its constants, and Triton's options, such as ``num_warps``.
        """
        self._kernel, self._constants = kernel, constants
        self._compiled: dict[tuple[int, ...], Any] = {}
        self._values: list[Any] = []  # of the constants, in the order of the kernel's parameters

    def launch(self, grid: tuple[int, int, int], tensors: Sequence[Tensor], numbers: Sequence[int]) -> None:
        """Launch it on the current device, which is that of the tensors."""
        addresses = 0
        for tensor in tensors:
            addresses |= tensor.data_ptr()
        key = (tensors[0].get_device(), *numbers)
        compiled = None if addresses % 16 else self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*tensors, *numbers, *self._values)
            return
        compiled = self._kernel[grid](*tensors, *numbers, **self._constants)
        if compiled is None or addresses % 16 or torch.version.hip:  # interpreted; rare; compiled for sizes of tensors
            return
        if len(self._compiled) >= MOST_COMPILED:
            self._compiled.clear()
        self._values = [self._constants[name] for name in self._kernel.arg_names if name in self._constants]
        self._compiled[key] = compiled


def accumulator(dtype: torch.dtype) -> Any:
    """Return the Triton dtype in which sums are accumulated: fp64 for fp64, otherwise fp32."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return `accumulator` as a dtype of torch."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def dense_rows_of(tensor: Tensor) -> Tensor:
    """Return ``tensor [..., width]`` itself if it is contiguous, else `rows_of` it; `row_stride` is right for both."""
    return tensor if tensor.is_contiguous() else rows_of(tensor)


def row_stride(rows: Tensor) -> int:
    """Return the number of elements from one row to the next of what `dense_rows_of` returned."""
    return rows.stride(0) if rows.ndim == 2 else rows.shape[-1]


def rows_of(tensor: Tensor) -> Tensor:
    """Return ``tensor`` as ``[rows, width]`` with rows that are contiguous in memory: a view if possible, else a copy.

    Args:
        tensor: ``[..., width]``, width >= 1, any strides.
    """
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least ``number`` >= 1."""
    return 1 << (number - 1).bit_length()


def num_multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors: persistent programs that run at the same time: [Note: Bits]."""
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS
    return _num_multiprocessors(device)


@cache
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
