"""State that a writer reads in place while training goes on: copied only where it changes before it is written.

Between two updates weights and optimizer states stand still; a step's forward and backward only read them
(DataStates-LLM, Maurya et al., HPDC 2024, section 4). So a writer on the same host may read them where they lie. Just
before the update the loop copies what the writer has not come to yet, and waits for what it is reading.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from threading import Condition

from torch import Tensor


class CopyOnWrite:
    """Tensors that a writer may read where they lie, until `settle`.

    Args:
        shared: tensors on the CPU, distinct objects, each with a place for its copy.
    """

    def __init__(self, shared: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        self._unread = {id(tensor): (tensor, place) for tensor, place in shared}
        self._copies: dict[int, Tensor] = {}
        self._num_reading = 0
        self._changed = Condition()

    @contextmanager
    def reading(self, tensor: Tensor) -> Generator[Tensor]:
        """The content of ``tensor`` as of the save; read it inside, each tensor once. Called by the writer's threads.

        A tensor that is not among these is given back as it is.
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
        """Return once every tensor may change; the bytes that had to be copied for that."""
        num_bytes = 0
        while True:
            with self._changed:
                if not self._unread:
                    break
                key, (tensor, place) = self._unread.popitem()  # the last: the writer comes from the front
                self._copies[key] = place.copy_(tensor.detach())
            num_bytes += tensor.nbytes
        with self._changed:
            self._changed.wait_for(lambda: not self._num_reading)
        return num_bytes
