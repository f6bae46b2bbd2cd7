"""Users who write into weights, move parts of a model, or return weights: as in one process, or refused by name."""

import warnings

import pytest
import torch
from torch import nn

from nets import WIDTH, Net, Turn, assert_every_stage_equals_one_process, rows, set_values
from zeroshard.comm import LocalCommunicator, NullCommunicator, run_threads
from zeroshard.zero import STAGES, MixedPrecision, Zero

BF16 = MixedPrecision(param_dtype=torch.bfloat16)


def at_stages(*stages):
    return pytest.mark.parametrize("stage", stages)


# -- values -------------------------------------------------------------------------------------------------------


def clip(params):
    with torch.no_grad():
        for param in params:
            param.clamp_(-0.1, 0.1)


def clip_data(params):
    for param in params:
        param.data.clamp_(-0.1, 0.1)


def prune(params):
    with torch.no_grad():
        for param in params:
            param.mul_((param.abs() > 0.2).to(param.dtype))


@pytest.mark.redundant
@pytest.mark.parametrize("write", [clip, prune])
@at_stages(0, 1, 2)
def test_what_is_written_between_backward_and_step_is_kept(stage, write):
    """Masters keep the digits of what was not written to."""

    def go(comm):
        net = Net()
        zero = Zero(net, stage, comm=comm, precision=BF16)
        before = zero.state_dict()
        optim = zero.optimizer(torch.optim.SGD, lr=0.0)
        net(rows(comm.rank)).float().sum().backward()
        write(net.parameters())
        optim.step()
        return before, zero.state_dict()

    for before, after in run_threads(go, 2):
        for name, old in before.items():
            new = old.to(torch.bfloat16)
            write([new])
            kept = new == old.to(torch.bfloat16)
            assert torch.equal(after[name], torch.where(kept, old, new.float()))


@pytest.mark.redundant(but=["0"])
@at_stages(*STAGES)
@pytest.mark.filterwarnings("ignore:model. weights are read outside of")
def test_weights_that_are_drawn_anew_before_the_first_step_are_the_ones_that_train(stage):
    """Through ``.data``, too, of which autograd hears nothing; what is sharded says that it cannot."""

    def draw(net):
        for index, param in enumerate(net.parameters()):
            param.data.copy_(torch.full(param.shape, 0.25 * index))

    def go(comm):
        net = Net()
        zero = Zero(net, stage, comm=comm, precision=BF16)
        optim = zero.optimizer(torch.optim.SGD, lr=0.0)
        if stage == 3:
            with pytest.raises(RuntimeError, match=r"^weights: it was written to .*full_params\(write_back=True\)"):
                draw(net)
            with zero.full_params(write_back=True):
                draw(net)
        else:
            draw(net)
        net(rows(comm.rank)).float().sum().backward()
        optim.step()
        return list(zero.state_dict().values())

    for state in run_threads(go, 2):
        assert all(torch.equal(found, torch.full(found.shape, 0.25 * i)) for i, found in enumerate(state))


@pytest.mark.parametrize("write", [clip, clip_data])
@pytest.mark.filterwarnings("ignore:model. weights are read outside of")
def test_sharded_weights_are_not_written_to(write):
    def go(comm):
        net = Net()
        zero = Zero(net, 3, comm=comm, precision=BF16)
        optim = zero.optimizer(torch.optim.SGD, lr=0.1)
        net(rows(comm.rank)).float().sum().backward()
        optim.step()
        assert all(param.isnan().all() for param in net.parameters())  # no old numbers either
        with pytest.raises(RuntimeError, match=r"it was written to while .*full_params\(write_back=True\)"):
            write(net.parameters())
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"^last.bias: it was written to while the weights"):
            net.last.bias.zero_()
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            net.last.bias.zero_()
        with pytest.raises(RuntimeError, match=r"^root: weights were written to .*full_params\(write_back=True\)"):
            net(rows(comm.rank))
        with zero.full_params(write_back=True):
            write(net.parameters())
        net(rows(comm.rank))
        return zero.state_dict()

    for state in run_threads(go, 2):
        assert max(value.abs().max() for value in state.values()) == torch.tensor(0.1, dtype=torch.bfloat16).float()


@pytest.mark.redundant
def test_a_forward_may_clip_its_own_weights():
    class Clipped(nn.Linear):
        def forward(self, x):
            clip([self.weight])
            return super().forward(x)

    assert_every_stage_equals_one_process(lambda: Net(block=lambda: Clipped(WIDTH, WIDTH)))


# -- parts ---------------------------------------------------------------------------------------------------------


