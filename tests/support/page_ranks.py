"""What the Python of a page trains: `trained` in this process, `start` in the ranks that a launcher would start.

Every rank draws the same random rows, so that the mean of their gradients is that of one process. The engines and
`ShardedOptimizer`s that a page makes without ``comm=`` are those that a launcher's ranks share.
"""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import torch

import forked
from pages import run_python


def trained(page):
    """Run a page in the current folder; ``(ranks, weights)`` of all that it has made, in order."""
    from zeroshard import ShardedOptimizer, Zero

    made = []
    torch.manual_seed(0)
    with ExitStack() as stack:
        for kind in (Zero, ShardedOptimizer):
            stack.enter_context(patch.object(kind, "__init__", _noting(kind.__init__, made)))
        run_python(page)
    return [(each.comm.world_size, _weights(each)) for each in made]


def _noting(construct, made):
    def init(self, *args, **kwargs):
        construct(self, *args, **kwargs)
        if "comm" not in kwargs:
            made.append(self)

    return init


def _weights(made):
    if hasattr(made, "rank_groups"):
        return made.state_dict()
    return {str(place): p.detach() for place, p in enumerate(p for group in made.param_groups for p in group["params"])}


def start(page, folder, world_size=2):
    """Start the ranks of a page, which share a folder; for `ended`."""
    folder.mkdir()
    common = os.environ | forked.meeting_point(world_size) | {"GLOO_SOCKET_IFNAME": "lo"}
    return [
        forked.Popen(
            [sys.executable, __file__, str(page), f"{folder}-{rank}.pt"],
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]


def ended(ranks, timeout_s=300.0):
    """What `trained` returned on each rank."""
    outputs = [rank.communicate(timeout=timeout_s)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), "\n".join(outputs)
    return [torch.load(rank.args[-1]) for rank in ranks]


if __name__ == "__main__":
    torch.set_num_threads(1)
    path, out = Path(sys.argv[1]), sys.argv.pop()
    torch.save(trained(path), out)
