"""A run on several machines that loses one goes on with fewer, and takes in one that comes later.

Each machine is a launcher of its own with one rank, and all are on this one.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

import forked
from zeroshard import checkpoint

PATIENCE_S = 600.0  # a busy machine starts a rank in half a minute


class Machines:
    def __init__(self, tmp_path, nnodes, *flags):
        (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 300)
        self.port = forked.free_port()
        endpoint = f"127.0.0.1:{self.port}"
        self.out = tmp_path / "run"
        self.command = [sys.executable, "-m", "zeroshard", "train", "--nnodes", nnodes, "--rdzv-endpoint", endpoint]
        self.command += f"""--nproc 1 --max-steps 1000000 --checkpoint-interval 50 --keep-checkpoints 3
            --eval-interval 0 --data text --data.path {tmp_path / "text.txt"} --data.dir {tmp_path / "data"}
            --model gpt2-demo --model.n_layer 1 --model.n_embd 16 --model.n_head 2 --seq-len 16 --global-batch-size 6
            --micro-batch-size 1 --warmup-steps 2 --eval-batches 1 --max-restarts 3 --comm ring
            --out {self.out}""".split()
        self.command += flags
        self.launchers = []

    def start(self):
        self.launchers.append(
            forked.Popen(
                self.command,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return self.launchers[-1]

    def serves(self):
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def events(self, kind):
        try:
            lines = (self.out / "metrics.jsonl").read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in events if event["event"] == kind]

    def wait_for(self, what):
        deadline = time.monotonic() + PATIENCE_S
        while not what():
            assert time.monotonic() < deadline, "nothing happened"
            assert any(launcher.poll() is None for launcher in self.launchers), self.launchers[0].communicate()
            time.sleep(0.05)


@pytest.fixture
def machines(tmp_path):
    made = []

    def make(nnodes, *flags):
        made.append(Machines(tmp_path, nnodes, *flags))
        return made[-1]

    yield make
    for each in made:
        for launcher in each.launchers:
            launcher.kill()
            launcher.wait()
            launcher.stderr.close()


@pytest.mark.slow
@pytest.mark.soak  # test_two_hosts has the same story, over a link that is cut
@pytest.mark.timeout(1800)
def test_a_run_that_loses_a_machine_goes_on_with_the_others_and_takes_in_one_that_comes_later(machines):
    world = machines("1:2")
    server = world.start()
    world.wait_for(world.serves)
    guest = world.start()
    world.wait_for(lambda: world.events("checkpoint"))
    assert [event["world_size"] for event in world.events("start")] == [2]
    guest.send_signal(signal.SIGKILL)  # its rank goes with it

    world.wait_for(lambda: len(world.events("start")) == 2)
    second = world.events("start")[1]
    assert second["world_size"] == 1
    assert second["step"] > 0
    at = len(world.events("checkpoint"))
    world.wait_for(lambda: len(world.events("checkpoint")) > at)

    later = world.start()
    world.wait_for(lambda: len(world.events("start")) == 3)
    third = world.events("start")[2]
    world.wait_for(lambda: world.events("checkpoint")[-1]["step"] > third["step"])
    for launcher in (server, later):
        launcher.send_signal(signal.SIGTERM)
    said = [each.communicate(timeout=PATIENCE_S)[1] for each in (server, later)]
    assert [server.returncode, later.returncode] == [143, 143], said
    assert "started again: another machine waits" in said[0], said
    assert "started again from the last good checkpoint, 2 times more at most" in said[0], said
    assert re.fullmatch(r"(resume: step .*\n)?", said[1]), said  # of rank 0, if the rendezvous gave it to this machine
    assert [event["world_size"] for event in world.events("start")] == [2, 1, 2]
    assert {event["tokens"] - event["step"] * 6 * 16 for event in world.events("step")} == {0}
    newest = checkpoint.latest(world.out / "checkpoints")
    assert newest is not None
    assert not checkpoint.verify(newest)
    assert checkpoint.read_manifest(newest).step == world.events("checkpoint")[-1]["step"]
