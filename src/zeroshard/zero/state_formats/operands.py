"""`FormattedStates`: states in another format between steps, which are decoded for a step of the pieces they are of.

With `zeroshard.Zero` steps run unit by unit, and a unit's in parts, so few states are wide at a time::

    between steps   exp_avg_codes, exp_avg_scales      every unit
    in its turn     exp_avg fp32, exp_avg_sq fp32      a part of a unit: decoded, stepped, encoded

A large piece is cut for it: a parameter that views some of its elements stands in for it, with states that view as many
of the piece's codes. On a CPU a part's wide states stay in its cache, so a step moves no more bytes than it has to, and
touches no new pages of memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn

from zeroshard.kernels import random_rounding
from zeroshard.kernels.random_rounding import StepNoise, decode_states, encode_states, nearest
from zeroshard.kernels.state_codes import SCALES
from zeroshard.zero.core.optimizer import State
from zeroshard.zero.optimizers.operands import Lists
from zeroshard.zero.optimizers.piecewise import PiecewiseOptimizer
from zeroshard.zero.state_formats.formats import STATES, StateFormat
from zeroshard.zero.state_formats.formats import format_of as format_of

Place = Callable[[Any], tuple[str, int]]  # of a piece: its parameter's name, and its first element there
Kept = dict[str, list[Tensor]]  # by kind: the tensors in which a state that is wide now was kept


def most_at_once(device_type: str) -> int:
    """Elements of a part of a unit, a multiple of every block: on a GPU many, because each operation is a launch."""
    return 1 << 20 if device_type == "cpu" else 1 << 24


class _Cut(NamedTuple):
    """What stands in for elements ``[start, stop)`` of a piece."""

    piece: nn.Parameter
    start: int
    stop: int


class FormattedStates:
    """Decodes the states of an optimizer's pieces for their step, and encodes them after it.

    Args:
        optimizer: of a class that `zeroshard.zero.state_formats.formats.format_of` accepts.
        form: the format.
        place: tells where a piece lies in its parameter.
    """

    def __init__(self, optimizer: Any, form: StateFormat, place: Place) -> None:
        self._optimizer, self.form, self._place = optimizer, form, place
        self._kinds = STATES[type(optimizer)]
        self._brought: list[tuple[Any, Kept]] = []
        self._cuts: dict[nn.Parameter, _Cut] = {}  # by what stands in
        self._made: dict[nn.Parameter, State] = {}  # of a piece whose first parts were stepped: states that it had not
        # Of the parts that are stepped in turn: how many are left, the memory of the wide states of one, and the noise
        self._num_left, self._wide, self._noise = 0, torch.empty(0), StepNoise()

    def to_bring(self, pieces: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Those that a step updates: states that it makes are encoded as well."""
        return [piece for piece in pieces if piece.grad is not None and piece.dtype == torch.float32]

    def parts(self, by_group: Lists) -> list[Lists]:
        """Divide pieces, by param group, into parts on which the class steps one after another; large ones are cut.

        Each is stepped between `bring` and `take_back`, all of them in their order.
        """
        self._cuts, self._made = {}, {}  # others: copies of this object for other threads have theirs
        found, left = list[Lists](), 0
        for number, pieces in enumerate(by_group):
            for each in chain.from_iterable(map(self._cut, pieces)):
                if each.numel() > left or not found:
                    found.append([[] for _ in by_group])
                    left = most_at_once(each.device.type)
                found[-1][number].append(each)
                left -= each.numel()
        self._num_left, self._noise = len(found), StepNoise()
        if len(found) > 1:  # memory that was touched before: on a CPU new pages take longer than all that is computed
            device = next(iter(self._cuts or chain.from_iterable(by_group))).device
            self._wide = torch.empty(len(self._kinds) * most_at_once(device.type), device=device)
        return found

    def _cut(self, piece: nn.Parameter) -> list[nn.Parameter]:
        most = most_at_once(piece.device.type)
        if piece.numel() <= most or not self.to_bring([piece]):
            return [piece]
        assert piece.grad is not None
        found: list[nn.Parameter] = []
        for flat, grad in zip(piece.detach().view(-1).split(most), piece.grad.reshape(-1).split(most), strict=True):
            part, start = nn.Parameter(flat), len(found) * most
            part.grad = grad
            self._cuts[part] = _Cut(piece, start, start + part.numel())
            found.append(part)
        return found

    def _of_part(self, kind: str, state: Tensor, cut: _Cut) -> Tensor:
        """View the elements of a piece's state, or its scales, that belong to a part of it."""
        block = self.form.block if kind.endswith(SCALES) else 1
        return state.view(-1)[cut.start // block : -(-cut.stop // block)]

    def _enter(self, part: nn.Parameter) -> None:
        """Have the state of what stands in for a part: views of the piece's, and copies of numbers."""
        cut = self._cuts.get(part)
        whole = None if cut is None else self._optimizer.state.get(cut.piece)
        if cut is not None and whole:
            self._optimizer.state[part] = {
                kind: value
                if not isinstance(value, Tensor)
                else self._of_part(kind, value, cut)
                if value.dim()
                else value.clone()  # the next part's step begins with the same
                for kind, value in whole.items()
            }

    def _leave(self, part: nn.Parameter) -> None:
        """Give the piece what the step of a part of it has made, and after the last part the numbers."""
        cut = self._cuts.get(part)
        if cut is None:
            return
        piece, states = cut.piece, self._optimizer.state
        own, whole, made = states.pop(part, {}), states[piece], self._made.setdefault(piece, {})
        for kind, value in own.items():
            if isinstance(value, Tensor) and value.dim():
                home = whole.get(kind)
                if home is None or home.dtype != value.dtype:  # else it was encoded in place
                    is_scales = kind.endswith(SCALES)
                    shape = (-(-piece.numel() // self.form.block),) if is_scales else piece.shape
                    made[kind] = made[kind] if kind in made else value.new_empty(shape)
                    self._of_part(kind, made[kind], cut).copy_(value)
        if cut.stop == piece.numel():
            by_element = {kind for kind, value in own.items() if isinstance(value, Tensor) and value.dim()}
            kept = {kind: whole[kind] for kind in by_element & whole.keys()} | self._made.pop(piece)
            final = {kind: kept.get(kind, value) for kind, value in own.items()}
            whole.clear()
            whole.update(final)

    def bring(self, pieces: Sequence[nn.Parameter]) -> None:
        """Decode the states that there are."""
        for piece in pieces:
            self._enter(piece)
        self._num_left -= 1
        states = self._optimizer.state
        decoded = zip(pieces, self._decoded([states.get(piece, {}) for piece in pieces]), strict=True)
        self._brought = [*self._brought, *decoded]  # another list: copies of this object for other threads have theirs

    def take_back(self) -> None:
        """Encode what was decoded, and what the step has made."""
        brought, self._brought = self._brought, []
        states = self._optimizer.state
        self._encode([(states.get(piece, {}), kept, *self._place_of(piece)) for piece, kept in brought], self._noise)
        for piece, _ in brought:
            self._leave(piece)
        if self._num_left <= 0:
            self._wide, self._noise = torch.empty(0), StepNoise()

    def _place_of(self, piece: nn.Parameter) -> tuple[str, int]:
        cut = self._cuts.get(piece)
        if cut is None:
            return self._place(piece)
        name, first = self._place(cut.piece)
        return name, first + cut.start

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
            self._encode([(state, {}, *self._place(piece))], StepNoise())
            again = dict(state)
            self._decoded([again])
            exact = exact and all(torch.equal(again[kind], value) for kind, value in wide.items())
        if not exact:
            what = f"the loaded states are rounded to {self.form.name}, in which this optimizer keeps them"
            warnings.warn(f"optimizer: {what} (state_format)", stacklevel=2)

    def kept(self, state: Mapping[str, Any]) -> State:
        """Return states that the class has made, of any tensor, as they are kept between steps; they do not change."""
        found = {kind: value.clone() if isinstance(value, Tensor) else value for kind, value in state.items()}
        self._encode([(found, {}, "", 0)], StepNoise())
        return found

    def _decoded(self, states: Sequence[State]) -> list[Kept]:
        """Put wide states in the place of what they are kept in, which is returned for each of ``states``."""
        found: list[Kept] = [{} for _ in states]
        rows: list[random_rounding.State] = []
        free = self._wide
        for state, own in zip(states, found, strict=True):
            for kind in self._kinds:
                names = [f"{kind}{name}" for name in self.form.kept]
                tensors = [state.get(name) for name in names]
                if [getattr(each, "dtype", None) for each in tensors] == [*self.form.kept.values()]:
                    own[kind] = [state.pop(name) for name in names]
                    like = own[kind][0]
                    if like.numel() <= free.numel() and like.device == free.device:
                        state[kind], free = free[: like.numel()].view(like.shape), free[like.numel() :]
                    else:
                        state[kind] = torch.empty_like(like, dtype=torch.float32)
                    rows.append(random_rounding.State(state[kind], own[kind], self.form.code_of(kind)))
        decode_states(rows, self.form.block)
        return found

    def _encode(self, pieces: Sequence[tuple[State, Kept, str, int]], noise: StepNoise) -> None:
        """Encode the wide states of pieces, into the tensors in which they were kept if there are any.

        Of each piece the states, these tensors, and where it lies. ``noise``: of the steps that the pieces have made.
        """
        rows: list[random_rounding.State] = []
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
