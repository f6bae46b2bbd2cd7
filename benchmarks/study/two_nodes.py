"""Two nodes as network namespaces with a link of some bandwidth between them, and ranks of a program in each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zeroshard.lab import network
from zeroshard.settings.sizes import parse_bandwidth


def result_of_ranks(program: str, words: Sequence[str], bandwidth: str, per_node: int = 1) -> dict[str, Any]:
    """What rank 0 printed after ``RESULT``, as JSON; each is ``program rank ADDRESS WORDS...`` with RANK set.

    ``per_node``: ranks in each node, which are neighbours.

    Raises:
        SystemExit: a rank failed.
    """
    with network.nodes(2, per_node, parse_bandwidth("bandwidth", bandwidth)) as made:
        command = [sys.executable, program, "rank", f"{made.address.rpartition('.')[0]}.1", *words]
        own = {"GLOO_SOCKET_IFNAME": network.INTERFACE, "OMP_NUM_THREADS": "1", "THP_MEM_ALLOC_ENABLE": "1"}
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, *command],
                env={**os.environ, **own, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, name in enumerate(name for name in made.names for _ in range(per_node))
        ]
        told = [rank.communicate()[0] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise SystemExit("a rank failed; see above")
    line = next(line for line in told[0].splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


def sent_so_far() -> int:
    """Bytes that this process's network namespace has sent by its own interface."""
    lines = [line for line in Path("/proc/self/net/dev").read_text().splitlines() if network.INTERFACE in line]
    return int(lines[0].split(":")[1].split()[8])
