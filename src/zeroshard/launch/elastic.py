"""Torch's elastic agent, driven from Python: it starts ranks, sees one end, ends the others, and starts all again.

torchrun does this too, but starts a run again whatever it died of: a wrong flag three times over, and a run that was
asked to stop. Here the root cause decides. What a restarted rank goes on from is not the agent's business: it finds
`environment.num_restarts` above 0 and takes the last good checkpoint.

Ranks that are all on this host are forked from this process, and meet in a store that it serves (`forked`,
`one_host`). Those of several hosts are spawned, since torch's c10d rendezvous holds threads.

[Note: A store of the ranks' own]
    With several hosts, ranks would meet at the agents' own store. Across a restart that store still holds what the dead
    world left there, and with restarts 5 of 10 crashes hung. So the agents are told to keep their store to themselves
    (``TORCH_DISABLE_SHARE_RDZV_TCP_STORE``): rank 0 of each attempt opens another, and 60 of 60 were clean. On one
    host each attempt has a new store in the launcher.
"""

from __future__ import annotations

import shutil
import signal
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch.distributed import DistNetworkError
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from zeroshard.errors import ExitStatus
from zeroshard.launch.ending import Ending, root_cause
from zeroshard.launch.environment import child_environment, count_restart, variable
from zeroshard.launch.forked import ForkedRank, can_fork, fork_command
from zeroshard.launch.leaving import end_at_once
from zeroshard.launch.leftovers import owned_folder
from zeroshard.launch.machines import UNREACHABLE_AFTER_S, Meeting, watch
from zeroshard.launch.meeting_store import open_store
from zeroshard.launch.one_host import OneHost

MONITOR_INTERVAL_S = 0.1
JOIN_TIMEOUT_S = 600  # that a machine waits for the least number of others
READ_TIMEOUT_S = 60  # of a machine's question to the meeting
LAST_CALL_S = 10  # that these wait for more, up to the largest number
WORTH_A_RESTART = frozenset({int(ExitStatus.FAILED), int(ExitStatus.PEER_LOST)})


def run_elastic(
    words: Sequence[str],
    nproc: int,
    meeting: Meeting,
    *,
    max_restarts: int,
    max_moves: int = 0,
    grace_s: int,
    run_id: str,
) -> Ending:
    """Run ``python -m zeroshard WORDS`` as ``nproc`` ranks on this machine, again after a loss, and wait for them.

    Where other machines take part, each starts its own ranks again, and all meet anew: those that are lost stay away,
    and one that comes later has the others start again, from the checkpoint that they write when they are asked to end.

    A signal to this process is passed on to the ranks. Call it from the main thread.

    Args:
        words: after ``zeroshard``.
        nproc: ranks.
        meeting: where the ranks meet, on this machine or among several; port 0: any free one.
        max_restarts: how often all are started again after one has failed or was lost.
        max_moves: how often beside that, after one has ended as `ExitStatus.MOVED_UP`.
        grace_s: from asking a rank to stop to SIGKILL.
        run_id: of this launch, the same on each machine.
    """
    one_host = meeting.max_nodes == 1
    try:
        handler = OneHost(meeting.host, meeting.port, run_id) if one_host else _meet(meeting, run_id)
    except RendezvousConnectionError:
        return Ending(ExitStatus.PEER_LOST, f"rdzv_endpoint: nobody answers at {meeting.endpoint}; start there too")
    with owned_folder("zeroshard-launch-") as log_dir, _ended_where_cut_off(meeting, log_dir):
        agent = _agent(words, nproc, meeting, handler, max_restarts, max_moves, grace_s, log_dir)
        try:
            result = agent.run()
        except (RendezvousTimeoutError, RendezvousClosedError, RendezvousConnectionError, DistNetworkError) as error:
            return Ending(ExitStatus.PEER_LOST, _why_not_met(error, meeting))
        except SignalException as stop:
            hung_up = stop.sigval == signal.SIGHUP  # which asks for the same as SIGTERM
            return Ending(ExitStatus.TERMINATED if hung_up else 128 + stop.sigval)
        except BaseException:
            handler.shutdown()
            raise
        handler.shutdown()
        return _ending(result.failures) if result.is_failed() else Ending(ExitStatus.OK)


