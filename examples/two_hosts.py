"""Two hosts on one machine: train over a real link between two network namespaces, cut it, and watch.

    sudo python examples/two_hosts.py [--launcher zeroshard|torchrun] [--seconds-after 5]

Each host is a namespace with an address of its own, and a veth pair between them is all that joins them (and the disk,
as on a cluster). Both start the same command. Then

1. the link goes down while they train: each names the other as lost, and host A goes on alone from the last checkpoint
   (with torchrun, which decides by itself, both end);
2. the link comes back and host B starts the same command again: A takes it in, and both go on from A's checkpoint;
3. both are asked to stop (SIGTERM): they save, and end in status 143.

It needs root and iproute2, and takes its namespaces down at the end, whatever that was. Exit status 1 if anything went
otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

PORT = 29400
PATIENCE_S = 150.0
FLAGS = """
    --data synthetic --model gpt2-demo --model.n-layer 2 --model.n-embd 32 --model.n-head 2 --seq-len 32
    --micro-batch-size 1 --global-batch-size 4 --max-steps 200000 --warmup-steps 10 --eval-interval 0 --eval-rows 1
    --checkpoint-interval 100 --keep-checkpoints 2 --comm ring --device cpu --resume auto
"""


class Host:
    """A network namespace, and the command that runs in it."""

    def __init__(self, letter: str, number: int, transcript: Transcript) -> None:
        self.letter, self.namespace, self.link = letter, f"zs{os.getpid()}{letter}", f"zs{os.getpid()}{letter}"
        self.address = f"10.83.0.{number}"
        self.process: subprocess.Popen[str] | None = None
        self._transcript = transcript

    def start(self, words: list[str]) -> None:
        """Run a command here; its errors go into the transcript as they come."""
        env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": self.link}
        command = ["ip", "netns", "exec", self.namespace, *words]
        self.process = subprocess.Popen(
            command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self.process.stderr is not None
        threading.Thread(target=self._listen, args=(self.process.stderr,), daemon=True).start()

    def _listen(self, stream: IO[str]) -> None:
        for line in stream:
            self._transcript.say(line.rstrip(), self.letter)

    def end(self) -> int:
        """The status of the command, once it has ended."""
        assert self.process is not None
        return self.process.wait(PATIENCE_S)


class Transcript:
    """What happened, with seconds since the start."""

    def __init__(self) -> None:
        self._start, self._lock = time.monotonic(), threading.Lock()

    def say(self, line: str, host: str = " ") -> None:
        """Print one line."""
        with self._lock:
            print(f"{time.monotonic() - self._start:6.1f} s  {host}  {line}", flush=True)


def ip(*words: str) -> None:
    """Run `ip`; what it complains of goes to stderr."""
    subprocess.run(["ip", *words], check=True)


@contextmanager
def two_hosts(transcript: Transcript) -> Generator[tuple[Host, Host]]:
    """Namespaces A and B with a link between them; gone at the end, with all that runs in them."""
    hosts = Host("A", 1, transcript), Host("B", 2, transcript)
    try:
        for host in hosts:
            ip("netns", "add", host.namespace)
        ip("link", "add", hosts[0].link, "netns", hosts[0].namespace, "type", "veth",
           "peer", "name", hosts[1].link, "netns", hosts[1].namespace)  # fmt: skip
        for host in hosts:
            ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.link)
            for device in ("lo", host.link):
                ip("-n", host.namespace, "link", "set", device, "up")
        yield hosts
    finally:
        for host in hosts:
            if host.process is not None and host.process.poll() is None:
                os.killpg(host.process.pid, signal.SIGKILL)
                host.process.wait()
            subprocess.run(["ip", "netns", "delete", host.namespace], check=False, stderr=subprocess.DEVNULL)


class Run:
    """What the run folder says."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def events(self, kind: str) -> list[dict[str, object]]:
        """The events of that kind so far."""
        try:
            lines = (self.out / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        except FileNotFoundError:
            return []
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in events if event["event"] == kind]

    def steps(self) -> int:
        """The last step's number; 0 before the first."""
        found = self.events("step")
        return int(str(found[-1]["step"])) if found else 0


def wait_for(what: Callable[[], bool], hosts: tuple[Host, ...]) -> None:
    """Return when ``what`` is true; RuntimeError where all hosts have ended, or nothing happens."""
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        if time.monotonic() > deadline:
            raise RuntimeError("nothing happened")
        if all(host.process is not None and host.process.poll() is not None for host in hosts):
            raise RuntimeError("both hosts have ended")
        time.sleep(0.1)


