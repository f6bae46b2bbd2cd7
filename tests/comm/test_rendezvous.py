"""Ranks that a launcher has started train together, whatever asks for them first; who is missing is named."""

import logging
import os
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist
from torch import nn

import forked
from zeroshard import ShardedOptimizer, Zero
from zeroshard.comm import LocalCommunicator, PeerError, RingCommunicator, TorchCommunicator, rendezvous
from zeroshard.comm.rendezvous import agree_at
from zeroshard.host.launch.environment import World
from zeroshard.train.setup import ranks

SLURM = {"SLURM_PROCID": "{rank}", "SLURM_LOCALID": "{rank}", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}
OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": "{rank}" for name in ("RANK", "LOCAL_RANK")}
OPEN_MPI |= {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "job-{port}"}
LAUNCHERS = {
    "torchrun": {"RANK": "{rank}", "LOCAL_RANK": "{rank}", "WORLD_SIZE": "2"},
    "srun": SLURM,
    "mpirun": OPEN_MPI,
}
ASKERS = {
    "Zero": "Zero(nn.Linear(4, 4)).comm",
    "meta": "Zero(nn.Linear(4, 4, device='meta'), init=lambda name, tensor: tensor.zero_()).comm",
    "ShardedOptimizer": "ShardedOptimizer(nn.Linear(4, 4).parameters(), torch.optim.AdamW).comm",
    "TorchCommunicator": "TorchCommunicator()",
    "RingCommunicator": "RingCommunicator()",
    "SharedMemoryCommunicator": "SharedMemoryCommunicator()",
    "ddp": "strategy('ddp').comm",
    "fsdp2": "strategy('fsdp2').comm",
}
PROGRAM = """
import logging, os, sys, torch, torch.distributed as dist
from torch import nn
from zeroshard import ShardedOptimizer, Zero
from zeroshard.comm import *
from zeroshard.parallel import Setup, build_strategy
logging.basicConfig(format="%(message)s", stream=sys.stdout)
logging.getLogger("zeroshard.comm").setLevel(logging.INFO)

def strategy(name):
    groups = lambda model: [{"params": list(model.parameters())}]
    return build_strategy(name, Setup(nn.Linear(4, 4), [], None, torch.optim.SGD, groups))
"""


@pytest.fixture
def in_two_ranks(tmp_path):
    """`in_two_ranks(code, variables)`: what the two ranks of a program print, by rank."""

    def run(code, variables=LAUNCHERS["torchrun"], **address):
        (tmp_path / "program.py").write_text(PROGRAM + code)
        port = forked.free_port()
        address = address or {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        told = [{name: text.format(rank=rank, port=port) for name, text in variables.items()} for rank in (0, 1)]
        common = os.environ | address | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        started = [
            forked.Popen(
                [sys.executable, str(tmp_path / "program.py")],
                env=common | each,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for each in told
        ]
        outputs = [each.communicate(timeout=300)[0] for each in started]
        assert [each.returncode for each in started] == [0, 0], outputs
        return outputs

    return run


@pytest.mark.redundant
def test_whatever_asks_first_joins_the_ranks_and_a_later_one_may_join_again(in_two_ranks):
    lines = (f"print({name!r}, {asks}.world_size); dist.destroy_process_group()\n" for name, asks in ASKERS.items())
    code = "".join(lines)
    first, second = (output.splitlines() for output in in_two_ranks(code))
    assert second == [f"{name} 2" for name in ASKERS]
    assert [line for line in first if line.startswith("torch.distributed: 2 ranks over ")] == first[::2]
    assert first[1::2] == second


@pytest.mark.redundant(but=["mpirun"])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_each_launchers_variables_lead_to_one_world(in_two_ranks, launcher):
    """Both start from rank 0's weights and end with the same ones; nothing is torn down by hand."""
    code = (
        "torch.manual_seed(TorchCommunicator().rank)\n"
        "net = nn.Linear(4, 4)\n"
        "zero = Zero(net)\n"
        "optim = zero.optimizer(torch.optim.SGD, lr=0.1)\n"
        "net(torch.randn(2, 4)).sum().backward(); optim.step()\n"
        "print(zero.comm.world_size, zero.state_dict()['weight'].sum().item())\n"
    )
    address = {"PATH": os.environ["PATH"]} if launcher == "mpirun" else {}  # on one machine it needs none
    first, second = (output.splitlines()[-1] for output in in_two_ranks(code, LAUNCHERS[launcher], **address))
    assert first == second
    assert first.startswith("2 ")


@pytest.mark.redundant
def test_a_group_of_the_users_is_taken_and_one_that_he_makes_too_late_is_refused(in_two_ranks):
    code = (
        "rank = int(os.environ['RANK'])\n"
        "dist.init_process_group('gloo', f'file://{sys.path[0]}/store', rank=rank, world_size=2)\n"
        "print(Zero(nn.Linear(4, 4)).comm.world_size)\n"
        "dist.destroy_process_group()\n"
        "print(Zero(nn.Linear(4, 4)).comm.world_size)\n"
        "try: dist.init_process_group('gloo')\n"
        "except ValueError as error: print(error)\n"
        "print(Zero(nn.Linear(4, 4), comm=LocalCommunicator()).comm.world_size)\n"
    )
    for output in in_two_ranks(code):
        lines = [line for line in output.splitlines() if not line.startswith("torch.distributed: ")]
        assert lines == ["2", "2", "trying to initialize the default process group twice!", "1"]


def test_what_a_rank_starts_is_no_rank(in_two_ranks):
    code = (
        "import subprocess, torch.utils.data as data\n"
        "class Rows(data.Dataset):\n"
        "    def __len__(self): return 1\n"
        "    def __getitem__(self, index): return Zero(nn.Linear(4, 4)).comm.world_size\n"
        "Zero(nn.Linear(4, 4))\n"
        "child = 'from torch import nn; from zeroshard import Zero; Zero(nn.Linear(4, 4))'\n"
        "done = subprocess.run([sys.executable, '-c', child], capture_output=True, text=True)\n"
        "print(done.stderr.splitlines()[-1])\n"
        "try: next(iter(data.DataLoader(Rows(), num_workers=1)))\n"
        "except RuntimeError as error: print(str(error).splitlines()[-1])\n"
    )
    for rank, output in enumerate(in_two_ranks(code)):
        of_child, of_worker = output.splitlines()[-2:]
        assert f"RuntimeError: this process was started by rank {rank} (process " in of_child
        assert "; give comm=LocalCommunicator() to train alone" in of_child
        assert of_worker.startswith("RuntimeError: a DataLoader's worker is no rank, ")


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"WORLD_SIZE": "2"}, "^RANK: is not set; set it, or call torch.distributed.init_process_group.. first"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "^MASTER_ADDR: is not set; set it, or .*init_process_group"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "h"}, "^MASTER_PORT: is not set; .*init_process_group"),
        ({"WORLD_SIZE": "2", "RANK": "0", "here": ""}, "^rank 0 of 2 cannot .*rank 1 of 2 did.*init_process_group"),
        ({"WORLD_SIZE": "2", "RANK": "1", "here": ""}, "^rank 1 of 2 cannot join the others .*init_process_group"),
    ],
)
def test_a_rank_that_cannot_meet_the_others_says_so_in_a_line(variables, said, monkeypatch):
    monkeypatch.setattr(rendezvous, "JOIN_S", 0.5)
    if "here" in variables:
        variables = {**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(forked.free_port())}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for ask in (lambda: Zero(nn.Linear(4, 4)), TorchCommunicator, RingCommunicator):
        with pytest.raises(RuntimeError, match=said) as caught:
            ask()
        assert "\n" not in str(caught.value)
    assert Zero(nn.Linear(4, 4), comm=LocalCommunicator()).comm.world_size == 1


