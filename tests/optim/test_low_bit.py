from copy import deepcopy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from soak import soaking
from zero.transport.test_reproducible import assert_same, train
from zeroshard.comm import NullCommunicator, run_threads
from zeroshard.kernels import adamw8bit, use_kernels
from zeroshard.kernels.adamw8bit import decode_signed, decode_unsigned, encode_signed, encode_unsigned, joined, split
from zeroshard.optim import AdamW8bit, FlashAdamW, MuonAdamW, fp32_state_dict
from zeroshard.zero import FlatLayout, Offload, Zero

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True)


def coded(values, *, signed):
    """Values ``[numel]`` of one block after `encode` and `decode`."""
    rows = torch.tensor(values, dtype=torch.float32)[None]
    codes = torch.empty(rows.shape, dtype=torch.int8)
    scales, out, scratch = torch.empty(1), torch.empty_like(rows), torch.empty_like(rows)
    (encode_signed if signed else encode_unsigned)(rows.clone(), codes, scales, scratch)
    (decode_signed if signed else decode_unsigned)(codes, scales, out, scratch)
    return out[0]


@pytest.mark.redundant
@settings(deadline=None, max_examples=200)
@given(st.lists(FLOATS.filter(lambda x: abs(x) < 1e37), min_size=1, max_size=40), st.booleans())
def test_codes_keep_signs_and_are_near_at_every_scale(values, signed):
    """Half a step between codes is (1 + 16 x)^2 / 17 / 2 of the number of codes, for x of the block's largest."""
    values = values if signed else [abs(x) for x in values]
    given_, got = torch.tensor(values, dtype=torch.float64), coded(values, signed=signed).double()
    assert got.isfinite().all()
    largest = given_.abs().max().clamp(min=2.0**-122)
    x = given_.abs() / largest
    half = (1 + 16 * x) ** 2 / (17 * 2 * (127 if signed else 256))
    floor = 0 if signed else largest / 4000  # the least level of a second moment
    assert ((got - given_).abs() <= largest * half * 1.15 + floor + 1e-44).all()
    assert not ((got * given_) < 0).any()
    if not signed and max(values) > 2e-38:
        assert (got > 0).all()


