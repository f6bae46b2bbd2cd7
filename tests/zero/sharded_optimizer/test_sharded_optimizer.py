"""Where the state lives cannot be seen in the weights: the same bits as the optimizer that is not sharded."""

import copy
import pickle
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import zeroshard
from soak import soaking
from zeroshard.comm import (
    CONTROL,
    Communicator,
    LocalCommunicator,
    ObservedCommunicator,
    RingCommunicator,
    run_threads,
    thread_transports,
)
from zeroshard.zero import ShardedOptimizer

O = torch.optim  # noqa: E741 -- a table reads better with it
SETTINGS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD momentum": (O.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    "SGD fused": (O.SGD, {"lr": 0.1, "weight_decay": 0.1, "fused": True}),  # torch's own fails on a late momentum
    "AdamW fused": (O.AdamW, {"lr": 1e-2, "fused": True}),
    "AdamW amsgrad fused": (O.AdamW, {"lr": 1e-2, "amsgrad": True, "fused": True}),
    "AdamW tensor lr": (O.AdamW, {"lr": torch.tensor(1e-2)}),
    "NAdam": (O.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    "RMSprop": (O.RMSprop, {"centered": True, "momentum": 0.5}),
    "Adadelta foreach": (O.Adadelta, {"lr": 1.0, "foreach": True}),
    "ASGD": (O.ASGD, {"lambd": 0.01, "t0": 1}),
    "Adafactor": (O.Adafactor, {"lr": 1e-1}),
    "Muon": (O.Muon, {"lr": 1e-2, "momentum": 0.9}),
}
NUM_STEPS, LATE, THAW = 8, 3, 5
SMALL = 100  # bytes a message: several buckets for each owner, and weights that travel alone
VOCAB, WIDTH = 7, 6


class Mixed(nn.Module):
    """Tied, frozen, sometimes used, never used, and late parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, 2)
        self.late = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        for index, param in enumerate(self.parameters()):
            nn.init.normal_(param, std=0.4, generator=torch.Generator().manual_seed(index))

    def forward(self, tokens: Tensor, *, all_of_it: bool = True) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x))
        x = self.late(self.frozen(x))
        if all_of_it:
            x = x + self.sometimes(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)), tokens.roll(1))


def tokens(rank: int, step: int) -> Tensor:
    return torch.randint(0, VOCAB, (5,), generator=torch.Generator().manual_seed(100 * step + rank))


def average(comm: Communicator, params: list[nn.Parameter]) -> None:
    for param in params:
        if param.grad is not None:
            comm.all_reduce(param.grad).wait()
            param.grad /= comm.world_size


def groups(model: nn.Module, name: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Two groups with their own settings, and one for later."""
    usable = [p for p in model.parameters() if name != "Muon" or p.dim() == 2]
    late = {id(p) for p in model.late.parameters()}
    first = [p for p in usable if id(p) not in late]
    key = "lambd" if name == "ASGD" else "lr"
    later = {"params": [p for p in usable if id(p) in late], key: 2e-2}
    return [{"params": first[:4]}, {"params": first[4:], key: 5e-3}], later


def train(comm: Communicator, name: str, sharding: dict[str, Any] | None) -> list[list[Tensor]]:
    """The weights after each step; ``sharding``: arguments of the sharded optimizer, None: the optimizer itself."""
    model = Mixed()
    cls, settings = SETTINGS[name]
    settings = copy.deepcopy(settings)
    given, late = groups(model, name)
    optim = cls(given, **settings) if sharding is None else ShardedOptimizer(given, cls, **sharding, **settings)
    scheduler = LambdaLR(optim, lambda step: 1 / (1 + step))
    history = []
    for step in range(NUM_STEPS):
        if step == LATE:
            optim.add_param_group(late)
            scheduler.base_lrs.append(late["lr"])
            scheduler.lr_lambdas.append(scheduler.lr_lambdas[0])
            late.setdefault("initial_lr", late["lr"])
        if step == THAW:
            model.frozen.requires_grad_(True)
            model.blocks[1].requires_grad_(False)
        if "weight_decay" in optim.param_groups[0]:
            optim.param_groups[0]["weight_decay"] = 0.1 * step
        model(tokens(comm.rank, step), all_of_it=step % 2 == 0).backward()
        average(comm, list(model.parameters()))
        optim.step()
        optim.zero_grad(set_to_none=step % 4 < 2)
        scheduler.step()
        history.append([p.detach().clone() for p in model.parameters()])
    return history


