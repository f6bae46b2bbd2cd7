"""`PiecewiseOptimizer`: a `PieceOptimizer` that looks to the user like an optimizer of one process.

It may have been made without the engine, its class may need whole tensors (`requirements` says so), and its methods
work (`methods`, `step_hooks`).

[Note: Whose parameters]
    ``param_groups`` hold the model's parameters, as in one process: clipping, scalers and schedules read them there,
    and their ``grad`` is global. Only while the class's own code runs (its ``step``, ``add_param_group``, loading) do
    they hold this rank's pieces. The keys of ``state`` are pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from functools import partial
from inspect import signature
from itertools import zip_longest
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.optim.classes.kept_states import ParamFacts
from zeroshard.optim.classes.reach import OptimizerKind, declared, no_class
from zeroshard.zero.buffers.unit import FlatGroup
from zeroshard.zero.core.layout import WHOLE
from zeroshard.zero.core.optimizer import PieceOptimizer, StepListener, pieces_in
from zeroshard.zero.optimizers.operands import CombinedOperands, StateFormat, WidenedGrads
from zeroshard.zero.optimizers.sharded_params import ShardedParams
from zeroshard.zero.whole_tensors.layout import kind_of_group, needed_block


class Listener(StepListener, Protocol):
    """What the engine does around an optimizer's step: `zeroshard.zero.engine_optimizers` does it."""

    def keep_blocks(self, blocks: Mapping[nn.Parameter, int]) -> None:
        """Lay these parameters out so that none is cut inside a block of so many elements."""

    def before_change(self) -> None:
        """Refuse a change of master weights outside of a step where all weights must stay as they are."""

    def note_call(self, what: str) -> None:
        """Note a call that every rank must make."""


