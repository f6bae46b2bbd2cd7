"""What notices or refuses misuse of an engine, and changes no bit of an ordinary step; the engine trains without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeroshard.zero.guards.collective_order import CollectiveOrder
from zeroshard.zero.guards.module_refusals import ModuleRefusals
from zeroshard.zero.guards.non_finite import NonFiniteGrads
from zeroshard.zero.guards.non_finite import require_finite as require_finite
from zeroshard.zero.guards.outdated import WatchedReads

if TYPE_CHECKING:
    from zeroshard.zero.engine import Zero


def install(engine: Zero) -> ModuleRefusals:
    """Guard an engine that has just been built; returns a handle that takes the guards from its model."""
    runtime, optimizers = engine._runtime, engine._optimizers
    order, looks = CollectiveOrder(runtime.rank_groups, optimizers.settings), NonFiniteGrads(runtime)
    reads = WatchedReads(runtime, order)
    runtime.agree_by(order)
    runtime.after_forward, runtime.local_grads = reads.forward_ends, looks
    runtime.voters.append(looks)
    runtime.weights.watch_reads(reads)
    return ModuleRefusals(engine.model, runtime, optimizers)
