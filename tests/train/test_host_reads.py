"""How often a step reads a tensor on the host: on a GPU each is a wait for all that was queued."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from zeroshard.comm import run_threads
from zeroshard.models import build_model
from zeroshard.train.loop import loop
from zeroshard.train.loop.step import moved
from zeroshard.zero import STAGES, Zero

READS = ("item", "tolist", "__bool__", "__float__", "__int__", "numpy")
ON_THE_CPU_ALONE = {"grad_norm.clip_", "flat_params._require_untouched"}  # what lies on a device is not read there


@pytest.fixture
def reads(monkeypatch):
    """Where tensors were read, as ``file.function``, by thread."""
    places = defaultdict(list)

    def counting(name):
        whole = getattr(torch.Tensor, name)

        def read(tensor, *args, **kwargs):
            frame = sys._getframe(1)
            while frame and "zeroshard" not in frame.f_code.co_filename:
                frame = frame.f_back
            place = f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}" if frame else "elsewhere"
            if place not in ON_THE_CPU_ALONE:
                places[threading.get_ident()].append(place)
            return whole(tensor, *args, **kwargs)

        return read

    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, counting(name))
    return places


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("num_micro", [1, 2])
def test_a_step_of_the_library_reads_one_message_of_each_backward_that_reduces(stage, num_micro, reads):
    """Which parameters had gradients anywhere. Clipping and the update read nothing of a device."""

    def on_rank(comm):
        model = build_model("gpt2-demo", vocab_size=61, seq_len=16, overrides={"n_layer": 2, "n_head": 2, "n_embd": 16})
        zero = Zero(model, stage, units=model.units, comm=comm)
        optimizer = zero.optimizer(torch.optim.AdamW, lr=1e-3, fused=True)
        tokens = torch.arange(16)[None] % 61
        for _ in range(4):
            reads[threading.get_ident()].clear()  # of all but the last: the first steps record the order of units
            for micro in range(num_micro):
                with zero.micro_batch(last=micro == num_micro - 1):
                    model(tokens, tokens).backward()
            zero.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        return list(reads[threading.get_ident()])

    for places in run_threads(on_rank, 2):
        assert set(places) == {"collective_order._max"}
        assert len(places) <= num_micro


def test_the_trainer_reads_loss_norm_and_wishes_to_stop_at_once(tiny_config, reads, monkeypatch):
    steps, take_step = [], loop.take_step

    def took(*args):
        reads[threading.get_ident()].clear()
        taken = take_step(*args)
        steps.append(list(reads[threading.get_ident()]))
        return taken

    monkeypatch.setattr(loop, "take_step", took)
    assert loop.run_training(tiny_config()) == 0
    assert steps[2:] == [["step._agree"]] * 4


def test_a_batch_goes_to_a_gpu_from_pinned_memory_which_alone_does_not_hold_the_host_up(monkeypatch):
    done = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: done.append("pinned") or tensor)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *args, **options: done.append((*args, options)) or tensor)
    for device in (torch.device("cuda", 1), torch.device("cpu")):
        moved(torch.zeros(2), device)
    options = {"non_blocking": True}
    assert done == ["pinned", (torch.device("cuda", 1), options), (torch.device("cpu"), options)]