def assert_same(one: list[list[Tensor]], other: list[list[Tensor]]) -> None:
    assert len(one) == len(other) == NUM_STEPS
    for step, (ours, theirs) in enumerate(zip(one, other, strict=True)):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), f"step {step}"


@pytest.mark.redundant
@pytest.mark.pairwise("name")
@pytest.mark.parametrize("bucket_bytes", [SMALL, 1 << 20])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_bits_are_those_of_the_unsharded_optimizer_with_gradients_averaged_by_hand(name, world_size, bucket_bytes):
    def both(comm):
        return train(comm, name, None), train(comm, name, {"comm": comm, "bucket_bytes": bucket_bytes})

    for plain, sharded in (by_rank := run_threads(both, world_size, timeout_s=120)):
        assert_same(plain, sharded)
        assert_same(sharded, by_rank[0][1])


def test_messages_travel_while_buckets_are_updated():
    """On the ring the order of events on rank 0: a bucket is under way when the next one is updated."""
    events = []

    class Told(ObservedCommunicator):
        def broadcast(self, tensor, src):
            events.append(("send", src))
            return super().broadcast(tensor, src)

    def go(transport):
        comm = RingCommunicator(transport=transport)
        params = [nn.Parameter(torch.ones(10)) for _ in range(6)]
        optim = ShardedOptimizer(params, O.SGD, comm=Told(comm) if comm.rank == 0 else comm, bucket_bytes=40, lr=0.1)
        events.clear()
        if comm.rank == 0:
            inner = type(optim.optim).step
            optim.optim.step = lambda: (events.append("update"), inner(optim.optim))
        for param in params:
            param.grad = torch.ones(10)
        optim.step()
        comm.close()
        return [param.detach() for param in params]

    transports = thread_transports(2)
    weights = run_threads(lambda comm: go(transports[comm.rank]), 2)
    assert all(torch.equal(w, torch.full((10,), 0.9)) for by_rank in weights for w in by_rank)
    assert events == ["update", ("send", 0), "update", ("send", 1), "update", *[("send", r) for r in (0, 1, 0, 1)]]


# -- where the state lives ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_each_state_is_on_one_rank_and_adam_takes_its_share(world_size):
    """2/N of the parameters' bytes and what balancing costs, never 3/N."""

    def go(comm):
        model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(8)], nn.Linear(32, 3))
        optim = ShardedOptimizer(model.parameters(), O.AdamW, comm=comm)
        model(torch.ones(2, 32)).sum().backward()
        average(comm, list(model.parameters()))
        optim.step()
        params = list(model.parameters())
        owned = [i for i, p in enumerate(params) if p in optim.state]
        assert owned == [i for i, p in enumerate(params) if optim.owner(p) == comm.rank]
        assert optim.state is optim.optim.state
        states = [t for p in params if p in optim.state for t in optim.state[p].values()]
        return owned, sum(t.nbytes for t in states), sum(p.nbytes for p in params)

    by_rank = run_threads(go, world_size)
    assert sorted(i for owned, _, _ in by_rank for i in owned) == list(range(18))
    for owned, state_bytes, param_bytes in by_rank:
        assert state_bytes <= 3 * param_bytes / world_size
        assert state_bytes % 8 == 4 * len(owned) % 8  # two states as large as the parameter, and a step counter each
    assert sum(state for _, state, _ in by_rank) == 2 * by_rank[0][2] + 4 * 18


