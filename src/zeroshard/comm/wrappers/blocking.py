"""Communication without overlap: each operation ends before its call returns, so that computation stands still for it.

What overlap is worth is the difference between a run and the same run over `BlockingCommunicator`: the same
operations, in the same order, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from zeroshard.comm.base import DONE, Work
from zeroshard.comm.wrappers.wrapper import Wrapper


class BlockingCommunicator(Wrapper):
    """``inner``, whose operations have ended when they return.

    On CUDA the current stream is ordered after them, which is what `Work.wait` does there; the host goes on.
    """

    def _around(self, op: str, whole: Tensor | None, issue: Callable[[], Work], detail: str = "") -> Work:
        issue().wait()
        return DONE
