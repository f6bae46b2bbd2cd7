"""Replicas that are killed at random moments: how soon the others train again, and what it does to the loss.

    python benchmarks/study/lost_replicas.py --text tinyshakespeare.txt --kills 20

Several launchers on this machine, each with one rank that is a replica, train by local steps; with ``--one-host`` one
launcher has all ranks. At random moments a rank is killed (its launcher starts it again with the others), or a launcher
with its rank, which is started again a little later; never the launcher that serves the rendezvous, as the machine that
others meet at must stay. Seconds are from the kill to the first step of the attempt that follows. The same training
undisturbed, with several seeds, says how far losses spread by chance.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Self

import psutil

MODEL = ["--model.n-layer", "2", "--model.n-head", "4", "--model.n-embd", "64", "--seq-len", "64"]
LONGEST_S = 600.0


class World:
    """Launchers that train together, and the log of their run."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, name: str, seed: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.out, self._port = folder / name, port
        self._one_host = arguments.one_host
        self._num_ranks = arguments.replicas if arguments.one_host else 1
        several = ["--nnodes", f"1:{arguments.replicas}", "--rdzv-endpoint", f"127.0.0.1:{port}"]
        words = [*([] if arguments.one_host else several), "--nproc", str(self._num_ranks)]
        words += ["--data", "text", "--data.path", arguments.text, "--data.dir", str(folder / "data"), *MODEL]
        words += ["--strategy", "zero1", "--shard-size", "1", "--local-steps.every", str(arguments.every)]
        words += ["--max-steps", str(arguments.steps), "--checkpoint-interval", str(arguments.every)]
        words += ["--keep-checkpoints", "2", "--eval-interval", str(arguments.steps), "--eval-rows", "80"]
        words += ["--global-batch-size", str(arguments.rows), "--micro-batch-size", "2", "--log-interval", "1000000"]
        words += ["--max-restarts", "1000", "--comm", "ring", "--seed", str(seed), "--out", str(self.out)]
        self._command = [sys.executable, "-m", "zeroshard", "train", *words]
        self.launchers = [self.start()]
        while not arguments.one_host and not self._serves():
            time.sleep(0.1)
        self.launchers += [self.start() for _ in range(0 if arguments.one_host else arguments.replicas - 1)]

    def start(self) -> subprocess.Popen[bytes]:
        """One more launcher."""
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(self._command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def _serves(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0

    def lines(self) -> list[str]:
        """Of the log, those that are whole."""
        try:
            text = (self.out / "metrics.jsonl").read_text()
        except FileNotFoundError:
            return []
        return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def num_steps(self) -> int:
        """Steps in the log, those that were taken twice included."""
        return sum('"event": "step"' in line for line in self.lines())

    def over(self) -> bool:
        """Whether the launcher that serves has ended."""
        return self.launchers[0].poll() is not None

    def rank_of(self, place: int) -> psutil.Process | None:
        """The rank of a launcher; None: it has none now."""
        try:
            ranks = psutil.Process(self.launchers[place].pid).children()
        except psutil.Error:
            return None
        return random.choice(ranks) if len(ranks) == self._num_ranks else None

    def val_loss(self) -> float:
        """At the end."""
        events = [json.loads(line) for line in self.lines()]
        return [event["loss"] for event in events if event["event"] == "eval"][-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End those that are left."""
        for launcher in self.launchers:
            launcher.send_signal(signal.SIGTERM)
            launcher.wait(LONGEST_S)

    def end(self) -> float:
        """Wait until it is over; the validation loss."""
        self.launchers[0].wait()
        return self.val_loss()


def disturbed(world: World, kills: int, chance: random.Random, pause_s: float) -> list[tuple[str, float]]:
    """Kill so many times; what, and the seconds until the next new step."""
    found: list[tuple[str, float]] = []
    while len(found) < kills and not world.over():
        time.sleep(chance.uniform(0.5, pause_s))
        place = chance.randrange(len(world.launchers))
        rank, before, began = world.rank_of(place), world.num_steps(), time.monotonic()
        if rank is None or not before:
            continue
        whole = place > 0 and chance.random() < 0.5
        if whole:
            world.launchers[place].kill()  # its rank ends with it
            world.launchers[place].wait()
        else:
            rank.kill()
        began_steps = sum('"event": "start"' in line for line in world.lines())
        while not world.over():
            lines = world.lines()
            starts = [index for index, line in enumerate(lines) if '"event": "start"' in line]
            if len(starts) > began_steps and any('"event": "step"' in line for line in lines[starts[-1] :]):
                break
            if time.monotonic() - began > LONGEST_S:
                raise SystemExit("nobody trains any more")
            time.sleep(0.05)
        found.append(("launcher" if whole else "rank", time.monotonic() - began))
        print(f"kill {len(found)}: a {found[-1][0]}, {found[-1][1]:.1f} s", file=sys.stderr, flush=True)
        if whole:
            world.launchers[place] = world.start()
    return found


def main() -> None:
    """Undisturbed runs, then the disturbed one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--one-host", action="store_true", help="one launcher, whose ranks are the replicas")
    parser.add_argument("--every", type=int, default=16)
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--rows", type=int, default=24, help="of a step, however many replicas there are")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--pause", type=float, default=20.0, help="most seconds between two kills")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lost-replicas-") as text:
        folder, losses = Path(text), []
        for seed in arguments.seeds:
            with World(arguments, folder, f"undisturbed-{seed}", seed) as world:
                losses.append(world.end())
            print(f"undisturbed, seed {seed}: validation loss {losses[-1]:.4f}", flush=True)
        with World(arguments, folder, "disturbed", arguments.seeds[0]) as world:
            found = disturbed(world, arguments.kills, random.Random(0), arguments.pause)
            loss = world.end()
        seconds = [each for _, each in found]
        spread = f"undisturbed {min(losses):.4f} to {max(losses):.4f}"
        print(f"{len(found)} kills: validation loss {loss:.4f}; {spread}")
        print(f"training again after {median(seconds):.1f} s in the median, {max(seconds):.1f} s at the most")


if __name__ == "__main__":
    main()
