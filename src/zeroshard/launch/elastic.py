"""Drives torch's elastic agent from Python: when one rank fails, it ends the others, and restarts all of them.

torchrun restarts a run whatever the cause of its end: three times after a wrong flag, and even after the run was asked
to stop. Here the root cause decides. A restarted rank resumes by itself: it sees that `environment.num_restarts` is
above 0, and loads the last good checkpoint.

Ranks are forked. With one machine, the launcher forks them before it serves their rendezvous store (`forked`,
`one_host`). With several machines, a separate process forks them (`fork_server`, `many_hosts`).

[Note: A rank that was killed]
    Its peers can neither continue nor save, because all ranks write a checkpoint together. So the launcher kills the
    remaining ranks at once. Otherwise it would wait for seconds until each has noticed and reported the loss.
"""

from __future__ import annotations

import math
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import psutil
from torch.distributed import DistNetworkError
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.api import RunProcsResult, SubprocessContext
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
from zeroshard.launch.forked import POLL_S, ForkedRank, can_fork, fork_command
from zeroshard.launch.leftovers import owned_folder
from zeroshard.launch.many_hosts import JOIN_TIMEOUT_S, ManyHosts
from zeroshard.launch.one_host import OneHost
from zeroshard.launch.rank_exit import end_at_once
from zeroshard.launch.rendezvous_address import UNREACHABLE_AFTER_S, RendezvousAddress, watch
from zeroshard.launch.rounds import MACHINE_CAME

MONITOR_INTERVAL_S = 0.1
# How long ranks may take to save a checkpoint when a machine comes; replicas save when they synchronise next.
SAVING_GRACE_S = 300
REAPING_S = 5  # from SIGKILL until a rank is given up that the kernel cannot end
STOP_S = 30  # from SIGTERM to SIGKILL for ranks that are to be started again
Fork = Callable[[Sequence[str], Mapping[str, str]], ForkedRank]
WORTH_A_RESTART = frozenset({int(ExitStatus.FAILED), int(ExitStatus.PEER_LOST)})


def run_elastic(
    words: Sequence[str],
    nproc: int,
    meeting: RendezvousAddress,
    *,
    max_restarts: int,
    max_stage_raises: int = 0,
    grace_s: int,
    run_id: str,
) -> Ending:
    """Run ``python -m zeroshard WORDS`` as ``nproc`` ranks on this machine, wait for them, restart them after a loss.

    If other machines take part, each restarts its own ranks, and all of them meet in a new round without the machines
    that were lost. When another machine comes, the ranks of all are asked to end. They write a checkpoint, and are
    restarted from it together with those of the new machine.

    A signal to this process is passed on to the ranks. Call it from the main thread.

    Args:
        words: the words after ``zeroshard``.
        nproc: how many ranks to start on this machine.
        meeting: where the ranks meet, on this machine or among several; port 0: any free one.
        max_restarts: how often all ranks are started again after one failed or was lost.
        max_stage_raises: how often they are also started again after one has ended with `ExitStatus.STAGE_RAISED`.
        grace_s: seconds from asking a rank to stop until SIGKILL.
        run_id: id of this launch, the same on each machine.

    Returns:
        The exit status of the root cause, and the line to print about it.
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
        agent = _agent(words, nproc, meeting, handler, max_restarts, max_stage_raises, grace_s, log_dir)
        agent.fork = fork
        return _run(agent, handler, meeting)


def _run(agent: _Agent, handler: OneHost | ManyHosts, meeting: RendezvousAddress) -> Ending:
    try:
        result = agent.run()
    except (RendezvousTimeoutError, RendezvousClosedError, RendezvousConnectionError, DistNetworkError) as error:
        return Ending(ExitStatus.PEER_LOST, _why_not_met(error, meeting))
    except ForkServerLostError as error:
        return Ending(ExitStatus.PEER_LOST, f"{error}; look for a lack of memory here, then start again")
    except SignalException as stop:
        unsaved = agent.exit_codes() & {ExitStatus.FAILED, ExitStatus.STORAGE}  # a rank has said why
        hung_up = stop.sigval == signal.SIGHUP  # which asks for the same as SIGTERM
        return Ending(max(unsaved, default=ExitStatus.TERMINATED if hung_up else 128 + stop.sigval))
    except BaseException:
        handler.shutdown()
        raise
    else:
        handler.shutdown()
        return _ending(result.failures) if result.is_failed() else Ending(ExitStatus.OK)
    finally:
        if isinstance(handler, ManyHosts):
            handler.leave()


def _why_not_met(error: Exception, meeting: RendezvousAddress) -> str:
    """Return one line for the user: why the machines did not meet, or can meet no more."""
    if isinstance(error, RendezvousTimeoutError):
        what = f"fewer than {meeting.min_nodes} machines came to {meeting.endpoint} within {JOIN_TIMEOUT_S} s"
        return f"nnodes: {what}; start the others too"
    if isinstance(error, RendezvousClosedError):
        return f"rdzv_endpoint: the run that met at {meeting.endpoint} has ended; start it again on every machine"
    what = f"the machine that served the rendezvous at {meeting.endpoint} is gone"
    return f"rdzv_endpoint: {what}; start again on every machine, --resume auto"


@contextmanager
def _ended_where_cut_off(meeting: RendezvousAddress, log_dir: str) -> Generator[None]:
    """Inside, end this launcher and with it its ranks once the meeting can no longer be reached.

    The process then ends at once, without cleanup, so ``log_dir`` is removed before.
    """
    if meeting.max_nodes == 1:
        yield
        return

    def end() -> None:
        """Print why and end this process; called on the thread of `watch`."""
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
    """Torch's agent, except that it restarts ranks only after failures that a restart may fix, and prints why."""

    restarts_left = moves_left = 0
    alone = True  # no other machine takes part
    words: tuple[str, ...] = ()  # the words after `zeroshard`

    fork: Fork | None = None  # None: ranks are spawned

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Number the ranks as the round says; torch's agents would exchange their numbers through the store."""
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
        if self.moves_left and (ending.status == ExitStatus.STAGE_RAISED or elsewhere):
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

    def _stop_workers(self, *_: Any, **__: Any) -> None:
        self._shutdown(timeout=STOP_S)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int | None = None) -> None:
        """End the ranks, after ``timeout`` seconds by SIGKILL; None, as in torch 2.11: after the agent's own limit.

        After Ctrl-C they may take as long as their step and their checkpoint take, until a second signal comes.
        """
        if isinstance(self._pcontext, _ForkedContext) and death_sig == signal.SIGINT:
            with suppress(SignalException):
                self._pcontext.stop_after_step()
        if self._pcontext:
            self._pcontext.close(death_sig, self._shutdown_timeout if timeout is None else timeout)
        super()._shutdown(death_sig)

    def exit_codes(self) -> set[int]:
        """Return the exit codes of the ranks that have ended, if this process has forked them."""
        handlers = getattr(self._pcontext, "subprocess_handlers", {}) if self._pcontext else {}
        return {code for handler in handlers.values() if (code := handler.proc.poll()) is not None}


