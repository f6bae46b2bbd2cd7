import copy
import io

import pytest
import torch

from exactness import assert_same_bits
from nets import Net, Turn, assert_every_stage_equals_one_process, backward, rows, train
from zeroshard.comm import LocalCommunicator, run_threads
from zeroshard.kernels import use_kernels
from zeroshard.kernels.launch import HAS_TRITON
from zeroshard.optim import FusedAdamW
from zeroshard.zero import STAGES, MixedPrecision, Zero

OPTIONS = {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-7, "weight_decay": 0.1}
BF16 = MixedPrecision(param_dtype=torch.bfloat16)
needs_triton = pytest.mark.skipif(not HAS_TRITON or torch.cuda.is_available(), reason="needs Triton's interpreter")


def take_steps(optimizer, model, num_steps=3, first=0):
    for step in range(first, first + num_steps):
        model(rows(0, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model):
    return [param.detach().clone() for param in model.parameters()]


def reference(params, **kwargs):
    return torch.optim.AdamW(params, **(OPTIONS | kwargs), foreach=False)


# -------------------------------------------------------------------------------------------- a torch optimizer


def test_weights_and_states_have_the_bits_of_torch_s():
    mine, theirs = Net(), Net()
    optimizers = FusedAdamW(mine.parameters(), **OPTIONS), reference(theirs.parameters())
    for optimizer, model in zip(optimizers, (mine, theirs), strict=True):
        take_steps(optimizer, model)
    assert_same_bits(values(mine), values(theirs))
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        a, b = optimizers[0].state[one], optimizers[1].state[other]
        assert list(a) == list(b)
        assert all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


@pytest.mark.parametrize("from_torch", [True, False])
def test_either_loads_what_the_other_saved(from_torch):
    models = Net(), Net()
    makers = [lambda p: FusedAdamW(p, lr=0.5), lambda p: torch.optim.AdamW(p, lr=0.5, foreach=False)]
    first, second = makers[from_torch](models[0].parameters()), makers[not from_torch](models[1].parameters())
    for group in first.param_groups:
        group.update(OPTIONS)
    take_steps(first, models[0])
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file))
    models[1].load_state_dict(models[0].state_dict())
    for optimizer, model in zip((first, second), models, strict=True):
        take_steps(optimizer, model, first=3)
    assert_same_bits(values(models[0]), values(models[1]))


def test_a_scheduler_a_closure_and_groups_of_their_own_rates():
    mine, theirs = Net(), Net()
    for make, model in ((FusedAdamW, mine), (reference, theirs)):
        params = list(model.parameters())
        optimizer = make([{"params": params[:2]}, {"params": params[2:-1], "lr": 1e-3, "weight_decay": 0.0}], **OPTIONS)
        optimizer.add_param_group({"params": params[-1:], "betas": (0.5, 0.6)})
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(3):

            def closure(model=model, optimizer=optimizer, step=step):
                optimizer.zero_grad()
                loss = model(rows(0, step)).square().mean()
                loss.backward()
                return loss

            assert optimizer.step(closure).requires_grad  # the closure's own loss
            schedule.step()
    assert_same_bits(values(mine), values(theirs))


def test_parameters_without_a_gradient_stay_and_count_no_step():
    param, other = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    optimizer = FusedAdamW([param, other], **OPTIONS)
    for step in range(3):
        param.grad = torch.ones(3)
        other.grad = torch.ones(3) if step == 1 else None
        optimizer.step()
    assert optimizer.state[param]["step"] == 3
    assert optimizer.state[other]["step"] == 1
    only = torch.nn.Parameter(torch.ones(3))
    alone = FusedAdamW([only], **OPTIONS)
    only.grad = torch.ones(3)
    alone.step()
    assert torch.equal(only, other)


def test_a_copy_of_the_optimizer_goes_on_as_it_does():
    model = Net()
    optimizer = FusedAdamW(model.parameters(), **OPTIONS)
    take_steps(optimizer, model)
    model_too, optimizer_too = copy.deepcopy((model, optimizer))
    for pair in ((optimizer, model), (optimizer_too, model_too)):
        take_steps(*pair, first=3)
    assert_same_bits(values(model), values(model_too))


