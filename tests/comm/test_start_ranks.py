"""Who this process is among the ranks, how ranks are started, and that they end together."""

import gc
import json
import os
import signal
import subprocess
import sys
import zlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.multiprocessing.api import RunProcsResult
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

import forked
from zeroshard.host.errors import UserError
from zeroshard.host.launch import elastic
from zeroshard.host.launch.elastic import SAVING_GRACE_S, STOP_S, _Agent, _ending
from zeroshard.host.launch.ending import Ending, root_cause
from zeroshard.host.launch.environment import World, tell_launcher, world_from_env
from zeroshard.host.launch.process_group import init_process_group, meet, shutdown
from zeroshard.host.launch.start_ranks import launch_workers

TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "n0", "MASTER_PORT": "29500"}
SLURM = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "40123", "SLURM_STEP_ID": "0"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "8"}
ON_ONE = {"OMPI_COMM_WORLD_LOCAL_SIZE": "8", "OMPI_MCA_ess_base_jobid": "7"}
MPICH = {"PMI_RANK": "5", "MPI_LOCALRANKID": "1", "PMI_SIZE": "8"}
ADDRESS = {"MASTER_ADDR": "h", "MASTER_PORT": "9"}


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return forked.run(
        [sys.executable, "-c", code], env=os.environ | env, capture_output=True, text=True, timeout=600, check=False
    )


def launch(*argv: str) -> Ending:
    """`launch_workers` in a process of its own, for it takes the process's signal handlers."""
    code = (
        "import json; from zeroshard.host.launch.start_ranks import launch_workers\n"
        f"ending = launch_workers({list(argv)}, 2); print(json.dumps([ending.status, ending.line]))"
    )
    done = run_python(code)
    assert done.stderr == ""
    return Ending(*json.loads(done.stdout.splitlines()[-1]))


ENVIRONMENTS = [
    ({}, None),
    (None, None),  # of this process, which nobody has put in a world
    (TORCHRUN, World(3, 1, 4, "n0", 29500)),
    ({name: value for name, value in TORCHRUN.items() if name != "LOCAL_RANK"}, World(3, 3, 4, "n0", 29500)),
    (SLURM | {"SLURM_JOB_NODELIST": "gpu[07-09,12],x3"}, World(5, 1, 8, "gpu07", 20_123)),  # the job's own port
    (SLURM | {"SLURM_JOB_NODELIST": "a-1,b-2"}, World(5, 1, 8, "a-1", 20_123)),
    (SLURM | ADDRESS, World(5, 1, 8, "h", 9)),
    (SLURM | ADDRESS | {"WORLD_SIZE": "8"}, World(5, 1, 8, "h", 9)),  # a script that sets all but the rank
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0"}, None),
    (SLURM | {"SLURM_STEP_ID": "4294967290"}, None),  # the shell of salloc
    ({name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}, None),  # the script of sbatch
    (OPEN_MPI | ADDRESS, World(5, 1, 8, "h", 9)),
    (OPEN_MPI | ON_ONE, World(5, 1, 8, "127.0.0.1", 20_000 + zlib.crc32(b"7") % 40_000)),
    (OPEN_MPI | ADDRESS | SLURM | {"SLURM_PROCID": "0"}, World(5, 1, 8, "h", 9)),  # mpirun starts its helpers by srun
    (MPICH | ADDRESS | SLURM | {"SLURM_PROCID": "0"}, World(5, 1, 8, "h", 9)),
    ({"WORLD_SIZE": "1"}, None),
    ({"WORLD_SIZE": "1", "RANK": "0"}, World()),
    (SLURM | TORCHRUN, World(3, 1, 4, "n0", 29500)),  # torchrun inside a job
]


@pytest.mark.parametrize(("env", "world"), ENVIRONMENTS)
def test_the_environment_says_which_rank_this_process_is(env, world):
    assert world_from_env(env) == world


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"RANK": "x"}, "RANK"),
        ({"RANK": "4"}, "RANK"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE"),
        ({"RANK": None}, "RANK"),
        ({"RANK": None, **SLURM}, "RANK"),  # another number of ranks than SLURM's
        ({"MASTER_ADDR": None}, "MASTER_ADDR"),
        ({"MASTER_PORT": None}, "MASTER_PORT"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT"),
    ],
)
def test_half_a_world_is_refused_by_the_variables_name(change, field):
    env = {name: value for name, value in (TORCHRUN | change).items() if value is not None}
    with pytest.raises(UserError) as caught:
        world_from_env(env)
    assert caught.value.field == field


def test_a_world_of_one_joins_and_leaves_and_may_join_again():
    for _ in range(2):
        init_process_group(World(), torch.device("cpu"))
        assert dist.get_world_size() == 1
        shutdown()
        assert not dist.is_initialized()
    shutdown()