def test_messages_are_few_and_frozen_weights_stay_at_home():
    def go(comm):
        observed = ObservedCommunicator(comm)
        frozen = [nn.Parameter(torch.ones(1000), requires_grad=False) for _ in range(4)]
        params = [nn.Parameter(torch.ones(25)) for _ in range(16)]
        optim = ShardedOptimizer([*frozen, *params], O.AdamW, comm=observed, bucket_bytes=400)
        observed.records.clear()
        for param in params[:-1]:
            param.grad = torch.ones(25)
        optim.step()
        return [(record.op, record.label, record.num_bytes) for record in observed.records]

    (control, *weights), other = run_threads(go, 2)
    assert [control, *weights] == other
    assert control[:2] == ("all_reduce", CONTROL)
    assert [num_bytes for _, _, num_bytes in weights] == [400, 400, 400, 300]
    assert {record[:2] for record in weights} == {("broadcast", "optimizer/weights")}


def test_a_rank_that_owns_nothing_takes_part():
    def go(comm):
        param = nn.Parameter(torch.full((3,), float(comm.rank)))
        optim = ShardedOptimizer([param], O.SGD, comm=comm, lr=1.0)
        assert torch.equal(param.detach(), torch.zeros(3))  # rank 0's
        param.grad = torch.ones(3)
        optim.step()
        optim.consolidate_state_dict(to=2)
        return param.detach(), [len(group["params"]) for group in optim.optim.param_groups]

    by_rank = run_threads(go, 3)
    assert [owned for _, owned in by_rank] == [[1], [0], [0]]
    assert all(torch.equal(weight, -torch.ones(3)) for weight, _ in by_rank)


# -- an optimizer like any other ---------------------------------------------------------------------------------------


def alone(params: Any, cls: type[torch.optim.Optimizer] = O.AdamW, **kwargs: Any) -> ShardedOptimizer:
    return ShardedOptimizer(params, cls, comm=LocalCommunicator(), **kwargs)


def test_it_is_a_torch_optimizer():
    assert zeroshard.ShardedOptimizer is ShardedOptimizer
    model = Mixed()
    optim = alone(model.parameters(), lr=0.5, betas=(0.8, 0.9))
    assert isinstance(optim, torch.optim.Optimizer)
    assert type(optim.optim) is O.AdamW
    assert optim.defaults == O.AdamW(model.parameters(), lr=0.5, betas=(0.8, 0.9)).defaults
    assert all(a is b for a, b in zip(optim.param_groups[0]["params"], model.parameters(), strict=True))
    assert optim.param_groups[0]["betas"] == (0.8, 0.9)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied; call consolidate_state_dict"):
            copied(optim)
    assert repr(optim).startswith("AdamW on rank 0 of 1: ShardedOptimizer (\nParameter Group 0")
    assert ShardedOptimizer(model.parameters(), O.SGD).comm.world_size == 1  # torch.distributed is not initialised


def test_hooks_closures_and_arguments_of_a_step():
    class Scaled(O.SGD):
        def step(self, closure=None, *, scale=1.0):
            loss = None if closure is None else closure()
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.data.add_(param.grad, alpha=-group["lr"] * scale)
            return loss if loss is None else loss.item() * 10

    def go(comm):
        params = [nn.Parameter(torch.ones(2)) for _ in range(3)]
        optim = ShardedOptimizer(params, Scaled, comm=comm, lr=1.0)
        heard = []
        optim.register_step_pre_hook(lambda o, args, kwargs: heard.append(("before", o is optim, kwargs)))
        optim.register_step_post_hook(lambda o, args, kwargs: heard.append("after"))

        def closure():
            assert torch.is_grad_enabled()
            optim.zero_grad()
            loss = sum(param.square().sum() for param in params)
            loss.backward()
            return loss

        loss = optim.step(closure, scale=0.25)
        assert optim.step() is None
        assert optim.step(0, scale=0.0) is None  # whatever is false is no closure
        assert heard == [*[("before", True, {"scale": 0.25}), "after", ("before", True, {}), "after"], *heard[4:]]
        return loss, [param.tolist() for param in params]

    # The class's own step was given the closure: its loss is what it returns.
    assert run_threads(go, 2) == [(60.0, [[-1.5, -1.5]] * 3)] * 2


