"""The first lines of a run: what is sharded over which ranks, how they communicate, what is trained."""

from pathlib import Path

import pytest
import torch

from tiny_runs import built
from zeroshard.train.setup.about_run import strategy_in_words


@pytest.mark.parametrize(
    ("name", "world_size", "over", "words"),
    [
        ("zero0", 2, 2, "zero0: all training state replicated on 2 ranks"),
        ("zero1", 4, 4, "zero1: optimizer states sharded over 4 ranks"),
        ("zero2", 2, 2, "zero2: optimizer states and gradients sharded over 2 ranks"),
        ("zero3", 8, 4, "zero3: optimizer states, gradients and parameters sharded over 4 ranks, in 2 replicas"),
        ("zero3", 1, 1, "zero3: one rank, which keeps all training state"),
        ("ddp", 2, 2, "ddp: PyTorch's DistributedDataParallel, all training state replicated on 2 ranks"),
        ("mine:Strategy", 2, 2, "mine:Strategy on 2 ranks"),
    ],
)
def test_a_strategy_is_told_by_what_it_shards_over_how_many_ranks(name, world_size, over, words):
    assert strategy_in_words(name, world_size, over=over) == words


@pytest.mark.redundant
def test_a_run_tells_what_it_is(tiny_config):
    config = tiny_config(global_batch_size=4, compile=False)
    run = built(config)
    num_params = sum(param.numel() for param in run.strategy.model.parameters())
    assert run.about == {
        "run": f"{Path(config.out)}, 6 steps",
        "strategy": "zero2: one rank, which keeps all training state",
        "comm": "none, one rank has no collectives",
        "model": f"gpt2-demo, {num_params:,} parameters",
        "data": "synthetic, 5,400 tokens to train on, tokenizer bytes of 256 ids",
        "batch": "2 sequences x 2 micro-batches x 1 rank x 16 tokens = 64 tokens a step",
        "compute": f"float32 on cpu, adamw with lr {config.lr:g}, torch {torch.__version__}",
    }


@pytest.mark.parametrize("has_instructions", [True, False])
def test_a_run_tells_that_this_cpu_computes_bfloat16_slowly(tiny_config, monkeypatch, has_instructions):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_instructions)
    said = ", for which this CPU has no instructions (float32 is many times faster)" * (not has_instructions)
    assert built(tiny_config(dtype="bfloat16")).about["compute"].startswith(f"bfloat16 on cpu{said}, adamw with lr ")


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_a_run_tells_whether_its_weights_leave_the_device_too(tiny_config, strategy):
    said = built(tiny_config(strategy=strategy, offload={"state": "all"})).about["offload"]
    assert (", weights copied up for each use" in said) == (strategy == "zero3")