def test_ranks_have_the_launchers_own_limit_to_end_and_less_where_they_start_again():
    """As torch 2.11 calls these two: without a limit."""
    limits = []
    agent = object.__new__(_Agent)
    agent._worker_watchdog = agent._health_check_server = None
    agent._pcontext = SimpleNamespace(close=lambda number, limit_s=None: limits.append((number, limit_s)))
    agent._shutdown_timeout = 7
    agent._shutdown(signal.SIGINT)
    assert limits.pop(0) == (signal.SIGINT, 7)
    limits.clear()
    agent._stop_workers(None)
    assert limits[0] == (signal.SIGTERM, STOP_S)


def test_only_a_rank_that_was_not_forked_searches_for_garbage_when_it_leaves(monkeypatch):
    program = (
        "import gc, torch\n"
        "from zeroshard.host.launch.environment import World\n"
        "from zeroshard.host.launch.process_group import init_process_group, shutdown\n"
        "searches = []\n"
        "gc.collect = lambda: searches.append(1)\n"
        "init_process_group(World(), torch.device('cpu'))\n"
        "shutdown()\n"
        "print(len(searches))\n"
    )
    done = forked.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"  # half a second; it ends by os._exit
    searches = []
    monkeypatch.setattr(gc, "collect", lambda: searches.append(1))
    init_process_group(World(), torch.device("cpu"))
    shutdown()
    assert len(searches) == 2


@pytest.mark.parametrize("launcher", ["torchrun", "ours"])
def test_a_world_that_was_started_again_finds_nothing_of_the_one_before(monkeypatch, launcher):
    """torchrun's store has served the one before; ranks of our own launcher have a new one each time."""
    if launcher == "ours":
        monkeypatch.setenv("ZEROSHARD_LAUNCHER_PID", str(os.getpid()))
    port = forked.free_port()
    worlds = [World(rank, rank, 2, "127.0.0.1", port) for rank in range(2)]

    def rank_of(rank, restarts):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        return meet(worlds[rank], timeout_s=600)

    kept = rank_of(0, 0)
    kept.set("left", "by the first world")
    assert rank_of(1, 0).get("left") == b"by the first world"
    assert rank_of(1, 1).check(["left"]) == (launcher == "ours")


@pytest.mark.redundant
def test_two_processes_meet_by_the_environment_and_part_cleanly():
    code = (
        "import torch, torch.distributed as dist\n"
        "from zeroshard.host.launch.environment import world_from_env\n"
        "from zeroshard.host.launch.process_group import init_process_group, shutdown\n"
        "world = world_from_env()\n"
        "init_process_group(world, torch.device('cpu'))\n"
        "total = torch.tensor([world.rank + 1.0]); dist.all_reduce(total); print(total.item())\n"
        "shutdown()\n"
    )
    common = forked.meeting_point(2)
    ranks = [
        forked.Popen(
            [sys.executable, "-c", code],
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=600) for rank in ranks]
    assert outputs == [("3.0\n", "")] * 2
    assert [rank.returncode for rank in ranks] == [0, 0]


def test_workers_that_end_well_end_in_zero():
    assert launch("--version") == Ending(0)


@pytest.mark.parametrize(
    ("failures", "status", "line"),
    [
        ({0: (6, "")}, 6, ""),
        ({0: (1, ""), 1: (5, "")}, 5, ""),
        ({0: (1, ""), 1: (2, "lr: wrong; mend")}, 2, "lr: wrong; mend"),
        ({0: (1, ""), 1: (-signal.SIGKILL, "")}, 4, "rank 1: was ended by SIGKILL; look for a lack of memory here"),
        (
            {0: (4, "rank 1: is gone"), 1: (-signal.SIGBUS, "")},
            4,
            "rank 1: was ended by SIGBUS; a token file was cut off while it was read, or its disk failed: "
            "prepare the data again, then resume",
        ),
        ({0: (-signal.SIGTERM, "")}, 143, ""),
        ({0: (-signal.SIGTERM, ""), 1: (3, "")}, 3, ""),
        ({0: (143, ""), 1: (138, "")}, 138, ""),  # the agent asked rank 0 to end once rank 1 had
        ({0: (1, ""), 1: (143, "")}, 1, ""),
        ({0: (143, ""), 1: (4, "rank 0: is gone")}, 143, ""),
        ({0: (4, "rank 1: is gone"), 1: (1, "memory: ran out")}, 1, "memory: ran out"),
        ({0: (1, ""), 1: (1, "memory: ran out")}, 1, "memory: ran out"),
    ],
)
def test_the_root_cause_decides_the_status(failures, status, line):
    assert root_cause(failures) == Ending(status, line)


