"""Communication without overlap: each operation ends before its call returns, so computation waits for it.

To measure how much time overlap saves, compare a run with the same run over `BlockingCommunicator`: it issues the same
operations in the same order, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from zeroshard.comm.base import DONE, Work
from zeroshard.comm.wrappers.wrapper import Wrapper


class BlockingCommunicator(Wrapper):
    """``inner``, except that each call waits for its operation.

    On CUDA the current stream waits, as `Work.wait` has it do; the host does not block.
    """

    def _around(self, op: str, unsharded: Tensor | None, issue: Callable[[], Work], detail: str = "") -> Work:
        issue().wait()
        return DONE
