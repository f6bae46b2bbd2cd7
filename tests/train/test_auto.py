"""``--strategy auto``: starts where it fits, and a stage higher after memory has run out."""

import os
import sys
from pathlib import Path

import pytest
import torch

import forked
from tiny_runs import events_of
from zeroshard.comm import LocalCommunicator, run_threads
from zeroshard.train.records.plan_contract import Job, Planned
from zeroshard.train.setup.auto import fitting_stage, lowest_stage, move_up, num_free_bytes
from zeroshard.train.setup.build import build_run
from zeroshard.zero import STAGES

CPU = torch.device("cpu")

# Ranks whose memory runs out in the third step at stage 0, on rank 1 alone; each attempt is one world.
PROGRAM = """
import os, sys
from zeroshard import cli
from zeroshard.host import process
process.prepare_torch()
import torch
from zeroshard.train.loop import loop

take_step = loop.take_step

def short_of_memory(run, step, stop_wanted):
    if step == 2 and not run.stage and os.environ["RANK"] == "1":
        raise torch.OutOfMemoryError("CUDA out of memory")
    return take_step(run, step, stop_wanted)

loop.take_step = short_of_memory  # and in the ranks, which are forked
sys.exit(cli.main(["train", "--nproc", "2", *sys.argv[1:]]))
"""


JOBS = {
    stage: Job(torch.nn.Module(), row, 0, 2, torch.float32, 1, 1, 8, uniform_order=True, device_type="cpu")
    for stage, row in STAGES.items()
}


def _needing(*peaks):
    """A planner by which a step of each stage needs so many bytes."""
    stage_of = {(row.params, row.grads, row.optim): stage for stage, row in STAGES.items()}
    return lambda job: Planned({}, [], peaks[stage_of[job.row.params, job.row.grads, job.row.optim]])


@pytest.mark.parametrize("stage", STAGES)
def test_the_lowest_stage_whose_peak_leaves_a_tenth_free_is_chosen(stage):
    peaks = (400, 300, 200, 100)
    chosen, why = fitting_stage(JOBS, _needing(*peaks), int(peaks[stage] / 0.9) + 1)
    assert chosen == stage
    assert "does not fit" not in why
    assert fitting_stage(JOBS, _needing(*peaks), peaks[stage])[0] == min(stage + 1, 3)


def test_where_nothing_fits_the_highest_stage_is_tried_and_what_is_not_known_is_said():
    chosen, why = fitting_stage(JOBS, _needing(9, 9, 9, 9), 1)
    assert chosen == 3
    assert "does not fit either" in why
    unknown = fitting_stage(JOBS, lambda job: Planned({}, [], why_no_peak="its forward reads values"), 1)
    assert unknown == (0, "no memory prediction is available (its forward reads values)")
    assert 0 < num_free_bytes(CPU, 4) < num_free_bytes(CPU, 1)


def test_the_lowest_stage_that_fits_on_every_rank_is_taken(tmp_path):
    def rank_main(comm):
        return lowest_stage((2 if comm.rank == 1 else 0, "fits"), comm, tmp_path, resuming=False)

    assert run_threads(rank_main, 3) == [
        (2, "another rank has less memory"),
        (2, "fits"),
        (2, "another rank has less memory"),
    ]


def test_where_memory_ran_out_the_next_start_of_the_run_is_a_stage_higher(tiny_config, tmp_path):
    config = tiny_config(strategy="auto", out=str(tmp_path))
    assert move_up(config, 1, rank=2, world_size=4) == "rank 2 ran out of memory at zero1; zero2 is next"
    comm = LocalCommunicator()
    assert lowest_stage((0, "fits"), comm, tmp_path, resuming=True) == (2, "rank 2 ran out of memory at zero1")
    assert lowest_stage((3, "fits"), comm, tmp_path, resuming=True) == (3, "fits")
    assert lowest_stage((0, "fits"), comm, tmp_path, resuming=False) == (0, "fits")


def test_where_no_stage_can_help_none_is_tried(tiny_config, tmp_path):
    config = tiny_config(strategy="auto", out=str(tmp_path))
    assert move_up(config, 3, rank=0, world_size=4) == ""
    assert move_up(config, 0, rank=0, world_size=1) == ""
    assert move_up(config.model_copy(update={"strategy": "zero1"}), 1, rank=0, world_size=4) == ""
    assert not list(tmp_path.iterdir())


def test_the_chosen_stage_is_said_and_built_and_the_wish_is_kept(tiny_config, capsys):
    config = tiny_config(strategy="auto")
    run = build_run(config, LocalCommunicator(), CPU, _needing(1 << 62, 1 << 62, 1, 1))
    run.close()
    assert capsys.readouterr().out.startswith("strategy auto: zero2: ")
    assert run.stage == 2
    assert run.config["strategy"] == "zero2"
    assert 'strategy = "auto"' in (Path(config.out) / "config.toml").read_text()


@pytest.mark.redundant
@pytest.mark.slow
def test_a_run_whose_memory_runs_out_goes_on_a_stage_higher_from_its_checkpoint(tmp_path):
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 300)
    out = tmp_path / "run"
    size = "--model gpt2-demo --model.n_layer 1 --model.n_embd 16 --model.n_head 2 --seq-len 16 --micro-batch-size 1"
    length = "--max-steps 4 --warmup-steps 1 --checkpoint-interval 2 --no-checkpoint-async --eval-interval 0"
    places = f"--out {out} --data.path {tmp_path / 'text.txt'} --data.dir {tmp_path / 'data'}"
    words = f"--strategy auto --comm ring --data text {places} {size} {length}".split()
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, *words]
    done = forked.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done
    (again,) = [line for line in done.stderr.splitlines() if line.startswith("started again")]
    assert again == "started again: strategy auto: rank 1 ran out of memory at zero0; zero1 is next"
    assert [event["step"] for event in events_of(out, "start")] == [0, 2]
    assert [event["step"] for event in events_of(out, "step")] == [1, 2, 3, 4]