def test_gradients_are_needed_on_the_owner_alone():
    def go(comm):
        params = [nn.Parameter(torch.ones(4)) for _ in range(4)]
        optim = ShardedOptimizer(params, O.SGD, comm=comm, lr=0.5, weight_decay=0.5)
        for index, param in enumerate(params[:3]):
            if optim.owner(param) == comm.rank:
                param.grad = torch.full((4,), float(index))
        if optim.owner(params[3]) != comm.rank:
            params[3].grad = torch.ones(4)  # where nobody asks for it
        optim.step()
        return [param[0].item() for param in params]

    assert run_threads(go, 2) == [[0.75, 0.25, -0.25, 1.0]] * 2


@pytest.mark.redundant
def test_parameters_of_every_kind():
    """Strided, scalar, empty, complex, half precision, integers that nobody trains: packed and alone."""

    def build():
        generator = torch.Generator().manual_seed(0)
        strided = torch.randn(6, 4, generator=generator).t()
        return [
            nn.Parameter(strided),
            nn.Parameter(torch.randn(30, 3, generator=generator)[:, :2]),
            nn.Parameter(torch.randn(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last)),
            nn.Parameter(torch.randn((), generator=generator)),
            nn.Parameter(torch.empty(0, 3)),
            nn.Parameter(torch.randn(5, dtype=torch.complex64, generator=generator)),
            nn.Parameter(torch.randn(7, generator=generator).to(torch.bfloat16)),
            nn.Parameter(torch.randn(3, generator=generator).to(torch.float64)),
            nn.Parameter(torch.arange(3, dtype=torch.int32), requires_grad=False),
        ]

    def steps(optim, params):
        for step in range(3):
            for index, param in enumerate(params):
                if param.requires_grad:
                    param.grad = torch.full_like(param, 0.1 * (index + step))
            optim.step()

    plain = build()
    unsharded = O.AdamW(plain, lr=0.1)
    steps(unsharded, plain)

    def go(comm, bucket_bytes):
        params = build()
        versions = [param._version for param in params]
        optim = ShardedOptimizer(params, O.AdamW, comm=comm, bucket_bytes=bucket_bytes, lr=0.1)
        steps(optim, params)
        assert all(p._version > v for p, v in zip(params, versions, strict=True) if p.requires_grad and p.numel())
        optim.consolidate_state_dict(to=1)
        if comm.rank == 1:
            states, expected = (o.state_dict()["state"] for o in (optim, unsharded))
            assert states.keys() == expected.keys() == set(range(8))
            for index, state in states.items():
                assert all(torch.equal(state[key], value) for key, value in expected[index].items())
                assert [x.stride() for x in state.values()] == [x.stride() for x in expected[index].values()]
        return params

    for bucket_bytes in (1, 64, 1 << 20):
        for params in run_threads(lambda comm, size=bucket_bytes: go(comm, size), 3):
            for ours, expected in zip(params, plain, strict=True):
                assert torch.equal(ours, expected)
                assert ours.stride() == expected.stride()


def test_sparse_gradients():
    def go(comm, sharded):
        tables = [nn.Embedding(9, 2, sparse=True) for _ in range(3)]
        for seed, table in enumerate(tables):
            nn.init.normal_(table.weight, generator=torch.Generator().manual_seed(seed))
        params = [table.weight for table in tables]
        optim = ShardedOptimizer(params, O.SparseAdam, comm=comm, lr=0.1) if sharded else O.SparseAdam(params, lr=0.1)
        for step in range(3):
            sum(table(torch.tensor([step, 2])).square().sum() for table in tables).backward()
            optim.step()
            optim.zero_grad()
        return [param.detach() for param in params]

    for plain, sharded in run_threads(lambda comm: (go(comm, False), go(comm, True)), 2):
        assert all(torch.equal(a, b) for a, b in zip(plain, sharded, strict=True))


