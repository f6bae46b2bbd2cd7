"""What goes with which strategy: the checks of settings that a row of `zeroshard.parallel.registry` decides."""

from __future__ import annotations

from typing import Any

from zeroshard.host.errors import UserError
from zeroshard.parallel.registry import STRATEGIES, strategies_with, strategy_entry
from zeroshard.settings import rules
from zeroshard.settings.offload import OffloadConfig
from zeroshard.settings.wire import WireConfig


def check_wire(wire: WireConfig, strategy: str) -> None:
    """Raise UserError if the strategy has no such wire format."""
    if not wire.given:
        return
    entry = strategy_entry(strategy)
    ours = ", ".join(name for name in strategies_with("planned") if STRATEGIES[name].stage)
    todo = f"leave it out, or use --strategy {ours}"
    name, value = f"wire.{wire.given}", getattr(wire, wire.given)
    if not entry.planned:
        raise UserError(name, f"{value} is given, and {strategy} does not use zeroshard's engine", todo)
    rules.check_wire(name, value, entry.stage, todo)


def check_offload(offload: OffloadConfig, strategy: str, *, local_steps: bool) -> None:
    """Raise UserError if the run cannot keep state off the device."""
    if offload.on and local_steps:
        what = f"{offload.state} is given, and outer steps of local_steps.every read master weights on the device"
        raise UserError("offload.state", what, "leave one of the two out")
    if offload.on and not strategy_entry(strategy).planned:
        todo = f"leave it out, or use --strategy {', '.join(strategies_with('planned'))}"
        what = f"{offload.state} is given, and {strategy} does not use zeroshard's engine"
        raise UserError("offload.state", what, todo)


def check_local_steps_settings(config: Any) -> None:
    """Raise UserError if another setting of ``config``, the `TrainConfig`, does not work with its local steps."""
    if not config.local_steps.on:
        return
    strategy, entry = config.strategy, strategy_entry(config.strategy)
    todo = f"leave it out, or use --strategy {', '.join(strategies_with('planned'))}"
    if not entry.planned:
        raise UserError(
            "local_steps.every", f"{strategy} cannot take local steps: it does not use zeroshard's engine", todo
        )
    rules.check_local_steps("local_steps.every", config.local_steps.every, config.shard_size)
    if config.ema_decay:
        what = f"{config.ema_decay} averages the weights of each step, which replicas do not have in common"
        raise UserError("ema_decay", what, "leave it out, or --local-steps.every")
    if config.dtype == "float16":
        what = (
            "float16 needs one loss scale on all ranks at each step, and replicas with local steps have none in common"
        )
        raise UserError("dtype", what, "use bfloat16, or leave out --local-steps.every")
