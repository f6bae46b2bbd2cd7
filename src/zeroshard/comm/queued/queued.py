"""The base of communicators of CPU tensors whose operations run asynchronously on a background thread.

The background thread (`worker`) runs one operation after another, each with a topic, a number that differs between
ranks whose calls have diverged (`pieces.topic_of`).
"""

from __future__ import annotations

import weakref
from abc import abstractmethod

from torch import Tensor

from zeroshard.comm.base import Work
from zeroshard.comm.flat import FlatCommunicator
from zeroshard.comm.operation_log import OperationLog
from zeroshard.comm.queued.messages import require_cpu
from zeroshard.comm.queued.pieces import topic_of
from zeroshard.comm.queued.worker import Operation, Worker


class QueuedCommunicator(FlatCommunicator):
    """The base class; a subclass calls `_open` once its ``rank`` and ``world_size`` are known."""

    def _open(self, name: str) -> None:
        """Start the background thread, with this name."""
        self._log = OperationLog(0)
        self._worker = Worker(name)
        self._parts: weakref.WeakSet[QueuedCommunicator] = weakref.WeakSet()

    @property
    @abstractmethod
    def buffer_bytes(self) -> int:
        """Bytes of its own buffers on this rank, with those of its parts."""

    def close(self) -> None:
        """Finish the operations issued, parts first, end the thread and disconnect; may be called twice."""
        for part in list(self._parts):
            part.close()
        self._worker.close()
        self._disconnect()

    def _submit(self, op: str, operation: Operation, *tensors: Tensor) -> Work:
        """Queue ``operation`` on the worker; the first of ``tensors`` is the unsharded one."""
        require_cpu(type(self).__name__, *tensors)
        topic = topic_of(self._log, op, tensors[0] if tensors else None)

        def run() -> None:
            self._set_topic(topic)
            operation()

        return self._worker.submit(run)

    # -- what a subclass implements; all but `_disconnect` run on the worker's thread ---------------------------------

    @abstractmethod
    def _set_topic(self, topic: int) -> None:
        """Label all messages from now on with this topic."""

    @abstractmethod
    def _disconnect(self) -> None:
        """Close the connections or the memory to the other ranks; may be called twice."""
