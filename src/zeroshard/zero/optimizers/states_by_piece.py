"""``optimizer.state`` of an optimizer over pieces: asked by one of the model's parameters it says where to look.

torch's is a dict that makes an empty one for each key that it does not have. So a log of ``optimizer.state[param]``, or
a reset of what is there, would find nothing and change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class NoState:
    """What makes the state of a key that has none: an empty dict for the class's own code, an error for any other.

    Args:
        holds_pieces: whether the class's own code runs now.
    """

    def __init__(self, holds_pieces: Callable[[], bool]) -> None:
        self._holds_pieces = holds_pieces

    def __call__(self) -> dict[str, Any]:
        """Of a key that has no state."""
        if self._holds_pieces():
            return {}
        raise RuntimeError(
            "optimizer.state: a parameter's is kept by the pieces of this rank, once there was a step: ask by those of "
            "zero.pieces(optimizer), or use zero.optim_state_dict(optimizer)"
        )

    def __reduce__(self) -> Any:  # a copy, or what was pickled, belongs to no engine
        return type, ({},)  # which is dict
