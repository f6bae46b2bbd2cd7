"""Checkpoints and state dicts pass between optimizers in fp32 and in 8 bits, at any stage and number of ranks."""

import copy
import logging
from functools import partial

import pytest
import torch
from torch import nn

import zeroshard
from zeroshard import Zero
from zeroshard.comm import NullCommunicator, run_threads
from zeroshard.host.errors import UserError
from zeroshard.kernels.adamw8bit import joined
from zeroshard.kernels.state_codes import as_codes, as_values, block_of, num_blocks
from zeroshard.optim import AdamW8bit, FlashAdamW
from zeroshard.optim.classes.kept_states import ParamFacts
from zeroshard.optim.state_conversion import as_kept

BF16, FP32 = torch.bfloat16, torch.float32
PAIRS = [
    (torch.optim.AdamW, FP32, AdamW8bit, FP32),
    (torch.optim.AdamW, FP32, FlashAdamW, BF16),
    (AdamW8bit, FP32, FlashAdamW, BF16),
]
BOTH_WAYS = [*PAIRS, *((there, to, here, of) for here, of, there, to in PAIRS)]
SHAPES = (31, 40), (40, 33), (33, 5)


def net(dtype):
    """Parameters whose pieces end inside blocks of 256, where nothing keeps them from it."""
    torch.manual_seed(0)
    layers = [nn.Linear(*shape) for shape in SHAPES]
    return nn.ModuleDict({"blocks": nn.ModuleList(layers[:2]), "head": layers[2]}).to(dtype)


def trained(zero, model, cls, steps, **settings):
    """An optimizer of ``model`` after some steps of gradients that do not depend on the number of ranks."""
    optimizer = zero.optimizer(cls, lr=0.01, **settings)
    for step in range(steps):
        rows = torch.randn(4, 31, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).dtype)
        x = rows
        for layer in (*model["blocks"], model["head"]):
            x = layer(x).tanh()
        x.float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def run(world_size, stage, cls, dtype, *, steps=0, path="", load="", state_dict=None, **settings):
    """The weights and the state of an optimizer that is saved to ``path``, or loaded."""
    start = net(dtype)

    def on_rank(comm):
        model = copy.deepcopy(start)
        zero = Zero(model, stage, [*model["blocks"]], comm)
        optimizer = trained(zero, model, cls, steps, **settings)
        if load:
            zeroshard.load(load, zero)
        if state_dict is not None:
            optimizer.load_state_dict(state_dict)
        if path:
            zeroshard.save(path, zero, step=steps)
        return zero.state_dict(), zero.optim_state_dict()

    return run_threads(on_rank, world_size)[0]


def assert_states_converted(before, after):
    """``after`` are a parameter's states ``before``, in another form; corrections are compared with the weights."""
    in_codes = any(kind.endswith("_codes") for kind in after)
    expected = as_codes(before, 256) if in_codes else as_values(before)
    assert expected.keys() - {"correction"} == after.keys() - {"correction"}
    for kind in after.keys() - {"correction"}:
        assert torch.equal(after[kind], torch.as_tensor(expected[kind])), kind


@pytest.mark.parametrize(("cls", "dtype", "other", "to"), BOTH_WAYS)
def test_a_checkpoint_is_loaded_into_the_other_class_at_another_stage_and_world_size(
    tmp_path, caplog, cls, dtype, other, to
):
    path = str(tmp_path / "saved")
    weights, saved = run(4, 3, cls, dtype, steps=2, path=path)
    with caplog.at_level(logging.WARNING, "zeroshard.checkpoint"):
        found, loaded = run(2, 1, other, to, load=path)
    (line,) = caplog.messages
    assert line.startswith(f"load: states are converted to those of {other.__name__}: ")
    assert len(saved["state"]) == len(loaded["state"]) == 6
    numbers = dict(zip(weights, saved["state"], strict=True))
    for name, weight in weights.items():
        before, after = saved["state"][numbers[name]], loaded["state"][numbers[name]]
        assert_states_converted(before, after)
        assert ("correction" in after) == (other is FlashAdamW)
        exact = joined(weight, before["correction"]) if "correction" in before else weight.float()
        kept = joined(found[name], after["correction"]) if "correction" in after else found[name].float()
        assert (exact - kept).abs().max() <= exact.abs().max() * 2.0**-15
        assert to is BF16 or torch.equal(exact, kept)


@pytest.mark.parametrize(("cls", "dtype", "other", "to"), BOTH_WAYS)
def test_a_full_state_dict_is_loaded_into_the_other_class(cls, dtype, other, to):
    _, saved = run(2, 2, cls, dtype, steps=2)
    _, loaded = run(4, 3, other, to, state_dict=saved)
    assert loaded["param_groups"][0]["lr"] == 0.01
    assert ("block" in loaded["param_groups"][0]) == (other is not torch.optim.AdamW)
    for state, own in zip(saved["state"].values(), loaded["state"].values(), strict=True):
        assert_states_converted(state, own)
        assert not own.get("correction", torch.zeros(1)).any()


def test_a_checkpoint_in_8_bits_is_read_as_it_is_by_its_own_class(tmp_path, caplog):
    path = str(tmp_path / "saved")
    weights, saved = run(4, 3, FlashAdamW, BF16, steps=2, path=path)
    found, loaded = run(2, 2, FlashAdamW, BF16, load=path)
    assert not caplog.messages
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())
    for state, own in zip(saved["state"].values(), loaded["state"].values(), strict=True):
        assert all(torch.equal(own[kind], value) for kind, value in state.items())