def _late_backward(comm: Communicator) -> None:
    """Alone, packed, and packed though its elements lie apart."""
    params = [*(nn.Parameter(torch.ones(n)) for n in (9, 3, 3, 2, 2)), nn.Parameter(torch.ones(4, 2)[:, 0])]
    optim = ShardedOptimizer(params, O.SGD, comm=comm, lr=0.1, bucket_bytes=30)
    losses = [param.square().sum() for param in params]
    for param in params:
        param.grad = torch.ones_like(param)
    optim.step()
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_autograd_sees_weights_change_on_every_rank(gloo_ranks):
    """`_late_backward` asserts that backward through a forward of the weights before the step is refused."""
    run_threads(_late_backward, 2)
    gloo_ranks(2).run(_late_backward)


@pytest.mark.redundant
def test_a_step_of_a_class_that_counts_for_itself_is_one_step():
    class Counting(O.SGD):
        def __init__(self, params, lr):
            super().__init__(params, lr)
            for group in self.param_groups:
                group["k"] = 0

        def step(self, closure=None):
            for group in self.param_groups:
                group["k"] += 1
                group["lr"] = 1.0 / group["k"]
            super().step()

    def go(comm):
        params = [nn.Parameter(torch.zeros(8)) for _ in range(7)]
        optim = ShardedOptimizer(params, Counting, comm=comm, bucket_bytes=32, lr=1.0)
        for _ in range(3):
            for param in params:
                param.grad = torch.ones(8)
            optim.step()
        return optim.param_groups[0]["k"], [param[0].item() for param in params]

    expected = -sum(torch.tensor(1.0 / k) for k in (1, 2, 3)).item()
    for k, weights in run_threads(go, 3):
        assert k == 3
        assert weights == pytest.approx([expected] * 7)


@pytest.mark.redundant
def test_what_a_class_of_ones_own_moves_without_a_gradient_is_sent_too():
    class Decays(O.Optimizer):
        def __init__(self, params, lr):
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for param in group["params"]:
                    param.data.mul_(0.5)

    def go(comm):
        params = [nn.Parameter(torch.ones(8)) for _ in range(5)]
        params[2].grad = torch.ones(8)
        ShardedOptimizer(params, Decays, comm=comm, lr=1.0).step()
        return torch.cat([param.detach() for param in params])

    for weights in run_threads(go, 3):
        assert torch.equal(weights, torch.full((40,), 0.5))


# -- state dicts -------------------------------------------------------------------------------------------------------


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        same = one.dtype == other.dtype and one.device == other.device and one.stride() == other.stride()
        return same and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(equal(a, b) for a, b in zip(one, other, strict=True))
    return type(one) is type(other) and one == other


def run(comm: Communicator, optim: torch.optim.Optimizer, model: nn.Module, steps: range) -> None:
    for step in steps:
        loss = sum(model(tokens(rank, step), all_of_it=step % 2 == 0) for rank in range(2))
        loss.backward()
        optim.step()
        optim.zero_grad()


