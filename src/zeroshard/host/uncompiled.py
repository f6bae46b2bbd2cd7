"""Keep torch's compiler out of the functions by which torch calls the engine.

A module's hooks belong to its call, so dynamo would trace them when the module is compiled: it would break the graph at
each collective, and compile parts of the engine again for each unit. A function that has gone through `uncompiled` ends
the graph before it and runs as in eager mode, with all that it calls. A unit's ``forward`` is then one graph, whether
the unit was compiled (``block.compile()``) or the model around it (``torch.compile(model)``). FSDP2 does the same
(``_dynamo_disable`` in ``torch/distributed/fsdp/_fully_shard``). In a world of one rank units have no hooks, and the
model is one graph: [Note: One piece] in `zeroshard.zero.core.passes`.

[Note: Hooks inside of a unit]
    `zeroshard.zero.runtime.module_hooks.attach_parts` hooks modules that are inside of a unit, where an end of the
    graph would cut the unit in two. Its hook is traced: dynamo guards `Unit.entered`, and leaves the rest out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TypeVar

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
