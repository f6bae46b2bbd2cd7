import pytest
import torch
from torch import nn

from tiny_runs import built
from zeroshard.cli.flags import flags_of, read_flags
from zeroshard.comm.backends.null import NullCommunicator
from zeroshard.host.errors import UserError
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.loop.loop import take_step
from zeroshard.train.setup.build import build_run
from zeroshard.train.setup.compiled import compile_model, compiled_in_words, with_compile

CPU = torch.device("cpu")
SHAPE = {"name": "gpt2-demo", "n_embd": 16, "n_head": 2}
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


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


@pytest.mark.redundant
@pytest.mark.parametrize(
    ("strategy", "num_ranks", "n_layer", "backend", "graphs"),
    [
        ("zero3", 1, 2, "aot_eager", 2),  # with gradients and without
        ("zero2", 2, 9, "eager", 6),  # before the blocks, one for all of them, after them; dynamo allows 8 variants
        pytest.param("ddp", 2, 9, "aot_eager", 2, marks=[pytest.mark.soak, pytest.mark.slow]),
        pytest.param("fsdp2", 2, 9, "aot_eager", 6, marks=[pytest.mark.soak, pytest.mark.slow]),
    ],
)
def test_compiled_runs_train_as_before(
    strategy, num_ranks, n_layer, backend, graphs, tiny_config, gloo_ranks, tmp_path
):
    found = {}
    recomputed = "selective" if strategy == "zero3" else "none"
    for compiled in ("off", "on"):
        config = tiny_config(
            model={**SHAPE, "n_layer": n_layer, "activation_checkpointing": recomputed},
            strategy=strategy,
            compile=compiled,
            compile_backend=backend,
            out=str(tmp_path / compiled),
        )
        if strategy.startswith("zero"):
            found[compiled] = [losses_and_graphs(NullCommunicator(num_ranks), config)]
        else:
            found[compiled] = gloo_ranks(num_ranks).run(losses_and_graphs, config)
    for (eager, none), (losses, num_graphs) in zip(found["off"], found["on"], strict=True):
        assert (none, num_graphs) == (0, graphs)
        assert losses == pytest.approx(eager, rel=1e-5)


def test_a_model_that_cannot_be_compiled_is_one_line():
    def fails(graph, inputs):
        raise RuntimeError("no such instruction")

    model = nn.Linear(2, 2)
    compile_model(model, fails, CPU)
    with pytest.raises(
        UserError, match=r"^compile: torch.compile cannot compile .*no such instruction.*; use --compile off$"
    ):
        model(torch.ones(2, 2))


def test_a_missing_compiler_is_said_at_once(tiny_config):
    from torch._inductor import config, cpp_builder

    cpp_builder.cpp_compiler_search.cache_clear()
    with config.patch({"cpp.cxx": (None, "no-such-compiler")}), pytest.raises(UserError) as refused:
        built(tiny_config(compile=True))
    cpp_builder.cpp_compiler_search.cache_clear()
    assert str(refused.value) == (
        "compile: no C++ compiler works here; install g++ or name one in CXX, "
        "or use --compile off or --compile-backend aot_eager"
    )
    built(tiny_config(compile=True, compile_backend="eager"))


AUTO = """
cpu | | off (auto: on a GPU alone)
cuda | | on (auto): the model is one graph; the first step may take 24 s
cuda | --compile | on: the model is one graph; the first step may take 24 s
cuda | --compile=yes --compile-backend eager | on: the model is one graph
cuda | --no-compile |
cuda | --compile off |
cuda | --reproducible 2 | off (auto: not with reproducible)
cuda | --reproducible 2 --compile on | on: one code for all blocks, and graphs before and after them; the first step may take 10 s
cuda | --tiles 2 --model.activation-checkpointing full | off (auto: not with tiles)
cuda | --sequence-parallel 2 --model.activation-checkpointing selective | off (auto: not with sequence_parallel)
cuda | --sequence-parallel 2 --compile auto | on (auto): one code for all blocks, and graphs before and after them; attention of shared sequences is not compiled; the first step may take 10 s
cuda without Triton | | off (auto: kernels for CUDA are written in Triton, which is not here)
"""  # noqa: E501


@pytest.mark.parametrize("row", AUTO.strip().splitlines())
def test_what_is_compiled_is_said(row, monkeypatch):
    where, words, said = map(str.strip, row.split("|"))
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: where == "cuda")
    raw = read_flags(words.split(), flags_of(TrainConfig))
    device = torch.device(where.partition(" ")[0])
    config = with_compile(TrainConfig.model_validate(raw), device)
    assert config.compile in ("on", "off")
    assert compiled_in_words(config, device, 2 if "parallel" in words else 1, 12) == said
