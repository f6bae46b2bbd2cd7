"""Errors for gradients that a user must not read or step with: they say why, and what to do instead."""

from __future__ import annotations

import weakref

import torch

from zeroshard.zero.buffers.unit import FlatGroup
from zeroshard.zero.runtime.runtime import PassObserver, Runtime


class PassRefusals(PassObserver):
    """Refuses gradients that are gone, incomplete or not reduced, and those of outdated weights."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = weakref.ref(runtime)

    def forward_ends(self) -> None:
        """Record units that were not called while their stale weights were being refreshed: forward may have read them.

        A read without a module's call has seen stale values: the new version lets autograd detect that.
        """
        runtime = self._runtime()
        if runtime is None or runtime.shard_params or not torch.is_grad_enabled():
            return
        for unit in runtime.order:
            if not runtime.has_called(unit) and unit.gather_in_flight:
                torch.autograd.graph.increment_version([p for group in unit.groups for p in group.params.params])
                runtime.may_have_read_stale.add(unit)

    def grad_arrives(self, group: FlatGroup) -> None:
        """Raise RuntimeError if forward may have read stale weights of the group's unit."""
        runtime = self._runtime()
        assert runtime is not None
        unit = next((unit for unit in runtime.may_have_read_stale if group in unit.groups), None)
        if unit is not None:
            raise RuntimeError(
                f"{unit.name}: its parameters have gradients, but neither it nor a module in it was called, so nothing "
                "waited for their gather and forward may have read weights from before the step; call the module, or "
                "leave it out of Zero(units=...)"
            )

    def require_shown(self, what: str) -> None:
        """Raise RuntimeError if gradients are gone, incomplete, not reduced yet, or were never reduced.

        ``what`` is the call or attribute that needs them; the message begins with it.
        """
        runtime = self._runtime()
        assert runtime is not None
        backward = runtime.backward
        if runtime.removed:
            raise RuntimeError(
                f"{what}: zero.remove() has detached the engine, so this has no effect on the model; "
                "make an optimizer over model.parameters()"
            )
        if backward is not None and backward.failed:
            raise RuntimeError(
                f"{what}: the last backward ended in an exception, and its gradients are incomplete; "
                "call zero_grad() and take the step again"
            )
        if backward is not None:
            raise RuntimeError(
                f"{what}: inside backward a gradient is this rank's own and not yet reduced over ranks; "
                "use it after backward()"
            )
        if runtime.weights.keep_unsharded_for_graph and torch.is_grad_enabled() and what.endswith(".grad"):
            raise RuntimeError(
                f"{what}: it has no graph of its own after backward(create_graph=True); "
                "use torch.autograd.grad(), or read it under torch.no_grad()"
            )
        if runtime.unreduced:
            raise RuntimeError(
                f"{what}: gradients accumulated under no_sync() were never reduced; "
                "run the last backward of a step outside no_sync()"
            )
