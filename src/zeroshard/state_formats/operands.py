"""`FormattedStates`: states in another format between steps, which are decoded for a step of the pieces they are of.

With `zeroshard.Zero` steps run unit by unit, so only one unit's states are wide at a time::

    between steps   exp_avg_codes, exp_avg_scales      every unit
    in its turn     exp_avg fp32, exp_avg_sq fp32      one unit: decoded, stepped, encoded
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from zeroshard.kernels import random_rounding
from zeroshard.kernels.random_rounding import StepNoise, decode_states, encode_states, nearest
from zeroshard.state_formats.formats import STATES, StateFormat
from zeroshard.zero.core.optimizer import State, StepOperands
from zeroshard.zero.optimizers.piecewise import PiecewiseOptimizer

Place = Callable[[Any], tuple[str, int]]  # of a piece: its parameter's name, and its first element there
Kept = dict[str, list[Tensor]]  # by kind: the tensors in which a state that is wide now was kept


class FormattedStates(StepOperands):
    """Decodes the states of an optimizer's pieces for their step, and encodes them after it.

    Args:
        optimizer: of a class that `zeroshard.state_formats.formats.format_of` accepts.
        form: the format.
        place: tells where a piece lies in its parameter.
    """

    def __init__(self, optimizer: Any, form: StateFormat, place: Place) -> None:
        self._optimizer, self.form, self._place = optimizer, form, place
        self._kinds = STATES[type(optimizer)]
        self._brought: list[tuple[Any, Kept]] = []

    def elsewhere(self, pieces: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Those that a step updates: states that it makes are encoded as well."""
        return [piece for piece in pieces if piece.grad is not None and piece.dtype == torch.float32]

    def bring(self, pieces: Sequence[nn.Parameter]) -> None:
        """Decode the states that there are."""
        states = self._optimizer.state
        decoded = zip(pieces, self._decoded([states.get(piece, {}) for piece in pieces]), strict=True)
        self._brought = [*self._brought, *decoded]  # another list: copies of this object for other threads have theirs

    def take_back(self) -> None:
        """Encode what was decoded, and what the step has made."""
        brought, self._brought = self._brought, []
        self._encode([(self._optimizer.state.get(piece, {}), kept, *self._place(piece)) for piece, kept in brought])

    def loaded(self, pieces: Iterable[nn.Parameter]) -> None:
        """Have states that were just loaded in the format: kept ones lose nothing, and others are encoded."""
        exact = True
        for piece in (piece for piece in pieces if piece.dtype == torch.float32):
            state = self._optimizer.state.get(piece, {})
            for kind in self._kinds:
                # torch's `load_state_dict` has converted them to the parameter's dtype.
                for name, dtype in self.form.kept.items():
                    if name and f"{kind}{name}" in state:
                        state[f"{kind}{name}"] = state[f"{kind}{name}"].to(dtype)
            wide = {kind: state[kind].clone() for kind in self._kinds if isinstance(state.get(kind), Tensor)}
            self._encode([(state, {}, *self._place(piece))])
            again = dict(state)
            self._decoded([again])
            exact = exact and all(torch.equal(again[kind], value) for kind, value in wide.items())
        if not exact:
            what = f"the loaded states are rounded to {self.form.name}, in which this optimizer keeps them"
            warnings.warn(f"optimizer: {what} (state_format)", stacklevel=2)

    def kept(self, state: Mapping[str, Any]) -> State:
        """Return states that the class has made, of any tensor, as they are kept between steps; they do not change."""
        found = {kind: value.clone() if isinstance(value, Tensor) else value for kind, value in state.items()}
        self._encode([(found, {}, "", 0)])
        return found

    def _decoded(self, states: Sequence[State]) -> list[Kept]:
        """Put wide states in the place of what they are kept in, which is returned for each of ``states``."""
        found: list[Kept] = [{} for _ in states]
        rows: list[random_rounding.State] = []
        for state, own in zip(states, found, strict=True):
            for kind in self._kinds:
                names = [f"{kind}{name}" for name in self.form.kept]
                tensors = [state.get(name) for name in names]
                if [getattr(each, "dtype", None) for each in tensors] == [*self.form.kept.values()]:
                    own[kind] = [state.pop(name) for name in names]
                    state[kind] = torch.empty_like(own[kind][0], dtype=torch.float32)
                    rows.append(random_rounding.State(state[kind], own[kind], self.form.code_of(kind)))
        decode_states(rows, self.form.block)
        return found

    def _encode(self, pieces: Sequence[tuple[State, Kept, str, int]]) -> None:
        """Encode the wide states of pieces, into the tensors in which they were kept if there are any.

        Of each piece the states, these tensors, and where it lies.
        """
        rows: list[random_rounding.State] = []
        noise = StepNoise()
        for state, kept, name, first in pieces:
            step = state.get("step")
            for number, kind in enumerate(self._kinds):
                values = state.get(kind)
                if not isinstance(values, Tensor) or values.dtype != torch.float32:
                    continue
                tensors, device = kept.get(kind) or self.form.made(values), values.device
                of = (
                    nearest(device)
                    if step is None
                    else noise.of(step, device, crc32(name.encode()) + first, number % 2)
                )
                rows.append(random_rounding.State(values.contiguous(), tensors, self.form.code_of(kind), of))
                del state[kind]
                state.update((f"{kind}{name}", each) for name, each in zip(self.form.kept, tensors, strict=True))
        encode_states(rows, self.form.block)


def attach(piecewise: PiecewiseOptimizer, form: StateFormat) -> None:
    """Keep the states of an engine's optimizer in a format, from its first step on."""
    known: Any = None  # the list of pieces that `places` is of
    places: dict[Any, tuple[str, int]] = {}

    def place(piece: Any) -> tuple[str, int]:
        nonlocal known
        if known is not piecewise.pieces:  # parameters have moved to another layout
            known = piecewise.pieces
            places.clear()
            for group in piecewise.slots:
                slots = group.params.layout.slots
                pairs = zip(group.params.pieces, group.shards_now, strict=True)
                places.update((shard, (slots[own.slot].name, own.interval[0])) for own, shard in pairs)
        return places[piece]

    piecewise.operands.formatted = FormattedStates(piecewise.optimizer, form, place)
    piecewise.operands.members.append(piecewise.operands.formatted)
