"""Ranks that may die: processes of their own, each running a script."""

import sys

import pytest

import forked

PREAMBLE = """
import os, sys, time, torch, torch.distributed as dist
torch.set_num_threads(1)
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
from zeroshard.comm import PeerError, RingCommunicator, SharedMemoryCommunicator
from zeroshard.host.launch.process_group import shutdown
OURS = {"ring": RingCommunicator, "shm": SharedMemoryCommunicator}
def say(what):
    with open(f"{folder}/said{rank}", "a") as file:
        file.write(str(what))
"""


@pytest.fixture
def rank_scripts(tmp_path):
    """`rank_scripts(script, world_size, **names)`: exit codes, and what each rank said with ``say``."""

    def run(script: str, world_size: int, **names: object) -> tuple[list[int | None], list[str]]:
        path = tmp_path / "script.py"
        path.write_text(PREAMBLE + script)
        processes = []
        for rank in range(world_size):
            known = {"rank": rank, "world_size": world_size, "folder": str(tmp_path)} | names
            code = f"import runpy; runpy.run_path({str(path)!r}, {known!r}, 'rank')"
            processes.append(forked.Popen([sys.executable, "-c", code]))
        codes = [process.wait(300) for process in processes]
        said = [tmp_path / f"said{rank}" for rank in range(world_size)]
        return codes, [file.read_text() if file.exists() else "" for file in said]

    return run
