import copy

import pytest
import torch
from torch import nn

from zeroshard import checkpoint
from zeroshard.comm import LocalCommunicator, run_threads
from zeroshard.zero import STAGES, MixedPrecision, ShardingStrategy, Zero
from zeroshard.zero.ema.average import Ema

DECAY = 0.9


def _model(seed=0):
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    return model


def _rows(step, num=4):
    return torch.randn(num, 5, generator=torch.Generator().manual_seed(step))


def _engine(comm, stage, optimizer_cls=torch.optim.AdamW, **kwargs):
    model = _model()
    zero = Zero(model, stage, units=[model[0]], comm=comm, **kwargs)
    return model, zero, zero.optimizer(optimizer_cls, lr=0.1), zero.ema(DECAY)


def _steps(model, optim, ema, steps):
    for step in steps:
        model(_rows(step)).square().mean().backward()
        optim.step()
        optim.zero_grad()
        ema.update()


def _by_hand(num_steps):
    """torch's own averaged model, in one process."""
    model = _model()
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(DECAY))
    average.update_parameters(model)
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(num_steps):
        model(_rows(step)).square().mean().backward()
        optim.step()
        optim.zero_grad()
        average.update_parameters(model)
    return average.module.state_dict(), model.state_dict()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [1, 3])
def test_the_average_is_torchs_and_the_weights_are_back_after_it(stage, world_size):
    expected, weights = _by_hand(3)

    def rank_main(comm):
        model, zero, optim, ema = _engine(comm, stage)
        _steps(model, optim, ema, range(3))
        before = zero.state_dict()
        with ema.weights():
            average, loss = zero.state_dict(), model(_rows(9)).square().mean().item()
            with zero.full_params():
                full = {name: param.detach().clone() for name, param in model.named_parameters()}
        after, last_loss = zero.state_dict(), model(_rows(9)).square().mean().item()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert all(torch.equal(full[name], average[name]) for name in average)
        plain = _model()
        plain.load_state_dict(average)
        assert loss == plain(_rows(9)).square().mean().item() != last_loss
        return average, after

    for average, after in run_threads(rank_main, world_size):
        for name, tensor in expected.items():
            torch.testing.assert_close(average[name], tensor, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(after[name], weights[name], rtol=1e-5, atol=1e-6)


def test_averages_are_kept_in_the_masters_dtype_and_sharded_with_them():
    def rank_main(comm):
        model, zero, optim, ema = _engine(comm, 3, precision=MixedPrecision(param_dtype=torch.bfloat16))
        _steps(model, optim, ema, range(1))
        assert {state["ema"].dtype for state in ema.state.values()} == {torch.float32}
        assert zero.memory_bytes()["ema"] == ema.num_bytes
        return ema.num_bytes

    assert sum(run_threads(rank_main, 2)) == 4 * sum(param.numel() for param in _model().parameters())


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adafactor])  # over pieces, over whole tensors
@pytest.mark.parametrize(("saved_at", "loaded_at"), [((3, 2), (1, 3)), ((0, 3), (3, 2)), ((2, 1), (0, 2))])
def test_a_checkpoint_has_the_average_at_any_stage_and_world(saved_at, loaded_at, cls, tmp_path):
    def save(comm):
        model, zero, optim, ema = _engine(comm, saved_at[0], cls)
        _steps(model, optim, ema, range(2))
        checkpoint.save(tmp_path / "c", zero, step=2)
        with ema.weights():
            return zero.state_dict()

    def load(comm):
        model, zero, optim, ema = _engine(comm, loaded_at[0], cls)
        checkpoint.load(tmp_path / "c", zero)
        weights = zero.state_dict()
        with ema.weights():
            average = zero.state_dict()
        _steps(model, optim, ema, range(1))  # the optimizer has its own state and nothing else
        return average, weights

    expected = run_threads(save, saved_at[1])[0]
    for average, weights in run_threads(load, loaded_at[1]):
        assert all(torch.equal(average[name], tensor) for name, tensor in expected.items())
        assert not any(torch.equal(weights[name], tensor) for name, tensor in expected.items())


def test_an_average_may_begin_at_a_checkpoint_and_end_at_one(tmp_path):
    model, zero, optim, ema = _engine(LocalCommunicator(), 2)
    _steps(model, optim, ema, range(2))
    checkpoint.save(tmp_path / "with", zero, step=2)
    other = Zero(_model(1), 1, comm=LocalCommunicator())
    other_optim = other.optimizer(torch.optim.AdamW, lr=0.1)
    checkpoint.load(tmp_path / "with", other)
    assert all(set(state) == {"step", "exp_avg", "exp_avg_sq"} for state in other_optim.state.values())
    checkpoint.save(tmp_path / "without", other, step=2)
    _steps(model, optim, ema, range(2))
    checkpoint.load(tmp_path / "without", zero)
    with ema.weights():
        average = copy.deepcopy(zero.state_dict())
    assert all(torch.equal(average[name], tensor) for name, tensor in other.state_dict().items())


