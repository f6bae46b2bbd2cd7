"""Ranks that may die: processes of their own, each running a script."""

from __future__ import annotations

import multiprocessing
import runpy

import pytest

from ranks import PRELOAD

PREAMBLE = """
import os, sys, time, torch, torch.distributed as dist
torch.set_num_threads(1)
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
from zeroshard.comm import PeerError, RingCommunicator, SharedMemoryCommunicator
from zeroshard.comm.launch import shutdown
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
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        processes = []
        for rank in range(world_size):
            known = {"rank": rank, "world_size": world_size, "folder": str(tmp_path)} | names
            processes.append(context.Process(target=runpy.run_path, args=(str(path), known, "rank"), daemon=True))
            processes[-1].start()
        for process in processes:
            process.join(60)
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
        said = [tmp_path / f"said{rank}" for rank in range(world_size)]
        return codes, [file.read_text() if file.exists() else "" for file in said]

    return run