def _why_not_met(error: Exception, meeting: Meeting) -> str:
    """One line for a user whose machines did not meet, or met no more."""
    if isinstance(error, RendezvousTimeoutError):
        what = f"fewer than {meeting.min_nodes} machines came to {meeting.endpoint} within {JOIN_TIMEOUT_S} s"
        return f"nnodes: {what}; start the others too"
    if isinstance(error, RendezvousClosedError):
        return f"rdzv_endpoint: the run that met at {meeting.endpoint} has ended; start it again on every machine"
    what = f"whoever served the meeting at {meeting.endpoint} is gone"
    return f"rdzv_endpoint: {what}; start again on every machine, --resume auto"


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
        """The meeting; ``serves``: from a store in this process, at the meeting's address alone.

        Raises:
            RendezvousConnectionError: the port is taken, or nobody answers there.
        """
        try:
            store = open_store(meeting.host, meeting.port, serves=serves, timeout_s=READ_TIMEOUT_S)
        except (OSError, RuntimeError) as error:
            raise RendezvousConnectionError(str(error)) from error
        parameters = RendezvousParameters(
            "c10d",
            meeting.endpoint,
            run_id,
            meeting.min_nodes,
            meeting.max_nodes,
            local_addr=meeting.own_address,
            join_timeout=JOIN_TIMEOUT_S,
            last_call_timeout=LAST_CALL_S,
        )
        return create_handler(store, C10dRendezvousBackend(store, run_id), parameters)

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
    words: tuple[str, ...] = ()  # after `zeroshard`

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        handler = worker_group.spec.rdzv_handler
        if not isinstance(handler, OneHost):
            return super()._start_workers(worker_group)
        if not can_fork():
            handler.serve()
            return super()._start_workers(worker_group)
        restarts = worker_group.spec.max_restarts - self._remaining_restarts
        envs = {worker.local_rank: _environment(worker_group, worker, restarts) for worker in worker_group.workers}
        self._pcontext = _ForkedContext(
            worker_group.spec.role, "zeroshard", dict.fromkeys(envs, self.words), envs, self._logs_specs
        )
        self._pcontext.start()
        handler.serve()
        return self._pcontext.pids()

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


class _ForkedContext(SubprocessContext):
    """Ranks forked from this process, watched as torch's agent watches those that it spawns."""

    def _start(self) -> None:
        self.subprocess_handlers = {
            rank: _Handler(rank, fork_command(words, child_environment(None) | self.envs[rank]))
            for rank, words in self.args.items()
        }


class _Handler(SubprocessHandler):
    """A forked rank as `SubprocessContext` knows it."""

    def __init__(self, local_rank: int, rank: ForkedRank) -> None:  # it has started already: nothing is inherited
        self.local_rank_id = local_rank
        self.proc = rank  # ty: ignore[invalid-assignment]

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Ask it to end."""
        self.proc.send_signal(death_sig or signal.SIGTERM)


def _environment(group: WorkerGroup, worker: Worker, restarts: int) -> dict[str, str]:
    """What torchrun tells a rank by its environment."""
    return {
        "RANK": str(worker.global_rank),
        "LOCAL_RANK": str(worker.local_rank),
        "WORLD_SIZE": str(worker.world_size),
        "LOCAL_WORLD_SIZE": str(group.spec.local_world_size),
        "GROUP_RANK": str(group.group_rank),
        "GROUP_WORLD_SIZE": str(group.group_world_size),
        "ROLE_NAME": group.spec.role,
        "ROLE_RANK": str(worker.role_rank),
        "ROLE_WORLD_SIZE": str(worker.role_world_size),
        "MASTER_ADDR": str(group.master_addr),
        "MASTER_PORT": str(group.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(group.spec.max_restarts),
        "TORCHELASTIC_RUN_ID": group.spec.rdzv_handler.get_run_id(),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": variable("TORCH_NCCL_ASYNC_ERROR_HANDLING") or "1",
    }


def _agent(
    words: Sequence[str],
    nproc: int,
    meeting: Meeting,
    handler: RendezvousHandler,
    max_restarts: int,
    max_moves: int,
    grace_s: int,
    log_dir: str,
) -> _Agent:
    spec = WorkerSpec(
        role="default",
        local_world_size=nproc,
        entrypoint=sys.executable,
        args=("-m", "zeroshard", *words),
        rdzv_handler=handler,
        max_restarts=max_restarts + max_moves,
        monitor_interval=MONITOR_INTERVAL_S,
        local_addr=meeting.own_address,
    )
    agent = _Agent(spec, DefaultLogsSpecs(log_dir=log_dir), shutdown_timeout=grace_s)
    agent.restarts_left, agent.moves_left = max_restarts, max_moves
    agent.alone, agent.words = isinstance(handler, OneHost), tuple(words)
    return agent


def _ending(failures: Mapping[int, Any]) -> Ending:
    return root_cause({rank: (failure.exitcode, _said(failure)) for rank, failure in failures.items()})


def _said(failure: Any) -> str:
    """What the rank left for us to print; where that is nothing, torch puts words of its own there."""
    message = failure.error_file_data.get("message", "")
    if not isinstance(message, str):
        return failure.message
    return "" if message == "<NONE>" else message
