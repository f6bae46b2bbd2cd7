"""What takes part in a run beside its steps: the callbacks that its settings ask for, ours and those of users.

A user's callback is a class given as ``--callback module:Class``, which is called with the `Run`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

from zeroshard.comm import Communicator
from zeroshard.comm.agree import first_rank_does, largest
from zeroshard.host.errors import UserError
from zeroshard.host.lazily import at_address
from zeroshard.parallel.zero import ZeroStrategy
from zeroshard.settings.validate import nearest
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.loop.average import AverageFollows
from zeroshard.train.loop.held_to_plan import HeldToPlan
from zeroshard.train.loop.measures import Measures
from zeroshard.train.loop.outer_steps import OuterStepsTaken
from zeroshard.train.loop.run import Run
from zeroshard.train.records.console import ConsoleRecorder
from zeroshard.train.records.log_files import LogFiles
from zeroshard.train.records.origin import now
from zeroshard.train.records.records import Callback, address_of
from zeroshard.train.records.trackers import trackers
from zeroshard.train.setup.about_run import next_command

FIELD = "callback"
_EVENT = re.compile(r"(on|before|after)_")
_MAY_END = ("on_step", "on_eval")  # events after which a callback may end the run


def callbacks_of(run: Run, config: TrainConfig) -> list[Callback]:
    """Return what takes part on every rank: profiler, average of the weights, outer steps, plan."""
    strategy = run.strategy
    # a trace labels units of our engine, or with other strategies the model's blocks
    units = [each for each in strategy.model.named_modules() if re.fullmatch(r"(.*\.)?blocks\.\d+", each[0])]
    if isinstance(strategy, ZeroStrategy):
        units = [(unit.name, unit.module) for unit in strategy.zero.units]
    measures = Measures(config.profile, strategy, run.comm, units, run.folder, run.device)
    found: list[Callback] = [measures]
    if strategy.ema is not None:
        found.append(AverageFollows(strategy.ema, run.clock))
    if run.local_steps is not None:
        found.append(OuterStepsTaken(run.local_steps, strategy.comm, run.clock))
    if run.contract is not None:
        found.append(HeldToPlan(run.contract, run, measures))
    return found


def recorders(run: Run, config: TrainConfig) -> list[Callback]:
    """Return log files, console and trackers on rank 0, none on others. Collective."""
    found: list[Callback] = []

    def open_them() -> None:
        found.append(LogFiles(run.folder, now, run.require_folder))
        next_is = next_command(config, run.folder)
        found.append(ConsoleRecorder(config.max_steps, config.log_interval, next_command=next_is))
        found.extend(trackers(config.track, run.folder, config.model_dump(mode="json")))

    first_rank_does(run.strategy.comm, open_them)
    return found


def users_classes(config: TrainConfig) -> list[type[Callback]]:
    """Import the classes that ``--callback`` names.

    Raises:
        UserError: one cannot be imported, is no `Callback`, has a method for an event that there is not, or cannot be
            called with a run.
    """
    return [_checked(address, at_address(address, FIELD)) for address in config.callback]


def _checked(address: str, found: Any) -> type[Callback]:
    if not (isinstance(found, type) and issubclass(found, Callback)):
        todo = "let it be a class, with zeroshard.train.Callback as its base"
        raise UserError(FIELD, f"{address} is no callback", todo)
    events = [name for name in vars(Callback) if _EVENT.match(name)]
    for name in dir(found):
        if _EVENT.match(name) and name not in events:
            todo = nearest(name, events, f"name it otherwise; events are {', '.join(events)}")
            raise UserError(FIELD, f"{address} has {name}, and there is no such event", todo)
    try:
        signature(found).bind("run")
    except TypeError as error:
        todo = "let its __init__ take the run alone"
        raise UserError(FIELD, f"{address} cannot be called with the run ({error})", todo) from None
    return found


def users_callbacks(run: Run, config: TrainConfig, saved: Mapping[str, Any]) -> list[Callback]:
    """Make the callbacks that ``--callback`` names, with their state from ``saved``, what a checkpoint says."""
    found = []
    for kind in users_classes(config):
        made = _agreeing(kind, run.strategy.comm)(run)
        if state := saved.get("callbacks", {}).get(address_of(kind)):
            made.load_state_dict(state)
        found.append(made)
    return found


def _agreeing(kind: type[Callback], comm: Communicator) -> type[Callback]:
    """Return the class with ranks that agree: all of them end the run if an event returns True on one of them."""

    def agreed(event: str) -> Callable[..., bool]:
        def method(self: Callback, *args: Any) -> bool:
            wish = getattr(kind, event)(self, *args)
            if wish not in (None, True, False):
                what = f"{address_of(kind)}.{event} returned {wish!r}"
                raise UserError(FIELD, what, "return True to end the run, else nothing")
            return bool(largest(comm, int(bool(wish))))

        return method

    own = {event: agreed(event) for event in _MAY_END if getattr(kind, event) is not getattr(Callback, event)}
    return type(kind.__name__, (kind,), {**own, "__module__": kind.__module__, "__qualname__": kind.__qualname__})