def test_a_trunk_of_two_engines_is_refused():
    trunk = nn.Linear(WIDTH, WIDTH)
    one, two = nn.Sequential(trunk, nn.Linear(WIDTH, 1)), nn.Sequential(trunk, nn.Linear(WIDTH, 1))
    zero = Zero(one, 1, comm=LocalCommunicator())
    with pytest.raises(ValueError, match=r"^model: .*has an engine already; call remove\(\)"):
        Zero(two, 1, comm=LocalCommunicator())
    tied = nn.Linear(WIDTH, WIDTH)
    tied.weight = trunk.weight
    with pytest.raises(ValueError, match=r"^model: .*has an engine already"):
        Zero(tied, 1, comm=LocalCommunicator())
    zero.remove()
    Zero(two, 1, comm=LocalCommunicator())


@at_stages(*STAGES)
def test_a_step_after_the_engine_was_removed_says_that_it_would_change_nothing(stage):
    net = Net()
    zero = Zero(net, stage, comm=NullCommunicator(2))
    optim = zero.optimizer(torch.optim.SGD, lr=0.1)
    net(rows(0)).sum().backward()
    zero.remove()
    net(rows(0)).sum().backward()
    for refused in (optim.step, lambda: zero.clip_grad_norm_(1.0)):
        with pytest.raises(RuntimeError, match=r"remove\(\) has detached the engine.*over model.parameters\(\)"):
            refused()


# -- views ---------------------------------------------------------------------------------------------------------


class Table(nn.Module):
    """Returns its weight, or parts of it, beside what it computes."""

    def __init__(self, look=lambda weight: weight):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.look = look

    def forward(self, x):
        return {"x": x @ self.weight, "weight": self.look(self.weight)}


LOOKS = {
    "itself": lambda weight: weight,
    "transposed": lambda weight: weight.t(),
    "a row": lambda weight: weight[0],
    "detached": lambda weight: weight.detach(),
    "in a list": lambda weight: [weight[1:].expand(2, -1, -1)],
}


def leaf(value):
    return value[0][0] if isinstance(value, list) else value


@pytest.mark.redundant
@pytest.mark.parametrize("look", LOOKS)
def test_a_unit_may_return_its_weights(look):
    def path(net, x):
        total = 0.0
        for block in net.blocks:
            found = block(x)
            x = torch.tanh(found["x"])
            total = total + leaf(found["weight"]).square().mean()
        return x + total

    def take_turn(turn: Turn) -> None:
        with torch.no_grad():
            turn.loss()
        turn.loss().backward()

    assert_every_stage_equals_one_process(lambda: Net(block=lambda: Table(LOOKS[look]), path=path), take_turn)


def test_weights_that_a_model_returns_can_be_read_later():
    def go(comm):
        net = Table()
        set_values(net)
        whole = net.weight.detach().clone()
        Zero(net, 3, comm=comm)
        with torch.no_grad():
            evaluated = net(rows(0))["weight"]
        trained = net(rows(0))
        trained["x"].sum().backward()
        return torch.equal(evaluated, whole), torch.equal(trained["weight"], whole)

    assert run_threads(go, 2) == [(True, True)] * 2


def test_weights_that_are_returned_inside_an_object_are_refused_by_name():
    class Holder:
        def __init__(self, weight):
            self.weight = weight

    net = Net(block=lambda: Table(Holder), path=lambda net, x: net.blocks[0](x)["x"])
    Zero(net, 3, comm=NullCommunicator(2))
    with pytest.raises(RuntimeError, match=r"^blocks.0: it returns a view of its own weights .*clone"):
        net(rows(0))


# -- frozen --------------------------------------------------------------------------------------------------------


def frozen_base():
    net = Net()
    net.first.requires_grad_(False)
    net.blocks.requires_grad_(False)
    return net