@pytest.mark.parametrize("asked_code", [143, -signal.SIGTERM, -signal.SIGKILL])
def test_a_rank_that_the_launcher_has_ended_is_no_cause(asked_code, monkeypatch):
    """Rank 1 has said why; rank 0, which still ran then, was asked to end."""
    failures = {rank: ProcessFailure(rank, 0, code, "no such file") for rank, code in ((0, asked_code), (1, 4))}
    failures[1].error_file_data = {"message": "rank 1: why"}
    polled = RunProcsResult({}, failures)
    monkeypatch.setattr(elastic.SubprocessContext, "_poll", lambda self: polled)
    ranks = object.__new__(elastic._Ranks)
    ranks._asked_to_end = {0}
    assert _ending(ranks._poll().failures) == Ending(4, "rank 1: why")


def test_a_rank_that_has_spoken_itself_leaves_nothing_to_print(tmp_path, monkeypatch):
    monkeypatch.setenv("ZEROSHARD_LAUNCHER_PID", "1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    for left in ("", "rank 1 is gone"):
        assert tell_launcher(left)
        failure = ProcessFailure(0, os.getpid(), 4, str(tmp_path / "error.json"))
        assert _ending({0: failure}) == Ending(4, left)


def test_a_rank_that_left_no_word_leaves_nothing_to_print():
    assert _ending({0: ProcessFailure(0, os.getpid(), 1, "no such file")}) == Ending(1)


@pytest.mark.parametrize(
    ("kills", "says", "ending"),
    [
        ([2, 2], None, Ending(4, "rank 1: was ended by SIGKILL; look for a lack of memory here")),
        ([None, None], None, Ending(4, "rank 1: was ended by SIGKILL; look for a lack of memory here")),
        ([2, 3], None, Ending(4, "rank 1: was killed by the kernel, as memory ran out; use less of it, or --fit")),
        ([2, 3], Ending(7, "next is less"), Ending(7, "next is less")),
    ],
)
def test_a_killed_rank_ran_out_of_memory_where_the_kernel_counts_that(kills, says, ending, monkeypatch):
    monkeypatch.setattr(elastic.host_memory, "num_oom_kills", lambda: kills[1])
    agent, asked = object.__new__(_Agent), []
    agent._oom_kills, agent.after_oom_kill = kills[0], lambda rank: (asked.append(rank), says)[1]
    codes = {0: 1, 1: -signal.SIGKILL}
    assert agent._cause({rank: ProcessFailure(rank, 0, code, "no such file") for rank, code in codes.items()}) == ending
    assert asked == ([1] if kills == [2, 3] else [])


@pytest.mark.parametrize(("waiting", "state"), [([0, 0, 1], WorkerState.HEALTHY), ([0] * 99, WorkerState.FAILED)])
def test_ranks_that_another_machine_has_asked_to_end_are_restarted_with_it(monkeypatch, waiting, state):
    """Its launcher was the first to hear that a machine waits; here the ranks have ended before the news came."""
    monkeypatch.setattr(elastic, "NEWS_S", 0.1)
    monkeypatch.setattr(elastic, "MONITOR_INTERVAL_S", 0.01)
    failed = RunResult(WorkerState.FAILED, failures={0: ProcessFailure(0, os.getpid(), 143, "no such file")})
    monkeypatch.setattr(elastic.LocalElasticAgent, "_monitor_workers", lambda *_: failed)
    waits = iter(waiting)
    group = SimpleNamespace(spec=SimpleNamespace(rdzv_handler=SimpleNamespace(num_nodes_waiting=lambda: next(waits))))
    agent = object.__new__(_Agent)
    agent._remaining_restarts, agent._worker_group = 3, group
    assert agent._monitor_workers(group).state == state
    assert agent._remaining_restarts == (3 if state is WorkerState.HEALTHY else 0)


def test_ranks_may_save_before_they_are_restarted_with_another_machine(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(elastic.LocalElasticAgent, "_restart_workers", lambda self, group: None)
    monkeypatch.setattr(elastic, "count_restart", lambda: None)
    monkeypatch.setattr(_Agent, "_shutdown", lambda self, number=signal.SIGTERM, timeout=0: asked.append(timeout))
    object.__new__(_Agent)._restart_workers(SimpleNamespace(state=WorkerState.HEALTHY))
    assert asked == [SAVING_GRACE_S]
    assert capsys.readouterr().err == "started again: another machine waits\n"


@pytest.mark.parametrize(("asked", "used"), [(None, "lo"), ("eth7", "eth7")])
def test_ranks_of_one_machine_talk_over_the_loopback_interface_where_nobody_says_otherwise(monkeypatch, asked, used):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if asked:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", asked)
    seen = []
    monkeypatch.setattr(
        "zeroshard.host.launch.elastic.run_elastic", lambda *args, **kwargs: seen.append(dict(os.environ))
    )
    with monkeypatch.context() as env:
        env.setattr(os, "environ", os.environ.copy())
        launch_workers(["train"], 2)
    assert [each["GLOO_SOCKET_IFNAME"] for each in seen] == [used]
    assert seen[0]["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
