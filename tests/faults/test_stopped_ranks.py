"""Ranks of our launcher that are killed or stopped: the right one is named, and the command ends soon."""

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

import forked

WORLD_SIZE, PATIENCE_S = 3, 300.0
# No rank is killed because it takes long to stop: what ends within `PATIENCE_S` has not waited for that.
PROGRAM = """
import sys
from zeroshard import cli
from zeroshard.host.launch import elastic

elastic.SHUTDOWN_GRACE_S = elastic.SAVING_GRACE_S = 3600
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.fixture
def run(tmp_path):
    """`run(*flags)`: a run of three ranks that takes its steps, and its ranks' processes in the order of ranks."""
    started = []

    def start(*flags):
        words = f"""train --data synthetic --nproc {WORLD_SIZE} --max-steps 1000000 --warmup-steps 1 --eval-interval 0
            --model.n-layer 1 --model.n-embd 16 --model.n-head 2 --seq-len 16 --micro-batch-size 1 --device cpu
            --out {tmp_path / "run"}""".split()
        pipe = subprocess.PIPE
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        process = forked.Popen(
            [sys.executable, "-c", PROGRAM, *words, *flags], env=env, stdout=pipe, stderr=pipe, text=True
        )
        started.append(process)
        log = tmp_path / "run" / "metrics.jsonl"
        while not (log.exists() and '"step"' in log.read_text()):
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        ranks = sorted(psutil.Process(process.pid).children(), key=lambda child: child.pid)  # as they were forked
        assert len(ranks) == WORLD_SIZE
        return process, ranks

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("killed", [2, pytest.param(0, marks=pytest.mark.soak)])
def test_the_rank_that_was_killed_is_named(run, killed):
    process, ranks = run()
    ranks[killed].kill()
    err = process.communicate(timeout=PATIENCE_S)[1]
    assert process.returncode == 4
    assert re.fullmatch(rf"error: rank {killed}: was ended by SIGKILL; [^\n]+\n", err), err
    assert forked.still_running(ranks) == []


@pytest.mark.parametrize("stopped", [0, pytest.param(2, marks=pytest.mark.soak)])
def test_a_stopped_rank_is_named_and_killed(run, stopped):
    process, ranks = run()
    ranks[stopped].send_signal(signal.SIGSTOP)
    err = process.communicate(timeout=PATIENCE_S)[1]
    assert process.returncode == 4
    assert re.search(rf"rank {stopped} has not answered for 8 s: it is stopped or lost", err), err
    assert forked.still_running(ranks) == []


def test_a_step_limit_is_told_of_where_the_rank_that_else_speaks_is_stopped(run, tmp_path):
    process, ranks = run("--step-timeout-s", "2")
    ranks[0].send_signal(signal.SIGSTOP)
    err = process.communicate(timeout=PATIENCE_S)[1]
    assert process.returncode == 4
    stacks = re.escape(str(tmp_path / "run" / "stacks"))
    hung = rf"a step has taken 2 s \(step_timeout_s\): the stacks of each rank are in {stacks}; start again[^\n]+"
    silent = "rank 0 has not answered for 8 s: it is stopped or lost"  # on a busy machine the sentinel may be the first
    assert re.fullmatch(rf"(error: ({hung}|{silent})\n)+", err), err
    assert forked.still_running(ranks) == []


def test_a_command_that_is_told_to_stop_does_not_wait_for_a_stopped_rank(run):
    process, ranks = run()
    ranks[1].send_signal(signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)
    assert forked.still_running(ranks) == []
