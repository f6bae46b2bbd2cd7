"""The trainer's own step on a GPU that is not there (`fake_cuda`): from a batch in the host's memory to the update.

Forward, loss, clipping, the message of a step and the update are the trainer's and the model's code over tensors of
``cuda:0``. A CPU build of torch has no backward for them: in its place the engine is told of a backward's events.
"""

from collections import Counter

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fake_cuda import CUDA, Peers, Waits, backward_events, device, guarded, reads  # noqa: F401 -- fixtures
from zeroshard.comm import ObservedCommunicator
from zeroshard.kernels.launch import traced
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.loop.run import Corpus, Run, Schedule
from zeroshard.train.loop.step import take_step
from zeroshard.train.setup import assemble
from zeroshard.train.setup.assemble import sharded

VOCAB_SIZE, SEQ_LEN, ROWS = 64, 16, 2
SHAPE = {"n_layer": 2, "n_embd": 32, "n_head": 2}
MODELS = {"gpt2": {"name": "gpt2-demo", **SHAPE}, "llama": {"name": "llama-tiny", "n_kv_head": 1, **SHAPE}}


class _Host:
    """What the host does with tensors of the device: copies in either direction, and reads."""

    def __init__(self, patch):
        self.pinned: list[torch.Tensor] = []
        self.moved, self.read, self.fetched = [], [], Counter()
        to = torch.Tensor.to

        def moving(tensor, *args, **options):
            moved = to(tensor, *args, **options)
            if tensor.device.type != moved.device.type:
                pinned = any(tensor is each for each in self.pinned)
                self.moved.append((f"{tensor.device.type} to {moved.device.type}", pinned, options.get("non_blocking")))
            return moved

        patch.setattr(torch.Tensor, "to", moving)
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: self.pinned.append(tensor) or tensor)
        patch.setattr(FakeTensor, "tolist", lambda report: self.read.append(report.numel()) or [4.0, 0.0, 0.0, 0.5])


class _Event:
    """Of a device that is never done: nobody may ask for how long it took."""

    def __init__(self, enable_timing=False):
        pass

    def record(self):
        pass

    def query(self):
        return False


@pytest.fixture
def host(monkeypatch):
    return _Host(monkeypatch)


@pytest.fixture
def taking(device, reads, host, monkeypatch):  # noqa: F811
    """`taking(**settings)`: a run of rank 1 of 4 on ``cuda:0``."""
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: CUDA.index)
    monkeypatch.setattr(assemble, "agree_on", lambda comm, facts: None)

    def make(**settings):
        given = {"device": "cpu", "seq_len": SEQ_LEN, "data": {"source": "synthetic"}, "ema_decay": 0.9}
        config = TrainConfig.model_validate(given | settings)
        comm = ObservedCommunicator(Peers(4, device))
        _, strategy = sharded(config, VOCAB_SIZE, None, comm, CUDA, draw=False)
        schedule = Schedule(4, config.grad_accum_steps, config.grad_clip, 0, 0, 0)
        batch = [torch.zeros(ROWS, SEQ_LEN, dtype=torch.int64) for _ in range(2)]
        return Run(
            strategy=strategy,
            corpus=Corpus(lambda step, micro_step: batch, (), VOCAB_SIZE, None, "", lambda kept: None),
            learning_rate=lambda step: 1e-3,
            schedule=schedule,
            folder=None,
            device=CUDA,
            tokens_per_step=ROWS * SEQ_LEN,
            comm=comm,
        )

    return make


@pytest.mark.redundant(but=["3-llama-bfloat16-reference-1"])
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # of which none is used here
@pytest.mark.parametrize(
    ("stage", "name", "dtype", "kernels", "num_micro"),
    [
        (0, "gpt2", "float32", "reference", 1),
        (1, "llama", "bfloat16", "triton", 2),
        (2, "gpt2", "bfloat16", "triton", 2),
        (3, "llama", "bfloat16", "reference", 1),
    ],
)
def test_a_step_of_the_trainer_on_a_gpu_reads_one_message(
    stage, name, dtype, kernels, num_micro, taking, host, monkeypatch
):
    launched = []
    with FakeTensorMode(), traced(lambda kernel, args: launched.append((kernel, args))), Waits() as waits:
        run = taking(
            strategy=f"zero{stage}", model=MODELS[name], dtype=dtype, kernels=kernels, grad_accum_steps=num_micro
        )
        whole, losses = torch.Tensor.backward, []

        def backward(loss):
            losses.append(loss)
            with monkeypatch.context() as patch:
                patch.setattr(torch.Tensor, "backward", whole)
                backward_events(run.strategy.zero)

        monkeypatch.setattr(torch.Tensor, "backward", backward)
        for step in range(2):
            for seen in (losses, host.read, host.moved, host.pinned, launched, waits.seen):
                seen.clear()
            record, _ = take_step(run, step, lambda: 0)
        optimizer = run.strategy.optimizer
        state = [value for each in optimizer.state.values() for value in each.values() if value.dim()]
    assert [(loss.device, loss.dtype) for loss in losses] == [(CUDA, torch.float32)] * num_micro
    assert all(tensor.device == CUDA and tensor.dtype == torch.float32 for tensor in state)
    assert host.read == [4]  # loss, two wishes, norm
    assert waits.seen == []
    assert Counter(host.moved) == {("cpu to cuda", True, True): 2 * num_micro + 1}  # batches, and the wishes
    assert all(each.device == CUDA for _, args in launched for each in args if isinstance(each, torch.Tensor))
    assert "linear_cross_entropy" in {kernel for kernel, _ in launched} or kernels == "reference"
    assert (record.loss, record.grad_norm) == (1.0, 0.5)  # of four ranks
