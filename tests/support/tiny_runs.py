"""Runs of the trainer that take milliseconds a step."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from zeroshard.comm import LocalCommunicator, run_threads

if TYPE_CHECKING:
    from zeroshard.train.config.config import TrainConfig


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory):
    """Where tokens are prepared once for the tests of this folder."""
    return tmp_path_factory.mktemp("data") / "tokens"


@pytest.fixture
def tiny_config(tmp_path, data_folder):
    """`tiny_config(**changes)`: a run of milliseconds a step, on synthetic tokens."""
    # Here, so that tests of kernels run where torch and Triton are installed and nothing else of the trainer's is.
    from zeroshard.train.config.config import TrainConfig

    def make(**changes) -> TrainConfig:
        values = {
            "model": {"name": "gpt2-demo", "n_layer": 2, "n_embd": 16, "n_head": 2},
            "data": {"source": "synthetic", "dir": str(data_folder), "max_tokens": 6000},
            "strategy": "zero2",
            "device": "cpu",
            "dtype": "float32",
            "seq_len": 16,
            "micro_batch_size": 2,
            "max_steps": 6,
            "warmup_steps": 2,
            "eval_interval": 3,
            "eval_batches": 3,
            "checkpoint_interval": 0,
            "out": str(tmp_path / "run"),
        }
        return TrainConfig.model_validate({**values, **changes})

    return make


@pytest.fixture
def text_config(tiny_config, tmp_path):
    """`text_config(**changes)`: the same on a text that repeats itself, in bytes."""
    path = tmp_path / "text.txt"
    path.write_text("abcd\n" * 2000)

    def make(**changes) -> TrainConfig:
        data = {"source": "text", "path": (str(path),), "dir": str(tmp_path / "tokens")}
        return tiny_config(**{"data": data, **changes})

    return make


@pytest.fixture
def refusal(capsys):
    """`refusal(*words)`: the one line that a refused command leaves, on stderr."""
    from zeroshard.cli import main

    def ask(*words):
        capsys.readouterr()
        assert main([*map(str, words)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert re.fullmatch(r"error: [^\n]+: [^\n]+; [^\n]+\n", err), err
        return err.strip()

    return ask


@pytest.fixture
def process_group(tmp_path):
    """This process alone, for strategies that stand on torch.distributed."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def built(config, comm=None):
    """The run of a rank, this process alone where ``comm`` is None, which is closed."""
    from zeroshard.train.setup.build import build_run

    run = build_run(config, comm or LocalCommunicator(), torch.device("cpu"))
    run.close()
    return run


def train_on(comm, config, *, until=None, predict=None, **told):
    """Train ``config`` on a rank, or ``until`` a step: the exit status, and the run, which is closed then."""
    from zeroshard.train.loop.loop import train
    from zeroshard.train.setup.build import build_run

    run = build_run(config, comm, torch.device("cpu"), predict=predict)
    try:
        end = run if until is None else replace(run, schedule=replace(run.schedule, max_steps=until))
        return train(end, **told), run
    finally:
        run.close()


def trained(config, world_size=1):
    """Loss and gradient norm of each step, and the last validation loss, by a world of threads."""
    run_threads(lambda comm: train_on(comm, config), world_size)
    seen = {}
    for event in events_of(config.out):
        if event["event"] == "start":
            seen.clear()  # what an earlier run in this folder said
        elif event["event"] in ("step", "eval"):
            key = event["step"] if event["event"] == "step" else "val"
            seen[key] = (event["loss"], event.get("grad_norm", 0.0))
    return seen


def summary_of(folder):
    """What ``summary.json`` of a run says."""
    return json.loads((Path(folder) / "summary.json").read_text())


def events_of(folder, kind=None):
    """The events in the log of a run, without their time of day; ``kind``: those alone."""
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    found = [event for event in map(json.loads, lines) if kind in (None, event["event"])]
    return [{key: value for key, value in event.items() if key != "time"} for event in found]
