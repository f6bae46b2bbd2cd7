"""State that the writer reads in place while training continues: copied only if it changes before it is written.

Weights and optimizer states do not change between two updates; a step's forward and backward only read them
(DataStates-LLM, Maurya et al., HPDC 2024, section 4). So a writer thread may read CPU state in place. Just before the
update, the training loop copies the tensors that the writer has not reached yet, and waits for those that the writer is
reading.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from threading import Condition

from torch import Tensor


class CopyOnWrite:
    """Tensors that a writer may read in place, until `settle`.

    Args:
        shared: tensors on the CPU, distinct objects, each with the destination of its copy.
    """

    def __init__(self, shared: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        self._unread = {id(tensor): (tensor, place) for tensor, place in shared}
        self._copies: dict[int, Tensor] = {}
        self._num_reading = 0
        self._changed = Condition()

    @contextmanager
    def reading(self, tensor: Tensor) -> Generator[Tensor]:
        """Yield the content of ``tensor`` as of the start of the save; once per tensor. The writer's threads call it.

        A tensor that is not one of the shared ones is yielded as it is.
        """
        with self._changed:
            shared = self._unread.pop(id(tensor), None)
            content = self._copies.pop(id(tensor), tensor)
            self._num_reading += shared is not None
        try:
            yield content
        finally:
            if shared is not None:
                with self._changed:
                    self._num_reading -= 1
                    self._changed.notify_all()

    def settle(self) -> int:
        """Return once every tensor may change; returns the number of bytes that had to be copied for that."""
        num_bytes = 0
        while True:
            with self._changed:
                if not self._unread:
                    break
                key, (tensor, place) = self._unread.popitem()  # the last one: the writer proceeds from the front
                self._copies[key] = place.copy_(tensor.detach())
            num_bytes += tensor.nbytes
        with self._changed:
            self._changed.wait_for(lambda: not self._num_reading)
        return num_bytes
