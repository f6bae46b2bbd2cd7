"""Finds the reach of an optimizer class by experiment, if nobody has declared it.

No list of names could answer for a user's own class, or for a class that works element by element with one setting
and not with another. So the class is run on tiny tensors, on the CPU wherever the parameters are, and compared:

| trial                                                    | what a change in the result means                    |
|----------------------------------------------------------|------------------------------------------------------|
| beside other tensors, with gradients a thousand times    | tensors influence each other: *cross-tensor*         |
| as large, in front and behind; other random seeds        | (or, if the seed alone does it, it is *random*)      |
| permuted and cut into one-dimensional pieces             | elements of a tensor do: *per-tensor*                |
| none of these                                            | *element-wise*: pieces of any tensor will do         |

A closure that is called again after weights have moved makes it *closure-driven*, and so does one whose loss changes
the update. The trials take three courses; a class that fails in one is not tried in the next:

| course                                     | shows                                                               |
|--------------------------------------------|---------------------------------------------------------------------|
| gradients that are independent, jump by    | clipping inside the optimizer, and what it does with zeros          |
| factors of 1000, and have zeros in them    |                                                                     |
| the same at later steps, to which numbers  | what begins after a warm-up                                         |
| that count steps are put forward (`clocks`)|                                                                     |
| the slope of a quadratic, which agrees     | what follows the progress of training: an estimate of the distance  |
| from step to step                          | from the start (Prodigy, D-Adaptation), rates that fall if a mean   |
|                                            | improves                                                            |

The last one takes the user's learning rate, and then 1, which is that of classes that find the rate themselves; in the
others it is one that moves weights, as a run may start from 0. Trials are in float64, which shows small influences, and
one more in the user's dtype, because a class may round at random where that is narrow. If a course cannot be tried, a
class is taken for per-tensor: whole tensors are right for an element-wise class too.

The proof is by example: a class that behaves differently for tensors larger than the largest one here is not detected.
A class that runs on GPUs only cannot be tried: it must declare its reach.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.optim.classes.clocks import AROUND, FAR
from zeroshard.optim.classes.experiment import (
    CPU,
    NUM_STEPS,
    SCALES,
    TOLERANCES,
    Experiment,
    Trial,
    TrialError,
)
from zeroshard.optim.classes.reach import OptimizerKind, Reach
from zeroshard.optim.classes.trials import isolated

NUM_FIRST = 3  # steps, in trials of later ones, before the clocks are put forward
NUM_DOWNHILL = 30  # by then estimates of a distance move, and means over ten steps have been compared
OWN_RATE = 1.0  # of classes that find the rate themselves: with a low one they need hundreds of steps for it
SHIFT = 1024.0  # far beyond what steps move weights
NUM_SHIFTED, LOW_RATE = 8, 1e-4  # Lookahead goes back after five or six; Adafactor moves by a share of the weights
SHAPES: tuple[tuple[int, ...], ...] = ((), (37,), (5, 7), (2, 3, 4), (3, 2, 3, 2))
LARGE = (136, 160)  # some classes factor only matrices of 128 or more rows, or quantise only 4096 or more elements
DECIDED = (Reach.CLOSURE_DRIVEN, Reach.RANDOM, Reach.UNUSABLE)  # no layout suits them, whatever else they do
ON_CPU = "tried on the CPU; a class that runs on other devices only declares its reach by the attribute zero_reach"


def weights_kept(
    optimizer_cls: type[Optimizer], settings: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> str | None:
    """Return how an optimizer keeps weights in its state, or goes back to weights; None if it does neither.

    Moments of gradients stay valid if something else replaces weights between two steps. An average of weights, as
    torch's ASGD keeps, the iterate of a schedule-free method, or the slow weights of Lookahead do not. So the class is
    run twice with the same gradients, and in one run a constant is added to the weights between two steps.

    Raises:
        Exception: whatever the class raises on tiny tensors of the dimensions of its parameters.
    """
    plain = {"weight_decay": 0.0}  # decay adds weights to gradients: moments would depend on the shift, yet stay valid
    with isolated():
        for group in groups:
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            options |= {key: value for key, value in plain.items() if key in options}
            subject = Experiment(optimizer_cls, settings, options, CPU, torch.float32, LOW_RATE, NUM_SHIFTED)
            histories = [subject.history([4] * min(param.dim(), 2) or [4], 1) for param in group["params"][:1]]
            near, far = (subject.run(histories, shift=shift) for shift in (0.0, SHIFT))
            for one, other in zip(near.states, far.states, strict=True):
                for kind, value in one.items():
                    there = other.get(kind)
                    tensors = isinstance(value, Tensor) and isinstance(there, Tensor) and value.shape == there.shape
                    if tensors and (value - there).abs().max() > SHIFT / 64:
                        return f"keeps weights in its state ({kind!r})"
            pairs = zip(near.weights, far.weights, strict=True)
            if any((there - here - SHIFT).abs().max() > SHIFT / 64 for here, there in pairs):
                return "goes back to weights that it has kept"
    return None


def probe(
    optimizer_cls: type[Optimizer], settings: Mapping[str, Any], group: Mapping[str, Any], device: torch.device
) -> OptimizerKind:
    """Find the kind of ``optimizer_cls`` with these settings by running it on tiny tensors on the CPU.

    Random generators are restored afterwards, and the class is given copies of settings. Learning rates and dtypes are
    replaced: `probe_as_used` takes the user's, and must follow.

    Args:
        settings: keyword arguments for it.
        group: settings of the param group in question, which override them.
        device: where the parameters live; settings that fit it alone (``capturable``, tensors there) are translated.

    Raises:
        Exception: whatever the class itself raises when it is built with these settings for any tensor.
    """
    with isolated():
        subject, alone, failures = _meet(_subjects(optimizer_cls, settings, group, device))
        if not alone:
            failure = next((failure for failure in failures if failure.built), None)
            if failure is None and _takes_no_groups(subject):
                return OptimizerKind(
                    Reach.UNUSABLE, "it takes a list of parameters alone, and is given param groups here"
                )
            if failure is None:
                cause = failures[0].cause  # the class does not accept these settings
                if subject.is_translated:
                    cause.add_note(f"{optimizer_cls.__name__} was {ON_CPU}")
                raise cause
            where = f" ({ON_CPU})" if subject.is_translated else ""
            return OptimizerKind(Reach.UNUSABLE, f"it fails on dense gradients: {failure}{where}")
        reach, reason = _watch(subject, alone)
        no_closure = "" if reach in DECIDED else _no_closure(subject, alone)
        if no_closure and subject.with_closure:
            reach, reason = Reach.CLOSURE_DRIVEN, no_closure
        if reach not in DECIDED:
            reach, reason = _watch_later(subject, alone, reach, reason)
        return OptimizerKind(reach, reason, tuple(len(shape) for shape in alone), no_closure=no_closure)


def probe_as_used(
    optimizer_cls: type[Optimizer],
    settings: Mapping[str, Any],
    group: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    found: OptimizerKind,
) -> OptimizerKind:
    """Return ``found``, the answer of `probe`, or what the user's learning rate and ``dtype`` of weights show."""
    reach, reason, when = found.reach, found.reason, "as training makes progress"
    shapes = [shape for shape in SHAPES if len(shape) in found.ndims][:3][
        -2:
    ]  # a vector and a matrix, if it takes both
    failures: list[TrialError] = []
    with isolated():
        for subject in _subjects(optimizer_cls, settings, group, device):
            subject.rate, subject.num_first, subject.downhill = None, NUM_DOWNHILL, True
            try:
                reach, reason = _watch_course(subject, shapes, reach, reason, when)
            except TrialError as error:
                failures.append(error)
                continue
            with suppress(TrialError):  # most classes are not made for this rate
                if reach not in DECIDED:
                    reach, reason = _watch_course(replace(subject, rate=OWN_RATE), shapes, reach, reason, when)
            if reach not in DECIDED and _draws(replace(subject, dtype=dtype), shapes):
                reach, reason = Reach.RANDOM, f"in {dtype} it {_INFLUENCES[Reach.RANDOM]}"
            return replace(found, reach=reach, reason=reason)
    if reach is Reach.ELEMENT_WISE:
        reach, reason = Reach.PER_TENSOR, f"{NUM_DOWNHILL} steps of it could not be tried: {failures[0]}"
    return replace(found, reach=reach, reason=reason)


