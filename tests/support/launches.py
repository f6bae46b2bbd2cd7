"""Operations of a step, as a GPU would be asked to launch them: counted by kind, and copies by the line that asked."""

import sys
from collections import Counter
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import zeroshard

SOURCES = f"{Path(zeroshard.__file__).parent}/"
COPIES = {"copy_", "clone", "_to_copy", "_foreach_copy_", "cat"}
# They make a tensor without a kernel.
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "_local_scalar_dense"}


class Launches(TorchDispatchMode):
    """Counts what launches a kernel on a GPU; a foreach operation is one, views and memory alone are none.

    Attributes:
        of_engine, of_model: operations by name, those that the engine asks for and all others.
        copies: those of them that only copy or cast, by file and function; of autograd's own the file is empty.
    """

    def __init__(self):
        super().__init__()
        self.of_engine, self.of_model, self.copies = Counter(), Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        # A subclass (`ShardedGrad`) decides itself what it launches. Collectives are no launches of the engine's.
        if not types and not func.is_view and name not in FREE and not name.startswith(("_record_function", "detach")):
            file, function = _asked_by()
            if not file.startswith("comm/"):
                (self.of_engine if file.startswith(("zero/", "changed_values")) else self.of_model)[name] += 1
                if name in COPIES:
                    self.copies[file, function] += 1
        return func(*args, **(kwargs or {}))

    @property
    def copies_of_engine(self):
        """How many of the copies the engine asks for."""
        return sum(number for name, number in self.of_engine.items() if name in COPIES)


def _asked_by():
    """File and function of the innermost line of the package, past the file that has torch's private names."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(SOURCES) and not file.endswith("host/torch_internals.py"):
            return file.removeprefix(SOURCES), frame.f_code.co_name
        frame = frame.f_back
    return "", ""


def launches_of(step, *, warm=2):
    """What one call of ``step`` launches, after ``warm`` calls of it."""
    for _ in range(warm):
        step()
    with torch.utils._python_dispatch._disable_current_modes(), Launches() as found:
        step()
    return found
