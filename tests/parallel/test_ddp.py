import pytest
import torch
from torch import nn

from zeroshard import checkpoint
from zeroshard.comm import LocalCommunicator, NullCommunicator
from zeroshard.host.launch.environment import World
from zeroshard.host.launch.process_group import init_process_group, shutdown
from zeroshard.parallel import Setup, build_strategy


class Tied(nn.Module):
    """A tied weight, a buffer, a scalar parameter and a frozen one."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 5, bias=False)
        self.last = nn.Linear(5, 5)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x):
        return (self.scale * self.last(self.first(x))).square().mean()


@pytest.fixture
def ddp():
    """`ddp(seed)`: two steps old, in a world of one."""

    def make(seed=0, steps=2):
        torch.manual_seed(seed)
        model = Tied()
        strategy = build_strategy(
            "ddp",
            Setup(
                model=model,
                units=[],
                comm=LocalCommunicator(),
                optimizer_cls=torch.optim.AdamW,
                param_groups=lambda module: [{"params": [p for p in module.parameters() if p.requires_grad]}],
                optimizer_kwargs={"lr": 0.1},
            ),
        )
        for _ in range(steps):
            strategy.model(torch.randn(4, 5)).backward()
            strategy.optimizer.step()
            strategy.optimizer.zero_grad()
        return strategy

    return make


@pytest.mark.redundant
def test_a_tied_weight_is_saved_once_and_every_kind_of_state_is_there(ddp):
    saved = {(shard.name, shard.kind): shard.shape for shard in ddp().named_shards()}
    trained = {"first.weight": (5, 5), "last.bias": (5,), "scale": ()}
    expected = {(name, kind): shape for name, shape in trained.items() for kind in ("param", "exp_avg", "exp_avg_sq")}
    expected |= {(name, "step"): () for name in trained}
    assert saved == expected | {("frozen", "param"): (3,), ("count", "buffer"): ()}


def test_ranks_write_even_shares_of_each_tensor(ddp):
    strategy, intervals = ddp(), []
    for rank in range(3):
        strategy.comm = NullCommunicator(3, rank)
        intervals.append({(s.name, s.kind): s.interval for s in strategy.named_shards()})
    assert [found["last.bias", "param"] for found in intervals] == [(0, 1), (1, 3), (3, 5)]
    assert [found["first.weight", "exp_avg"] for found in intervals] == [(0, 8), (8, 16), (16, 25)]
    assert [("scale", "param") in found for found in intervals] == [False, False, True]


def test_empty_tensors_are_saved_once_and_loaded(ddp, tmp_path):
    first, second = ddp(), ddp(seed=1)
    for strategy in (first, second):
        strategy.module.register_parameter("none", nn.Parameter(torch.empty(0, 3), requires_grad=False))
        strategy.module.register_buffer("nothing", torch.empty(0))
    saved = [(shard.name, shard.kind, shard.shape, shard.interval) for shard in first.named_shards()]
    assert saved.count(("none", "param", (0, 3), (0, 0))) == 1
    assert saved.count(("nothing", "buffer", (0,), (0, 0))) == 1
    first.comm = NullCommunicator(3, 1)  # another rank writes none
    assert not {"none", "nothing"} & {shard.name for shard in first.named_shards()}
    first.comm = LocalCommunicator()
    checkpoint.save(tmp_path / "c", first, step=2)
    checkpoint.load(tmp_path / "c", second)
    assert torch.equal(second.module.last.bias, first.module.last.bias)


def test_gradients_travel_in_the_last_micro_batch_alone():
    """In a group of one rank, whose messages are counted where DDP would send them."""
    init_process_group(World(), torch.device("cpu"))
    try:
        model, sent = nn.Linear(5, 5), []
        setup = Setup(model, [], None, torch.optim.SGD, lambda module: [{"params": list(module.parameters())}])
        strategy = build_strategy("ddp", setup)

        def count(state, bucket):
            sent.append(bucket.index())
            future = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        strategy.model.register_comm_hook(None, count)
        for last in (False, False, True):
            with strategy.micro_batch(last):
                strategy.model(torch.ones(2, 5)).sum().backward()
            assert len(sent) == int(last)
        with strategy.no_sync():
            strategy.model(torch.ones(2, 5)).sum().backward()
        assert len(sent) == 1
        del strategy
    finally:
        shutdown()


def test_several_ranks_without_torch_distributed_are_refused():
    setup = Setup(nn.Linear(2, 2), [], NullCommunicator(2), torch.optim.SGD, lambda m: [{"params": m.parameters()}])
    with pytest.raises(ValueError, match="init_process_group"):
        build_strategy("ddp", setup)
