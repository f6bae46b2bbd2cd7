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

import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous

from zeroshard.comm.launch import Ending, root_cause
from zeroshard.errors import ExitStatus

MONITOR_INTERVAL_S = 0.1
WORTH_A_RESTART = frozenset({int(ExitStatus.FAILED), int(ExitStatus.PEER_LOST)})


def run_elastic(
    command: Sequence[str],
    nproc: int,
    address: str,
    port: int,
    *,
    max_restarts: int,
    max_moves: int = 0,
    grace_s: int,
    run_id: str,
) -> Ending:
    """Run ``command`` as ``nproc`` ranks on this machine, again after a loss, and wait for them.

    A signal to this process is passed on to the ranks. Call it from the main thread.

    Args:
        command: a program and its words.
        nproc: ranks.
        address, port: where they meet; port 0: any free one.
        max_restarts: how often all are started again after one has failed or was lost.
        max_moves: how often beside that, after one has ended as `ExitStatus.MOVED_UP`.
        grace_s: from asking a rank to stop to SIGKILL.
        run_id: of this launch.
    """
    parameters = RendezvousParameters(
        "c10d", f"{address}:{port}", run_id, min_nodes=1, max_nodes=1, local_addr=address, is_host=True
    )
    handler = rendezvous.get_rendezvous_handler(parameters)
    spec = WorkerSpec(
        role="default",
        local_world_size=nproc,
        entrypoint=command[0],
        args=tuple(command[1:]),
        rdzv_handler=handler,
        max_restarts=max_restarts + max_moves,
        monitor_interval=MONITOR_INTERVAL_S,
        local_addr=address,
    )
    with tempfile.TemporaryDirectory(prefix="zeroshard-") as log_dir:
        agent = _Agent(spec, DefaultLogsSpecs(log_dir=log_dir), shutdown_timeout=grace_s)
        agent.restarts_left, agent.moves_left = max_restarts, max_moves
        try:
            result = agent.run()
        except SignalException as stop:
            return Ending(128 + stop.sigval)
        except BaseException:
            handler.shutdown()
            raise
        handler.shutdown()
        return _ending(result.failures) if result.is_failed() else Ending(ExitStatus.OK)


class _Agent(LocalElasticAgent):
    """The agent, which starts again after what is worth it alone, and says so."""

    restarts_left = moves_left = 0

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.state is not WorkerState.FAILED or not self._remaining_restarts:
            return result
        ending = _ending(result.failures)
        why = ending.line or f"exit status {ending.status}"
        if ending.status == ExitStatus.MOVED_UP and self.moves_left:
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


def _ending(failures: Mapping[int, Any]) -> Ending:
    return root_cause({rank: (failure.exitcode, failure.message) for rank, failure in failures.items()})