@needs_triton
def test_triton_serves_by_argument_and_by_context():
    by_reference, by_argument, by_context = Net(), Net(), Net()
    take_steps(FusedAdamW(by_reference.parameters(), **OPTIONS), by_reference)
    take_steps(FusedAdamW(by_argument.parameters(), **OPTIONS, kernels="triton"), by_argument)
    with use_kernels("triton"):
        take_steps(FusedAdamW(by_context.parameters(), **OPTIONS), by_context)
    assert_same_bits(values(by_argument), values(by_context))
    for one, other in zip(values(by_argument), values(by_reference), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)  # hyper-parameters in fp32
    assert not all(torch.equal(*pair) for pair in zip(values(by_argument), values(by_reference), strict=True))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lr": -1.0}, "lr: -1.0"),
        ({"betas": (1.0, 0.9)}, "beta1: 1.0"),
        ({"eps": float("nan")}, "eps: nan"),
        ({"weight_decay": -1.0}, "weight_decay: -1.0"),
        ({"lr": torch.tensor(1e-3)}, "lr: tensor"),
    ],
)
def test_a_wrong_hyper_parameter_is_named_and_leaves_no_group(given, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        FusedAdamW([torch.nn.Parameter(torch.ones(2))], **given)
    optimizer = FusedAdamW([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match=f"^{message}"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], **given})
    assert len(optimizer.param_groups) == 1


def test_what_it_cannot_do_is_refused():
    param = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = FusedAdamW([param])
    saved = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2, 2))], amsgrad=True).state_dict()
    optimizer.load_state_dict(saved)
    param.grad = torch.ones(2, 2)
    with pytest.raises(ValueError, match=r"^amsgrad: FusedAdamW has no such variant"):
        optimizer.step()
    coupled = torch.optim.Adam([torch.nn.Parameter(torch.ones(2, 2))], weight_decay=0.1).state_dict()
    optimizer.load_state_dict(coupled)
    with pytest.raises(ValueError, match=r"^decoupled_weight_decay: FusedAdamW adds no decay to gradients"):
        optimizer.step()
    optimizer = FusedAdamW([param])
    param.grad = torch.ones(2, 2).to_sparse()
    with pytest.raises(ValueError, match=r"^params: the gradient of a parameter of shape \(2, 2\) is sparse"):
        optimizer.step()
    with pytest.raises(ValueError, match=r"^copies: a tensor of shape \(3,\) is no parameter"):
        optimizer.write_copies({torch.ones(3): torch.ones(3)})
    with pytest.raises(ValueError, match=r"^copies: shape \(4,\) is not its parameter's \(2, 2\)"):
        optimizer.write_copies({param: torch.ones(4)})


# ------------------------------------------------------------------------------------------------ under `Zero`


def clipped(turn: Turn) -> None:
    backward(turn)
    if turn.zero is not None:
        turn.zero.clip_grad_norm_(0.05)


def clipped_twice_and_looked_at(turn: Turn) -> None:
    backward(turn)
    if turn.zero is None:
        return
    before = turn.zero.full_grads()
    norm = turn.zero.clip_grad_norm_(0.05)
    after = turn.zero.full_grads()
    for name, grad in before.items():
        torch.testing.assert_close(after[name], grad * (0.05 / (norm + 1e-6)))
    torch.testing.assert_close(turn.zero.clip_grad_norm_(0.05), torch.tensor(0.05), rtol=1e-4, atol=0)


def test_every_stage_equals_one_process():
    assert_every_stage_equals_one_process(Net, optimizer=FusedAdamW, **OPTIONS)


def at_each_stage(turn, optimizer, precision, stages=tuple(STAGES), **kwargs):
    """Weights by stage and rank, of two thread ranks."""

    def trained(comm, stage):
        settings = {"stage": stage, "precision": precision}
        return train(comm, Net, turn, settings, optimizer=optimizer, **OPTIONS, **kwargs)

    return [run_threads(lambda comm, s=stage: trained(comm, s), 2, timeout_s=120) for stage in stages]


@pytest.mark.parametrize("precision", [None, BF16])
def test_sixteen_bit_weights_written_in_its_pass_are_those_of_a_pass_of_their_own(precision):
    mine = at_each_stage(backward, FusedAdamW, precision)
    theirs = at_each_stage(backward, torch.optim.AdamW, precision, foreach=False)
    for by_rank, others in zip(mine, theirs, strict=True):
        for weights, expected in zip(by_rank, others, strict=True):
            assert_same_bits(list(weights.values()), list(expected.values()))