def _takes_no_groups(subject: Experiment) -> bool:
    """Whether the class can be built of parameters, but of no param groups."""
    params = [nn.Parameter(subject.history(shape, 1)[0]) for shape in SHAPES[1:3]]
    try:
        subject.optimizer_cls(params, **copy.deepcopy(dict(subject.settings)))
    except Exception:  # noqa: BLE001 -- each class raises its own
        return False
    return True


def _meet(subjects: Iterable[Experiment]) -> tuple[Experiment, dict[tuple[int, ...], Trial], list[TrialError]]:
    """Try a tensor of each shape alone; return the trials that worked of the subject that takes most shapes."""
    found: list[tuple[Experiment, dict[tuple[int, ...], Trial]]] = []
    failures: list[TrialError] = []
    for subject in subjects:
        alone: dict[tuple[int, ...], Trial] = {}
        for shape in SHAPES:
            try:
                alone[shape] = subject.run([subject.history(shape, len(shape))])
            except TrialError as error:
                failures.append(error)
        found.append((subject, alone))
        if len(alone) == len(SHAPES):
            break
    return *max(found, key=lambda each: len(each[1])), failures


def _subjects(
    optimizer_cls: type[Optimizer], settings: Mapping[str, Any], group: Mapping[str, Any], device: torch.device
) -> Iterator[Experiment]:
    """Each dtype, and step without and with a closure."""
    for dtype in TOLERANCES:  # float64 shows smaller influences; custom kernels may support float32 only
        for with_closure in (False, True):
            yield Experiment(optimizer_cls, settings, group, device, dtype, with_closure=with_closure)


