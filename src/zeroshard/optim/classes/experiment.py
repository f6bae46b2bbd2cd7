"""An experiment with an optimizer class: steps of a new instance over tiny tensors, which leave nothing behind.

What a class does and what it keeps is nowhere declared, so it is tried: `zeroshard.optim.classes.probe` asks how
far gradients reach in its step, `zeroshard.optim.classes.kept_states` which states it has after each one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.optim.classes.clocks import Clocks
from zeroshard.optim.classes.trials import begin_training, seed_generators

NUM_STEPS = 6
NUM_LATER = 4  # in trials of later steps: from each time on at which clocks are put forward
SCALES = (1.0, 0.01, 30.0, 1.0, 0.03, 3.0)  # of the gradients, step by step; of losses too
LEARNING_RATE = 0.01
LOWEST_RATE = 1e-5  # a lower one of the user's moves weights by hardly more than rounding does
SHIFTED_AFTER = 2  # steps, after which weights are shifted
CPU = torch.device("cpu")
# Relative to the largest update. Equal bits are not required: fused and vectorised kernels round an element in the body
# of a tensor differently from one in its tail, and pieces have other tails. Influence between elements is far larger.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}


class TrialError(Exception):
    """The class could not be built with these tensors, or, if ``built``, its step raised."""

    def __init__(self, cause: Exception, *, built: bool) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.cause, self.built = cause, built


@dataclass
class Trial:
    """The result of one trial: weights after `NUM_STEPS` steps, and the optimizer with its state."""

    weights: list[Tensor]
    optimizer: Optimizer
    closure_calls: int  # maximum in one step, counting only calls after weights have moved
    clocks: Clocks

    @property
    def states(self) -> list[Mapping[str, Any]]:
        """Those of parameters; a class may keep something under other keys as well."""
        return [state for key, state in self.optimizer.state.items() if isinstance(key, Tensor)]


@dataclass
class Experiment:
    """One class with its settings, stepped over tiny tensors in one dtype.

    Attributes:
        device: where the user's parameters live: settings that fit it alone are translated to the CPU.
    """

    optimizer_cls: type[Optimizer]
    settings: Mapping[str, Any]
    group: Mapping[str, Any]
    device: torch.device
    dtype: torch.dtype
    rate: float | None = LEARNING_RATE  # None: the user's own
    num_first: int = NUM_STEPS
    later: tuple[int, ...] = ()
    with_closure: bool = False
    downhill: bool = False  # whether gradients are slopes of a quadratic

    @property
    def is_translated(self) -> bool:
        """Whether the user's parameters are on another kind of device."""
        return self.device.type != "cpu"

    @property
    def num_steps(self) -> int:
        """Steps of a trial: the first ones, then some from each of the ``later`` steps on."""
        return self.num_first + len(self.later) * NUM_LATER

    def history(self, shape: Sequence[int], seed: int, scale: float = 1.0) -> Tensor:
        """``[1 + num_steps, *shape]``: weights to start from, then a gradient for each step.

        Downhill it is ``[3, *shape]``: weights to start from, the weights at which the slope is zero, and the
        curvature. It is below zero for some elements, and for all if ``scale`` is not 1: their slopes grow, while most
        others fall.
        """
        generator = torch.Generator().manual_seed(seed)
        num = 2 if self.downhill else self.num_steps
        values = torch.randn((1 + num, *shape), generator=generator, dtype=torch.float64)
        gone = torch.rand((1 + num, *shape), generator=generator, dtype=torch.float64)
        if self.downhill:
            values[1] *= scale
            values[2] = values[2].exp().where((gone[2] > 0.3) & (scale == 1.0), -values[2].exp()) / 10
            return values.to(self.dtype)
        scales = (SCALES * num)[:num]
        values[1:] *= scale * torch.tensor(scales, dtype=torch.float64).view(-1, *[1] * len(shape))
        values[1:][gone[1:] < 0.2] = 0.0
        return values.to(self.dtype)

    def run(
        self,
        histories: Sequence[Tensor],
        seed: int = 0,
        shift: float = 0.0,
        losses: Sequence[float] = (1.0,),
        after_step: Callable[[Optimizer, Sequence[nn.Parameter]], None] = lambda optimizer, params: None,
    ) -> Trial:
        """Take `num_steps` steps with a new optimizer over one tensor for each of these histories.

        ``shift``: what is added to all weights after `SHIFTED_AFTER` steps, as if something else replaced them.
        ``losses``: what closures return, step by step and then again. ``after_step``: is called after each.
        """
        params = [nn.Parameter(history[0].clone()) for history in histories]
        optimizer = self._built(params)
        seed_generators(seed)
        closure_calls, clocks = 0, Clocks()
        for step in range(1, 1 + self.num_steps):
            which, since = divmod(step - 1 - self.num_first, NUM_LATER)
            if which >= 0 and not since:
                clocks.set(optimizer, self.later[which])
            for param, history in zip(params, histories, strict=True):
                slope = self.downhill
                param.grad = (param.detach() - history[1]) * history[2] if slope else history[step].clone()
                if step == 1 + SHIFTED_AFTER:
                    param.data.add_(shift)
            closure = _Closure(params, losses[step % len(losses)])
            try:
                cast("Any", optimizer).step(*([closure] if self.with_closure else []))
            except Exception as error:
                raise TrialError(error, built=True) from error
            closure_calls = max(closure_calls, closure.num_late)
            clocks.tick(optimizer)
            after_step(optimizer, params)
        return Trial([param.detach() for param in params], optimizer, closure_calls, clocks)

    def _built(self, params: list[nn.Parameter]) -> Optimizer:
        """A new optimizer of these parameters, with the learning rate of the trial."""
        group, settings = copy.deepcopy(dict(self.group)), copy.deepcopy(dict(self.settings))
        if self.is_translated:
            group, settings = _with_tensors(group, Tensor.cpu), _with_tensors(settings, Tensor.cpu)
        try:
            optimizer = self.optimizer_cls([{**group, "params": params}], **settings)
            begin_training(optimizer)
        except Exception as error:
            raise TrialError(error, built=False) from error
        for given in optimizer.param_groups:
            if self.is_translated and given.get("capturable"):
                # This keeps numbers in GPU tensors, which torch refuses on the CPU; the computation is the same.
                numbers = {name: _with_tensors(value, Tensor.item) for name, value in given.items() if name != "params"}
                given.update(numbers, capturable=False)
            rate = given.get("lr")
            if not isinstance(rate, Tensor | int | float):
                continue
            moves = self.rate or (float(rate) if float(rate) >= LOWEST_RATE else LEARNING_RATE)
            given["lr"] = rate.fill_(moves) if isinstance(rate, Tensor) else moves
        return optimizer

    def same(self, found: Tensor, whole: Tensor, start: Tensor) -> bool:
        """Whether two results agree, relative to how far ``whole`` has moved from ``start``, and but for rounding."""
        update, size = (
            float(each.abs().nan_to_num().max()) if each.numel() else 0.0 for each in (whole - start, whole)
        )
        rounding = self.num_steps * torch.finfo(self.dtype).eps * size
        return torch.allclose(found, whole, rtol=0.0, atol=TOLERANCES[self.dtype] * update + rounding, equal_nan=True)


class _Closure:
    """Returns a loss, and counts the calls that come after weights have moved."""

    def __init__(self, params: list[nn.Parameter], loss: float) -> None:
        self.params, self.loss = params, loss
        self.before = [param.detach().clone() for param in params]
        self.num_late = 0

    def __call__(self) -> Tensor:
        moved = any(not torch.equal(now, then) for now, then in zip(self.params, self.before, strict=True))
        self.num_late += moved
        return torch.tensor(self.loss)


def _with_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return settings in which ``change`` has replaced each tensor."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) is dict:
        return {key: _with_tensors(each, change) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(each, change) for each in value)
    return value
