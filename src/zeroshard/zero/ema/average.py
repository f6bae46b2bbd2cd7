"""An exponential moving average of the weights, sharded like the optimizer's states.

    average <- decay * average + (1 - decay) * weight        after each step, for the pieces that this rank updates

Averaged weights often evaluate better than the last ones (Polyak and Juditsky 1992, "Acceleration of Stochastic
Approximation by Averaging"). An update needs no communication, because averages are sharded like the master weights.
To be used they are swapped with the weights, which needs no second model, and are then gathered as weights are.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager

import torch
from torch import Tensor

from zeroshard.host.torch_internals import lerp_each

EMA = "ema"  # the kind of its tensors in a checkpoint


class Ema:
    """The average of some weights, which starts from their current values; `Zero.ema` makes one for an engine.

    Args:
        weights: the tensors that an optimizer on this rank updates, each once: pieces of master weights, parameters,
            `DTensor`s. Those that are not of a floating type have no average.
        decay: how much of the old average an update keeps, in [0, 1).
        replaced: called after averages and weights were swapped; may be collective.
        complete: called before weights are read: waits for updates of them that are under way.
        called: told the name of a method that every rank must call, when it is called.

    Attributes:
        decay: may be changed between updates; a low one early forgets the initial values sooner.
        state: ``{weight: {"ema": average}}``, of the weight's shape and dtype; laid out like an optimizer's state, so
            that a checkpoint saves them alike.
        applied: whether the averages are in the place of the weights now.

    Raises:
        ValueError: a decay outside [0, 1).
    """

    def __init__(
        self,
        weights: Iterable[Tensor],
        decay: float,
        replaced: Callable[[], None] = lambda: None,
        complete: Callable[[], None] = lambda: None,
        called: Callable[[str], None] = lambda method: None,
    ) -> None:
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"decay: {decay} is outside [0, 1)")
        self.decay = decay
        self.applied = False
        self.state: dict[Tensor, dict[str, Tensor]] = {
            weight: {EMA: weight.detach().clone()} for weight in weights if weight.dtype.is_floating_point
        }
        self._replaced, self._complete, self._called = replaced, complete, called

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages with the current weights; call it once after each step that was taken.

        Raises:
            RuntimeError: inside `weights`.
        """
        self._called("update")
        self.require_away("update")
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for weight, state in self.state.items():
            if _local(state[EMA]).dtype != weight.dtype:  # it was frozen when the average began
                state[EMA] = state[EMA].to(weight.dtype)
            by_kind.setdefault((weight.device, weight.dtype), []).append(weight)
        for weights in by_kind.values():
            averages = [_local(self.state[weight][EMA]) for weight in weights]
            lerp_each(averages, [_local(weight) for weight in weights], 1.0 - self.decay)

    @contextmanager
    def weights(self) -> Generator[None]:
        """In this block the model computes with the averages: evaluate it, read its ``state_dict``. Collective.

        Raises:
            RuntimeError: inside another such block.
        """
        self._called("weights")
        self.require_away("weights")
        self._swap()
        self.applied = True
        try:
            yield
        finally:
            self._swap()
            self.applied = False

    def require_away(self, what: str) -> None:
        """Raise RuntimeError while the averages are in the place of the weights; wait for updates under way."""
        self._complete()
        if self.applied:
            raise RuntimeError(f"{what}: the averages are in the place of the weights; leave ema.weights() first")

    @torch.no_grad()
    def load(self, read: Callable[[Tensor], Tensor | None]) -> None:
        """Load saved averages; if ``read(weight)`` is None, none was saved, and the average starts from the weight.

        Args:
            read: returns the saved average of a weight, with as many elements as the weight has on this rank.

        Raises:
            RuntimeError: inside `weights`.
        """
        self.require_away("load")
        for weight, state in self.state.items():
            average, saved = _local(state[EMA]), read(weight)
            average.copy_(_local(weight) if saved is None else saved.view(average.shape))

    @property
    def num_bytes(self) -> int:
        """Bytes of the averages on this rank."""
        averages = [_local(state[EMA]) for state in self.state.values()]
        return sum(average.nbytes for average in averages)

    @torch.no_grad()
    def _swap(self) -> None:
        for weight, state in self.state.items():
            here, average = _local(weight.detach()), _local(state[EMA])
            held = here.clone()
            here.copy_(average)
            average.copy_(held)
        self._replaced()


def _local(tensor: Tensor) -> Tensor:
    """The tensor, or a `DTensor`'s local part; `DTensor` is not imported, because that takes most of a second."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()
