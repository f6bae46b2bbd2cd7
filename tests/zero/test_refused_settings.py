"""Settings of an engine that cannot be, alone or together: each is refused by its name."""

import math
from dataclasses import replace

import pytest
import torch

from nets import Net
from zeroshard.comm import NullCommunicator
from zeroshard.zero import STAGES, LocalSteps, MixedPrecision, ShardingStrategy, Zero


def _zero(world_size=4, **given):
    Zero(Net(), comm=NullCommunicator(world_size), **given)


def _in_nodes(size):
    return MixedPrecision(reduce="int8", node_size=size)


# How an engine or its settings are built, and how the line begins that refuses it.
REFUSED = [
    (lambda: _zero(stage=4), "stage: 4 is not a ZeRO stage; choose 0, 1, 2 or 3, or give a ShardingStrategy"),
    (lambda: _zero(stage=True), "stage: True is not a ZeRO stage; choose 0, 1, 2 or 3, or give a ShardingStrategy"),
    (lambda: _zero(prefetch=-1), "prefetch must be at least 0, got -1"),
    (lambda: _zero(prefetch=True), "prefetch must be at least 0, got True"),
    (lambda: _zero(precision="bf16"), "precision: 'bf16' is not a MixedPrecision; give MixedPrecision(torch.bfloat16)"),
    (lambda: _zero(accumulate="both"), "accumulate: 'both' is unknown; choose 'local' or 'sharded'"),
    (lambda: _zero(buffers="mean"), "buffers: 'mean' is unknown; choose one of 'broadcast', 'keep'"),
    (lambda: _zero(units=["blocks", "nothing"]), "units: 'nothing' is neither a class of the model's modules"),
    (lambda: _zero(shard_size=3), "shard_size: groups of 3 ranks do not partition a world of 4; choose one of 1, 2, 4"),
    (lambda: _zero(shard_size=True), "shard_size: groups of True ranks do not partition a world of 4; choose one of"),
    (lambda: _zero(stage=0, shard_size=1), "shard_size: stage 0 shards nothing; choose stage 1, 2 or 3, or leave it"),
    (lambda: _zero(secondary_shard_size=1), "secondary_shard_size: must be at least 2, got 1; leave it out"),
    (lambda: _zero(secondary_shard_size=4), "secondary_shard_size: groups of 4 do not partition 4 ranks into"),
    (lambda: _zero(1, secondary_shard_size=2), "secondary_shard_size: groups of 2 do not partition 1 ranks into"),
    (lambda: _zero(secondary_shard_size=True), "secondary_shard_size must be at least 1, got True"),
    (lambda: _zero(stage=2, secondary_shard_size=2), "secondary_shard_size: 2 is given, and a row of replicated"),
    (lambda: _zero(stage=STAGES[3], secondary_shard_size=2), "secondary_shard_size: stage is a ShardingStrategy,"),
    (lambda: _zero(6, precision=_in_nodes(4)), "node_size: groups of 4 do not partition 6 ranks into several; choose"),
    (lambda: _zero(1, precision=_in_nodes(2)), "node_size: groups of 2 do not partition 1 ranks into several; leave"),
    (lambda: _zero(precision=_in_nodes(2), shard_size=2), "node_size: 2 is given, and with shard_size = 2 gradients"),
    (lambda: _zero(precision=_in_nodes(2), shard_size=2, local_steps=LocalSteps(every=4)), "node_size: 2 is given,"),
    (lambda: _zero(reproducible=3), "reproducible: 3 is no power of two; give the most ranks that you will use, as 4"),
    (lambda: _zero(reproducible=True), "reproducible: True is no power of two; give the most ranks that you will"),
    (lambda: _zero(3, reproducible=4), "reproducible: 4 micro-batches cannot be shared out evenly to 3 ranks; use 1,"),
    (lambda: _zero(reproducible=8, accumulate="local"), "reproducible: 8 is given, and accumulate adds up on each"),
    (lambda: _zero(reproducible=8, shard_size=1), "reproducible: 8 is given, and shard_size adds up over two levels"),
    (lambda: _zero(reproducible=8, precision=MixedPrecision(reduce="int8")), "reproducible: 8 is given, and"),
    (lambda: _zero(reproducible=8, shard_size=1, local_steps=LocalSteps(2)), "reproducible: 8 is given, and"),
    (lambda: _zero(local_steps=LocalSteps(every=8)), "local_steps: it needs several replicas, and without a"),
    (lambda: _zero(shard_size=1, local_steps=LocalSteps(every=8, fragments=5)), "fragments: 5 are more than the 4"),
    (lambda: MixedPrecision(param_dtype="bf16"), "param_dtype: 'bf16' is not a torch.dtype; use torch.bfloat16 or"),
    (lambda: MixedPrecision(reduce_dtype=torch.int8), "reduce_dtype: torch.int8 is not a floating-point dtype; use"),
    (lambda: MixedPrecision(cast_forward_inputs="no"), "cast_forward_inputs: 'no' is not a bool; give True or False"),
    (lambda: MixedPrecision(rounding_seed=1.5), "rounding_seed: 1.5 is not a whole number; give an int"),
    (lambda: MixedPrecision(gather="int8", node_size=2), "node_size: 2 is given, and gradients have no wire format;"),
    (lambda: _in_nodes(True), "node_size must be at least 2, got True"),
    (lambda: ShardingStrategy("shard", "replicate", "replicate"), "params: sharded weights need sharded gradients;"),
    (lambda: ShardingStrategy("shard", "shard", "replicate"), "grads: sharded gradients need a sharded optimizer;"),
    (lambda: ShardingStrategy("replicate", "replicate", "halved"), "optim: 'halved' is no placement; choose"),
    (lambda: replace(STAGES[3], secondary_shard_size=1.5), "secondary_shard_size must be at least 1, got 1.5"),
    (lambda: replace(STAGES[3], reshard_after_forward="no"), "reshard_after_forward: 'no' is not a bool; give True"),
    (lambda: replace(STAGES[3], secondary_shard_size=2, reshard_after_forward=False), "secondary_shard_size: 2 is"),
    (lambda: LocalSteps(every=0), "every: 0 local steps for each outer step; give 1 or more"),
    (lambda: LocalSteps(every=4, outer_lr=math.nan), "outer_lr: nan is not above 0; DiLoCo's is 0.7"),
    (lambda: LocalSteps(every=4, outer_lr="0.7"), "outer_lr: '0.7' is no number; give one"),
    (lambda: LocalSteps(every=4, outer_momentum=1.0), "outer_momentum: 1.0 is outside [0, 1); DiLoCo's is 0.9"),
    (lambda: LocalSteps(every=4, fragments=5), "fragments: 5 fragments cannot synchronise at different steps of 4;"),
    (lambda: LocalSteps(every=4, fragments=1.5), "fragments: 1.5 is no whole number; give one"),
    (lambda: LocalSteps(every=4, wire=torch.int8), "wire: torch.int8 is not a wire format; give a floating-point"),
    (lambda: LocalSteps(every=4, wire="int7"), "wire: 'int7' is not a wire format; give a floating-point dtype, or"),
    (lambda: LocalSteps(every=4, wire="int4", block=3), "block: blocks of 3 elements do not pack; give a multiple of"),
    (lambda: LocalSteps(every=4, wire=torch.float8_e4m3fn), "wire: torch.float8_e4m3fn has no scale, and most"),
    (lambda: LocalSteps(every=4, rounding_seed="x"), "rounding_seed: 'x' is no whole number; give one"),
]


@pytest.mark.parametrize(("build", "line"), REFUSED)
def test_settings_that_cannot_be_are_refused_by_name(build, line):
    with pytest.raises((ValueError, TypeError)) as said:
        build()
    assert str(said.value).startswith(line)
