"""Torch's elastic agent, driven from Python: it starts ranks, sees one end, ends the others, and starts all again.

torchrun does this too, but starts a run again whatever it died of: a wrong flag three times over, and a run that was
asked to stop. Here the root cause decides. What a restarted rank goes on from is not the agent's business: it finds
`launch.num_restarts` above 0 and takes the last good checkpoint.

[Note: A store of the ranks' own]
    By default ranks meet at the agent's own store. Across a restart that store still holds what the dead world left
    there, and with restarts 5 of 10 crashes hung. So the agent is told to keep its store to itself
    (``TORCH_DISABLE_SHARE_RDZV_TCP_STORE``): rank 0 of each attempt opens another, and 60 of 60 were clean.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch.distributed import DistNetworkError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous import registry as rendezvous

from zeroshard.comm.ending import Ending, root_cause
from zeroshard.comm.launch import count_restart
from zeroshard.comm.leaving import end_at_once
from zeroshard.comm.machines import UNREACHABLE_AFTER_S, Meeting, watch
from zeroshard.errors import ExitStatus

MONITOR_INTERVAL_S = 0.1
JOIN_TIMEOUT_S = 600  # that a machine waits for the least number of others
LAST_CALL_S = 10  # that these wait for more, up to the largest number
WORTH_A_RESTART = frozenset({int(ExitStatus.FAILED), int(ExitStatus.PEER_LOST)})


def run_elastic(
    command: Sequence[str],
    nproc: int,
    meeting: Meeting,
    *,
    max_restarts: int,
    max_moves: int = 0,
    grace_s: int,
    run_id: str,
) -> Ending:
    """Run ``command`` as ``nproc`` ranks on this machine, again after a loss, and wait for them.

    Where other machines take part, each starts its own ranks again, and all meet anew: those that are lost stay away,
    and one that comes later has the others start again, from the checkpoint that they write when they are asked to end.

    A signal to this process is passed on to the ranks. Call it from the main thread.

    Args:
        command: a program and its words.
        nproc: ranks.
        meeting: where the ranks meet, on this machine or among several; port 0: any free one.
        max_restarts: how often all are started again after one has failed or was lost.
        max_moves: how often beside that, after one has ended as `ExitStatus.MOVED_UP`.
        grace_s: from asking a rank to stop to SIGKILL.
        run_id: of this launch, the same on each machine.
    """
    try:
        handler = _meet(meeting, run_id)
    except RendezvousConnectionError:
        return Ending(ExitStatus.PEER_LOST, f"rdzv_endpoint: nobody answers at {meeting.endpoint}; start there too")
    spec = WorkerSpec(
        role="default",
        local_world_size=nproc,
        entrypoint=command[0],
        args=tuple(command[1:]),
        rdzv_handler=handler,
        max_restarts=max_restarts + max_moves,
        monitor_interval=MONITOR_INTERVAL_S,
        local_addr=meeting.own_address,
    )
    with tempfile.TemporaryDirectory(prefix="zeroshard-") as log_dir, _ended_where_cut_off(meeting, log_dir):
        agent = _Agent(spec, DefaultLogsSpecs(log_dir=log_dir), shutdown_timeout=grace_s)
        agent.restarts_left, agent.moves_left = max_restarts, max_moves
        agent.alone = meeting.max_nodes == 1
        try:
            result = agent.run()
        except RendezvousTimeoutError:
            what = f"fewer than {meeting.min_nodes} machines came to {meeting.endpoint} within {JOIN_TIMEOUT_S} s"
            return Ending(ExitStatus.PEER_LOST, f"nnodes: {what}; start the others too")
        except RendezvousClosedError:
            what = f"the run that met at {meeting.endpoint} has ended"
            return Ending(ExitStatus.PEER_LOST, f"rdzv_endpoint: {what}; start it again on every machine")
        except (RendezvousConnectionError, DistNetworkError):
            what = f"whoever served the meeting at {meeting.endpoint} is gone"
            return Ending(ExitStatus.PEER_LOST, f"rdzv_endpoint: {what}; start again on every machine, --resume auto")
        except SignalException as stop:
            return Ending(128 + stop.sigval)
        except BaseException:
            handler.shutdown()
            raise
        handler.shutdown()
        return _ending(result.failures) if result.is_failed() else Ending(ExitStatus.OK)


@contextmanager
def _ended_where_cut_off(meeting: Meeting, log_dir: str) -> Generator[None]:
    """Inside, this launcher ends, and its ranks with it, once the meeting cannot be reached any more.

    It removes ``log_dir`` before, since it then ends at once.
    """
    if meeting.max_nodes == 1:
        yield
        return

    def end() -> None:
        """Say so and end this process, on the watching thread."""
        what = f"{meeting.endpoint} has not answered for {UNREACHABLE_AFTER_S:.0f} s"
        line = f"error: rdzv_endpoint: {what}; start again with --resume auto once it can be reached"
        shutil.rmtree(log_dir, ignore_errors=True)
        end_at_once(line, ExitStatus.PEER_LOST)

    left = threading.Event()
    threading.Thread(target=watch, args=(meeting, left, end), name="meeting", daemon=True).start()
    try:
        yield
    finally:
        left.set()


def _meet(meeting: Meeting, run_id: str) -> RendezvousHandler:
    def handler(*, serves: bool) -> RendezvousHandler:
        """The meeting; ``serves``: from a store in this process, which a RendezvousConnectionError says is taken."""
        parameters = RendezvousParameters(
            "c10d",
            meeting.endpoint,
            run_id,
            meeting.min_nodes,
            meeting.max_nodes,
            local_addr=meeting.own_address,
            is_host=serves,
            join_timeout=JOIN_TIMEOUT_S,
            last_call_timeout=LAST_CALL_S,
        )
        return rendezvous.get_rendezvous_handler(parameters)

    try:
        return handler(serves=meeting.serves)
    except RendezvousConnectionError:
        if not meeting.serves:
            raise
        return handler(serves=False)  # another launcher on this machine was faster


class _Agent(LocalElasticAgent):
    """The agent, which starts again after what is worth it alone, and says so."""

    restarts_left = moves_left = 0
    alone = True  # no other machine takes part

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.state is not WorkerState.FAILED or not self._remaining_restarts:
            return result
        ending = _ending(result.failures)
        why = ending.line or f"exit status {ending.status}"
        elsewhere = not self.alone and ending.status == ExitStatus.PEER_LOST and not self.restarts_left
        if self.moves_left and (ending.status == ExitStatus.MOVED_UP or elsewhere):
            self.moves_left -= 1
            print(f"started again: {why}", file=sys.stderr, flush=True)
        elif ending.status in WORTH_A_RESTART and self.restarts_left:
            self.restarts_left -= 1
            print(
                f"started again from the last good checkpoint, {self.restarts_left} times more at most: {why}",
                file=sys.stderr,
                flush=True,
            )
        else:
            self._remaining_restarts = 0
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if worker_group.state is WorkerState.HEALTHY:
            print("started again: another machine has come", file=sys.stderr, flush=True)
        count_restart()
        super()._restart_workers(worker_group)


def _ending(failures: Mapping[int, Any]) -> Ending:
    return root_cause({rank: (failure.exitcode, _said(failure)) for rank, failure in failures.items()})


def _said(failure: Any) -> str:
    """What the rank left for us to print; where that is nothing, torch puts words of its own there."""
    message = failure.error_file_data.get("message", "")
    if not isinstance(message, str):
        return failure.message
    return "" if message == "<NONE>" else message
