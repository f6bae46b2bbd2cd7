"""Keep torch's compiler out of the functions by which torch calls the engine.

A module's hooks belong to its call, so dynamo would trace them when the module is compiled: it would break the graph at
each collective, and compile parts of the engine again for each unit. A function that has gone through `uncompiled` ends
the graph before it and runs as in eager mode, with all that it calls. A unit's ``forward`` is then one graph, whether
the unit was compiled (``block.compile()``) or the model around it (``torch.compile(model)``). FSDP2 does the same
(``_dynamo_disable`` in ``torch/distributed/fsdp/_fully_shard``). In a world of one rank units have no hooks, and the
model is one graph: [Note: One piece] in `zeroshard.zero.core.passes`.

[Note: Hooks inside of a unit]
    `zeroshard.zero.runtime.runtime.Runtime.attach_parts` hooks modules that are inside of a unit, where an end of the
    graph would cut the unit in two. Its hook is traced: dynamo guards `Unit.entered`, and leaves the rest out.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., object])
_REASON = (
    "zeroshard gathers weights and reduces gradients here, between graphs; leave fullgraph out, or compile blocks "
    "instead, by block.compile()"
)


def uncompiled(function: _Function) -> _Function:
    """Return ``function`` so that `torch.compile` neither traces it nor what it calls.

    It imports the compiler, which takes seconds; torch's optimizers import it too.
    """
    return torch.compiler.disable(function, reason=_REASON)


def made_once(make: _Function) -> _Function:
    """``make``, a function without arguments that calls `uncompiled`, such that it is called once."""
    _made.append(cache(make))
    return _made[-1]


_made: list[Any] = []
_COMPILER = "torch._dynamo"


class _NotImported(ModuleType):
    """The compiler, until more is asked of it than its settings, and to leave functions alone."""

    def __init__(self, folders: Iterable[str]) -> None:
        super().__init__(_COMPILER)
        self._folders, self._left = list(folders), list[Any]()

    def disable(self, function: Any, *how: Any, **named: Any) -> Any:
        """The function itself, which nothing compiles."""
        self._left.append(function)
        return function

    def __getattr__(self, name: str) -> Any:
        if name == "config":  # a file of its own
            self.__path__ = self._folders
            try:
                return importlib.import_module(f"{_COMPILER}.{name}")
            finally:
                del self.__path__
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        self.leave()
        return getattr(importlib.import_module(_COMPILER), name)

    def leave(self) -> None:
        """Be imported by whoever asks next."""
        if sys.modules.get(_COMPILER) is self:
            del sys.modules[_COMPILER]
        for function in self._left:
            vars(function).pop("__dynamo_disable", None)  # what torch remembers of it
        for made in _made:
            made.cache_clear()


@contextmanager
def compiler_not_imported() -> Generator[None]:
    """In this block, in which nothing may be compiled, the compiler is not imported, which would take two seconds.

    torch imports it to have functions left alone, such as those that compute shapes on the meta device.
    """
    spec = None if _COMPILER in sys.modules else find_spec(_COMPILER)
    if spec is None:
        yield
        return
    compiler = sys.modules[_COMPILER] = _NotImported(spec.submodule_search_locations or ())
    try:
        yield
    finally:
        compiler.leave()


_lock, _num_eager, _stance = threading.Lock(), 0, None


@contextmanager
def eagerly() -> Generator[None]:
    """In this block functions that are compiled run as they were written, and nothing is compiled.

    The compiler's state is that of a process. So of threads that are ranks the last one to leave restores it.
    """
    global _num_eager, _stance
    with _lock:
        _num_eager += 1
        if _num_eager == 1:
            _stance = torch.compiler.set_stance("force_eager")
    try:
        yield
    finally:
        with _lock:
            _num_eager -= 1
            if _num_eager == 0 and _stance is not None:
                _stance.__exit__(None, None, None)
