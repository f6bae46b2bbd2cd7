"""Drives torch's elastic agent from Python: when one rank fails, it ends the others, and restarts all of them.

torchrun restarts a run whatever the cause of its end: three times after a wrong flag, and even after the run was asked
to stop. Here the root cause decides. A restarted rank resumes by itself: it sees that `environment.num_restarts` is
above 0, and loads the last good checkpoint.

With one machine, the launcher forks the ranks before it serves their rendezvous store (`forked`, `one_host`). With
several machines it has threads, so ranks are spawned (`several_hosts`).

[Note: A rank that was killed]
    Its peers can neither continue nor save, because all ranks write a checkpoint together. So the launcher kills the
    remaining ranks at once. Otherwise it would wait for seconds until each has noticed and reported the loss.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psutil
from torch.distributed import DistError
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

from zeroshard.host import host_memory
from zeroshard.host.errors import ExitStatus
from zeroshard.host.launch.ending import Ending, root_cause
from zeroshard.host.launch.environment import child_environment, count_restart, variable
from zeroshard.host.launch.forked import POLL_S, StartedRank, can_fork, fork_command, spawn_command
from zeroshard.host.launch.leftovers import owned_folder
from zeroshard.host.launch.one_host import OneHost
from zeroshard.host.launch.rank_exit import end_at_once
from zeroshard.host.launch.rendezvous_address import UNREACHABLE_AFTER_S, RendezvousAddress, watch
from zeroshard.host.launch.several_hosts import JOIN_TIMEOUT_S, SeveralHosts

MONITOR_INTERVAL_S = 0.1
SHUTDOWN_GRACE_S = 30  # from SIGTERM to SIGKILL: long enough to save a checkpoint
# How long ranks may take to save a checkpoint when a machine waits; replicas save when they synchronise next.
SAVING_GRACE_S = 300
NEWS_S = 1.5  # after so long a launcher has read that another machine waits: torch reads the state once a second
REAPING_S = 5  # from SIGKILL until a rank is given up that the kernel cannot end
STOP_S = 30  # from SIGTERM to SIGKILL for ranks that are to be started again
StartRank = Callable[[Sequence[str], Mapping[str, str]], StartedRank]
WORTH_A_RESTART = frozenset({int(ExitStatus.FAILED), int(ExitStatus.PEER_LOST)})


def run_elastic(
    words: Sequence[str],
    nproc: int,
    rendezvous: RendezvousAddress,
    *,
    max_restarts: int,
    max_levers: int = 0,
    after_oom_kill: Callable[[int], Ending | None] | None = None,
) -> Ending:
    """Run ``python -m zeroshard WORDS`` as ``nproc`` ranks on this machine, wait for them, restart them after a loss.

    If other machines take part, each restarts its own ranks, and all of them meet again without the machines that were
    lost. When a machine waits, because it has just come or its ranks have failed, the ranks of all are asked to end.
    They write a checkpoint if they can, and are restarted together with those of that machine.

    A signal to this process is passed on to the ranks. Call it from the main thread.

    Args:
        words: the words after ``zeroshard``.
        nproc: how many ranks to start on this machine.
        rendezvous: where the ranks meet, on this machine or among several; port 0: any free one.
        max_restarts: how often all ranks are started again after one failed or was lost.
        max_levers: how often they are also started again after one has ended with `ExitStatus.OUT_OF_MEMORY`.
        after_oom_kill: says how the run ended of which the kernel has killed this rank for lack of memory; None, or if
            it returns None: a rank was lost.

    Returns:
        The exit status of the root cause, and the line to print about it.
    """
    try:
        if rendezvous.max_nodes == 1:
            handler = OneHost(rendezvous.host, rendezvous.port, f"zeroshard-{os.getpid()}")
        else:
            handler = SeveralHosts.at(rendezvous, "zeroshard")  # the same id on each machine
    except RendezvousConnectionError:
        return Ending(ExitStatus.PEER_LOST, f"rdzv_endpoint: nobody answers at {rendezvous.endpoint}; start there too")
    with owned_folder("zeroshard-launch-") as log_dir, _ended_where_cut_off(rendezvous, log_dir):
        spec = WorkerSpec(
            role="default",
            local_world_size=nproc,
            entrypoint=sys.executable,
            args=("-m", "zeroshard", *words),
            rdzv_handler=handler,
            max_restarts=max_restarts + max_levers,
            monitor_interval=MONITOR_INTERVAL_S,
            local_addr=rendezvous.own_address,
        )
        agent = _Agent(spec, DefaultLogsSpecs(log_dir=log_dir))
        agent._shutdown_timeout = SHUTDOWN_GRACE_S  # torch 2.11 does not take it as an argument
        agent.restarts_left, agent.moves_left, agent.words = max_restarts, max_levers, tuple(words)
        agent.after_oom_kill = after_oom_kill or (lambda rank: None)
        return _run(agent, handler, rendezvous)


def _run(agent: _Agent, handler: OneHost | SeveralHosts, rendezvous: RendezvousAddress) -> Ending:
    try:
        result = agent.run()
        if result is None:  # as torch's agent ends on a spare machine, once the others have finished
            raise RendezvousClosedError
    except (RendezvousTimeoutError, RendezvousClosedError, RendezvousConnectionError, DistError) as error:
        return Ending(ExitStatus.PEER_LOST, _why_not_met(error, rendezvous))
    except SignalException as stop:
        unsaved = agent.exit_codes() & {ExitStatus.FAILED, ExitStatus.STORAGE}  # a rank has said why
        hung_up = stop.sigval == signal.SIGHUP  # which asks for the same as SIGTERM
        return Ending(max(unsaved, default=ExitStatus.TERMINATED if hung_up else 128 + stop.sigval))
    except BaseException:
        handler.shutdown()
        raise
    handler.shutdown()
    return agent.ending if result.is_failed() else Ending(ExitStatus.OK)


def _why_not_met(error: Exception, rendezvous: RendezvousAddress) -> str:
    """Return one line for the user: why the machines did not meet, or can meet no more."""
    if isinstance(error, RendezvousTimeoutError):
        what = f"fewer than {rendezvous.min_nodes} machines came to {rendezvous.endpoint} within {JOIN_TIMEOUT_S} s"
        return f"nnodes: {what}; start the others too"
    if isinstance(error, RendezvousClosedError):
        return f"rdzv_endpoint: the run that met at {rendezvous.endpoint} has ended; start it again on every machine"
    what = f"the machine that served the rendezvous at {rendezvous.endpoint} is gone"
    return f"rdzv_endpoint: {what}; start again on every machine, --resume auto"


@contextmanager
def _ended_where_cut_off(rendezvous: RendezvousAddress, log_dir: str) -> Generator[None]:
    """Inside, end this launcher and with it its ranks once the rendezvous can no longer be reached.

    The process then ends at once, without cleanup, so ``log_dir`` is removed before.
    """
    if rendezvous.max_nodes == 1:
        yield
        return

    def end() -> None:
        """Print why and end this process; called on the thread of `watch`."""
        what = f"{rendezvous.endpoint} has not answered for {UNREACHABLE_AFTER_S:.0f} s"
        line = f"error: rdzv_endpoint: {what}; start again with --resume auto once it can be reached"
        shutil.rmtree(log_dir, ignore_errors=True)
        end_at_once(line, ExitStatus.PEER_LOST)

    left = threading.Event()
    threading.Thread(target=watch, args=(rendezvous, left, end), name="rendezvous", daemon=True).start()
    try:
        yield
    finally:
        left.set()


class _Agent(LocalElasticAgent):
    """Torch's agent, except that it restarts ranks only after failures that a restart may fix, and prints why."""

    restarts_left = moves_left = 0
    words: tuple[str, ...] = ()  # the words after `zeroshard`
    ending: Ending  # of the last ranks that failed
    after_oom_kill: Callable[[int], Ending | None]
    _oom_kills: int | None = None  # before the ranks were started

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._oom_kills = host_memory.num_oom_kills()
        handler = worker_group.spec.rdzv_handler
        restarts = worker_group.spec.max_restarts - self._remaining_restarts
        envs = {worker.local_rank: _environment(worker_group, worker, restarts) for worker in worker_group.workers}
        self._pcontext = _Ranks(
            worker_group.spec.role, "zeroshard", dict.fromkeys(envs, self.words), envs, self._logs_specs
        )
        self._pcontext.start_rank = fork_command if isinstance(handler, OneHost) and can_fork() else spawn_command
        self._pcontext.start()
        if isinstance(handler, OneHost):
            handler.serve()
        return self._pcontext.pids()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.state is not WorkerState.FAILED:
            return result
        alone = isinstance(worker_group.spec.rdzv_handler, OneHost)
        ending = self.ending = self._cause(result.failures)
        if not alone and ending.status == ExitStatus.TERMINATED and self._machine_waits():
            return RunResult(WorkerState.HEALTHY)  # as if this launcher had heard of it before its ranks: restart them
        if not self._remaining_restarts:
            return result
        why = ending.line or f"exit status {ending.status}"
        of_another_host = not alone and ending.status == ExitStatus.PEER_LOST and not self.restarts_left
        if self.moves_left and (ending.status == ExitStatus.OUT_OF_MEMORY or of_another_host):
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

    def _cause(self, failures: Mapping[int, Any]) -> Ending:
        """The root cause; of a rank that was killed, whether the kernel did it as memory ran out: it counts those."""
        ending = _ending(failures)
        kills, rank = host_memory.num_oom_kills(), ending.killed_rank
        if rank is None or kills is None or self._oom_kills is None or kills == self._oom_kills:
            return ending
        line = f"rank {rank}: was killed by the kernel, as memory ran out; use less of it, or --fit"
        return self.after_oom_kill(rank) or Ending(ending.status, line)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if worker_group.state is WorkerState.HEALTHY:
            print("started again: another machine waits", file=sys.stderr, flush=True)
            self._shutdown(timeout=SAVING_GRACE_S)
        count_restart()
        super()._restart_workers(worker_group)

    def _machine_waits(self) -> bool:
        """Return whether another machine waits, if only the ranks have been told of it so far."""
        deadline = time.monotonic() + NEWS_S
        while not (waits := self._worker_group.spec.rdzv_handler.num_nodes_waiting()) and time.monotonic() < deadline:
            time.sleep(MONITOR_INTERVAL_S)
        return waits > 0

    def _stop_workers(self, *_: Any, **__: Any) -> None:
        self._shutdown(timeout=STOP_S)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int | None = None) -> None:
        """End the ranks, after ``timeout`` seconds by SIGKILL; None, as in torch 2.11: after the agent's own limit.

        After Ctrl-C they may take as long as their step and their checkpoint take, until a second signal comes.
        """
        if isinstance(self._pcontext, _Ranks) and death_sig == signal.SIGINT:
            with suppress(SignalException):
                self._pcontext.stop_after_step()
        if self._pcontext:
            self._pcontext.close(death_sig, self._shutdown_timeout if timeout is None else timeout)
        super()._shutdown(death_sig)

    def exit_codes(self) -> set[int]:
        """Return the exit codes of the ranks that have ended."""
        handlers = self._pcontext.subprocess_handlers.values() if isinstance(self._pcontext, _Ranks) else ()
        return {code for handler in handlers if (code := handler.proc.poll()) is not None}