@pytest.mark.parametrize("turn", [clipped, clipped_twice_and_looked_at])
def test_clipping_as_it_reads_is_clipping_before(turn):
    """Up to a unit of fp32 in the norm, which torch sums in another precision; between stages, the same bits."""
    mine = at_each_stage(turn, FusedAdamW, None)
    (expected, _), *_ = at_each_stage(turn, torch.optim.AdamW, None, stages=(0,), foreach=False)
    for weights in (weights for by_rank in mine for weights in by_rank):
        assert_same_bits(list(weights.values()), list(mine[0][0].values()))
        for name, whole in expected.items():
            torch.testing.assert_close(weights[name], whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_passes_that_are_saved(stage):
    """Between backward and the next forward, nobody but the optimizer touches gradients and own weights."""

    def rank_main(comm):
        zero = Zero(Net(), stage=stage, comm=comm, precision=BF16)
        optimizer = zero.optimizer(FusedAdamW, **OPTIONS)
        zero.model(rows(comm.rank)).square().mean().backward()
        grads = [piece.grad.clone() for piece in zero.pieces(optimizer)]
        zero.clip_grad_norm_(1e-3)
        unscaled = [piece.grad.clone() for piece in zero.pieces(optimizer)]
        optimizer.step()
        due = [group.params._copy_due for unit in zero.units for group in unit.groups]
        return grads, unscaled, due, zero._runtime.weights_readable

    for grads, unscaled, due, readable in run_threads(rank_main, 2, timeout_s=120):
        assert_same_bits(grads, unscaled)
        assert not any(due)
        assert readable == (stage == 0)  # the others still have to be told the other rank's weights


def test_a_parameter_that_joins_later_is_written_too():
    model = Net()
    zero = Zero(model, stage=1, comm=LocalCommunicator(), precision=BF16)
    first, *others = model.parameters()
    optimizer = zero.optimizer(FusedAdamW, [first], **OPTIONS)
    optimizer.add_param_group({"params": others})
    backward(Turn(model, 0, 0))
    optimizer.step()
    for group in (group for unit in zero.units for group in unit.groups):
        assert torch.equal(group.params.full, group.params.master.bfloat16())
        assert not group.params.stale


def test_two_optimizers_of_which_one_saves_passes():
    """A factor is left to nobody unless all can take it, and own weights are copied where one optimizer does not."""

    def trained(comm, cls, kwargs):
        model = Net()
        zero = Zero(model, stage=2, comm=comm, precision=BF16)
        params = list(model.parameters())
        pair = [zero.optimizer(cls, params[::2], **OPTIONS, **kwargs), zero.optimizer(torch.optim.SGD, params[1::2])]
        for step in range(3):
            backward(Turn(model, comm.rank, step))
            zero.clip_grad_norm_(0.05)
            for optimizer in pair:
                optimizer.step()
                optimizer.zero_grad()
        return list(zero.state_dict().values())

    mine = run_threads(lambda comm: trained(comm, FusedAdamW, {}), 2, timeout_s=120)
    theirs = run_threads(lambda comm: trained(comm, torch.optim.AdamW, {"foreach": False}), 2, timeout_s=120)
    for one, other in zip(mine, theirs, strict=True):
        assert_same_bits(one, other)


def test_a_factor_that_is_due_reaches_those_who_do_not_read_by_themselves():
    """Accumulation after clipping, a closure, and gradients that are set to zero while the norm is not finite."""
    model = Net()
    zero = Zero(model, stage=2, comm=LocalCommunicator())
    optimizer = zero.optimizer(FusedAdamW, **OPTIONS)

    def grads():
        return [piece.grad.clone() for piece in zero.pieces(optimizer)]

    backward(Turn(model, 0, 0))
    alone = grads()
    norm = zero.clip_grad_norm_(0.05)
    backward(Turn(model, 0, 0))
    for grad, once in zip(grads(), alone, strict=True):
        torch.testing.assert_close(grad, once * (0.05 / (norm + 1e-6)) + once)

    seen = []

    def closure():
        optimizer.zero_grad()
        backward(Turn(model, 0, 1))
        zero.clip_grad_norm_(0.05)
        seen.extend(grads())

    optimizer.step(closure)
    factor = 0.05 / (torch.cat(seen).norm() + 1e-6)
    for grad, before in zip(grads(), seen, strict=True):
        torch.testing.assert_close(grad, before * factor)

    next(iter(optimizer.param_groups[0]["params"])).grad.fill_(float("nan"))
    assert zero.clip_grad_norm_(0.05).isnan()
    optimizer.zero_grad(set_to_none=False)
    assert not any(grad.any() for grad in grads())
    backward(Turn(model, 0, 0))
    after = grads()
    optimizer.zero_grad()
    backward(Turn(model, 0, 0))
    for grad, fresh in zip(after, grads(), strict=True):  # nothing is left of that factor
        assert torch.equal(grad, fresh)


@needs_triton
def test_the_kernel_under_the_engine_writes_16_bit_weights_and_clips():
    ends = []
    for kernels in ("reference", "triton"):
        weights = train(
            LocalCommunicator(),
            Net,
            clipped,
            {"stage": 2, "precision": MixedPrecision(param_dtype=torch.float16)},  # bf16 the interpreter truncates
            optimizer=FusedAdamW,
            kernels=kernels,
            **OPTIONS,
        )
        ends.append(weights)
    for name in ends[0]:
        torch.testing.assert_close(ends[0][name], ends[1][name], rtol=0, atol=1e-6)