def test_an_optimizer_that_would_move_averaged_weights_comes_first():
    model = _model()
    zero = Zero(model, 3, comm=LocalCommunicator())
    zero.ema(DECAY)
    with pytest.raises(RuntimeError, match=r"an average has the old one; make ema\(\) after it"):
        zero.optimizer(torch.optim.Adafactor)
    zero.optimizer(torch.optim.AdamW)


def test_what_would_change_the_average_for_the_weights_is_refused():
    model, zero, optim, ema = _engine(LocalCommunicator(), 3)
    model(_rows(0)).square().mean().backward()
    with ema.weights():
        for act in (
            optim.step,
            ema.update,
            lambda: list(zero.named_shards()),
            lambda: zero.load_state_dict({}),
            lambda: zero.load_named_shards(None),
            lambda: ema.weights().__enter__(),
        ):
            with pytest.raises(RuntimeError, match=r"leave ema.weights\(\) first"):
                act()
    optim.step()
    with pytest.raises(ValueError, match="keeps an average already"):
        zero.ema()
    for decay in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match="outside"):
            Zero(_model(), comm=LocalCommunicator()).ema(decay)


KEEP_WEIGHTS = ShardingStrategy("shard", "shard", "shard", reshard_after_forward=False)


@pytest.mark.parametrize("stage", [*STAGES, KEEP_WEIGHTS], ids=[*map(str, STAGES), "keep"])
def test_an_evaluation_between_forward_and_backward_leaves_the_gradients_as_they_are(stage):
    def rank_main(comm):
        grads = []
        for evaluated in (False, True):
            model, zero, optim, ema = _engine(comm, stage)
            _steps(model, optim, ema, range(2))
            loss = model(_rows(2)).square().mean()
            if evaluated:
                with ema.weights(), torch.no_grad():
                    model(_rows(3))
            loss.backward()
            grads.append(zero.full_grads())
        return grads

    for without, after in run_threads(rank_main, 2):
        assert all(torch.equal(without[name], after[name]) for name in without)


@pytest.mark.parametrize("stage", [*STAGES, KEEP_WEIGHTS], ids=[*map(str, STAGES), "keep"])
def test_no_step_by_gradients_of_the_average(stage):
    def rank_main(comm):
        model, _zero, optim, ema = _engine(comm, stage)
        _steps(model, optim, ema, range(2))
        with ema.weights():
            model(_rows(2)).square().mean().backward()
            loss = model(_rows(3)).square().mean()
        with pytest.raises(RuntimeError, match=r"^step: these are gradients of the averages, from a backward inside"):
            optim.step()
        optim.zero_grad()
        _steps(model, optim, ema, range(2, 3))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        with ema.weights():
            model(_rows(2)).square().mean().backward()
        for param in model.parameters():
            param.grad = torch.ones(param.shape)  # gradients of the user's own may be stepped by
        optim.step()

    run_threads(rank_main, 2)


@pytest.mark.parametrize("stage", STAGES)
def test_unsharded_weights_follow_the_average_in_and_out(stage):
    def rank_main(comm):
        model, zero, optim, ema = _engine(comm, stage)
        _steps(model, optim, ema, range(2))
        weights = zero.state_dict()
        with ema.weights():
            average = zero.state_dict()
        with zero.full_params():
            assert all(torch.equal(param, weights[name]) for name, param in model.named_parameters())
            with ema.weights():
                assert all(torch.equal(param, average[name]) for name, param in model.named_parameters())
            assert all(torch.equal(param, weights[name]) for name, param in model.named_parameters())
        assert not torch.equal(weights["0.weight"], average["0.weight"])

    run_threads(rank_main, 2)


def test_the_weights_are_back_where_an_evaluation_fails():
    model, zero, optim, ema = _engine(LocalCommunicator(), 2)
    _steps(model, optim, ema, range(2))
    before = zero.state_dict()
    with pytest.raises(ZeroDivisionError), ema.weights():
        raise ZeroDivisionError
    assert all(torch.equal(before[name], tensor) for name, tensor in zero.state_dict().items())
    ema.update()


def test_integers_have_no_average():
    weights = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.arange(3), requires_grad=False)]
    ema = Ema(weights, 0.5)
    assert list(ema.state) == weights[:1]
    with torch.no_grad():
        weights[0].fill_(3.0)
    ema.update()
    assert ema.state[weights[0]]["ema"].tolist() == [2.0, 2.0]