SHELL = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "7"}  # as `salloc -n 2` has it, and with the lines below sbatch's script


@pytest.mark.parametrize(
    ("variables", "warned"),
    [
        ({"WORLD_SIZE": "1"}, False),
        ({"WORLD_SIZE": "1", "RANK": "0"}, False),
        (SHELL, True),
        (SHELL | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, True),
        (SHELL | {"SLURM_PROCID": "0", "SLURM_STEP_ID": str(0xFFFFFFFA)}, True),
    ],
)
def test_one_process_is_alone_and_slurms_other_tasks_are_named(variables, warned, monkeypatch, caplog):
    rendezvous._warn_of_other_tasks.cache_clear()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    params = nn.Linear(4, 4).parameters()
    assert Zero(nn.Linear(4, 4)).comm.world_size == ShardedOptimizer(params, torch.optim.SGD).comm.world_size == 1
    lines = ["SLURM has 2 tasks for this job, but this process trains alone: srun did not start it"] * warned
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == lines


@pytest.mark.parametrize(
    ("devices", "which"),
    [
        (["cuda:0", "cuda:0"], "its tensors on cuda:0, the GPU of another rank; call "),
        (["cpu", "cuda:0"], "rank 1 has 'cuda', rank 0 has 'cpu'"),
    ],
)
def test_ranks_on_one_gpu_or_on_other_devices_are_refused(devices, which, monkeypatch):
    """Threads that join as processes do, up to the group."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("Gpu", (), {"uuid": device.index}))
    store, said = dist.HashStore(), []
    monkeypatch.setattr(rendezvous, "_store_of", lambda world: store)

    def rank_main(rank):
        with pytest.raises(RuntimeError) as caught:
            rendezvous._join(World(rank, rank, 2, "here", 1), torch.device(devices[rank]))
        said.append(str(caught.value))

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(said)) == 1
    assert which in said[0]


@pytest.mark.parametrize(("absent", "named"), [({2}, "rank 2 of 4"), ({1, 3}, "rank 1, 3 of 4"), ({0}, "rank 0 of 4")])
def test_ranks_that_do_not_come_are_named_by_all_that_did(absent, named):
    store, said = dist.HashStore(), []

    def rank_main(rank):
        with pytest.raises(PeerError, match=rf"^{named} did not join the rendezvous") as caught:
            agree_at(store, rank, 4, {"lr": 0.1}, patience_s=0.3)
        said.append(str(caught.value))

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(4) if rank not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(said) == 4 - len(absent)


def test_a_rank_zero_that_never_comes_is_named(monkeypatch):
    monkeypatch.setattr(rendezvous, "RENDEZVOUS_S", 0.2)
    with socket.socket() as probe, ExitStack() as stack:
        probe.bind(("127.0.0.1", 0))
        world = World(1, 1, 2, "127.0.0.1", probe.getsockname()[1])
        probe.close()
        with pytest.raises(PeerError, match=r"^rank 0 did not join the rendezvous at 127\.0\.0\.1:\d+ within 0\.2 s"):
            ranks.join(world, "shm", "zero2", torch.device("cpu"), stack)
