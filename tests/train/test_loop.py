import gc
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tiny_runs import events_of, summary_of, train_on
from zeroshard import checkpoint, cli
from zeroshard.comm import LocalCommunicator, run_threads
from zeroshard.host import gc_frequency
from zeroshard.host.errors import ExitStatus
from zeroshard.train import start
from zeroshard.train.loop import loop
from zeroshard.train.loop.loop import train
from zeroshard.train.loop.step import step_seed
from zeroshard.train.records.log_files import LogFiles
from zeroshard.train.setup.build import build_run
from zeroshard.train.start import run_training

CPU = torch.device("cpu")


@pytest.fixture
def built_run(tiny_config):
    """`built_run(**changes)`: a run in this process; its observers are closed at the end."""
    runs = []

    def make(**changes):
        runs.append(build_run(tiny_config(**changes), LocalCommunicator(), CPU))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


def as_flags(config):
    """The command line of ``config``'s few settings."""
    data = config.data
    table = f"--data {data.source} --data.dir {data.dir} --data.max_tokens {data.max_tokens} --out {config.out}"
    model = f"--model {config.model.name} --model.n_layer 1 --model.n_embd 16 --model.n_head 2 --device cpu"
    steps = f"--max-steps {config.max_steps} --warmup-steps {config.warmup_steps} --seq-len 16 --micro-batch-size 2"
    return f"{table} {model} {steps}".split()


def _train_as_threads(config, world_size, stop_wanted=lambda rank: False):
    """Each rank's exit status."""

    def rank_main(comm):
        status, run = train_on(comm, config, stop_wanted=lambda: stop_wanted(comm.rank))
        assert any(isinstance(each, LogFiles) for each in run.callbacks) == (comm.rank == 0)
        return status

    return run_threads(rank_main, world_size)


def test_a_run_leaves_its_log_its_summary_and_a_checkpoint(tiny_config):
    config = tiny_config(checkpoint_interval=4)
    assert run_training(config) == ExitStatus.OK
    folder = Path(config.out)
    kinds = [event["event"] for event in events_of(folder)]
    expected = ["start", "eval", "step", "step", "step", "eval", "step", "step", "step", "eval", "end"]
    assert [kind for kind in kinds if kind != "checkpoint"] == expected
    for event in events_of(folder, "checkpoint"):  # written while the next steps are taken
        assert event["num_bytes"] > 0
        assert 0 < event["stall_s"] < event["total_s"]
    assert [event["step"] for event in events_of(folder, "checkpoint")] == [4, 6]
    steps = events_of(folder, "step")
    assert [event["step"] for event in steps] == [1, 2, 3, 4, 5, 6]
    assert [event["tokens"] for event in steps] == [32 * step for step in range(1, 7)]
    assert steps[0]["lr"] == config.lr / 2
    assert all(event["mfu"] is None for event in steps)  # no peak is known for this device
    summary = summary_of(folder)
    assert summary["status"] == "ok"
    assert summary["step"] == 6
    assert summary["loss"] == steps[-1]["loss"]
    assert summary["val_loss"] == events_of(folder, "eval")[-1]["loss"]
    assert checkpoint.latest(folder / "checkpoints") == folder / "checkpoints" / "step-00000006"
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(("module", "name"), [(loop, "take_step"), (start, "built")], ids=["step", "start"])
def test_a_peer_that_torch_s_own_collectives_lose_is_told_in_a_line_and_status_four(
    tiny_config, monkeypatch, capsys, module, name
):
    def fail(*args):
        raise RuntimeError("[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242")

    monkeypatch.setattr(module, name, fail)
    config = tiny_config(max_steps=1, warmup_steps=0)
    assert cli.main(["train", *as_flags(config)]) == ExitStatus.PEER_LOST
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: rank 0: a collective failed: a peer was lost or never came")


@pytest.mark.redundant
def test_what_communication_costs_is_told_by_unit_kind_and_phase(tiny_config):
    config = tiny_config(strategy="zero3", micro_batch_size=1)
    _train_as_threads(config, 2)
    for event in events_of(config.out, "step"):
        assert set(event["exposed_s"]) == {"weights/forward", "weights/backward", "grads/backward", "control"}
        assert 0 < sum(event["exposed_s"].values()) < event["step_s"]
    exposed = summary_of(config.out)["exposed_s_per_step"]
    units = {"root", "blocks.0", "blocks.1"}
    assert {f"{unit}/{kind}" for unit in units for kind in ("weights/forward", "grads/backward")} <= set(exposed)
    assert "blocks.0/weights/backward" in exposed