@pytest.mark.redundant(but=["Adafactor"])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_consolidated_dict_is_the_unsharded_one_and_loads_at_any_world_size(name):
    """Two steps on one world size, the dict through both kinds of optimizer, two more on another."""
    cls, settings = SETTINGS[name]

    def build(make):
        model = Mixed()
        given, _ = groups(model, name)
        return model, make(given, **copy.deepcopy(settings))

    plain_model, plain = build(cls)
    run(None, plain, plain_model, range(2))
    expected = copy.deepcopy(plain.state_dict())
    middle = copy.deepcopy(plain_model.state_dict())
    run(None, plain, plain_model, range(2, 4))

    def first(comm):
        model, optim = build(lambda params, **kw: ShardedOptimizer(params, cls, comm=comm, bucket_bytes=SMALL, **kw))
        run(comm, optim, model, range(2))
        optim.consolidate_state_dict(to=1)
        return optim.state_dict() if comm.rank == 1 else None

    _, found = run_threads(first, 2)
    assert list(found["state"]) == sorted(expected["state"])
    assert equal(found, expected)

    def second(comm, saved):
        model, optim = build(lambda params, **kw: ShardedOptimizer(params, cls, comm=comm, bucket_bytes=SMALL, **kw))
        model.load_state_dict(middle)
        optim.load_state_dict(saved)
        owned = {p for p in model.parameters() if p in optim.state}
        assert owned <= {p for group in optim.optim.param_groups for p in group["params"]}
        assert comm.world_size == 1 or len(owned) < max(len(expected["state"]), 1)
        run(comm, optim, model, range(2, 4))
        optim.consolidate_state_dict()
        return dict(model.state_dict()), optim.state_dict() if comm.rank == 0 else None

    ways = product((found, expected), (1, 3)) if soaking() else ((found, 3), (expected, 1))  # the two are equal
    for saved, world_size in ways:
        before = copy.deepcopy(saved)
        by_rank = run_threads(lambda comm, saved=saved: second(comm, saved), world_size)
        assert all(equal(weights, dict(plain_model.state_dict())) for weights, _ in by_rank)
        assert equal(by_rank[0][1], plain.state_dict())
        assert equal(saved, before)  # what was loaded is the user's
    model, optim = build(cls)
    model.load_state_dict(middle)
    optim.load_state_dict(found)
    run(None, optim, model, range(2, 4))
    assert equal(dict(model.state_dict()), dict(plain_model.state_dict()))


def test_state_dict_says_what_to_do_first():
    def go(comm):
        params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
        optim = ShardedOptimizer(params, O.SGD, comm=comm, lr=0.1, momentum=0.9)
        here = rf"call consolidate_state_dict\(to={comm.rank}\) on every rank first"
        with pytest.raises(RuntimeError, match=f"each rank has a part of the state, .*; {here}"):
            optim.state_dict()
        optim.consolidate_state_dict(to=1)
        if comm.rank == 0:
            with pytest.raises(RuntimeError, match="brought to rank 1, this is rank 0; ask there, or call"):
                optim.state_dict()
        changes = {
            "step": lambda saved: optim.step(),
            "load": lambda saved: optim.load_state_dict(saved),
            "add": lambda saved: optim.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
        }
        for change in changes.values():
            saved = None
            for rank in range(2):
                optim.consolidate_state_dict(to=rank)
                saved = optim.state_dict() if comm.rank == rank else saved
            change(saved)
            with pytest.raises(RuntimeError, match=f"each rank has a part of the state, .*; {here}"):
                optim.state_dict()
        with pytest.raises(ValueError, match="to: rank 2 is outside a world of 2; ranks count from 0"):
            optim.consolidate_state_dict(to=2)

    run_threads(go, 2)


def test_hooks_of_state_dicts():
    def go(comm):
        params = {"a": nn.Parameter(torch.ones(2)), "b": nn.Parameter(torch.ones(3))}
        optim = ShardedOptimizer(params.items(), O.Adam, comm=comm)
        assert [group["param_names"] for group in optim.param_groups] == [["a", "b"]]
        heard = []
        optim.register_state_dict_pre_hook(lambda o: heard.append(o is optim))
        optim.register_state_dict_post_hook(lambda o, found: {**found, "version": 1})
        optim.register_load_state_dict_pre_hook(lambda o, given: {k: v for k, v in given.items() if k != "version"})
        optim.register_load_state_dict_post_hook(lambda o: heard.append("loaded"))
        for param in params.values():
            param.grad = torch.ones_like(param)
        optim.step()
        saved = [None, None]
        for rank in range(2):
            optim.consolidate_state_dict(to=rank)
            if comm.rank == rank:
                saved = optim.state_dict()
        assert sorted(saved) == ["param_groups", "state", "version"]
        assert sorted(saved["state"]) == [0, 1]
        assert saved["param_groups"][0]["param_names"] == ["a", "b"]
        saved["param_groups"][0]["lr"] = 0.25
        optim.load_state_dict(saved)
        assert heard == [True, "loaded"]
        assert optim.param_groups[0]["lr"] == optim.optim.param_groups[0]["lr"] == 0.25
        assert optim.param_groups[0]["param_names"] == ["a", "b"]
        assert len(optim.optim.param_groups[0]["params"]) == len(optim.optim.param_groups[0]["param_names"]) == 1
        with pytest.raises(ValueError, match=r"its groups are of \[1\] parameters, this optimizer's of \[2\]"):
            optim.load_state_dict({"state": {}, "param_groups": [{"params": [0]}]})
        optim.step()

    run_threads(go, 2)


