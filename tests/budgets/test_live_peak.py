"""The most memory that a rank has in forward and backward at stage 3, counted over every tensor that is alive.

P is the bytes of the model's weights. On 4 ranks shards of weights, gradients and Adam's two states are P together.
On top come at most four units (here 0.124 P each): the weights of the unit that runs and of the next one, and the
gradients of that unit and of the one whose reduction is in flight. PyTorch's own test allows FSDP2 as many, and 16 MiB
for what else there is: 1.66 P, with a transformer of 8 blocks and 512 features
(test/distributed/_composable/fsdp/test_fully_shard_memory.py).
"""

import pytest
import torch

from zeroshard.comm import NullCommunicator
from zeroshard.models import build_model
from zeroshard.train.profiling.memory import AllocationRecorder
from zeroshard.zero import Zero

NUM_BLOCKS, WIDTH = 8, 96


def _peak(num_micro, **zero_kwargs):
    """The peak of the third step's forwards and backwards, the model's bytes, and a block's."""
    overrides = {"n_layer": NUM_BLOCKS, "n_embd": WIDTH, "n_head": 4}
    model = build_model("gpt2-demo", vocab_size=32, seq_len=4, overrides=overrides)
    model_bytes, block_bytes = (sum(p.nbytes for p in each.parameters()) for each in (model, model.blocks[0]))
    zero = Zero(model, 3, comm=NullCommunicator(4), units=list(model.blocks), **zero_kwargs)
    optim = zero.optimizer(torch.optim.Adam, lr=1e-3)
    tokens = torch.zeros(1, 4, dtype=torch.int64)

    def gradients():
        for micro in range(num_micro):
            with zero.micro_batch(last=micro == num_micro - 1):
                model(tokens, tokens).backward()

    for _ in range(2):
        gradients()
        optim.step()
        optim.zero_grad()
    recorder = AllocationRecorder(zero.holdings).follow(model, optim)
    with recorder:
        gradients()
    recorder.remove()
    return recorder.peak, model_bytes, block_bytes


@pytest.mark.parametrize("num_micro", [1, 2])
def test_stage_three_peaks_four_units_above_its_shards(num_micro):
    peak, model_bytes, block_bytes = _peak(num_micro)
    root_bytes = model_bytes - NUM_BLOCKS * block_bytes
    assert block_bytes / model_bytes == pytest.approx(0.124, abs=1e-3)
    unsharded = peak.by_category["unit_buffers"] + peak.by_category.get("prefetch", 0)
    assert unsharded <= 4 * block_bytes + 2 * root_bytes
    assert peak.num_bytes < 1.66 * model_bytes