@pytest.mark.redundant
@settings(deadline=None, max_examples=200)
@given(FLOATS)
def test_a_weight_of_24_bits_survives_in_two_parts(value):
    exact = (torch.tensor([value]).view(torch.int32) // 256 * 256).view(torch.float32)
    weight, correction = torch.empty(1, dtype=torch.bfloat16), torch.empty(1, dtype=torch.int8)
    split(exact.clone(), weight, correction)
    assert torch.equal(weight, exact.bfloat16()) or not weight.isfinite()
    there = joined(weight, correction)
    assert abs(int(there.view(torch.int32)) - int(exact.view(torch.int32))) <= 256 or not there.isfinite()
    split(there.clone(), weight, correction)
    assert torch.equal(joined(weight, correction), there)


@pytest.mark.redundant(but=["inf"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_no_number_is_seen_in_its_block_and_in_no_other(bad):
    param = nn.Parameter(torch.ones(600))
    optimizer = AdamW8bit([param], 0.1)
    for step in range(2):
        param.grad = torch.ones(600)
        if step == 0:
            param.grad[300] = bad
        optimizer.step()
    assert not param[300].isfinite()
    assert param[:256].isfinite().all()
    assert param[512:].isfinite().all()


def run_alone(cls, dtype, chunk, monkeypatch):
    monkeypatch.setattr(adamw8bit, "CHUNK", chunk)
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((70, 33), (5,), (), (256,), (1000,))]
    optimizer = cls(params, 0.01, betas=(0.9, 0.95))
    for _ in range(5):
        for param in params:
            param.grad = (torch.randn(param.shape) * 10.0 ** torch.randint(-4, 3, param.shape)).to(dtype)
        with use_kernels("reference"):
            optimizer.step()
    return params, optimizer


@pytest.mark.redundant
@pytest.mark.parametrize(("cls", "dtype"), [(AdamW8bit, torch.float32), (FlashAdamW, torch.bfloat16)])
def test_the_result_has_the_same_bits_in_chunks_of_any_size(cls, dtype, monkeypatch):
    runs = [run_alone(cls, dtype, chunk, monkeypatch) for chunk in (256, 1024, 1 << 20)]
    for params, optimizer in runs[1:]:
        for param, first in zip(params, runs[0][0], strict=True):
            assert torch.equal(param, first)
            for kind, value in optimizer.state[param].items():
                assert torch.equal(value, runs[0][1].state[first][kind])


def test_a_weight_in_another_order_of_memory_takes_the_same_step():
    torch.manual_seed(0)
    start, grads = torch.randn(40, 30), torch.randn(2, 40, 30)
    weights = nn.Parameter(start.clone()), nn.Parameter(start.t().contiguous().t())
    optimizer = AdamW8bit(weights, 0.1)
    for grad in grads:
        for weight in weights:
            weight.grad = grad.clone()
        optimizer.step()
    assert torch.equal(*weights)
    assert not torch.equal(weights[1], start)


@pytest.mark.parametrize(
    ("cls", "group"),
    [
        (AdamW8bit, {"params": [nn.Parameter(torch.zeros(4, dtype=torch.float64))]}),
        (MuonAdamW, {"params": [nn.Parameter(torch.zeros(4))], "matrices": True}),
    ],
)
def test_a_group_that_is_refused_is_not_added(cls, group):
    optimizer = cls([nn.Parameter(torch.zeros(4, 4))])
    with pytest.raises(ValueError, match="params: "):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1


def test_steps_are_near_those_of_adamw():
    torch.manual_seed(0)
    start = torch.randn(40, 70)
    ours, theirs, flash = (nn.Parameter(start.clone().to(d)) for d in (torch.float32, torch.float32, torch.bfloat16))
    with torch.no_grad():
        ours.copy_(flash.float())
        theirs.copy_(flash.float())
    optimizers = AdamW8bit([ours], 1e-3), torch.optim.AdamW([theirs], 1e-3), FlashAdamW([flash], 1e-3)
    first = theirs.detach().clone()
    for _ in range(50):
        grad = torch.randn(40, 70) + 0.3
        for param, optimizer in zip((ours, theirs, flash), optimizers, strict=True):
            param.grad = grad.to(param.dtype)
            optimizer.step()
    moved = (theirs - first).norm()
    assert (ours - theirs).norm() < 0.05 * moved
    whole = joined(flash.detach(), optimizers[2].state[flash]["correction"])
    assert (whole - theirs).norm() < 0.05 * moved
    assert (flash.float() - theirs).norm() > 0.05 * moved  # bf16 alone is not enough


def test_states_are_loaded_as_they_were_and_those_of_adamw_are_encoded(monkeypatch):
    params, optimizer = run_alone(FlashAdamW, torch.bfloat16, 1024, monkeypatch)
    saved = optimizer.state_dict()
    copies = [nn.Parameter(param.detach().clone()) for param in params]
    other = FlashAdamW(copies, 0.01, betas=(0.9, 0.95))
    other.load_state_dict(saved)
    for param, copy in zip(params, copies, strict=True):
        for kind, value in optimizer.state[param].items():
            assert other.state[copy][kind].dtype == value.dtype
            assert torch.equal(other.state[copy][kind], value)


def test_states_pass_between_adamw_and_adamw8bit_and_settings_with_them():
    torch.manual_seed(0)
    plain, ours = nn.Parameter(torch.ones(300)), nn.Parameter(torch.ones(300))
    adamw, low = torch.optim.AdamW([plain], 0.1), AdamW8bit([ours], 0.2, block=64)
    plain.grad = torch.randn(300)
    adamw.step()
    low.load_state_dict(adamw.state_dict())
    assert low.param_groups[0]["lr"] == 0.1
    assert low.param_groups[0]["block"] == 64
    state, kept = low.state[ours], adamw.state[plain]
    assert {kind: tuple(value.shape) for kind, value in state.items()} == {
        "step": (),
        **dict.fromkeys(("exp_avg_codes", "exp_avg_sq_codes"), (300,)),
        **dict.fromkeys(("exp_avg_scales", "exp_avg_sq_scales"), (5,)),
    }
    again = torch.optim.AdamW([nn.Parameter(torch.ones(300))])
    again.load_state_dict(fp32_state_dict(low.state_dict()))
    (found,) = again.state.values()
    assert again.param_groups[0].keys() == adamw.param_groups[0].keys()
    assert int(found["step"]) == 1
    assert torch.allclose(found["exp_avg"], kept["exp_avg"], rtol=0.07, atol=1e-3)
    assert torch.allclose(found["exp_avg_sq"], kept["exp_avg_sq"], rtol=0.07, atol=1e-6)
    with pytest.raises(ValueError, match=r"state_dict: its states are momentum_buffer; AdamW8bit keeps exp_avg_codes"):
        low.load_state_dict({**low.state_dict(), "state": {0: {"momentum_buffer": torch.ones(300)}}})


@pytest.mark.parametrize(
    ("settings_", "what"),
    [
        ({"block": 100}, "block: 100"),
        ({"block": 8}, "block: 8"),
        ({"lr": -1.0}, "lr: -1.0"),
        ({"betas": (1, 0)}, "beta1: 1"),
    ],
)
def test_settings_outside_their_range_are_refused(settings_, what):
    with pytest.raises(ValueError, match=what):
        AdamW8bit([nn.Parameter(torch.ones(3))], **settings_)


def test_parameters_of_other_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"params: torch\.float64; AdamW8bit takes float32"):
        AdamW8bit([nn.Parameter(torch.ones(3, dtype=torch.float64))])


# ---------------------------------------------------------------------------------------------------- in the engine


@pytest.fixture(scope="module")
def alone():
    """What one process computes, by class and dtype."""
    return {(cls, dtype): train(1, 0, cls, dtype=dtype) for cls, dtype in CLASSES}


CLASSES = [(AdamW8bit, torch.float32), (FlashAdamW, torch.bfloat16)]


@pytest.mark.pairwise("dtype", "stage")
@pytest.mark.parametrize(("cls", "dtype"), CLASSES)
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_weights_and_states_have_the_same_bits_at_each_stage_and_number_of_ranks(alone, world_size, stage, cls, dtype):
    assert_same(train(world_size, stage, cls, dtype=dtype), alone[cls, dtype])


@pytest.mark.redundant(but=["FlashAdamW-dtype1"])
@pytest.mark.parametrize(("cls", "dtype"), CLASSES)
def test_a_run_continues_at_another_stage_and_number_of_ranks_with_the_same_bits(tmp_path, alone, cls, dtype):
    path = str(tmp_path / "half")
    train(4, 3, cls, dtype=dtype, steps=1, path=path)
    continued = train(2, 1, cls, dtype=dtype, steps=2, resumed=path)
    assert_same(continued, alone[cls, dtype])


@pytest.mark.parametrize("block", [16, 256])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_no_part_of_a_shard_ends_inside_a_block_of_a_parameter(world_size, block):
    shapes = [("a", (33, 70)), ("b", (5,)), ("c", (251,)), ("d", ()), ("e", (256,)), ("f", (7, 40)), ("g", (0, 3))]
    for parts in (1, 2):
        layout = FlatLayout.of(shapes, world_size, 8, parts, block)
        pieces = [piece for rank in range(world_size) for piece in layout.owned(rank)]
        assert sum(piece.numel for piece in pieces) == sum(slot.numel for slot in layout.slots)
        assert all(piece.interval[0] % block == 0 for piece in pieces)
        ends = [slot.offset + slot.numel for slot in layout.slots]
        assert all(slot.offset >= end for slot, end in zip(layout.slots[1:], ends[:-1], strict=True))
        assert layout.padded_numel <= sum(slot.numel for slot in layout.slots) + block * (
            len(shapes) + world_size * parts
        )


@pytest.mark.parametrize("how", ["load_state_dict", "full_params"])
def test_further_bits_of_weights_that_are_replaced_are_forgotten(how):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16()
    zero = Zero(model, 3, list(model), NullCommunicator(1))
    optimizer, start = zero.optimizer(FlashAdamW), zero.state_dict()
    model(torch.ones(1, 64, dtype=torch.bfloat16)).float().sum().backward()
    optimizer.step()
    states = [optimizer.state[piece] for piece in zero.pieces()]
    assert any(state["correction"].any() for state in states)
    if how == "load_state_dict":
        zero.load_state_dict(start)
    else:
        with torch.no_grad(), zero.full_params(write_back=True):
            model[0].weight.zero_()
    assert not any(state["correction"].any() for state in states)
    assert all(state["exp_avg_codes"].any() for state in states)


HOST_BYTES = {torch.optim.AdamW: (4, 8), AdamW8bit: (4, 2), FlashAdamW: (2, 3)}  # of an element's master and states


@pytest.mark.parametrize("cls", HOST_BYTES)
def test_memory_of_the_host_falls_with_the_states(cls):
    dtype = torch.bfloat16 if cls is FlashAdamW else torch.float32
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(dtype)
    zero = Zero(model, 3, list(model), NullCommunicator(2), offload=Offload())
    optimizer = zero.optimizer(cls)
    model(torch.ones(1, 64, dtype=dtype)).float().sum().backward()
    optimizer.step()
    taken, (master, states) = zero.memory_bytes(), HOST_BYTES[cls]
    pieces = zero.pieces()
    numel = sum(piece.numel() for piece in pieces)
    scales = 0 if cls is torch.optim.AdamW else sum(8 * -(-piece.numel() // 256) for piece in pieces)
    assert taken["host_optimizer"] == states * numel + scales + 4 * len(pieces)
    padding = taken["host_master"] - master * numel
    assert 0 <= padding <= 4 * 256 * master
    assert taken["optimizer"] == 0


@pytest.mark.parametrize(
    ("cls", "dtype", "per_param"),
    [(torch.optim.AdamW, torch.float32, 16.0), (AdamW8bit, torch.float32, 10.0), (FlashAdamW, torch.bfloat16, 7.0)],
)
def test_weights_gradients_and_states_take_16_10_and_7_bytes_of_a_parameter(cls, dtype, per_param):
    """And a scale for each block of each moment, 8 bytes of 256 elements, and a step count of each piece."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(dtype)
    zero = Zero(model, 1, list(model), NullCommunicator(1))
    optimizer = zero.optimizer(cls)
    model(torch.ones(1, 64, dtype=dtype)).float().sum().backward()
    optimizer.step()
    numels = [param.numel() for param in model.parameters()]
    scales = sum(8 * -(-numel // 256) for numel in numels) if cls is not torch.optim.AdamW else 0
    taken = zero.memory_bytes()
    padding = taken["params"] + taken["grads"] - 2 * sum(numels) * dtype.itemsize
    assert 0 <= padding < 2 * 4 * 256 * dtype.itemsize * 2
    assert sum(taken.values()) - padding == per_param * sum(numels) + scales + 4 * len(numels)


# ------------------------------------------------------------------------- sums of gradients in another order


STEPS = 20 if soaking() else 8


def losses(cls, dtype, world_size, stage):
    """Losses of `STEPS`, whose gradients are summed as ranks happen to share them."""
    rows = torch.randint(40, (STEPS, 8, 2, 16), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(2))
    start = nn.ModuleDict({"embed": nn.Embedding(40, 32), "blocks": blocks, "head": nn.Linear(32, 40)})

    def on_rank(comm):
        model, found = deepcopy(start).to(dtype), []
        zero = Zero(model, stage, [*model["blocks"]], comm)
        optimizer = zero.optimizer(cls, lr=0.01)
        for step in range(STEPS):
            mine = rows[step, comm.rank :: comm.world_size].flatten(0, 1)
            x = model["embed"](mine)
            for block in model["blocks"]:
                x = x + block(x)
            loss = nn.functional.cross_entropy(model["head"](x).float()[:, :-1].flatten(0, 1), mine[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    return torch.tensor(run_threads(on_rank, world_size)).mean(0)


def spread(cls, dtype):
    """By how much, relative to it, the loss of a step differs most between numbers of ranks."""
    runs = [losses(cls, dtype, world_size, stage) for world_size, stage in ((1, 0), (2, 1), (4, 2), (8, 3))]
    return max(float(((run - runs[0]).abs() / runs[0]).max()) for run in runs)


@pytest.mark.redundant
@pytest.mark.parametrize(
    ("cls", "dtype", "budget"),
    [
        (torch.optim.AdamW, torch.float32, 1e-6),
        (AdamW8bit, torch.float32, 5e-5),  # a gradient's last bit may round a moment to the next of 256 codes
        (torch.optim.AdamW, torch.bfloat16, 1e-3),
        (FlashAdamW, torch.bfloat16, 1e-3),
    ],
)
def test_without_reproducible_sums_losses_differ_by_their_rounding(cls, dtype, budget):
    assert 0 < spread(cls, dtype) <= budget


def test_a_second_moment_follows_gradients_that_shrink():
    """Rounded to the nearest, its codes would stay: at the end it would be 1.4 times too large on average."""
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.zeros(64 * 256)) for _ in range(2))
    optimizers = AdamW8bit([ours], betas=(0.9, 0.99)), torch.optim.AdamW([theirs], betas=(0.9, 0.99))
    sizes, falls = 10.0 ** (torch.rand(64 * 256) * 2 - 2), torch.arange(64 * 256) % 2 == 0
    for step in range(400):
        grad = torch.randn(64 * 256) * torch.where(falls & (step >= 100), 0.1 * sizes, sizes)
        for param, optimizer in zip((ours, theirs), optimizers, strict=True):
            param.grad = grad.clone()
            optimizer.step()
    found = fp32_state_dict(optimizers[0].state_dict())["state"][0]["exp_avg_sq"]
    ratio = (found / optimizers[1].state[theirs]["exp_avg_sq"]).log() / 2
    assert ratio[falls].mean().abs() < 0.02
    assert ratio[~falls].mean().abs() < 0.02