class _ForkedContext(SubprocessContext):
    """Forked ranks, monitored as torch's agent monitors the ranks that it spawns."""

    fork: Fork = staticmethod(fork_command)

    def _start(self) -> None:
        self._asked_to_end: set[int] = set()  # ranks that still ran when they were sent a signal
        self.subprocess_handlers = {
            rank: _Handler(rank, self.fork(words, child_environment(None) | self.envs[rank]))
            for rank, words in self.args.items()
        }

    def stop_after_step(self) -> None:
        """Send SIGINT to each rank and return once all have ended."""
        self._ask_to_end(signal.SIGINT, math.inf)

    def _ask_to_end(self, number: signal.Signals, limit_s: float) -> None:
        """Send a signal to the ranks that run, and wait for their end; kill those that are stopped: they hear none."""
        end_s = time.monotonic() + limit_s
        running = [handler for handler in self.subprocess_handlers.values() if handler.proc.poll() is None]
        self._asked_to_end |= {handler.local_rank_id for handler in running}
        for handler in running:
            handler.close(number)
        while running and time.monotonic() < end_s:
            for handler in running:
                if _is_stopped(handler.proc.pid):
                    handler.close(signal.SIGKILL)
            time.sleep(POLL_S)
            running = [handler for handler in running if handler.proc.poll() is None]

    def _poll(self) -> RunProcsResult | None:
        result = super()._poll()
        if result is not None and result.is_failed():
            # that a rank ended by our own signal is no failure of it: the cause is a rank that had ended before
            ended_here = {
                rank
                for rank in self._asked_to_end & result.failures.keys()
                if result.failures[rank].exitcode in (-signal.SIGKILL, -signal.SIGTERM)
            }
            if ended_here < result.failures.keys():
                for rank in ended_here:
                    del result.failures[rank]
        return result

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        codes = [handler.proc.poll() for handler in self.subprocess_handlers.values()]
        if -signal.SIGKILL in codes:  # [Note: A rank that was killed]
            death_sig = signal.SIGKILL
        self._ask_to_end(death_sig, timeout)
        super()._close(signal.SIGKILL, REAPING_S)  # those that still run


def _is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, as by SIGSTOP or a debugger."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.NoSuchProcess:
        return False


class _Handler(SubprocessHandler):
    """A forked rank, with the interface that `SubprocessContext` expects."""

    def __init__(self, local_rank: int, rank: ForkedRank) -> None:  # not super().__init__, which would start a process
        self.local_rank_id = local_rank
        self.proc = rank  # ty: ignore[invalid-assignment]

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Send the rank ``death_sig``, by default SIGTERM."""
        self.proc.send_signal(death_sig or signal.SIGTERM)


def _environment(group: WorkerGroup, worker: Worker, restarts: int) -> dict[str, str]:
    """Return the environment variables that torchrun sets for a rank."""
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
    meeting: RendezvousAddress,
    handler: OneHost | ManyHosts,
    max_restarts: int,
    max_stage_raises: int,
    grace_s: int,
    log_dir: str,
) -> _Agent:
    spec = WorkerSpec(
        role="default",
        local_world_size=nproc,
        entrypoint=sys.executable,
        args=("-m", "zeroshard", *words),
        rdzv_handler=handler,
        max_restarts=max_restarts + max_stage_raises,
        monitor_interval=MONITOR_INTERVAL_S,
        local_addr=meeting.own_address,
    )
    agent = _Agent(spec, DefaultLogsSpecs(log_dir=log_dir))
    agent._shutdown_timeout = grace_s  # torch 2.11 does not take it as an argument
    agent.restarts_left, agent.moves_left = max_restarts, max_stage_raises
    agent.alone, agent.words = isinstance(handler, OneHost), tuple(words)
    return agent


def _ending(failures: Mapping[int, Any]) -> Ending:
    return root_cause({rank: (failure.exitcode, _said(failure)) for rank, failure in failures.items()})


def _said(failure: Any) -> str:
    """Return the message that the rank left for us to print; empty if torch put its own placeholder there."""
    message = failure.error_file_data.get("message", "")
    if not isinstance(message, str):
        return failure.message
    return "" if message == "<NONE>" else message
