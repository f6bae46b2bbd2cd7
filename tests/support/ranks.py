"""Real ranks for tests: gloo processes that are started once for each world size and run one function after another.

A rank costs a few milliseconds to give work to. The processes are forked (`forked`), meet through a file, use one
thread each, and leave gloo cleanly at the end. A function is named by its file and name, not pickled, so that it may
live in any test module.
"""

import gc
import importlib.util
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Client, Listener, wait
from pathlib import Path
from typing import Any

import pytest

import forked
import observed

LEAVE = "leave"  # in the place of a task
TIMEOUT_S = 300.0  # a rank that has not answered hangs: no machine is so busy


class RankError(AssertionError):
    """A rank failed; the message is its traceback."""


class GlooRanks:
    """`world_size` processes, each with a `TorchCommunicator` over gloo."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._folder = tempfile.TemporaryDirectory(prefix="zeroshard-ranks-")
        folder = self._folder.name
        with Listener(f"{folder}/pipes", "AF_UNIX", backlog=world_size) as listener:
            self._processes = [
                forked.Popen([sys.executable, __file__, str(rank), str(world_size), folder], stdin=subprocess.DEVNULL)
                for rank in range(world_size)
            ]
            pipes = [listener.accept() for _ in range(world_size)]
        by_rank = {pipe.recv(): pipe for pipe in pipes}
        self._pipes = [by_rank[rank] for rank in range(world_size)]

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """``fn(comm, *args)`` on every rank; its results by rank. ``fn`` is a module's function.

        Raises:
            RankError: a rank raised, died, or did not answer in time. The ranks are gone then.
        """
        test = os.environ.get(observed.TEST, "")
        task = pickle.dumps((fn.__code__.co_filename, fn.__qualname__, args, test))
        for pipe in self._pipes:
            pipe.send_bytes(task)
        answers: dict[int, Any] = {}
        waiting = dict(zip(self._pipes, range(self.world_size), strict=True))
        while waiting:
            ready = wait(list(waiting), TIMEOUT_S)
            try:
                for pipe in ready:
                    rank = waiting.pop(pipe)
                    done, answers[rank] = pickle.loads(pipe.recv_bytes())
                    if not done:
                        raise RankError(f"rank {rank}:\n{answers[rank]}")
                if not ready:
                    raise RankError(f"ranks {sorted(waiting.values())} did not answer in {TIMEOUT_S} s")
            except (EOFError, RankError) as error:
                self.kill()
                raise error if isinstance(error, RankError) else RankError("a rank died") from None
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps(LEAVE))
        return [answers[rank] for rank in range(self.world_size)]

    def end(self) -> None:
        """Tell the ranks to end."""
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps(None))

    def close(self) -> list[int | None]:
        """End the ranks; their exit codes."""
        self.end()
        return self.join()

    def join(self) -> list[int | None]:
        """Wait for ranks that were told to end; their exit codes."""
        codes = [process.wait(TIMEOUT_S) for process in self._processes]
        self.kill()
        return codes

    def kill(self) -> None:
        """End the ranks now."""
        for process in self._processes:
            process.kill()
            process.wait()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()
        self._pipes, self._processes = [], []

    @property
    def alive(self) -> bool:
        """Whether all ranks can be given work."""
        return bool(self._processes) and all(process.poll() is None for process in self._processes)


def _rank_main(rank: int, world_size: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    from zeroshard.comm import TorchCommunicator
    from zeroshard.host.launch.process_group import shutdown

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=TIMEOUT_S / 2),
    )
    comm = TorchCommunicator()
    pipe = Client(f"{folder}/pipes", "AF_UNIX")
    pipe.send(rank)
    while (task := pickle.loads(pipe.recv_bytes())) is not None:
        if task == LEAVE:
            _leave_groups()
            continue
        path, name, args, test = task
        try:
            with observed.task(test):
                answer = (True, getattr(_module(path), name)(comm, *args))
        except BaseException:  # noqa: BLE001 -- it is told to the test
            answer = (False, traceback.format_exc())
        pipe.send_bytes(pickle.dumps(answer))
        del task, args, answer
    del comm
    shutdown()


def _leave_groups() -> None:
    """Leave the groups of a task that every rank has ended: a thread of each polls 100 times a second."""
    import torch.distributed as dist

    made = [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    for group in made:
        dist.destroy_process_group(group)
    if made:
        del group, made
        gc.collect()


def _module(path: str) -> Any:
    """A test module by its file, imported once."""
    name = f"ranks_of_{Path(path).parent.name}_{Path(path).stem}"  # two folders may have a file of one name
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Taken over by the tests' conftest."""
    parser.addoption("--exits", type=int, default=2, help="how often four ranks are started and ended (default: 2)")
    parser.addoption("--kills", type=int, default=1, help="how often a run is killed and goes on (default: 1)")


@pytest.fixture(scope="session")
def gloo_ranks():
    """`gloo_ranks(world_size)`: ranks that live as long as the tests."""
    pools: dict[int, GlooRanks] = {}

    def ranks(world_size: int) -> GlooRanks:
        if world_size not in pools or not pools[world_size].alive:
            pools[world_size] = GlooRanks(world_size)
        return pools[world_size]

    yield ranks
    alive = {world_size: pool for world_size, pool in pools.items() if pool.alive}
    for pool in alive.values():
        pool.end()
    codes = {world_size: pool.join() for world_size, pool in alive.items()}
    assert all(code == 0 for by_rank in codes.values() for code in by_rank), codes


if __name__ == "__main__":
    sys.path += map(str, Path(__file__).parents[1:3])  # arguments may be functions of test modules, pickled by name
    _rank_main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
