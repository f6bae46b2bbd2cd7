"""Weights that travel as differences: what every rank has stays the same bits, near the masters, and survives."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from late import late
from zeroshard import checkpoint
from zeroshard.comm import NullCommunicator, ObservedCommunicator, run_threads
from zeroshard.zero import LocalSteps, MixedPrecision, Zero, loaded_later
from zeroshard.zero.buffers.common_copy import HEADER_BYTES

DELTA = MixedPrecision(gather="int4-delta", block=32)
POLICIES = {"fp32": DELTA, "bf16": MixedPrecision(torch.bfloat16, gather="int4-delta", block=32)}


class _Net(nn.Module):
    """Two matrices that travel so, one of which is frozen, and a bias that does not."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(24, 184)
        self.second = nn.Linear(184, 24, bias=False).requires_grad_(False)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))).float().square().mean()


def _drawn():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return _Net()


ORIGINAL = _drawn()  # before there are threads, which share a generator


def _made(comm, stage=2, policy=DELTA, lr=1e-2, **kwargs):
    zero = Zero(copy.deepcopy(ORIGINAL), stage, comm=comm, precision=policy, **kwargs)
    return zero, zero.optimizer(torch.optim.AdamW, lr=lr)


def _step(zero, optimizer, step):
    generator = torch.Generator().manual_seed(10 * step + zero.comm.rank)
    zero.model(torch.randn(3, 24, generator=generator)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _shown(zero):
    with zero.full_params():
        return {name: param.detach().clone() for name, param in zero.model.named_parameters()}


def _same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _end(zero, optimizer, steps):
    for step in steps:
        _step(zero, optimizer, step)
    return _shown(zero), zero.state_dict()


def _whole(comm, policy=DELTA, num_steps=6):
    return _end(*_made(comm, policy=policy), range(num_steps))


@pytest.mark.parametrize("policy", POLICIES)
def test_all_ranks_have_the_same_bits_within_half_a_code_of_the_masters(policy):
    def on_rank(comm):
        zero, optimizer = _made(late(comm), policy=POLICIES[policy], lr=1e-3)
        found = []
        for step in range(12):
            before = _shown(zero)["first.weight"].float()
            _step(zero, optimizer, step)
            found.append((before, _shown(zero), zero.state_dict()["first.weight"]))
        return found

    ranks = run_threads(on_rank, 2)
    for (before, shown, master), (_, other, _) in zip(*ranks, strict=True):
        assert _same(shown, other)
        assert torch.equal(shown["second.weight"].float(), ORIGINAL.second.weight.to(shown["second.weight"].dtype))
        half_a_code = (master - before).abs().max() / 7 / 2
        off = (shown["first.weight"].float() - master).abs()
        rounding = master.abs() * 2.0**-8 if policy == "bf16" else 1e-6
        assert (off <= half_a_code * 1.001 + rounding).all()
    assert not torch.equal(shown["first.weight"].float(), master)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("evaluates", [False, True])
def test_a_restart_has_the_bits_of_the_run_that_went_on_at_either_stage(policy, evaluates, tmp_path):
    """Whether the copy has the last step's differences when it is saved or will have them."""

    def on_rank(comm):
        zero, optimizer = _made(comm, 1, POLICIES[policy])
        _end(zero, optimizer, range(2))
        _step(zero, optimizer, 2)
        if evaluates:
            with torch.no_grad():
                zero.model(torch.ones(1, 24))
        checkpoint.save(tmp_path / "saved", zero, step=3)
        zero, optimizer = _made(comm, 2, POLICIES[policy], init=loaded_later)
        checkpoint.load(tmp_path / "saved", zero)
        return _end(zero, optimizer, range(3, 6))

    expected = run_threads(lambda comm: _whole(comm, POLICIES[policy]), 2)
    for found, (shown, state) in zip(run_threads(on_rank, 2), expected, strict=True):
        assert _same(found[0], shown)
        assert _same(found[1], state)


def test_another_world_and_another_wire_go_on_from_a_checkpoint_and_one_without_a_copy_does(tmp_path):
    def save(comm, policy, name):
        zero, optimizer = _made(comm, 2, policy)
        shown = _end(zero, optimizer, range(3))[0]
        checkpoint.save(tmp_path / name, zero, step=3)
        return shown

    def load(comm, stage, policy, name):
        zero, optimizer = _made(comm, stage, policy)
        checkpoint.load(tmp_path / name, zero)
        shown = _shown(zero)
        _end(zero, optimizer, range(3, 4))
        return shown, zero.state_dict()

    had = run_threads(lambda comm: save(comm, DELTA, "delta"), 3)[0]
    for shown, _ in run_threads(lambda comm: load(comm, 1, DELTA, "delta"), 2):
        assert _same(shown, had)
    for _, state in run_threads(lambda comm: load(comm, 3, MixedPrecision(gather="int8"), "delta"), 2):
        assert state["first.weight"].isfinite().all()
    whole = checkpoint.consolidate(tmp_path / "delta")
    assert all("gathered" not in state for state in whole["optimizer"]["state"].values())
    run_threads(lambda comm: save(comm, None, "exact"), 2)
    exact = checkpoint.consolidate(tmp_path / "exact")["model"]
    for shown, _ in run_threads(lambda comm: load(comm, 2, DELTA, "exact"), 2):
        assert _same(shown, exact)


def _averages(zero, step):
    ema = zero._stepping.ema or zero.ema(0.5)
    ema.update()
    if step % 2:
        with ema.weights(), torch.no_grad():
            zero.model(torch.ones(1, 24))


def _reads(zero, step):
    with zero.full_params(), torch.no_grad():
        zero.model.first.weight.add_(step + 1.0)


def _changes_stage(zero, step):
    zero.restage(1 + step % 2)


def _saves(zero, step):
    list(zero.named_shards())


@pytest.mark.filterwarnings(r"ignore:full_params\(\). weights were written to in this block")
@pytest.mark.parametrize("between", [_averages, _reads, _changes_stage, _saves])
def test_what_is_done_between_steps_leaves_no_trace(between):
    def on_rank(comm):
        zero, optimizer = _made(comm)
        for step in range(6):
            _step(zero, optimizer, step)
            between(zero, step)
        return _shown(zero), zero.state_dict()

    for found, (shown, state) in zip(run_threads(on_rank, 2), run_threads(_whole, 2), strict=True):
        assert _same(found[0], shown)
        assert _same(found[1], state)


@pytest.mark.filterwarnings(r"ignore:full_params\(\). weights were written to in this block")
def test_what_is_written_and_forgotten_before_a_step_leaves_no_trace():
    def on_rank(comm):
        zero, optimizer = _made(comm)
        hook = optimizer.register_step_pre_hook(lambda *_: _reads(zero, 1))
        found = _end(zero, optimizer, range(6))
        hook.remove()
        return found

    for found, (shown, state) in zip(run_threads(on_rank, 2), run_threads(_whole, 2), strict=True):
        assert _same(found[0], shown)
        assert _same(found[1], state)


@pytest.mark.parametrize("how", ["inside full_params", "through .data"])
def test_what_is_written_reaches_the_masters_and_the_rest_keeps_its_digits(how):
    def on_rank(comm):
        zero, optimizer = _made(comm)
        _end(zero, optimizer, range(3))
        before = zero.state_dict()
        if how == "through .data":
            zero.model.first.weight.data[5, 3] = 0.625
            zero.model.first.weight.data[100, 3] = 0.25
        else:
            with zero.full_params(write_back=True), torch.no_grad():
                zero.model.first.weight[5, 3] = 0.625
                zero.model.first.weight[100, 3] = 0.25
        return before, zero.state_dict(), _end(zero, optimizer, range(3, 5))[0]

    ranks = run_threads(on_rank, 2)
    for before, after, shown in ranks:
        expected = before["first.weight"].clone()
        expected[5, 3], expected[100, 3] = 0.625, 0.25
        assert torch.equal(after["first.weight"], expected)
        assert _same(shown, ranks[0][2])


def test_what_is_written_on_one_rank_alone_is_an_error_and_not_two_models():
    def on_rank(comm):
        zero, optimizer = _made(comm)
        _end(zero, optimizer, range(2))
        if comm.rank == 0:
            zero.model.first.weight.data[5, 3] = 0.625
        with (
            pytest.raises(RuntimeError, match=r"^root: this rank's copy of rank 0's shard differs")
            if comm.rank
            else (nullcontext())
        ):
            _step(zero, optimizer, 2)
            zero.model(torch.ones(1, 24))
        return comm.rank

    assert run_threads(on_rank, 2) == [0, 1]


def test_a_block_with_nan_is_nan_on_every_rank_and_is_well_when_the_master_is():
    def on_rank(comm):
        zero, optimizer = _made(comm, lr=1e-3)
        _step(zero, optimizer, 0)
        (group,) = [group for group in zero._runtime.groups() if group.params.common is not None and group.trained]
        healthy = group.params.master[7].clone()
        with torch.no_grad():
            if comm.rank == 1:
                group.params.master[7] = float("nan")
            group.params.mark_stale()
            ill = _shown(zero)["first.weight"]
            group.params.master[7] = healthy
            group.params.mark_stale()
        for _ in range(8):
            group.params.mark_stale()
            shown = _shown(zero)["first.weight"]
        return ill, shown, zero.state_dict()["first.weight"]

    for ill, shown, master in run_threads(on_rank, 2):
        assert ill.isnan().sum() == 32
        torch.testing.assert_close(shown, master, rtol=0, atol=1e-6)


def test_bytes_are_those_of_int4_and_memory_has_the_owner_s_shard_more():
    def of(gather):
        observed = ObservedCommunicator(NullCommunicator(4))
        zero, optimizer = _made(observed, 2, MixedPrecision(gather=gather))
        for step in range(2):
            observed.drain()
            _step(zero, optimizer, step)
        return sum(r.num_bytes for r in observed.records if r.op == "all_gather"), zero.memory_bytes()["params"], zero

    delta, memory, zero = of("int4-delta")
    int4, less, _ = of("int4")
    shards = [g.params.layout.shard_numel for g in zero._runtime.groups() if g.params.common is not None]
    assert memory - less == 4 * sum(shards)
    assert delta == int4 + 4 * HEADER_BYTES  # of the buffer that is trained


def test_where_no_copy_outlives_a_step_it_is_refused_in_a_line():
    comm = NullCommunicator(4)
    with pytest.raises(ValueError, match=r"^gather: int4-delta sends differences to the last step's unsharded weights"):
        _made(comm, 3)
    with pytest.raises(ValueError, match=r"^gather: stage 0 has no wire format"):
        _made(comm, 0)
    zero, _ = _made(comm, 2)
    with pytest.raises(ValueError, match=r"^gather: int4-delta sends differences"):
        zero.restage(3)
    with pytest.raises(ValueError, match=r"^gather: int4-delta needs the same weights on all ranks, and replicas"):
        _made(comm, 2, shard_size=2, replicas=LocalSteps(every=2))
    with pytest.raises(ValueError, match=r"^reduce: int4-delta is of weights alone; choose int4 for gradients"):
        MixedPrecision(reduce="int4-delta")
    with pytest.raises(ValueError, match=r"^gather: \['int4'\] is not a wire format"):
        MixedPrecision(gather=["int4"])
    with pytest.raises(ValueError, match=r"^gather: 'int8-delta' is not a wire format; .* e4m3, int4-delta$"):
        MixedPrecision(gather="int8-delta")