@pytest.mark.parametrize("world_size", [1, 2])
@at_stages(*STAGES)
def test_a_frozen_base_has_no_masters(stage, world_size):
    net = frozen_base()
    zero = Zero(net, stage, comm=NullCommunicator(world_size), precision=BF16)
    sharded = world_size if stage == 3 else 1
    held = zero.memory_bytes()
    frozen = [group for unit in zero.units for group in unit.groups if not group.trained]
    trained = [group for unit in zero.units for group in unit.groups if group.trained]
    num_bytes = sum(2 * group.params.layout.padded_numel // sharded for group in frozen)
    for group in trained:
        numel = group.params.layout.padded_numel
        num_bytes += 0 if stage == 3 and world_size > 1 else 2 * numel
        num_bytes += 4 * numel // (1 if stage == 0 else world_size)
    assert held["params"] + held["master"] == num_bytes
    assert {value.dtype for value in zero.state_dict().values()} == {torch.float32}
    assert {shard.tensor.dtype for shard in zero.named_shards()} == {torch.float32}


@pytest.mark.redundant
@at_stages(*STAGES)
def test_a_frozen_base_that_is_trained_later_gets_its_masters(stage):
    def go(comm):
        net = frozen_base()
        zero = Zero(net, stage, comm=comm, precision=BF16)
        optim = zero.optimizer(torch.optim.AdamW, lr=1e-4)
        average = zero.ema(0.5)
        for step in range(4):
            if step == 2:
                net.requires_grad_(True)
            net(rows(comm.rank, step)).float().square().mean().backward()
            optim.step()
            optim.zero_grad()
            average.update()
        return zero.state_dict(), {s.dtype for unit in zero.units for group in unit.groups for s in group.shards}

    by_rank = run_threads(go, 2)
    start = {
        name: value if name.startswith("last") else value.bfloat16().float()
        for name, value in Net().state_dict().items()
    }
    for state, dtypes in by_rank:
        assert dtypes == {torch.float32}
        for name, value in state.items():
            moved = (value - start[name]).abs()
            assert 0 < moved.max() < 1e-3  # in steps that bfloat16 would have rounded away


# -- writes that would be lost ----------------------------------------------------------------------------------------

WRITES = {
    "in place": lambda weight: weight.mul_(0.5),
    "through .data": lambda weight: weight.data.mul_(0.5),
    "by an assignment to .data": lambda weight: setattr(weight, "data", weight.data * 0.5),
    "into a row": lambda weight: weight.__setitem__(0, 0.0),
    "by an operator": lambda weight: weight.__iadd__(1.0),
    "by foreach": lambda weight: torch._foreach_mul_([weight], 0.5),
    "by an initialiser": lambda weight: nn.init.normal_(weight, generator=torch.Generator().manual_seed(0)),
    "as an output": lambda weight: torch.add(torch.ones_like(weight), 1.0, out=weight),
    "into a view": lambda weight: weight.view(-1)[3:].zero_(),
    "into a detached one": lambda weight: weight.detach().fill_(2.0),
}


@pytest.mark.redundant(but=["as an output"])
@pytest.mark.filterwarnings("ignore:model. weights are read outside of")
@pytest.mark.parametrize("write", WRITES)
def test_a_write_into_sharded_weights_names_full_params(write):
    """As of averages that are kept by hand, merged adapters, or sharpness-aware steps."""
    net = Net()
    zero = Zero(net, 3, comm=NullCommunicator(2), units=list(net.blocks))
    optim = zero.optimizer(torch.optim.SGD, lr=0.1)
    for _ in range(2):
        for layer in (net.last, net.blocks[1]):
            with torch.no_grad(), pytest.raises(RuntimeError, match=r"sharded.*zero.full_params\(write_back=True\)"):
                WRITES[write](layer.weight)
        net(rows(0)).sum().backward()
        optim.step()
        optim.zero_grad()


@pytest.mark.redundant(but=["1-in place-bf16", "3-by an assignment to .data-bf16"])
@pytest.mark.pairwise
@pytest.mark.parametrize("precision", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("write", WRITES)
@at_stages(*STAGES)
def test_writes_that_full_params_drops_are_told_once(stage, write, precision):
    def go(comm):
        net = Net()
        zero = Zero(net, stage, comm=comm, precision=precision)
        before = zero.state_dict()
        for _ in range(2):
            with torch.no_grad(), zero.full_params():
                WRITES[write](net.last.weight)
        kept = not torch.equal(zero.state_dict()["last.weight"], before["last.weight"])
        with zero.full_params():
            shown = before["last.weight"].to(net.last.weight.dtype)
            assert kept or torch.equal(net.last.weight, shown)
        with torch.no_grad(), zero.full_params(write_back=True):
            WRITES[write](net.last.weight)
        return kept

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        kept = run_threads(go, 2)
    said = [str(each.message) for each in told]
    if stage == 3 or not all(kept):
        assert said == [said[0]] * 2  # of each rank
        assert said[0].startswith("full_params(): weights were written to in this block")
        assert "zero.full_params(write_back=True)" in said[0]
        assert {each.filename for each in told} == {__file__}
    else:
        assert not said


@at_stages(3)
def test_values_that_are_put_back_inside_full_params_are_no_writes(stage):
    net = Net()
    zero = Zero(net, stage, comm=NullCommunicator(2))
    with warnings.catch_warnings(record=True) as told, torch.no_grad():
        warnings.simplefilter("always")
        with zero.full_params():
            own = {name: param.clone() for name, param in net.named_parameters()}
            for param in net.parameters():
                param.mul_(0.5)
            net(rows(0))
            for name, param in net.named_parameters():
                param.copy_(own[name])
        with zero.full_params(), zero.full_params(write_back=True):
            net.last.weight.mul_(0.5)
    assert not told
