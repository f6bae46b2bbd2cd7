"""Fewer outer steps: what local steps save on a slow link, what they cost in loss, and when a target loss is reached.

    sudo python benchmarks/study/local_steps.py --text tinyshakespeare.txt               # minutes: 0.9 M parameters
    sudo python benchmarks/study/local_steps.py --text tinyshakespeare.txt --full        # hours: 10 M, 2,000 steps
    python benchmarks/study/local_steps.py --text FILE --mode none --every 1 32 --seeds 0 1 2  # the loss alone, no root

Each replica is one rank on a node of its own, a network namespace whose link is shaped. Bytes are those that leave the
nodes by the counters of their interfaces, from the first step to the last; they have TCP's and IP's headers and all
control messages in them. ``--every 1`` reduces gradients at each step. The loss is the validation loss at the end, of
the weights that all replicas have in common, and the same tokens are seen in every row.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil

from zeroshard.host.columns import columns
from zeroshard.lab.network import INTERFACE

SMALL = ["--model.n-layer", "4", "--model.n-head", "4", "--model.n-embd", "128", "--seq-len", "64"]
FULL = ["--model.n-layer", "6", "--model.n-head", "6", "--model.n-embd", "384", "--seq-len", "256"]


class Counted:
    """What leaves the nodes, looked at several times a second: the counters go with the network when a run ends.

    The ranks are asked for the interface of their own namespace, since others may have networks on this machine.
    """

    def __init__(self, launcher: int, log: Path) -> None:
        self._launcher, self._log, self._over = psutil.Process(launcher), log, threading.Event()
        self._first: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int | None:
        """Bytes of all nodes together since the first step; None where no interface was there to be looked at."""
        self._over.set()
        self._thread.join()
        return sum(self._last[pid] - first for pid, first in self._first.items()) if self._first else None

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            if not self._log.exists() or '"event": "step"' not in self._log.read_text():
                continue
            with suppress(psutil.Error, OSError):  # a rank has ended meanwhile
                for child in self._launcher.children(recursive=True):
                    sent = _sent_bytes(child.pid)
                    if sent is not None:
                        self._first.setdefault(child.pid, sent)
                        self._last[child.pid] = sent


def _sent_bytes(pid: int) -> int | None:
    """What has left the node that a process is in; None: it is in none."""
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            return int(numbers.split()[8])
    return None


def run(arguments: argparse.Namespace, folder: Path, replicas: int, every: int, seed: int) -> dict[str, Any]:
    """A run of `zeroshard train`: its losses, its times and its bytes."""
    out = folder / f"replicas{replicas}-every{every}-seed{seed}"
    words = ["--data", "text", "--data.path", arguments.text, "--data.dir", str(folder / "data"), "--out", str(out)]
    words += [*(FULL if arguments.full else SMALL), "--nproc", str(replicas), "--shard-size", "1", "--seed", str(seed)]
    words += [
        "--strategy",
        "zero1",
        "--max-steps",
        str(arguments.steps),
        "--eval-interval",
        str(arguments.eval_interval),
    ]
    words += ["--global-batch-size", str(arguments.rows), "--micro-batch-size", str(arguments.rows // replicas)]
    words += ["--warmup-steps", str(max(arguments.steps // 20, 1)), "--log-interval", "1000000", "--eval-rows", "320"]
    words += ["--local-steps.every", str(every), *(arguments.more if every > 1 else [])]
    if arguments.mode != "none":
        words += ["--link.mode", arguments.mode, "--link.bandwidth", arguments.bandwidth]
    began = time.monotonic()
    command = [sys.executable, "-m", "zeroshard", "train", *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=pipe, text=True) as launcher:
        counted = Counted(launcher.pid, out / "metrics.jsonl")
        said = launcher.communicate()[1]
    wall_s, num_bytes = time.monotonic() - began, counted.stop()
    if launcher.returncode:
        raise SystemExit(said)
    events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    evals = [event for event in events if event["event"] == "eval"]
    clock, at = 0.0, {}
    for event in steps:
        clock += event["step_s"]
        at[event["step"]] = clock
    return {
        "replicas": replicas,
        "every": every,
        "seed": seed,
        "val_loss": evals[-1]["loss"],
        "curve": [(event["step"], at.get(event["step"], 0.0), event["loss"]) for event in evals],
        "step_s": clock / len(steps),
        "median_step_s": median(event["step_s"] for event in steps),
        "wall_s": wall_s,
        "interface_bytes": num_bytes,
        "collective_bytes": sum(sum(event["comm"].values()) for event in steps if event["comm"]),
    }


def table(found: list[dict[str, Any]]) -> str:
    """A row for each number of replicas and of local steps (``every``), seeds together, against ``every`` 1."""
    head = ("replicas", "every", "val loss", "against 1", "step", "against 1", "crossed", "of 1", "to loss of 1")
    rows = [head]
    for replicas, every in dict.fromkeys((each["replicas"], each["every"]) for each in found):
        ours = [each for each in found if (each["replicas"], each["every"]) == (replicas, every)]
        base = [each for each in found if (each["replicas"], each["every"]) == (replicas, 1)] or ours
        loss, loss_of_1 = (fmean(each["val_loss"] for each in side) for side in (ours, base))
        step_s, step_s_of_1 = (fmean(each["step_s"] for each in side) for side in (ours, base))
        crossed, crossed_of_1 = (fmean(each["interface_bytes"] or 0 for each in side) for side in (ours, base))
        times = [reached(each["curve"], loss_of_1 * 1.02) for each in ours]
        known = [each for each in times if each is not None]
        rows.append(
            (
                str(replicas),
                str(every),
                f"{loss:.4f}",
                f"{loss / loss_of_1 - 1:+.2%}",
                f"{step_s * 1e3:.1f} ms",
                f"{step_s_of_1 / step_s:.2f} x",
                f"{crossed / 1e6:.2f} MB" if crossed else "",
                f"1/{crossed_of_1 / crossed:.1f}" if crossed else "",
                f"{fmean(known):.1f} s" if len(known) == len(times) else "never",
            )
        )
    return "\n".join(columns(rows, right=range(len(head))))


def reached(curve: list[tuple[int, float, float]], loss: float) -> float | None:
    """Seconds of steps until the validation loss is at most ``loss``; None: never."""
    return next((seconds for _, seconds, value in curve if value <= loss), None)


def main() -> None:
    """Run every cell and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="file to train on")
    parser.add_argument("--replicas", type=int, nargs="+", default=[2])
    parser.add_argument("--every", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--rows", type=int, default=16, help="sequences of a step, all replicas together")
    parser.add_argument("--eval-interval", type=int, default=64)
    parser.add_argument("--mode", default="netns", choices=["netns", "simulated", "none"])
    parser.add_argument("--bandwidth", default="100Mbit/s")
    parser.add_argument(
        "--full", action="store_true", help="10 M parameters, 2,000 steps, three seeds, 2 and 4 replicas"
    )
    parser.add_argument("--more", nargs="*", default=[], help="further flags where replicas take local steps")
    parser.add_argument("--json", help="write what was measured")
    arguments = parser.parse_args()
    if arguments.full:
        arguments.steps, arguments.seeds, arguments.replicas, arguments.rows = 2000, [0, 1, 2], [2, 4], 32
        arguments.every = [1, 32]
        arguments.eval_interval = 200
    with tempfile.TemporaryDirectory(prefix="local-steps-") as folder:
        found = []
        for seed in arguments.seeds:
            for replicas in arguments.replicas:
                for every in arguments.every:
                    found.append(run(arguments, Path(folder), replicas, every, seed))
                    print(json.dumps({k: v for k, v in found[-1].items() if k != "curve"}), file=sys.stderr, flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=2), encoding="utf-8")
    print(table(found))


if __name__ == "__main__":
    main()
