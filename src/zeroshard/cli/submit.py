"""`zeroshard submit`: a training run as a SLURM job that saves when it is pre-empted, is queued again, and resumes.

    SLURM sends SIGUSR1 ahead of the end -> every rank saves and exits with status 138 -> submitit queues the job again
    -> the same command with ``--resume auto``
    a rank's machine is lost -> the others exit with status 4 -> the same, ``max_restarts`` times

submitit (https://github.com/facebookincubator/submitit) writes the batch file and asks for the requeue. It runs a
`TrainJob` in each task. The job starts a rank as a process of its own, because a rank must receive the signal itself
and exit with a status of its own. submitit pickles the job, which consists only of the command's arguments.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Literal

from pydantic import Field

from zeroshard.host.errors import ExitStatus, UserError
from zeroshard.host.launch.environment import World, child_environment, preempt_with
from zeroshard.settings.base import Config

SIGNAL = signal.SIGUSR1  # on it a run saves, and exits with `ExitStatus.PREEMPTED`
_FIRST_PORT, _NUM_PORTS = 20_000, 40_000


class SubmitConfig(Config):
    """The resources to ask the cluster for; the arguments of the run follow after `train`."""

    nodes: int = Field(1, ge=1, description="Machines.")
    gpus_per_node: int = Field(0, ge=0, description="GPUs of each machine, one rank each; 0: ranks compute on CPUs.")
    tasks_per_node: int = Field(0, ge=0, description="Ranks on each machine; 0: as many as GPUs, or 1.")
    cpus_per_task: int = Field(0, ge=0, description="CPU cores of each rank; 0: as the cluster chooses.")
    mem_gb: int = Field(0, ge=0, description="Memory of each machine in GB; 0: as the cluster chooses.")
    time_min: int = Field(60, ge=1, description="Minutes until the job is ended, or queued again.")
    max_timeouts: int = Field(10, ge=0, description="Times that it is queued again after its time was over.")
    max_restarts: int = Field(
        3, ge=0, description="Times that it is queued again after a rank or its machine was lost."
    )
    signal_delay_s: int = Field(120, ge=1, description="Seconds before the end at which ranks are told to save.")
    partition: str = Field("", description="Partition of the cluster; empty: its default.")
    account: str = Field("", description="Account to charge; empty: the user's default.")
    qos: str = Field("", description="Quality of service; empty: the default.")
    constraint: str = Field("", description="Features that machines must have; empty: any.")
    setup: tuple[str, ...] = Field((), description="Shell commands before the run, such as 'module load cuda'.")
    name: str = Field("zeroshard", min_length=1, description="Name of the job.")
    folder: str = Field(
        "slurm", min_length=1, description="Folder of batch files and logs, on a disk that all machines see."
    )
    cluster: Literal["slurm", "local"] = Field("slurm", description="local: on this machine, to try it out.")

    @property
    def num_tasks(self) -> int:
        """Ranks on each machine."""
        return self.tasks_per_node or self.gpus_per_node or 1


class TrainJob:
    """One task of a job, called by submitit: runs a rank, and has the job queued again if the rank was pre-empted.

    Args:
        words: the arguments after ``zeroshard train``.
        restarts: how many times it is queued again after a rank or its machine was lost.
    """

    def __init__(self, words: Sequence[str], restarts: int = 0) -> None:
        self.words, self.restarts = list(words), restarts
        self._rank: int | None = None  # process id

    def __call__(self) -> int:
        """Run the rank to its end and return its exit status; if the job is to be queued again, rank 0 does not return.

        Raises:
            SystemExit: the run failed, with its status.
        """
        import submitit

        here = submitit.JobEnvironment()
        env = child_environment(None if here.cluster == "slurm" else _world(here))
        # not a subprocess.Popen, because both this frame and a signal handler that interrupts it wait for the child
        self._rank = os.posix_spawn(sys.executable, [sys.executable, "-m", "zeroshard", "train", *self.words], env)
        status = self._wait()
        if self._starts_again_after(status) and here.global_rank == 0:
            signal.raise_signal(SIGNAL)  # submitit's handler calls `checkpoint`; it does not return
        if status != ExitStatus.OK and not self._starts_again_after(status):
            raise SystemExit(status)
        return status

    def checkpoint(self) -> Any:
        """The job to queue: the same run, returned once this rank has saved. submitit calls it on `SIGNAL`."""
        import submitit

        left = self.restarts
        if self._rank is not None:
            if self._running():
                os.kill(self._rank, SIGNAL)
            status = self._wait()
            if not self._starts_again_after(status):
                raise SystemExit(status)
            left -= status == ExitStatus.PEER_LOST
        return submitit.helpers.DelayedSubmission(TrainJob(self.words, left))

    def __getstate__(self) -> dict[str, Any]:
        return {"words": self.words, "restarts": self.restarts, "_rank": None}

    def _starts_again_after(self, status: int) -> bool:
        return status == ExitStatus.PREEMPTED or (status == ExitStatus.PEER_LOST and self.restarts > 0)

    def _running(self) -> bool:
        assert self._rank is not None
        return os.waitid(os.P_PID, self._rank, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None

    def _wait(self) -> int:
        """Wait for the rank and return its exit status; WNOWAIT keeps the status, so it can be asked for again."""
        assert self._rank is not None
        ended = os.waitid(os.P_PID, self._rank, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        return ended.si_status if ended.si_code == os.CLD_EXITED else 128 + ended.si_status


def submit(config: SubmitConfig, words: Sequence[str]) -> str:
    """Queue the run; returns a line with the job's number and the folder of its logs.

    Args:
        config: the resources to ask the cluster for.
        words: the arguments after ``zeroshard train``, checked already; with ``--resume``, so that the run can resume.

    Raises:
        UserError: submitit or SLURM is missing here, or SLURM refuses the job.
    """
    if find_spec("submitit") is None:
        raise UserError("submit", "submitit is not installed", 'pip install "zeroshard[slurm]"')
    preempt_with(SIGNAL)
    import submitit
    from submitit.core.utils import FailedJobError

    retries = {f"{config.cluster}_max_num_timeout": config.max_timeouts}
    try:
        executor = submitit.AutoExecutor(config.folder, cluster=config.cluster, **retries)
    except RuntimeError:
        raise UserError(
            "submit", "there is no SLURM on this machine", "submit from where srun is, or --cluster local"
        ) from None
    executor.update_parameters(**_parameters(config))
    try:
        job = executor.submit(TrainJob(words, config.max_restarts))
    except (FailedJobError, subprocess.CalledProcessError, OSError) as error:
        what = " ".join(str(error).split())
        raise UserError("submit", f"the job was refused ({what})", "ask for what the cluster has") from None
    return f"job {job.job_id}  logs in {job.paths.folder}"


def _parameters(config: SubmitConfig) -> dict[str, Any]:
    """The parameters by submitit's names, without those that are left to the cluster."""
    asked: dict[str, Any] = {
        "name": config.name,
        "nodes": config.nodes,
        "tasks_per_node": config.num_tasks,
        "timeout_min": config.time_min,
        "gpus_per_node": config.gpus_per_node,
        "cpus_per_task": config.cpus_per_task,
        "mem_gb": config.mem_gb,
    }
    slurm: dict[str, Any] = {
        "signal_delay_s": config.signal_delay_s,
        "partition": config.partition,
        "account": config.account,
        "qos": config.qos,
        "constraint": config.constraint,
        "setup": list(config.setup),
        # If a rank fails, the others are killed at once. Since 22.05 srun does not take sbatch's cores per task.
        "srun_args": [
            "--kill-on-bad-exit=1",
            *[f"--cpus-per-task={config.cpus_per_task}"] * bool(config.cpus_per_task),
        ],
        "additional_parameters": {"requeue": True},
    }
    if config.cluster == "slurm":
        asked |= {f"slurm_{name}": value for name, value in slurm.items()}
    return {name: value for name, value in asked.items() if value not in (0, "", [])}


def _world(here: Any) -> World:
    """The world of a task of a local job, which has no variables of SLURM."""
    port = _FIRST_PORT + int(here.job_id) % _NUM_PORTS
    return World(here.global_rank, here.local_rank, here.num_tasks, "127.0.0.1", port)
