"""Three ranks train through the command line; one dies or skips a layer, and the others say so and end."""

import os
import re
import subprocess
import sys
import time

import psutil
import pytest

import forked

WORLD_SIZE, PATIENCE_S = 3, 300.0

# At its fourth reduction of blocks.1's gradients, or in its fourth step, the culprit does what it was told to do.
PROGRAM = """
import os, sys, time
from zeroshard import cli
from zeroshard.host import process

process.prepare_torch()
from zeroshard.zero.core.passes import Passes

fault, culprit, *argv = sys.argv[1:]
begin, calls = Passes._begin_reduction, []

def begin_with_fault(self, unit, groups):
    if unit.name == "blocks.1" and os.environ["RANK"] == culprit:
        calls.append(unit)
        if len(calls) == 4:
            print("now", flush=True)
            if fault == "hangs":
                time.sleep(3600)
            if fault == "dies":
                os._exit(9)
            return
    begin(self, unit, groups)

Passes._begin_reduction = begin_with_fault

if fault.startswith("dies in "):  # inside of blocks.1, which need not be a unit of ours
    from zeroshard.train.loop import loop

    take_step = loop.take_step

    def die(*ignored):
        print("now", flush=True)
        os._exit(9)

    def die_in_backward(block, inputs, output):
        output.register_hook(die)

    def step_with_fault(run, step, *rest):
        if step == 3 and os.environ["RANK"] == culprit:
            (block,) = (module for name, module in run.strategy.model.named_modules() if name.endswith("blocks.1"))
            block.register_forward_hook(die if fault == "dies in forward" else die_in_backward)
        return take_step(run, step, *rest)

    loop.take_step = step_with_fault

sys.exit(cli.main(["train", *argv]))
"""


@pytest.fixture
def ranks(tmp_path):
    """`ranks(fault, culprit, *flags, strategy=...)`: the processes of a run."""
    started = []

    def start(fault, culprit, *flags, strategy="zero2"):
        text = tmp_path / "text.txt"
        text.write_text("to be or not to be, that is the question\n" * 300)
        words = f"""--data text --data.path {text} --data.dir {tmp_path / "data"} --out {tmp_path / "run"}
            --max-steps 100000 --model gpt2-demo --model.n_layer 2 --model.n_embd 24 --model.n_head 2 --seq-len 16
            --micro-batch-size 1 --eval-interval 0 --strategy {strategy}""".split()
        command = [sys.executable, "-c", PROGRAM, fault, str(culprit), *flags, *words]
        world = forked.meeting_point(WORLD_SIZE)
        for rank in range(WORLD_SIZE):
            env = os.environ | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            pipe = subprocess.PIPE
            started.append(forked.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True))
        return started

    yield start
    for process in started:
        process.kill()
        process.communicate()


def _endings(processes, culprit):
    """Exit status and stderr of each rank, within `PATIENCE_S` of the fault."""
    assert "now\n" in iter(processes[culprit].stdout.readline, ""), processes[culprit].communicate()[1]
    began = time.monotonic()
    endings = []
    for process in processes:
        err = process.communicate(timeout=PATIENCE_S - (time.monotonic() - began))[1]
        endings.append((process.returncode, err))
    return endings


@pytest.mark.redundant(but=["shm-0"])
@pytest.mark.slow
@pytest.mark.parametrize(("comm", "culprit"), [("torch", 1), ("ring", 2), ("shm", 0)])
def test_a_rank_that_dies_is_named_by_the_others_which_end(ranks, comm, culprit):
    endings = _endings(ranks("dies", culprit, "--comm", comm), culprit)
    assert endings.pop(culprit) == (9, "")
    assert [status for status, _ in endings] == [4, 4], endings
    said = [err for _, err in endings if err]
    assert any(re.match(rf"error: rank \d: rank {culprit}\b", err) for err in said), endings
    for err in said:  # rank 0 keeps the store here: who comes later than its end finds rank 0 gone too
        assert re.fullmatch(rf"error: rank \d: rank [0{culprit}]\b[^\n]* is gone\b[^\n]+\n", err), endings