def _watch(subject: Experiment, alone: dict[tuple[int, ...], Trial]) -> tuple[Reach, str]:
    if any(trial.closure_calls for trial in alone.values()):
        return Reach.CLOSURE_DRIVEN, _MOVED
    histories = [subject.history(shape, len(shape)) for shape in alone]
    expected = [trial.weights[0] for trial in alone.values()]
    if all(torch.equal(weight, history[0]) for weight, history in zip(expected, histories, strict=True)):
        return Reach.UNUSABLE, f"it moves no weight in {NUM_STEPS} steps, so what it would do cannot be told"

    def again() -> list[Tensor]:
        return [subject.run([history], seed=3).weights[0] for history in histories]

    try:
        influence = _influence(subject, histories, expected, again)
    except TrialError:  # the class accepts such tensors only one at a time
        influence = Reach.CROSS_TENSOR
    if influence is not None:
        return influence, f"it {_INFLUENCES[influence]}"
    reason = _not_element_wise(subject, alone)
    if reason:
        return Reach.PER_TENSOR, reason
    return Reach.ELEMENT_WISE, "it updates each element from that element's own history"


_MOVED = "it calls the closure again at weights that it has moved, and ranks gather weights between steps only"
_LOSS = "it follows the loss that its closure returns, and each rank has the loss of its own rows"


def _no_closure(subject: Experiment, alone: dict[tuple[int, ...], Trial]) -> str:
    """Return why a step may not be given a closure; "" if it may, or cannot."""
    closed = replace(subject, with_closure=True)
    histories = [subject.history(shape, len(shape)) for shape in alone]
    try:
        one, other = (closed.run(histories, losses=losses) for losses in ((1.0,), SCALES))
    except TrialError:
        return ""
    if one.closure_calls:
        return _MOVED
    return "" if all(map(torch.equal, one.weights, other.weights)) else _LOSS


_INFLUENCES = {
    Reach.RANDOM: "draws random numbers, which differ between ranks and between layouts",
    Reach.CROSS_TENSOR: "lets the gradients of one tensor change the update of another, and no rank has all of them",
}


def _influence(
    subject: Experiment, histories: list[Tensor], expected: list[Tensor], again: Callable[[], list[Tensor]]
) -> Reach | None:
    """Return whether tensors in front or behind change weights, or random numbers do; None: neither does.

    ``again``: runs the trial of ``expected`` again, with another random seed.
    """

    def as_expected(found: Sequence[Tensor]) -> bool:
        triples = zip(found, expected, histories, strict=True)
        return all(subject.same(one, other, history[0]) for one, other, history in triples)

    shapes = [history.shape[1:] for history in histories if history.shape[1:] != LARGE]
    partners = [subject.history(tuple(size + 1 for size in shape), 9, scale=1000.0) for shape in shapes]
    found = subject.run([*partners, *histories, *partners], seed=1).weights
    if as_expected(found[len(partners) : -len(partners)]):
        return None
    return Reach.CROSS_TENSOR if as_expected(again()) else Reach.RANDOM


