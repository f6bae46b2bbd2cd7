"""Checks saved states of an optimizer before they are loaded: are they the states that this optimizer keeps?

Kernels believe what an optimizer's state says. torch's fused AdamW reads and writes as many elements of ``exp_avg`` as
the parameter has, whatever the shape of ``exp_avg``. A state of another optimizer is no better: it is loaded without an
error, and a step fails later, or continues from other numbers. So whatever loads states asks here first.

What a class keeps is found by steps of another instance, with the same settings, on two small stand-ins for a
parameter, because a class may keep something beside the first one alone:

| a state of the stand-in             | what is accepted for a parameter                                    |
|-------------------------------------|---------------------------------------------------------------------|
| is a number, or has one element     | one element                                                         |
| has the stand-in's shape            | the parameter's shape                                               |
| has another shape                   | the shape that it has for a stand-in as large as the parameter      |
| is there after each step, of two    | only with this state                                                |
| is never there                      | refused for torch's classes and ours; others may keep it later      |
| is floating, complex or integer     | a dtype of the same sort, which is converted                        |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.host.errors import UserError
from zeroshard.optim.classes.experiment import CPU, Experiment
from zeroshard.optim.classes.plain_states import FORM, flat
from zeroshard.optim.classes.trials import isolated

NUM_STEPS = 4
_SIZES = (3, 5, 2, 7, 2, 3)  # of a stand-in's dimensions


@dataclass(frozen=True)
class Source:
    """Where saved states come from, in the words of an error."""

    field: str | None  # what the error is about; None: the parameter
    todo: str  # what to do about it


CHECKPOINT = Source(
    None,
    "load it into the optimizer that it was saved from, or load the weights alone (train: --init-from; a loop: "
    'zero.load_state_dict(zeroshard.consolidate(path)["model"]))',
)
STATE_DICT = Source("state_dict", "give the state, as zero.optim_state_dict() returns it, of the same class")

Kept = Mapping[str, Any]  # kind -> the state of a stand-in: a tensor or a number
KeptAs = Callable[[Kept], Kept]


@dataclass(frozen=True)
class ParamFacts:
    """What an optimizer knows of one parameter."""

    # name, shape, dtype, device: of the parameter, unsharded
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    kept_whole: bool = True  # whether the optimizer is given the whole tensor, and not one-dimensional pieces of it
    # elements of a block that no piece cuts, from the parameter's first on; a state may have one of each
    block: int = 1
    # makes of the class's states what is kept of them between steps; None: the same. Both may be loaded
    kept_as: KeptAs | None = None


@dataclass(frozen=True)
class SavedState:
    """Shape and dtype of a saved state of one parameter; ``dtype``: None for a number."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None

    @classmethod
    def of(cls, value: Any) -> SavedState:
        """Describe a state as an optimizer has it: a tensor, or a number."""
        return cls(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else cls((), None)


@dataclass(frozen=True)
class _Trial:
    """What steps on a stand-in leave: the states that it has after each, and all, as they are after the last."""

    always: frozenset[str]
    ever: Kept
    gained: Mapping[str, Any]  # settings that steps have added to the param group

    def kept(self, kept_as: KeptAs) -> _Trial:
        """The same as they are kept between steps."""
        always = frozenset(kept_as({kind: self.ever[kind] for kind in self.always}))
        return _Trial(always, kept_as(self.ever), self.gained)


class KeptStates:
    """What one param group of an optimizer keeps for its parameters.

    Args:
        make: makes another optimizer of the class, with its settings, over the param groups that it is given.
        settings: the param group's own settings, those with which the optimizer will step after the load.
        saved_settings: those of the saved group with the same parameters, if it is known.
        source: where saved states come from.
    """

    def __init__(
        self,
        make: partial[Optimizer],
        settings: Mapping[str, Any],
        saved_settings: Mapping[str, Any] | None,
        source: Source,
    ) -> None:
        cls = cast("type[Optimizer]", make.func)
        self._name, self._make = cls.__name__, make
        self._knows_all = cls.__module__.startswith(("torch.optim", "zeroshard."))
        self._settings = {key: value for key, value in settings.items() if key not in ("params", "param_names")}
        self._saved_settings, self._source = saved_settings, source
        self._trials: dict[Any, _Trial | None] = {}
        self._unsaved = ""

    def require(self, param: ParamFacts, saved: Mapping[str, SavedState]) -> Kept:
        """Return the states of a stand-in for ``param`` by kind, to which those that are loaded are made `alike`.

        Raises:
            UserError: the ``saved`` states of the parameter are not those that the optimizer keeps.
        """
        small = _SIZES[: len(param.shape)] if param.kept_whole else _SIZES[:1]
        shapes = [small, param.shape] if param.kept_whole and small != param.shape else [small]
        error: UserError | None = None
        for kept_as in dict.fromkeys((None, param.kept_as)):
            for shape in shapes:  # some classes keep other states for large tensors
                trial = self._trial(shape, param.dtype, param.device)
                if trial is not None and kept_as is not None:
                    trial = trial.kept(kept_as)
                found = self._mismatch(param, saved, shape, trial)
                if found is None:
                    return {} if trial is None else trial.ever
                error = error or found
        assert error is not None
        raise error

    def kinds(self, param: ParamFacts) -> frozenset[str]:
        """Return the states that may be loaded for ``param``, in any of its forms; empty if the class is not tried."""
        trial = self._small_trial(param)
        if trial is None:
            return frozenset()
        return frozenset({**trial.ever, **(param.kept_as(trial.ever) if param.kept_as else {})})

    def gained(self, param: ParamFacts) -> Mapping[str, Any]:
        """Return the settings that steps add to the group of ``param``, with a value of each; empty if not tried."""
        trial = self._small_trial(param)
        return {} if trial is None else trial.gained

    def unsaved(self, param: ParamFacts) -> str:
        """Return what a checkpoint cannot hold of the states of ``param``; "" if nothing, or if it is not tried."""
        self._small_trial(param)
        return self._unsaved

    def require_none(self, params: Iterable[ParamFacts]) -> None:
        """Raise UserError if the class keeps states, and none were saved because another class was."""
        first = next(iter(params), None)
        if first is None or not self._of_another_class:
            return
        trial = self._small_trial(first)
        if trial is not None and trial.always:
            raise self._other(first.name, trial.always, {})

    @property
    def _of_another_class(self) -> bool:
        """Whether the saved group's settings are of another class: each of the two lacks some of the other's."""
        if self._saved_settings is None:
            return False
        ours, theirs = self._settings.keys(), self._saved_settings.keys() - {"params", "param_names"}
        return bool(ours - theirs) and bool(theirs - ours - {"initial_lr"})

    def _mismatch(
        self, param: ParamFacts, saved: Mapping[str, SavedState], stand_in: tuple[int, ...], trial: _Trial | None
    ) -> UserError | None:
        """Return what is wrong with the saved states; None if the trial explains them."""
        always, ever = (frozenset(), {}) if trial is None else (trial.always, trial.ever)
        lacking, unknown = always - saved.keys(), saved.keys() - ever.keys()
        if lacking or (unknown and trial is not None and (self._knows_all or self._of_another_class)):
            return self._other(param.name, ever.keys(), saved)
        for kind, state in saved.items():
            example = ever.get(kind)
            if not _fits(example, state.shape, stand_in, param):
                single = isinstance(example, int | float) or (isinstance(example, Tensor) and example.numel() == 1)
                what = f"{state.shape}, and {self._name} keeps {'one number' if single else param.shape}"
                return self._error(param.name, kind, "{} has the shape " + what)
            if isinstance(example, Tensor) and state.dtype is not None and _sort(example.dtype) != _sort(state.dtype):
                what = f"{state.dtype}, and {self._name} keeps {example.dtype}"
                return self._error(param.name, kind, "{} is " + what)
        return None

    def _other(self, name: str, ours: Iterable[str], saved: Iterable[str]) -> UserError:
        what = f"{self._name} keeps {_listed(ours)}" + "{}, and saved are "
        return self._error(name, "", f"{what}{_listed(saved)}: states of another optimizer")

    def _error(self, name: str, kind: str, what: str) -> UserError:
        """An error about a parameter; ``what``: has {} where the parameter is named, unless it is the field."""
        of = "" if self._source.field is None else f" of {name}"
        return UserError(self._source.field or name, what.replace("{}", kind + of), self._source.todo)

    def _small_trial(self, param: ParamFacts) -> _Trial | None:
        return self._trial(_SIZES[: len(param.shape)] if param.kept_whole else _SIZES[:1], param.dtype, param.device)

    def _trial(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> _Trial | None:
        """The states of a stand-in of this shape; None if the class cannot be tried."""
        key = (shape, dtype, device)
        if key not in self._trials:
            try:
                self._trials[key] = self._tried(shape, dtype, device)
            except Exception:  # noqa: BLE001 -- each class raises its own; only shapes are checked then
                self._trials[key] = None
        return self._trials[key]

    def _tried(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> _Trial:
        found: list[dict[str, Any]] = []

        def look(optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None:
            try:
                found.extend(_by_kind(optimizer.state.get(param, {})) for param in params)
            except ValueError as error:
                self._unsaved = str(error)
                raise

        with isolated():
            cls = cast("type[Optimizer]", self._make.func)
            tried = Experiment(cls, self._make.keywords, self._settings, CPU, dtype, rate=None, num_first=NUM_STEPS)
            values = torch.tensor([1.0] + [0.5] * NUM_STEPS, dtype=dtype, device=device)  # weights, then gradients
            history = values.view(-1, *[1] * len(shape)).expand(-1, *shape)  # which takes no memory
            optimizer = tried.run([history, history], after_step=look).optimizer
        always = frozenset.intersection(*(frozenset(kinds) for kinds in found))
        group = optimizer.param_groups[0]
        gained = {key: group[key] for key in group.keys() - self._settings.keys() - {"params"}}
        return _Trial(always, {kind: value for kinds in found for kind, value in kinds.items()}, gained)


def _by_kind(state: Mapping[Any, Any]) -> dict[str, Any]:
    """The tensors and numbers of a state."""
    return {kind: value for kind, value in flat(state).items() if kind != FORM}


def alike(kept: Any, value: Tensor) -> Any:
    """Return a loaded state as the optimizer keeps it; ``kept``: that state of a stand-in, None if it has none."""
    if isinstance(kept, int | float):
        return type(kept)(value.item())
    if not isinstance(kept, Tensor):
        return value
    value = value.to(kept.dtype)
    return value.reshape(kept.shape) if kept.numel() == value.numel() == 1 else value


def _fits(example: Any, shape: tuple[int, ...], stand_in: tuple[int, ...], param: ParamFacts) -> bool:
    """Whether a state of this shape may be the parameter's; ``example``: that of the stand-in, None: it has none."""
    single = prod(shape) == 1
    if isinstance(example, Tensor) and is_by_block(tuple(example.shape), prod(stand_in), param.block):
        return is_by_block(shape, prod(param.shape), param.block) or (single and prod(param.shape) == 1)
    if example is None:
        return param.kept_whole or single or shape == param.shape
    if not isinstance(example, Tensor) or (example.numel() == 1 and prod(stand_in) != 1):
        return single
    if tuple(example.shape) == stand_in:
        return shape == param.shape or (single and prod(param.shape) == 1)
    return stand_in == param.shape and shape == tuple(example.shape)


def is_by_block(shape: tuple[int, ...], numel: int, block: int) -> bool:
    """Whether a state of this shape may have one element for each ``block`` elements of a tensor of ``numel``."""
    return block > 1 and numel > 1 and shape == (-(-numel // block),)


def _sort(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex"
    return "floating" if dtype.is_floating_point else "integer"


def _listed(kinds: Iterable[str]) -> str:
    *others, last = sorted(kinds) or ["no states"]
    return f"{', '.join(others)} and {last}" if others else last


def of_groups(
    make: partial[Optimizer],
    groups: Sequence[tuple[Mapping[str, Any], Mapping[str, Any] | None, Sequence[ParamFacts]]],
    saved: Callable[[str], Mapping[str, SavedState]],
    source: Source = CHECKPOINT,
) -> dict[str, Kept]:
    """Check the saved states of all parameters of an optimizer; return `KeptStates.require` of those that have any.

    Args:
        make: as for `KeptStates`.
        groups: of each param group its settings after the load, the saved ones if they are known, its parameters.
        saved: returns the saved states of a parameter, by kind.
        source: where they come from.

    Raises:
        UserError: they are not the states that the optimizer keeps.
    """
    found: dict[str, Kept] = {}
    any_state = any(saved(param.name) for _, _, params in groups for param in params)
    for settings, saved_settings, params in groups:
        kept = KeptStates(make, settings, saved_settings, source)
        if not any_state:
            kept.require_none(params)
        for param in params:
            states = saved(param.name)
            if states:
                found[param.name] = kept.require(param, states)
    return found


def require_kept(
    make: partial[Optimizer],
    groups: Iterable[Mapping[str, Any]],
    saved_groups: Iterable[Mapping[str, Any]],
    params: Iterable[Sequence[ParamFacts]],
    states: Mapping[str, Mapping[str, Any]],
) -> None:
    """Raise UserError unless an unsharded state dict has the states that an optimizer keeps with the settings in it.

    Args:
        make: as for `KeptStates`.
        groups, saved_groups: the optimizer's param groups, and those of the state dict.
        states: of the state dict, by the names of ``params``.
    """
    saved = {
        name: {kind: SavedState.of(value) for kind, value in _by_kind(state).items()} for name, state in states.items()
    }
    facts = [({**own, **theirs}, theirs, some) for own, theirs, some in zip(groups, saved_groups, params, strict=True)]
    of_groups(make, facts, lambda name: saved.get(name, {}), STATE_DICT)