class PiecewiseOptimizer(PieceOptimizer[FlatGroup]):
    """A `PieceOptimizer` whose param groups show the model's parameters: [Note: Whose parameters].

    Attributes:
        operands: where its steps find masters, gradients and states.
        make: makes another one, of the same class and settings, over the param groups that it is given.
        kinds: what the class may be given, with the settings of each param group.
        state_format: how its states are kept between steps; None: as the class makes them.
        holds_pieces: whether its param groups hold the pieces now, as they do while the class's own code runs.
        sharded: the engine's parameters, of which it claims some.
        listener: is notified of its steps.
    """

    operands: CombinedOperands
    listener: Listener  # ty: ignore[incompatible-mutable-override] -- there always is one
    kinds: list[OptimizerKind]

    def __init__(
        self,
        optimizer_cls: type[Optimizer],
        params: Iterable[Any],
        kwargs: dict[str, Any],
        sharded: ShardedParams,
        listener: Listener,
        state_format: StateFormat | None = None,
    ) -> None:
        if not (isinstance(optimizer_cls, type) and issubclass(optimizer_cls, Optimizer)):
            raise TypeError(no_class(optimizer_cls))
        if isinstance(params, Tensor):
            raise TypeError("params: give an iterable of parameters or of group dicts, not one tensor")
        given: list[Any] = list(params)
        if not given:
            raise ValueError("params: the optimizer got an empty list; give it at least one parameter")
        groups: list[dict[str, Any]] = given if isinstance(given[0], dict) else [{"params": given}]
        self.make, self.state_format, self.kinds = partial(optimizer_cls, **kwargs), state_format, []
        with sharded.all_or_none():
            claimed = [{**group, "params": sharded.claim(group)} for group in groups]
            blocks = {param: n for group in claimed for param, n in self._blocks(group, sharded).items()}
            if blocks:
                # Build the class once before anything is laid out anew: it may refuse parameters by their shape.
                self.make([{**group, "params": _stand_ins(group["params"])} for group in claimed])
                listener.keep_blocks(blocks)
            super().__init__(optimizer_cls, claimed, sharded.homes, **kwargs)
        self._attach(sharded, listener, has_state=False)
        self.show_params()

    def _blocks(self, group: Mapping[str, Any], sharded: ShardedParams) -> dict[nn.Parameter, int]:
        """Those of a group's parameters that may not be cut anywhere, with the elements of a block: `needed_block`.

        Either the class needs it, or the format of its states. The kind of the group is noted.
        """
        optimizer_cls, settings = cast("type[Optimizer]", self.make.func), self.make.keywords
        dtypes = {param: sharded.homes[param][0].params.dtype for param in group["params"]}
        kind = kind_of_group(optimizer_cls, settings, group, dtypes.values())
        block = needed_block(optimizer_cls, kind, has_all=sharded.has_all(dtypes))
        blocks = dict.fromkeys(dtypes, block) if block != 1 else {}
        self.kinds.append(kind)
        if self.state_format is not None:
            blocks |= self.state_format.blocks(optimizer_cls, {**settings, **group}, dtypes)
        return blocks

    def _attach(self, sharded: ShardedParams, listener: Listener, *, has_state: bool) -> None:
        self.sharded, self.listener = sharded, listener
        narrow = any(group.grads.reduced_dtype != group.params.dtype for group, _ in sharded.homes.values())
        self.operands = CombinedOperands(*([WidenedGrads()] if narrow else []))
        self.has_state, self.holds_pieces = has_state, False
        self._everywhere_of: Any = None
        self._everywhere: dict[int, bool] = {}  # `is_everywhere`, by index, in the layout of these pieces

    @classmethod
    def adopted(
        cls, optimizer: Optimizer, sharded: ShardedParams, listener: Listener, *, may_move: bool
    ) -> PiecewiseOptimizer:
        """Wrap an optimizer that the user has made over the model's parameters; the caller cuts its states into pieces.

        Raises:
            ValueError: it holds other parameters too, or is of a class that cannot be sharded.
            RuntimeError: it needs whole tensors, and some are cut into pieces that may not move, or cannot.
        """
        self = cls.__new__(cls)
        name = type(optimizer).__name__
        accepted = signature(type(optimizer)).parameters
        kwargs = {key: value for key, value in optimizer.defaults.items() if key in accepted}
        self.optimizer, self.homes, self.make = optimizer, sharded.homes, partial(type(optimizer), **kwargs)
        self.state_format, self.kinds = None, []
        self._attach(sharded, listener, has_state=any(isinstance(key, Tensor) for key in optimizer.state))
        with sharded.all_or_none():
            self.by_group = [sharded.claim(group) for group in optimizer.param_groups]
            for group, chosen in zip(optimizer.param_groups, self.by_group, strict=True):
                try:
                    blocks = self._blocks({**group, "params": chosen}, sharded)
                except TypeError as error:  # its settings do not tell how it was built
                    raise ValueError(f"step: {error}; make it by zero.optimizer({name}, ...)") from error
                cut = sharded.cut_inside(blocks)
                if cut and not may_move:
                    what = "tensors" if WHOLE in cut.values() else "blocks of tensors"
                    raise RuntimeError(
                        f"step: {name} needs {what} that are whole on one rank; make it by zero.optimizer({name}, ...)"
                    )
                if cut:
                    listener.keep_blocks(cut)
            self.hold_pieces()
        return self

    def is_everywhere(self, index: int) -> bool:
        """Whether each rank updates some of the parameters of the param group with this index."""
        if self._everywhere_of is not self.pieces:  # these are in another layout now
            self._everywhere_of, self._everywhere = self.pieces, {}
        if index not in self._everywhere:
            self._everywhere[index] = self._reaches_every_rank(index)
        return self._everywhere[index]

    def _reaches_every_rank(self, index: int) -> bool:
        slots: dict[FlatGroup, set[int]] = {}
        for home, slot in (self.homes[param] for param in self.by_group[index]):
            slots.setdefault(home, set()).add(slot)
        homes = list(slots)
        if not all(home.params.shard_optim for home in homes):
            return True
        return bool(homes) and all(
            any(piece.slot in slots[home] for home in homes for piece in home.params.layout.owned(rank))
            for rank in range(homes[0].params.comm.world_size)
        )

    @property
    def is_called_by_unit(self) -> bool:
        """Whether the class's own methods may be called for a unit at a time."""
        kind = declared(type(self.optimizer), self.make.keywords)
        return kind.by_unit if kind else type(self.optimizer).__module__.startswith("torch.optim.")

    def require_shardable(self) -> None:
        """Raise ValueError if the class may update nothing less than all tensors."""
        for kind in self.kinds:
            needed_block(type(self.optimizer), kind, has_all=False)

    def facts(self) -> list[list[ParamFacts]]:
        """What the optimizer knows of its parameters that are in the model, for each param group."""
        return [[self._facts(*self.homes[param]) for param in self.sharded.present(each)] for each in self.by_group]

    def _facts(self, group: FlatGroup, slot: int) -> ParamFacts:
        place, params = group.params.layout.slots[slot], group.params
        whole, block = group.keeps_tensors_whole, params.layout.block
        formatted = self.operands.formatted
        kept = None if formatted is None else formatted.kept
        return ParamFacts(place.name, place.shape, params.dtype, params.master.device, whole, block, kept)

    # -- the engine's part in steps ---------------------------------------------------------------------------

    def weights_changed(self) -> None:
        """Mark all of its weights stale, as their masters have changed, whether they had gradients or not."""
        self.listener.before_change()
        for group, slots in self.slots.items():
            torch.autograd.graph.increment_version([group.params.params[slot] for slot in slots])
            group.params.mark_stale()

    # -- whose parameters -------------------------------------------------------------------------------------

    def show_pieces(self) -> None:
        """Have the param groups hold this rank's pieces, as the class's own code needs them.

        Raises:
            ValueError: groups, or parameters in them, are not those that the optimizer was given.
        """
        groups = self.optimizer.param_groups
        if self.holds_pieces:
            return
        if self.operands.later is not None:
            self.operands.wait()
        for group, chosen in zip_longest(groups, self.by_group):
            # By identity: tensors have another equality.
            if group is None or chosen is None or [*map(id, group["params"])] != [*map(id, chosen)]:
                raise ValueError(
                    "param_groups: groups or their params were changed by hand; use optimizer.add_param_group(), or "
                    "make the optimizer anew"
                )
        for group, pieces in zip(groups, self.pieces, strict=True):
            group["params"] = pieces
        self.holds_pieces = True

    def show_params(self) -> None:
        """Have the param groups hold the model's parameters, as the user knows them."""
        for group, chosen in zip(self.optimizer.param_groups, self.by_group, strict=True):
            group["params"] = list(chosen)
        self.holds_pieces = False

    @contextmanager
    def at_pieces(self) -> Generator[None]:
        """In this block the param groups hold this rank's pieces."""
        if self.holds_pieces:
            yield
            return
        self.show_pieces()
        try:
            yield
        finally:
            self.show_params()

    def take_pieces_anew(self) -> None:
        """Take the pieces in the current groups, to which parameters have moved; for an optimizer without state."""
        assert not self.has_state
        self.hold_pieces()
        # Some classes (Adagrad) have state from the start: take the state that is made for the new pieces.
        groups = zip(self.optimizer.param_groups, self.pieces, strict=True)
        fresh = self.make([{**group, "params": pieces} for group, pieces in groups])
        self.optimizer.state.clear()
        self.optimizer.state.update(fresh.state)

    def add_param_group(self, add_group: Callable[[dict[str, Any]], None], given: dict[str, Any]) -> None:
        """Add a group of the model's parameters; ``add_group``: the class's own method."""
        with self.sharded.all_or_none():
            chosen = self.sharded.claim(given)
            claimed = {**given, "params": chosen}
            blocks = self._blocks(claimed, self.sharded)
            if blocks:
                self.make([{**given, "params": _stand_ins(chosen)}])
                self.listener.keep_blocks(blocks)
            pieces = [shard for param in chosen for _, shard in pieces_in(*self.homes[param])]
            self.show_pieces()
            try:
                add_group({**given, "params": pieces})
                self.by_group.append(chosen)
                self.hold_pieces()
            finally:
                self.show_params()


def _stand_ins(params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Parameters of the same shapes, dtypes and devices without memory of their own."""
    nothing = [(param, torch.zeros((), dtype=param.dtype, device=param.device)) for param in params]
    return [nn.Parameter(each.expand(param.shape), requires_grad=param.requires_grad) for param, each in nothing]
