"""Torch's elastic agent, driven from Python: when one rank ends it ends the others, and restarts all of them.

torchrun restarts a run whatever it died of: three times after a wrong flag, and after the run was asked to stop. Here
the root cause decides. A restarted rank resumes by itself: it finds `environment.num_restarts` above 0 and loads the
last good checkpoint.

Ranks are forked: those of a launcher that is alone from this process, before it serves the store at which they meet
(`forked`, `one_host`); where machines come and go from a server beside it (`fork_server`, `many_hosts`).

[Note: A rank that was killed]
    Its peers can neither go on nor save: a checkpoint is written by all. So the launcher ends the ranks that are left
    at once, where it would else wait until each has found out and told what it knows of the loss, for seconds.
"""

from __future__ import annotations

import shutil
import signal
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
    RendezvousTimeoutError,
)

from zeroshard.errors import ExitStatus
from zeroshard.launch.ending import Ending, root_cause
from zeroshard.launch.environment import child_environment, count_restart, variable
from zeroshard.launch.fork_server import ForkServer, ForkServerLostError
from zeroshard.launch.forked import ForkedRank, can_fork, fork_command
from zeroshard.launch.leaving import end_at_once
from zeroshard.launch.leftovers import owned_folder
from zeroshard.launch.machines import UNREACHABLE_AFTER_S, Meeting, watch
from zeroshard.launch.many_hosts import JOIN_TIMEOUT_S, ManyHosts
from zeroshard.launch.one_host import OneHost
from zeroshard.launch.rounds import MACHINE_CAME

MONITOR_INTERVAL_S = 0.1
SAVING_GRACE_S = 300  # that ranks have for a checkpoint when a machine comes; replicas take theirs where they meet next
Fork = Callable[[Sequence[str], Mapping[str, str]], ForkedRank]
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
    with ExitStack() as stack:
        fork: Fork | None = fork_command if one_host else None
        if not one_host and can_fork():
            server = ForkServer()
            stack.callback(server.close)
            fork = server.fork
        try:
            handler = OneHost(meeting.host, meeting.port, run_id) if one_host else ManyHosts(meeting, nproc, run_id)
        except RendezvousConnectionError:
            return Ending(ExitStatus.PEER_LOST, f"rdzv_endpoint: nobody answers at {meeting.endpoint}; start there too")
        log_dir = stack.enter_context(owned_folder("zeroshard-launch-"))
        stack.enter_context(_ended_where_cut_off(meeting, log_dir))
        agent = _agent(words, nproc, meeting, handler, max_restarts, max_moves, grace_s, log_dir)
        agent.fork = fork
        return _run(agent, handler, meeting)


def _run(agent: _Agent, handler: OneHost | ManyHosts, meeting: Meeting) -> Ending:
    try:
        result = agent.run()
    except (RendezvousTimeoutError, RendezvousClosedError, RendezvousConnectionError, DistNetworkError) as error:
        return Ending(ExitStatus.PEER_LOST, _why_not_met(error, meeting))
    except ForkServerLostError as error:
        return Ending(ExitStatus.PEER_LOST, f"{error}; look for a lack of memory here, then start again")
    except SignalException as stop:
        hung_up = stop.sigval == signal.SIGHUP  # which asks for the same as SIGTERM
        return Ending(ExitStatus.TERMINATED if hung_up else 128 + stop.sigval)
    except BaseException:
        handler.shutdown()
        raise
    else:
        handler.shutdown()
        return _ending(result.failures) if result.is_failed() else Ending(ExitStatus.OK)
    finally:
        if isinstance(handler, ManyHosts):
            handler.leave()


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


class _Agent(LocalElasticAgent):
    """Torch's agent, which restarts ranks only after failures that a restart can mend, and prints why it does."""

    restarts_left = moves_left = 0
    alone = True  # no other machine takes part
    words: tuple[str, ...] = ()  # after `zeroshard`

    fork: Fork | None = None  # None: ranks are spawned

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """As the round says, where torch's agents would ask each other."""
        handler = spec.rdzv_handler
        if not isinstance(handler, ManyHosts):
            return super()._assign_worker_ranks(store, group_rank, group_world_size, spec)
        assert handler.current is not None, "this machine is in no round"
        ranks = range(handler.first_rank, handler.first_rank + spec.local_world_size)
        total = sum(handler.current.num_ranks)
        return [Worker(local, rank, rank, total, total) for local, rank in enumerate(ranks)]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        handler = worker_group.spec.rdzv_handler
        if self.fork is None or (isinstance(handler, OneHost) and not can_fork()):
            if isinstance(handler, OneHost):
                handler.serve()
            return super()._start_workers(worker_group)
        restarts = worker_group.spec.max_restarts - self._remaining_restarts
        envs = {worker.local_rank: _environment(worker_group, worker, restarts) for worker in worker_group.workers}
        self._pcontext = _ForkedContext(
            worker_group.spec.role, "zeroshard", dict.fromkeys(envs, self.words), envs, self._logs_specs
        )
        self._pcontext.fork = self.fork
        self._pcontext.start()
        if isinstance(handler, OneHost):
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
        handler = worker_group.spec.rdzv_handler
        if worker_group.state is WorkerState.HEALTHY and isinstance(handler, ManyHosts):
            why = handler.why_over()
            print(f"started again: {why}", file=sys.stderr, flush=True)
            if why == MACHINE_CAME:
                self._shutdown(timeout=SAVING_GRACE_S)
            else:  # [Note: A rank that was killed]
                self._shutdown(signal.SIGKILL)
        count_restart()
        super()._restart_workers(worker_group)


class _ForkedContext(SubprocessContext):
    """Ranks forked from this process, watched as torch's agent watches those that it spawns."""

    fork: Fork = staticmethod(fork_command)

    def _start(self) -> None:
        self.subprocess_handlers = {
            rank: _Handler(rank, self.fork(words, child_environment(None) | self.envs[rank]))
            for rank, words in self.args.items()
        }

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        codes = [handler.proc.poll() for handler in self.subprocess_handlers.values()]
        if -signal.SIGKILL in codes:  # [Note: A rank that was killed]
            death_sig = signal.SIGKILL
        super()._close(death_sig, timeout)


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
    handler: OneHost | ManyHosts,
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
