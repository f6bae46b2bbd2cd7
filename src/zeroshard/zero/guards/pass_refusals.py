"""Errors for gradients that a user must not read or step with: they say why, and what to do instead."""

from __future__ import annotations

import weakref

import torch

from zeroshard.zero.guards.collective_order import CollectiveOrder
from zeroshard.zero.runtime.runtime import Runtime


class PassRefusals:
    """Refuses gradients that are gone, incomplete or not reduced, and those of outdated views."""

    def __init__(self, runtime: Runtime, order: CollectiveOrder) -> None:
        self._runtime, self._order = weakref.ref(runtime), order

    def forward_ends(self) -> None:
        """Let autograd refuse a backward through views of weights from before the step, whose gather ends only now.

        Nobody has read the parameters themselves: [Note: Read between steps] in `outdated`.
        """
        self._order.take_gathers()
        runtime = self._runtime()
        if runtime is None or not torch.is_grad_enabled():
            return
        for group in (group for unit in runtime.order for group in unit.groups):
            if group.params.state.in_flight and not group.params.shard_params:
                torch.autograd.graph.increment_version(group.params.params)

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
        if runtime.keep_unsharded_for_graph and torch.is_grad_enabled() and what.endswith(".grad"):
            raise RuntimeError(
                f"{what}: it has no graph of its own after backward(create_graph=True); "
                "use torch.autograd.grad(), or read it under torch.no_grad()"
            )
        if runtime.unreduced:
            raise RuntimeError(
                f"{what}: gradients accumulated under no_sync() were never reduced; "
                "run the last backward of a step outside no_sync()"
            )