def _draws(subject: Experiment, shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether other random numbers change weights; False for a class that refuses the dtype."""
    histories = [subject.history(shape, len(shape)) for shape in shapes]
    try:
        one, other = (subject.run(histories, seed=seed).weights for seed in (0, 3))
    except TrialError:
        return False
    return not all(torch.equal(*pair) for pair in zip(one, other, strict=True) if not pair[0].isnan().any())


def _watch_later(
    subject: Experiment, alone: dict[tuple[int, ...], Trial], reach: Reach, reason: str
) -> tuple[Reach, str]:
    """Return the reach, and why, after later steps too: of all tensors together, beside others, and in pieces."""
    trial = next(iter(alone.values()))
    if reach is Reach.ELEMENT_WISE and trial.clocks.hidden(trial.optimizer):
        reach, reason = Reach.PER_TENSOR, "it may count steps where nobody sees it, and do something else later"
    if not trial.clocks.found:
        return reach, reason
    around = (step - AROUND for step in trial.clocks.settings(trial.optimizer))
    subject.num_first, subject.later = NUM_FIRST, tuple(sorted({*around, *FAR} - {*range(NUM_FIRST)}))
    shapes = [*alone, *([LARGE] if (5, 7) in alone else [])]
    try:
        return _watch_course(subject, shapes, reach, reason, "from a later step on")
    except TrialError as error:
        if reach is not Reach.ELEMENT_WISE:
            return reach, reason
        return Reach.PER_TENSOR, f"its later steps could not be tried: {error}"


def _watch_course(
    subject: Experiment, shapes: Sequence[tuple[int, ...]], reach: Reach, reason: str, when: str
) -> tuple[Reach, str]:
    """Return the reach, and why, after trials of all tensors together, beside others, and in pieces."""
    histories = [subject.history(shape, len(shape)) for shape in shapes]
    together = subject.run(histories)
    if together.closure_calls:
        return Reach.CLOSURE_DRIVEN, f"{when} {_MOVED}"
    expected = together.weights
    if reach is Reach.CROSS_TENSOR:
        return (Reach.RANDOM, f"{when} it {_INFLUENCES[Reach.RANDOM]}") if _draws(subject, shapes) else (reach, reason)
    influence = _influence(subject, histories, expected, lambda: subject.run(histories, seed=3).weights)
    if influence is not None:
        return influence, f"{when} it {_INFLUENCES[influence]}"
    whole = dict(zip(shapes, zip(histories, expected, strict=True), strict=True))
    if reach is Reach.PER_TENSOR or _pieces_do(subject, whole):
        return reach, reason
    return Reach.PER_TENSOR, f"{when} it updates pieces of a tensor differently from the whole tensor"


def _not_element_wise(subject: Experiment, alone: dict[tuple[int, ...], Trial]) -> str:
    """Return why the class cannot be given pieces; "" if it can."""
    for shape, trial in alone.items():
        for state in trial.states:
            for kind, value in state.items():
                if isinstance(value, Tensor) and value.numel() > 1 and tuple(value.shape) != shape:
                    return f"it keeps a state {kind!r} of shape {tuple(value.shape)} for a tensor of shape {shape}"
    expected = {shape: (subject.history(shape, len(shape)), trial.weights[0]) for shape, trial in alone.items()}
    try:
        if not _pieces_do(subject, expected):
            return "it updates pieces of a tensor differently from the whole tensor"
        history = subject.history(LARGE, 2)
        if not _pieces_do(subject, {LARGE: (history, subject.run([history]).weights[0])}):
            return "it updates pieces of a large tensor differently from the whole tensor"
    except TrialError as error:
        return f"it does not take one-dimensional pieces: {error}"
    return ""


def _pieces_do(subject: Experiment, expected: Mapping[tuple[int, ...], tuple[Tensor, Tensor]]) -> bool:
    """Whether tensors that are permuted and cut into pieces reach the same weights as whole ones."""
    pieces: list[Tensor] = []
    cuts: list[tuple[Tensor, int]] = []  # of each tensor: its permutation and how many pieces it has
    for history, _ in expected.values():
        flat = history.reshape(len(history), -1)
        numel = flat.shape[1]
        order = torch.randperm(numel, generator=torch.Generator().manual_seed(numel))
        first = numel * 3 // 7
        sizes = [size for size in (first, 1, numel - first - 1) if size]
        pieces += flat[:, order].split(sizes, dim=1)
        cuts.append((order, len(sizes)))
    weights = iter(subject.run(pieces).weights)
    for (order, num_pieces), (history, whole) in zip(cuts, expected.values(), strict=True):
        found = torch.empty_like(whole).view(-1)
        found[order] = torch.cat([next(weights) for _ in range(num_pieces)])
        if not subject.same(found.view_as(whole), whole, history[0]):
            return False
    return True
