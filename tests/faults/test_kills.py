"""A run that is killed at a random moment ends in the same bits as one that never was. ``pytest --kills 100``: more.

Three ranks train through the command line and save often. In each round a rank is killed, or the launcher is, and a new
one goes on: at any moment from the start of the ranks to their end, or as soon as a save has begun. Nothing of theirs
stays behind.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import forked
from same_results import contents
from zeroshard import checkpoint
from zeroshard.checkpoint import store

WORLD_SIZE, NUM_STEPS, PATIENCE_S, LOOK_S = 3, 40, 600.0, 0.2
FLAGS = f"""train --nproc {WORLD_SIZE} --max-steps {NUM_STEPS} --checkpoint-interval 3 --eval-interval 0
    --data text --model gpt2-demo --model.n_layer 1 --model.n_embd 16 --model.n_head 2 --seq-len 16
    --micro-batch-size 1 --warmup-steps 2 --eval-batches 1 --max-restarts 3""".split()


class World:
    """A run of the command line, and its processes."""

    def __init__(self, tmp_path: Path, name: str, *flags: str) -> None:
        text = tmp_path / "text.txt"
        text.write_text("to be or not to be, that is the question\n" * 300)
        self.out = tmp_path / name
        self.folder = tmp_path / f"{name}-here"  # the working folder of each of its processes, by which they are known
        self.folder.mkdir()
        self.temporary = tmp_path / f"{name}-temporary"
        self.temporary.mkdir()
        self.pids: set[int] = set()  # of all its processes that were ever seen
        command = [sys.executable, "-m", "zeroshard", *FLAGS, *flags, "--out", str(self.out), "--data.path", str(text)]
        self.command = [*command, "--data.dir", str(tmp_path / "data")]
        self.start()

    def start(self, *flags: str) -> None:
        pipe = subprocess.PIPE
        env = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary)}
        self.launcher = forked.Popen(
            [*self.command, *flags], env=env, cwd=self.folder, stdout=subprocess.DEVNULL, stderr=pipe, text=True
        )

    def processes(self) -> list[int]:
        """Of this run, wherever they hang."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    here = (entry / "cwd").readlink()
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                except OSError:
                    continue  # it has ended meanwhile
                if here == self.folder and state != "Z":
                    found.append(int(entry.name))
        self.pids |= set(found)
        return found

    def ranks(self) -> list[int]:
        return [pid for pid in self.processes() if pid != self.launcher.pid]

    def ended(self) -> tuple[int, str]:
        """Exit status and stderr."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                err = self.launcher.communicate(timeout=LOOK_S)[1]
                return self.launcher.returncode, err
            except subprocess.TimeoutExpired:
                assert time.monotonic() < deadline, "it does not end"
                self.processes()

    def left(self) -> list[Path]:
        """What its processes left outside of its folders."""
        return [*self.temporary.iterdir()]

    def checkpoints(self) -> list[Path]:
        return sorted(self.out.glob("checkpoints/step-*"))

    def weights(self) -> dict[tuple[str, str], torch.Tensor]:
        path = checkpoint.latest(self.out / "checkpoints")
        assert path is not None
        assert path.name == f"step-{NUM_STEPS:08d}"
        return contents(path)

    def kill_all(self) -> None:
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.launcher.communicate()


@pytest.fixture
def world(tmp_path):
    """`world(name, *flags)`: a run; nothing of it outlives the test."""
    worlds = []

    def make(name, *flags):
        worlds.append(World(tmp_path, name, *flags))
        return worlds[-1]

    yield make
    for each in worlds:
        each.kill_all()


def _wait_for(what, look_s=0.05):
    """``look_s``: a look at all processes of a machine takes as long as a step."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := what()):
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(look_s)
    return found


def _assert_sound(run):
    """Whatever is called complete is whole."""
    for path in run.checkpoints():
        if store.resolve(path):
            assert not checkpoint.verify(path)


def _wait_for_a_moment(run, rng, lifetime_s):
    """Any one of a run whose ranks are there, or one inside a save; no longer than it runs."""
    if rng.random() < 0.5:
        time.sleep(rng.uniform(0.0, lifetime_s))
        return
    save = rng.randrange(1, NUM_STEPS // 3)

    def has_come():
        is_saving = len(run.checkpoints()) >= save and any(run.out.glob("checkpoints/.step-*.tmp"))
        return is_saving or run.launcher.poll() is not None

    _wait_for(has_come, look_s=0.005)  # a save is short


def _kill_a_rank(run, rng, lifetime_s):
    """Then the launcher brings the world back."""
    pids = _wait_for(lambda: run.ranks() if len(run.ranks()) == WORLD_SIZE else None)
    _wait_for_a_moment(run, rng, lifetime_s)
    victim = rng.choice(pids)
    try:
        os.kill(victim, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _kill_the_launcher(run, rng, lifetime_s):
    """Then the kernel takes the ranks, and a new launcher goes on."""
    _wait_for(run.ranks)
    assert any(run.temporary.iterdir())  # a launcher's, which the next one removes
    _wait_for_a_moment(run, rng, lifetime_s)
    run.launcher.kill()
    _wait_for(lambda: not run.processes())
    run.launcher.communicate()
    _assert_sound(run)
    run.start("--resume", "auto")


def pytest_generate_tests(metafunc):
    if "round_number" in metafunc.fixturenames:
        metafunc.parametrize("round_number", range(metafunc.config.getoption("--kills")))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Weights of a run that nobody kills, and for how long its ranks ran in seconds."""
    run = World(tmp_path_factory.mktemp("undisturbed"), "whole")
    try:
        _wait_for(run.ranks)
        began = time.monotonic()
        assert run.ended() == (0, "")
        return run.weights(), time.monotonic() - began
    finally:
        run.kill_all()


@pytest.mark.slow
def test_a_run_that_is_killed_ends_in_the_bits_of_one_that_is_not(round_number, undisturbed, world):
    expected, lifetime_s = undisturbed
    rng = random.Random(round_number)
    run = world("killed")
    if round_number % 3 == 2:
        _kill_the_launcher(run, rng, lifetime_s)
        status, err = run.ended()
    else:
        killed = _kill_a_rank(run, rng, lifetime_s)
        status, err = run.ended()
        if killed and err:
            again = r"^started again from the last good checkpoint, 2 times more at most: rank \d"
            assert re.search(again, err, re.M), err
    assert status == 0, err
    assert not run.processes()
    assert len(run.pids) >= 1 + WORLD_SIZE
    assert run.left() == []
    _assert_sound(run)
    found = run.weights()
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in found.items())


@pytest.mark.slow
def test_a_run_asked_to_stop_is_not_started_again_and_says_so_by_its_status(world):
    for number, status in ((signal.SIGUSR1, 138), (signal.SIGTERM, 143), (signal.SIGHUP, 143)):
        run = world(f"stopped-{number}", "--max-steps", "100000")
        _wait_for(run.checkpoints)
        os.kill(run.ranks()[1] if number == signal.SIGUSR1 else run.launcher.pid, number)
        assert run.ended() == (status, "")
        assert not run.processes()
        assert run.left() == []
        _assert_sound(run)


@pytest.mark.slow
def test_a_mistake_is_not_worth_a_restart(world):
    run = world("mistake", "--data.max-tokens", "3")
    status, err = run.ended()
    assert status == 2
    assert re.fullmatch(r"error: [^\n]+\n", err)