def test_accumulation_over_micro_batches_is_one_large_batch(tiny_config, tmp_path):
    """The global batch has the same rows either way, so losses and weights agree within rounding."""
    together = tiny_config(micro_batch_size=6, out=str(tmp_path / "a"))
    apart = tiny_config(micro_batch_size=2, grad_accum_steps=3, out=str(tmp_path / "b"))
    run_training(together)
    run_training(apart)
    for one, other in zip(events_of(together.out, "step"), events_of(apart.out, "step"), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


def test_unsharded_gradients_travel_once_a_step_however_many_micro_batches_it_has(tiny_config, tmp_path):
    sent = []
    for num_micro in (1, 3):
        changes = {"grad_accum_steps": num_micro, "max_steps": 2, "warmup_steps": 1, "eval_interval": 0}
        config = tiny_config(strategy="zero1", micro_batch_size=1, out=str(tmp_path / str(num_micro)), **changes)
        _train_as_threads(config, 2)
        sent.append([event["comm"] for event in events_of(config.out, "step")])
    assert sent[0] == sent[1]
    assert set(sent[0][1]) == {"reduce_scatter", "all_gather"}


def test_a_wish_to_stop_on_one_rank_stops_all_after_that_step_with_a_checkpoint(tiny_config):
    config = tiny_config(eval_interval=0)

    asked = []

    def stop_wanted(rank):
        asked.append(rank)
        return rank == 1 and asked.count(1) == 3

    assert _train_as_threads(config, 2, stop_wanted) == [ExitStatus.TERMINATED] * 2
    assert [event["step"] for event in events_of(config.out, "step")] == [1, 2, 3]
    assert checkpoint.latest(Path(config.out) / "checkpoints").name == "step-00000003"
    assert events_of(config.out, "end")[0]["status"] == "terminated"


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGTERM, ExitStatus.TERMINATED),
        (signal.SIGHUP, ExitStatus.TERMINATED),
        (signal.SIGUSR1, ExitStatus.PREEMPTED),
    ],
)
def test_a_signal_is_noted_saved_for_and_told_by_the_status(tiny_config, monkeypatch, number, status):
    config = tiny_config(eval_interval=0)
    take_step = loop.take_step

    def signalled(run, step, stop_wanted):
        if step == 2:
            os.kill(os.getpid(), number)
        return take_step(run, step, stop_wanted)

    monkeypatch.setattr(loop, "take_step", signalled)
    before = signal.getsignal(number)
    assert run_training(config) == status
    assert signal.getsignal(number) == before
    assert checkpoint.latest(Path(config.out) / "checkpoints").name == "step-00000003"
    assert events_of(config.out, "end")[0]["status"] == status.name.lower()


@pytest.mark.redundant
def test_too_many_steps_that_are_not_finite_stop_the_run_with_its_weights_as_they_were(built_run, capsys):
    run = built_run(eval_interval=0, optim={"max_not_finite": 2})
    before = {}
    forward = run.strategy.model.forward
    calls = 0

    def explode(tokens_BT, targets_BT):
        nonlocal calls
        calls += 1
        loss = forward(tokens_BT, targets_BT)
        if calls == 3:
            before.update(run.strategy.state_dict())
        return loss * float("nan") if calls >= 3 else loss

    run.strategy.model.forward = explode
    assert train(run) == ExitStatus.NOT_FINITE
    after = run.strategy.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    steps = events_of(run.folder, "step")
    assert [event["loss"] is None for event in steps] == [False, False, True, True]
    assert [event["why_skipped"] for event in steps] == ["", "", "not finite", "not finite"]
    assert events_of(run.folder, "end")[0]["num_skipped"] == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: step 4: loss nan")
    assert "the first NaN/Inf was the output of the model (GPT2) on rank 0" in lines[0]
    assert checkpoint.latest(run.folder / "checkpoints") is None


def test_a_skipped_step_uses_up_data_and_no_learning_rate(built_run):
    run = built_run(eval_interval=0, warmup_steps=4)
    forward, calls = run.strategy.model.forward, []

    def explode(tokens_BT, targets_BT):
        calls.append(tokens_BT)
        return forward(tokens_BT, targets_BT) * (float("nan") if len(calls) == 2 else 1.0)

    run.strategy.model.forward = explode
    train(replace(run, schedule=replace(run.schedule, max_steps=4)))
    steps = events_of(run.folder, "step")
    assert [event["lr"] for event in steps] == [run.learning_rate(taken) for taken in (0, 1, 1, 2)]
    assert steps[1]["lr"] < steps[3]["lr"]
    assert [event["tokens"] for event in steps] == [32, 64, 96, 128]


@pytest.mark.parametrize("by_caller", [0, 7], ids=["none", "some"])
def test_a_run_freezes_nothing_where_its_caller_has_frozen_objects(by_caller, built_run, monkeypatch):
    """As a worker of pytest: the collector would go over a million objects again, or never find cycles of a run."""
    counts, calls = [by_caller], []
    collector = SimpleNamespace(
        get_freeze_count=lambda: counts[-1],
        freeze=lambda: (calls.append("freeze"), counts.append(9)),
        unfreeze=lambda: (calls.append("unfreeze"), counts.append(0)),
        set_threshold=gc.set_threshold,
    )
    monkeypatch.setattr(gc_frequency, "gc", collector)
    assert train(built_run(max_steps=2)) is ExitStatus.OK
    assert calls == ([] if by_caller else ["freeze", "unfreeze"])


@pytest.mark.redundant
def test_an_interrupt_leaves_a_log_of_whole_lines(tiny_config, monkeypatch):
    config = tiny_config(eval_interval=0)
    take_step, calls = loop.take_step, 0

    def interrupted(*args):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return take_step(*args)

    monkeypatch.setattr(loop, "take_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_training(config)
    assert [event["step"] for event in events_of(config.out, "step")] == [1, 2]


def test_dropout_has_another_seed_for_each_step_and_rank(built_run):
    seeds = {step_seed(0, step, rank) for step in range(10) for rank in range(4)}
    assert len(seeds) == 40
    assert step_seed(0, 3, 1) == step_seed(0, 3, 1)


@pytest.mark.redundant
def test_interval_zero_means_only_at_the_end(built_run):
    run = built_run(eval_interval=0, checkpoint_interval=0)
    train(replace(run, schedule=replace(run.schedule, max_steps=2)))
    kinds = [event["event"] for event in events_of(run.folder)]
    assert kinds == ["start", "step", "step", "eval", "checkpoint", "end"]
