"""`run_training`: builds a run from its configuration, trains it, and says in one line what has ended it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from zeroshard.comm.wrappers.sentinel import peer_error_of
from zeroshard.host.errors import ExitStatus, FirstRankStorageError, is_of_storage, storage_line
from zeroshard.host.launch.environment import World, world_from_env
from zeroshard.host.launch.rank_exit import TIME_TO_SPEAK_S, end_as_hung
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.loop.loop import train
from zeroshard.train.loop.run import Run
from zeroshard.train.loop.stopping import stop_signals_noted
from zeroshard.train.loop.watchdog import Alive, Watchdog
from zeroshard.train.records.plan_contract import Predict
from zeroshard.train.setup.build import built
from zeroshard.train.setup.fit import Fit, FitEndsRunError


def run_training(config: TrainConfig, predict: Predict | None = None, fit: Fit | None = None) -> int:
    """Build the run that ``config`` describes, train it and clean up; returns the exit status. Each rank calls it once.

    A failing disk or folder is reported in one line on stderr and gives `ExitStatus.STORAGE`.

    ``predict`` makes the run's plan, and ``fit`` makes it fit.

    Raises:
        UserError: the configuration cannot be satisfied here; raised on every rank.
        KeyboardInterrupt: from a second Ctrl-C; passed on, with the log intact.
        PeerError: another rank was lost.
    """
    world = world_from_env() or World()
    try:
        with (
            built(config, predict, fit) as run,
            stop_signals_noted(speaks=world.rank == 0) as stop_wanted,
            Watchdog(run.folder, world.rank, config.step_timeout_s, end_as_hung) as watchdog,
        ):
            return int(_trained(run, stop_wanted, watchdog.alive))
    except FitEndsRunError as end:
        if world.rank == 0:
            print(end.said, file=sys.stderr if end.status else sys.stdout, flush=True)
        return int(end.status)
    except OSError as error:
        if not is_of_storage(error):
            raise
        if not isinstance(error, FirstRankStorageError):
            if world.rank:
                # If all ranks meet the same error, rank 0 reports it, and the launcher ends this rank during the sleep.
                time.sleep(TIME_TO_SPEAK_S)
            line = storage_line(config.out, error, "then start again with --resume auto")
            print(f"error: {f'rank {world.rank}: ' if world.rank else ''}{line}", file=sys.stderr, flush=True)
        return int(ExitStatus.STORAGE)
    except RuntimeError as error:  # a rank was lost while the ranks connect, when there is no communicator to ask
        lost = peer_error_of(None, error)
        if lost is None:
            raise
        raise lost from error


def _trained(run: Run, stop_wanted: Callable[[], int], alive: Alive) -> ExitStatus:
    """Call `train`; an error of torch's own collectives says that a rank was lost."""
    try:
        with run.out_of_memory(lambda: f"in step {run.progress.step + 1:,}"):
            return train(run, stop_wanted, alive)
    except RuntimeError as error:
        lost = peer_error_of(run.strategy.comm, error)
        if lost is None:
            raise
        raise lost from error  # collectives of torch's own strategies bypass our communicator and raise plain errors