# -- refused -----------------------------------------------------------------------------------------------------------


def test_optimizers_that_need_all_parameters_at_once_are_refused_by_name():
    class Mine(O.LBFGS):
        pass

    class Together(O.SGD):
        """Divides by the norm of all gradients, where it is told to."""

        def __init__(self, params, lr, together=True):
            super().__init__(params, lr)
            for group in self.param_groups:
                group.setdefault("together", together)

        def step(self, closure=None):
            params = [p for group in self.param_groups for p in group["params"] if group["together"]]
            nn.utils.clip_grad_norm_(params, 0.1)
            return super().step(closure)

    params = [nn.Parameter(torch.ones(2))]
    refused = {O.LBFGS: "it calls the closure again", Mine: "it calls", Together: "it lets the gradients"}
    for cls, reason in refused.items():
        with pytest.raises(ValueError, match=f"optimizer_cls: {cls.__name__} cannot be sharded: {reason}"):
            alone(params, cls, lr=0.1)
    optim = alone(params, Together, lr=0.1, together=False)
    with pytest.raises(ValueError, match="Together cannot be sharded: it lets the gradients"):
        optim.add_param_group({"params": [nn.Parameter(torch.ones(2))], "together": True})
    assert len(optim.param_groups) == len(optim.optim.param_groups) == 1
    with pytest.raises(TypeError, match=r"optimizer_cls: 'AdamW' is not a torch.optim.Optimizer class"):
        alone(params, "AdamW")
    with pytest.raises(ValueError, match="cannot be sharded again"):
        alone(params, ShardedOptimizer)
    for left, instead in (("offload", r"use Zero\(model, stage=1, offload="), ("state_format", "use zero.optimizer")):
        with pytest.raises(TypeError, match=f"^{left}: a ShardedOptimizer keeps states .*{instead}"):
            ShardedOptimizer([nn.Parameter(torch.ones(2))], O.AdamW, comm=LocalCommunicator(), **{left: "int8"})
    with pytest.raises(ValueError, match="differentiable: autograd cannot follow"):
        alone(params, differentiable=True)


def test_parameters_that_cannot_be_used_are_refused_in_words():
    param = nn.Parameter(torch.ones(2))
    wrong = [
        ([], ValueError, "empty parameter list"),
        (iter(()), ValueError, "empty parameter list"),
        (param, TypeError, "iterable of Tensors"),
        ([{"params": {param}}], TypeError, "ordered collections"),
        (["weight"], TypeError, "can only optimize Tensors"),
        ([{"params": [param]}, {"params": [param]}], ValueError, "more than one parameter group"),
        ([param * 2], ValueError, "non-leaf"),
        ([nn.Parameter(torch.ones(2, device="meta"))], ValueError, r"shape \(2,\) is on the meta device; give whole"),
    ]
    for given, error, message in wrong:
        with pytest.raises(error, match=message):
            alone(given)
    with pytest.raises(ValueError, match=r"^bucket_bytes must be at least 1, got 0"):
        alone([param], bucket_bytes=0)
    with pytest.raises(ValueError, match="comm: process_group is given too"):
        ShardedOptimizer([param], O.SGD, process_group=object(), comm=LocalCommunicator())
    with pytest.raises(ValueError, match="Invalid learning rate"):
        alone([param], lr=-1.0)
    optim = alone([param])
    optim.param_groups[0]["params"].append(nn.Parameter(torch.ones(2)))
    with pytest.raises(ValueError, match="a parameter that no rank owns; use add_param_group"):
        optim.step()
    optim = alone([param])
    optim.param_groups.append({"params": []})
    with pytest.raises(ValueError, match="a group was added or removed by hand"):
        optim.step()