@pytest.mark.pairwise("cls")
@pytest.mark.parametrize("how", ["checkpoint", "state dict"])
@pytest.mark.parametrize(("cls", "dtype"), [(AdamW8bit, FP32), (FlashAdamW, BF16)])
@pytest.mark.parametrize(("before", "after"), [(64, 256), (1024, 256)])
def test_codes_of_other_blocks_are_encoded_in_the_optimizer_s_own(tmp_path, caplog, cls, dtype, before, after, how):
    path = str(tmp_path / "saved")
    weights, saved = run(4, 3, cls, dtype, steps=2, path=path, block=before)
    given = {"load": path} if how == "checkpoint" else {"state_dict": saved}
    found, loaded = run(2, 1, cls, dtype, block=after, **given)
    assert {group["block"] for group in loaded["param_groups"]} == {after}
    assert {group["lr"] for group in loaded["param_groups"]} == {0.01}
    for state, own in zip(saved["state"].values(), loaded["state"].values(), strict=True):
        numel = max(value.numel() for value in state.values())  # one block before and after: as it was
        expected = state if numel <= min(before, after) else as_codes(as_values(state), after)
        assert own.keys() == expected.keys()
        assert all(torch.equal(own[kind], torch.as_tensor(value)) for kind, value in expected.items())
    if how == "checkpoint":
        (line,) = caplog.messages
        assert f"encoded in blocks of {after} instead of {before}, which rounds them again" in line
        assert all(torch.equal(found[name], weight) for name, weight in weights.items())


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.RMSprop])
def test_states_of_another_rule_are_refused_in_one_line(tmp_path, cls):
    path = str(tmp_path / "saved")
    run(1, 0, AdamW8bit, FP32, steps=1, path=path)
    with pytest.raises(UserError, match=f"{cls.__name__} keeps .*saved are .*exp_avg_codes.*states of another"):
        run(1, 0, cls, FP32, load=path)


@pytest.mark.parametrize("numel", [1, 2, 15, 16, 17, 255, 256, 257, 1000, 4096, 5000])
def test_the_number_of_scales_tells_the_elements_of_a_block(numel):
    for block in (2**exponent for exponent in range(4, 13)):
        found = block_of(numel, num_blocks(numel, block))
        assert found == block or (num_blocks(numel, block) == 1 and found >= numel)


class Saved:
    """A reader of one parameter's states."""

    def __init__(self, states):
        self.states = states

    def kinds(self, name):
        return {kind: tuple(value.shape) for kind, value in self.states.items()}

    def read(self, name, kind, interval):
        return self.states[kind].reshape(-1)[slice(*interval)].clone()


@pytest.mark.parametrize("saves", ["fp32", "blocks of 64", "blocks of 1024"])
@pytest.mark.parametrize("cls", [AdamW8bit, torch.optim.AdamW])
def test_codes_of_any_interval_are_those_of_the_whole_parameter(cls, saves):
    torch.manual_seed(0)
    first = torch.cat([torch.randn(512), 1e-5 * torch.randn(188)])  # the last block is small, and shorter
    wide = {"exp_avg": first, "exp_avg_sq": first.square(), "step": torch.tensor(3.0), "param": torch.ones(700)}
    narrow = as_codes(wide, 256)
    assert (as_values(narrow)["exp_avg"] - first).abs()[512:].max() < 2e-6
    saved, expected = (wide, narrow) if cls is AdamW8bit else (narrow, as_values(narrow))
    if saves != "fp32":
        saved = as_codes(wide, int(saves.removeprefix("blocks of ")))
        expected = as_values(saved) if cls is torch.optim.AdamW else as_codes(as_values(saved), 256)
    facts = ParamFacts("p", (700,), FP32, torch.device("cpu"), kept_whole=False, block=256)
    seen = as_kept(partial(cls), [({}, [facts])], Saved(saved), say=False)
    assert seen.kinds("p").keys() == expected.keys()
    for kind, value in expected.items():
        numel = value.numel()
        for interval in ((0, 0), (0, numel), (numel // 3, numel // 2), (numel - 1, numel), (256, 300), (255, 257)):
            start, stop = (min(end, numel) for end in interval)
            assert torch.equal(seen.read("p", kind, (start, stop)), value.reshape(-1)[start:stop]), (kind, interval)


def test_an_average_of_weights_in_bf16_is_loaded_beside_weights_in_fp32(tmp_path):
    path = str(tmp_path / "saved")
    model = net(BF16)
    zero = Zero(model, 3, [*model["blocks"]], NullCommunicator(1))
    trained(zero, model, FlashAdamW, 1)
    average = zero.ema(0.5)
    average.update()
    zeroshard.save(path, zero, step=1)
    other = net(FP32)
    again = Zero(other, 3, [*other["blocks"]], NullCommunicator(1))
    again.optimizer(torch.optim.AdamW)
    found = again.ema(0.5)
    zeroshard.load(path, again)
    with average.weights(), found.weights():
        kept = again.state_dict()
        assert all(torch.equal(kept[name].bfloat16(), value) for name, value in zero.state_dict().items())