@pytest.mark.redundant(but=["1-backward-ddp"])
@pytest.mark.slow
@pytest.mark.pairwise
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_dies_under_a_strategy_of_pytorchs_ends_the_others_with_a_line(ranks, strategy, where, culprit):
    endings = _endings(ranks(f"dies in {where}", culprit, "--comm", "torch", strategy=strategy), culprit)
    assert endings.pop(culprit) == (9, "")
    assert [status for status, _ in endings] == [4, 4], endings
    said = [err for _, err in endings if err]
    assert said, endings
    for err in said:  # on a busy machine nobody may be found silent in time to be named, or the watch may say it first
        why = r"(rank \d\b[^\n]* is gone\b|a collective failed: a peer was lost)"
        line = rf"rank \d: {why}[^\n]*; start again with --resume auto|rank {culprit} has not answered for 8 s[^\n]*"
        assert re.fullmatch(rf"error: ({line})\n", err), endings


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "launcher"),
    [
        ("ddp", "torchrun"),
        ("fsdp2", "ours"),
        pytest.param("fsdp2", "torchrun", marks=pytest.mark.soak),
        pytest.param("ddp", "ours", marks=pytest.mark.soak),
    ],
)
def test_a_rank_that_is_killed_under_a_launcher_leaves_one_line_and_no_traceback_of_ours(strategy, launcher, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "zeroshard"]
    run = ["train", "--data", "synthetic", "--strategy", strategy, "--max-steps", "100000", "--warmup-steps", "1"]
    run += ["--model.n-layer", "1", "--model.n-embd", "16", "--model.n-head", "2", "--seq-len", "16"]
    run += ["--micro-batch-size", "1", "--eval-interval", "0", "--out", str(tmp_path / "run")]
    if launcher == "ours":
        command, run = [sys.executable, "-m", "zeroshard"], [*run, "--nproc", "2"]
    log = tmp_path / "run" / "metrics.jsonl"
    pipe = subprocess.PIPE
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    with forked.Popen([*command, *run], env=env, stdout=pipe, stderr=pipe, text=True, cwd=tmp_path) as process:
        try:
            while not (log.exists() and '"step"' in log.read_text()):
                assert process.poll() is None, process.communicate()
                time.sleep(0.1)
            ranks = [child for child in psutil.Process(process.pid).children() if not child.children()]
            ranks[-1].kill()
            err = process.communicate(timeout=PATIENCE_S)[1]
        finally:
            process.kill()
    assert "gloo" not in err.lower(), err
    if launcher == "ours":
        assert process.returncode == 4
        assert re.fullmatch(r"error: rank [01]: was ended by SIGKILL; [^\n]+\n", err), err
        return
    ours, _, torchruns = err.partition("Traceback (most recent call last)")
    assert re.search(
        r"^error: rank [01]: rank [01]\b[^\n]* is gone\b[^\n]+; start again with --resume auto$", ours, re.M
    ), err
    assert "ChildFailedError" in torchruns
    assert torchruns.count("Traceback") == 0
    assert re.search(r"exitcode +: 4 ", torchruns), err  # torchrun's own status is 1
    assert forked.still_running(ranks) == []


def test_a_rank_that_skips_a_layer_is_named_with_it_and_all_end(ranks):
    endings = _endings(ranks("skips", 1, "--comm", "ring"), 1)
    assert [status for status, _ in endings] == [4, 4, 4], endings
    said = [err for _, err in endings if err]  # who found it first; another may have found it in the same second
    assert said, endings
    for err in said:
        assert re.fullmatch(r"error: [^\n]*ranks diverged at operation \d+: [^\n]+\n", err), endings
        assert "blocks.1/grads" in err
        assert "rank 1 issued" in err


def test_a_step_that_hangs_ends_with_the_stacks_of_every_rank(ranks, tmp_path):
    endings = _endings(ranks("hangs", 1, "--comm", "shm", "--step-timeout-s", "3"), 1)
    assert [status for status, _ in endings] == [4, 4, 4], endings
    folder = tmp_path / "run" / "stacks"
    assert {err for _, err in endings if err} == {
        f"error: a step has taken 3 s (step_timeout_s): the stacks of each rank are in {folder}; "
        "start again with --resume auto\n"
    }
    stacks = [(folder / f"rank-{rank:05d}.txt").read_text() for rank in range(WORLD_SIZE)]
    assert "in begin_with_fault" in stacks[1]
    assert all("in take_step" in stack for stack in stacks)