class _Ranks(SubprocessContext):
    """The ranks of this machine, monitored as torch's agent monitors the ranks that it spawns."""

    start_rank: StartRank = staticmethod(fork_command)

    def _start(self) -> None:
        self._asked_to_end: set[int] = set()  # ranks that still ran when they were sent a signal
        self.subprocess_handlers = {
            rank: _Handler(rank, self.start_rank(words, child_environment(None) | self.envs[rank]))
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
                if result.failures[rank].exitcode in (-signal.SIGKILL, -signal.SIGTERM, ExitStatus.TERMINATED)
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
    """A rank, with the interface that `SubprocessContext` expects."""

    def __init__(self, local_rank: int, rank: StartedRank) -> None:  # not super().__init__, which would start a process
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
        "TORCHELASTIC_USE_AGENT_STORE": str(group.spec.rdzv_handler.use_agent_store),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": variable("TORCH_NCCL_ASYNC_ERROR_HANDLING") or "1",
    }


def _ending(failures: Mapping[int, Any]) -> Ending:
    return root_cause({rank: (failure.exitcode, _said(failure)) for rank, failure in failures.items()})


def _said(failure: Any) -> str:
    """Return the message that the rank left for us to print; empty if torch put its own placeholder there."""
    message = failure.error_file_data.get("message", "")
    if not isinstance(message, str):
        return failure.message
    return "" if message == "<NONE>" else message
