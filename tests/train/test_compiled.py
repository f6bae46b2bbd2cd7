import pytest
import torch
from torch import nn

from tiny_runs import built
from zeroshard.errors import UserError
from zeroshard.train.loop.loop import take_step
from zeroshard.train.setup.build import build_run
from zeroshard.train.setup.compiled import compile_blocks

CPU = torch.device("cpu")
SHAPE = {"name": "gpt2-demo", "n_layer": 9, "n_embd": 16, "n_head": 2}  # more blocks than dynamo allows variants


def losses_and_graphs(comm, config):
    """Training losses, a loss without gradients, and how many graphs were compiled for that."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    run = build_run(config, comm, CPU)
    losses = [take_step(run, step, lambda: False)[0].loss for step in range(2)]
    with torch.no_grad():
        tokens_BT, targets_BT = run.corpus.batches(9, 0)
        losses.append(float(run.strategy.model.eval()(tokens_BT, targets_BT)))
    run.close()
    return losses, counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", ["zero3", *(pytest.param(name, marks=pytest.mark.soak) for name in ("ddp", "fsdp2"))]
)
def test_compiled_blocks_train_as_before_and_share_their_graphs(strategy, tiny_config, gloo_ranks, tmp_path):
    found = {}
    for compiled in (False, True):
        config = tiny_config(
            model={**SHAPE, "activation_checkpointing": "selective" if strategy == "zero3" else "none"},
            strategy=strategy,
            compile=compiled,
            compile_backend="aot_eager",
            out=str(tmp_path / str(compiled)),
        )
        found[compiled] = gloo_ranks(2).run(losses_and_graphs, config)
    for (eager, none), (losses, num_graphs) in zip(found[False], found[True], strict=True):
        assert (none, num_graphs) == (0, 2)  # with gradients and without
        assert losses == pytest.approx(eager, rel=1e-5)


class Breaks(nn.Module):
    def forward(self, x):
        torch._dynamo.graph_break()
        return x + 1


def test_a_block_that_cannot_be_compiled_whole_is_an_error_and_not_slow():
    block = Breaks()
    compile_blocks([block], "eager", CPU)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        block(torch.ones(1))


def test_a_missing_compiler_is_said_at_once(tiny_config, monkeypatch):
    from torch._inductor import config, cpp_builder

    cpp_builder.cpp_compiler_search.cache_clear()
    monkeypatch.setattr(config.cpp, "cxx", (None, "no-such-compiler"))
    with pytest.raises(UserError) as refused:
        built(tiny_config(compile=True))
    assert str(refused.value) == (
        "compile: no C++ compiler works here; install g++ or name one in CXX, "
        "or use --no-compile or --compile-backend aot_eager"
    )
    built(tiny_config(compile=True, compile_backend="eager"))


def test_kernels_for_cuda_need_triton(monkeypatch):
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: False)
    with pytest.raises(UserError, match=r"compile: kernels for CUDA are written in Triton, which is not here; "):
        compile_blocks([], "inductor", torch.device("cuda"))