def words_of(launcher: str, host: Host, server: Host, folder: Path) -> list[str]:
    """The command: the same on each host with our launcher; torchrun must be told who serves, and who one is."""
    train = ["train", *FLAGS.split(), "--out", str(folder / "run"), "--data.dir", str(folder / "data")]
    endpoint = f"{server.address}:{PORT}"
    if launcher == "zeroshard":
        meet = ["--nnodes", "1:2", "--rdzv-endpoint", endpoint, "--nproc", "1", "--max-restarts", "3"]
        return [sys.executable, "-m", "zeroshard", *train, *meet]
    meet = f"--nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint {endpoint} --local-addr {host.address}"
    serves = f"--rdzv-conf is_host={int(host is server)}"
    return [sys.executable, "-m", "torch.distributed.run", *meet.split(), *serves.split(), "-m", "zeroshard", *train]


def rehearse(launcher: str, seconds_after: float, folder: Path, transcript: Transcript) -> None:
    """Run the three acts.

    Raises:
        RuntimeError: something did not happen.
    """
    run = Run(folder / "run")
    with two_hosts(transcript) as (a, b):
        command = " ".join(words_of(launcher, a, a, Path("."))[1:])
        transcript.say(f"both hosts: python {command}")
        for host in (a, b):
            host.start(words_of(launcher, host, a, folder))
        wait_for(lambda: len(run.events("checkpoint")) > 0 and run.steps() > 120, (a, b))
        transcript.say(f"training on {run.events('start')[-1]['world_size']} ranks, past step {run.steps() // 10 * 10}")

        ip("-n", a.namespace, "link", "set", a.link, "down")
        transcript.say("the link is cut")
        if launcher == "torchrun":
            statuses = a.end(), b.end()
            transcript.say(f"torchrun has ended on both hosts, with status {statuses[0]} and {statuses[1]}")
            _require(0 not in statuses, "a run that lost its peer ended well")
            return
        wait_for(lambda: len(run.events("start")) == 2, (a,))
        start = run.events("start")[-1]
        transcript.say(f"A goes on from step {start['step']} with {start['world_size']} rank")
        _require(start["world_size"] == 1 and int(str(start["step"])) > 0, "it did not go on alone from a checkpoint")
        status = b.end()
        transcript.say(f"B has ended, with status {status}")
        _require(status == 4, "a lost peer is status 4")

        saved = len(run.events("checkpoint"))
        wait_for(lambda: len(run.events("checkpoint")) > saved, (a,))
        ip("-n", a.namespace, "link", "set", a.link, "up")
        transcript.say("the link is back; B starts again")
        b.start(words_of(launcher, b, a, folder))
        wait_for(lambda: len(run.events("start")) == 3, (a, b))
        start = run.events("start")[-1]
        transcript.say(f"both go on from step {start['step']} with {start['world_size']} ranks")
        _require(start["world_size"] == 2, "B was not taken in")
        at = run.steps()
        wait_for(lambda: run.steps() > at + 50, (a, b))
        time.sleep(seconds_after)

        for host in (a, b):
            assert host.process is not None
            os.killpg(host.process.pid, signal.SIGTERM)
        transcript.say("both are asked to stop")
        statuses = a.end(), b.end()
        last = run.events("checkpoint")[-1]["step"]
        transcript.say(f"they have saved step {last} and ended, with status {statuses[0]} and {statuses[1]}")
        _require(statuses == (143, 143), "status 143 says that it was saved")


def _require(held: bool, otherwise: str) -> None:
    if not held:
        raise RuntimeError(otherwise)


def main() -> int:
    """Rehearse; 0 if all went as the module says."""
    parser = argparse.ArgumentParser(description="Train on two network namespaces, cut the link, and watch.")
    parser.add_argument("--launcher", choices=("zeroshard", "torchrun"), default="zeroshard")
    parser.add_argument("--seconds-after", type=float, default=0.0, help="to train on before they are stopped")
    args = parser.parse_args()
    if os.geteuid() != 0 or shutil.which("ip") is None:
        print("error: two_hosts: it makes network namespaces; run it as root, with iproute2", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that the namespaces go
    transcript = Transcript()
    with tempfile.TemporaryDirectory(prefix="two-hosts-") as folder:
        try:
            rehearse(args.launcher, args.seconds_after, Path(folder), transcript)
        except RuntimeError as error:
            transcript.say(f"not as it should be: {error}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
