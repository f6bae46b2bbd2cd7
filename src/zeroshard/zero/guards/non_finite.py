"""Names the ranks whose own gradients had the first NaN/Inf, which a reduction passes on to all ranks.

After a reduction every rank has it, and after the step it is in every weight. So before its gradients are reduced each
rank looks at the sum of one small parameter's, in the first unit that has any and in the root unit: a NaN/Inf in the
data, or of a layer behind, comes through there. Whether a rank found one is a further flag of the message that ranks
exchange at the end of each backward; only if one did they exchange which. Nobody waits for a GPU: what it has computed
by the end of the next backward is reported there.

Rank 0 warns once, at the step that makes weights NaN/Inf. A step that is skipped, by a `GradScaler` say, warns of none.
"""

from __future__ import annotations

import math
import warnings
import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from zeroshard.comm.agree import by_rank
from zeroshard.comm.streams import Mark
from zeroshard.zero.buffers.unit import FlatGroup, FlatUnit
from zeroshard.zero.runtime.runtime import Runtime


class _Look(NamedTuple):
    total: Tensor  # the sum of a gradient's elements, 0-dim on the host
    there: Mark  # behind its copy from a GPU; None: it is there
    num_steps: int  # steps of optimizers before it


class NonFiniteGrads:
    """Looks for NaN/Inf in the gradients of one engine."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = weakref.ref(runtime)
        self._looks: list[_Look] = []  # that are not reported yet
        self._slots: weakref.WeakKeyDictionary[FlatGroup, list[int]] = weakref.WeakKeyDictionary()  # smallest first
        self._num_steps = 0
        self._found = 0  # by this rank, as it tells the others: 1, or 2 if a step has been taken since
        self._ranks: list[int] = []  # that had a NaN/Inf in the gradients that are there now
        self._warned = False

    def units(self) -> set[FlatUnit]:
        """The units at which it looks in the backward that begins: the first that has any gradients, and the root."""
        runtime = self._runtime()
        if runtime is None or runtime.comm.world_size == 1:
            return set()
        first = next((unit for unit in runtime.order if runtime.trained[unit]), runtime.root)
        return {runtime.root, first}

    def before_reduce(self, unit: FlatUnit) -> None:
        """Look at a gradient of one of these units."""
        runtime = self._runtime()
        if runtime is not None:
            for group in runtime.trained[unit][:1]:
                self._look(runtime, group)

    def _look(self, runtime: Runtime, group: FlatGroup) -> None:
        slots = self._slots.get(group)
        if slots is None:
            numels = [slot.numel for slot in group.params.layout.slots]
            slots = self._slots[group] = sorted((n for n, numel in enumerate(numels) if numel), key=numels.__getitem__)
        grad = group.grads.local_grad(slots)
        if type(grad) is not Tensor or (grad.is_cuda and torch.cuda.is_current_stream_capturing()):
            return  # a fake tensor has no values
        total = (torch.view_as_real(grad) if grad.is_complex() else grad).sum(dtype=torch.float64)
        there = None
        if total.is_cuda:
            total = total.to("cpu", non_blocking=True)
            there = runtime.streams_of([group]).mark()
        self._looks.append(_Look(total, there, self._num_steps))

    def votes(self) -> list[bool]:
        """Whether this rank has found a NaN/Inf that it has not reported yet."""
        waiting = [look for look in self._looks if look.there is not None and not look.there.query()]
        finished, self._looks = [look for look in self._looks if all(look is not each for each in waiting)], waiting
        bad = [look for look in finished if not math.isfinite(float(look.total))]
        self._found = max([1 + (look.num_steps < self._num_steps) for look in bad], default=0)
        return [self._found > 0]

    def agreed(self, votes: list[int]) -> None:
        """Some rank has found one: exchange which. Collective, if one has."""
        runtime = self._runtime()
        if not any(votes) or runtime is None:
            return
        all_found = by_rank(runtime.comm, self._found)
        self._ranks = self._ranks or [rank for rank, each in enumerate(all_found) if each]
        if max(all_found) > 1:  # a device has reported it after the step
            self._warn(runtime)

    def ranks(self) -> list[int]:
        """Return the ranks that had a NaN/Inf in the gradients that are there now, as far as is seen. Collective."""
        runtime = self._runtime()
        for look in self._looks:
            if look.there is not None:
                look.there.synchronize()
        if runtime is not None and runtime.comm.world_size > 1 and not self._ranks:  # alike on every rank
            self.votes()
            self.agreed([True])
        return self._ranks

    def before_step(self) -> None:
        """Warn if the gradients of this step have a NaN/Inf."""
        runtime = self._runtime()
        if self._ranks and runtime is not None:
            self._warn(runtime)
        self._num_steps += 1

    def cleared(self) -> None:
        """Gradients were cleared: forget what was found in them, unless a step was taken."""
        self._looks = [look for look in self._looks if look.num_steps < self._num_steps]
        self._ranks = []

    def _warn(self, runtime: Runtime) -> None:
        if not self._warned and runtime.comm.rank == 0:
            warnings.warn(
                f"step: gradients of {named(self._ranks)} had a NaN/Inf before they were averaged, so this step makes "
                "weights NaN/Inf on every rank; look at the data there, or skip such steps: "
                "zero.clip_grad_norm_(..., error_if_nonfinite=True) raises before them",
                stacklevel=6,
            )
        self._warned = True


def require_finite(runtime: Runtime, norm_type: float, norm: Tensor) -> Tensor:
    """Return the global ``norm`` of an engine's gradients, 0-dim; RuntimeError if it is NaN or inf. Collective then."""
    if math.isfinite(float(norm)):  # the same bits on every rank
        return norm
    looks = runtime.local_grads
    ranks = looks.ranks() if isinstance(looks, NonFiniteGrads) else []
    who = f"; {named(ranks)} had the first NaN/Inf" if ranks else ""
    raise RuntimeError(
        f"clip_grad_norm_: the total norm of order {norm_type} for gradients is non-finite, so it cannot be clipped"
        f"{who}; skip the step by zero_grad(), or set error_if_nonfinite=False to scale them by it all the same"
    )


def named(ranks: list[int]) -> str:
    """Return ``rank 1``, or ``ranks 0, 1``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