def test_ranks_that_differ_all_hear_of_it():
    def build(comm, params, cls=O.AdamW, **kwargs):
        with pytest.raises((ValueError, TypeError)) as caught:
            ShardedOptimizer(params[comm.rank], cls, comm=comm, **kwargs)
        return caught.type, str(caught.value)

    a, b = torch.ones(2), torch.ones(2, 3)
    cases = [
        ([[a, b], [a]], "rank 0 has 2 parameters, in groups of [2], rank 1 has 1 parameters, in groups of [1]"),
        ([[a, b], [b, a]], "rank 0 has as number 0 float32 [2] on cpu, rank 1 has as number 0 float32 [2, 3] on cpu"),
        ([[a, b], [a, b.double()]], "rank 0 has as number 1 float32 [2, 3] on cpu, rank 1 has as number 1 float64"),
    ]
    for tensors, message in cases:
        params = [[nn.Parameter(tensor) for tensor in by_rank] for by_rank in tensors]
        one, other = run_threads(lambda comm, params=params: build(comm, params), 2)
        assert one == other
        assert message in one[1]
    # what one rank's arguments raise there, every rank raises
    found = run_threads(lambda comm: build(comm, [[nn.Parameter(a)], []]), 2)
    assert found == [
        (ValueError, "rank 1: optimizer got an empty parameter list"),
        (ValueError, "optimizer got an empty parameter list"),
    ]
    vectors = [[nn.Parameter(torch.ones(9, 9)), nn.Parameter(a)]] * 2  # Muon wants matrices; the vector is rank 1's
    assert [error for error, _ in run_threads(lambda comm: build(comm, vectors, O.Muon), 2)] == [ValueError] * 2


def test_a_group_that_is_refused_changes_nothing():
    def go(comm):
        params = [nn.Parameter(torch.ones(2, 2)) for _ in range(3)]
        optim = ShardedOptimizer(params[:2], O.Muon, comm=comm, lr=0.1)
        for wrong, settings in (
            ([params[0]], {}),
            ([nn.Parameter(torch.ones(2 + comm.rank, 2))], {}),
            ([nn.Parameter(torch.ones(2, 2))], {"momentum": 0.5} if comm.rank else {"params": 3}),
        ):
            with pytest.raises((ValueError, TypeError)):
                optim.add_param_group({"params": wrong, **settings})
        assert len(optim.param_groups) == len(optim.optim.param_groups) == 1
        optim.add_param_group({"params": params[2:], "lr": 0.5})
        assert [optim.owner(param) for param in params] == [0, 1, 0]
        assert [group["lr"] for group in optim.optim.param_groups] == [0.1, 0.5]
        for param in params:
            param.grad = torch.ones(2, 2)
        optim.step()

    run_threads(go, 2)


def _group_of_some(comm: Communicator) -> list[float] | None:
    group = dist.new_group([0, 2])
    if comm.rank == 1:
        with pytest.raises(RuntimeError, match="no member of the group"):
            ShardedOptimizer([nn.Parameter(torch.ones(1))], O.SGD, group, lr=0.1)
        return None
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    optim = ShardedOptimizer(params, O.SGD, group, lr=0.5)
    for param in params:
        param.grad = torch.ones_like(param)
    optim.step()
    optim.consolidate_state_dict(to=1)
    assert optim.comm.rank == 0 or optim.state_dict()["param_groups"][0]["lr"] == 0.5
    return [param[0].item() for param in params]


def test_a_process_group_of_some_ranks(gloo_ranks):
    assert gloo_ranks(3).run(_group_of_some) == [[0.5, 0.5], None, [0.5, 0.5]]
