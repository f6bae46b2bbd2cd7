import pytest
import torch
from torch import nn

from zeroshard.comm import NullCommunicator, run_threads
from zeroshard.zero import STAGES, MixedPrecision, RankGroups, Unit
from zeroshard.zero.buffers.unit import build_groups
from zeroshard.zero.core.layout import WHOLE
from zeroshard.zero.state.relayout import lay_out_anew
from zeroshard.zero.whole_tensors.layout import balanced


def _params():
    return [
        ("a", nn.Parameter(torch.ones(3))),
        ("wide", nn.Parameter(torch.ones(2, dtype=torch.float64))),
        ("b", nn.Parameter(torch.ones(4))),
        ("frozen", nn.Parameter(torch.ones(5), requires_grad=False)),
    ]


def _unit(stage=3, precision=None):
    groups = build_groups(
        "u", _params(), STAGES[stage], RankGroups.of(NullCommunicator(2)), precision or MixedPrecision(), {}
    )
    return Unit("u", nn.Identity(), groups)


def test_weights_are_unsharded_between_unshard_and_reshard():
    unit = _unit()
    for each in unit.groups:
        each.params.unshard()
    unit.wait_for_unshard()
    assert all(group.params.full_bytes for group in unit.groups)
    unit.reshard()
    assert not any(group.params.full_bytes for group in unit.groups)


def _masters(unit):
    return {
        slot.name: view
        for group in unit.groups
        for slot, view in zip(
            group.params.layout.slots, group.params.layout.views(group.params.gather_master()), strict=True
        )
    }


@pytest.mark.redundant
@pytest.mark.parametrize("precision", [None, MixedPrecision(param_dtype=torch.bfloat16)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_parameters_leave_their_group_for_one_that_keeps_tensors_whole(stage, precision):
    def go(comm):
        params = [(name, param) for name, param in _params()]
        with torch.no_grad():
            for index, (_, param) in enumerate(params):
                param.copy_(torch.arange(param.numel()) / 3 + index)  # thirds are no bfloat16
        values = {name: param.clone() for name, param in params}
        frozen = values["frozen"]
        values["frozen"] = frozen.to(precision.compute_dtype(frozen.dtype)).to(frozen.dtype)  # it has no master
        unit = Unit("u", nn.Identity(), build_groups("u", params, STAGES[stage], RankGroups.of(comm), precision, {}))
        loads = [0] * 2
        chosen = {dict(params)["b"], dict(params)["wide"]}
        lay_out_anew(unit, chosen, WHOLE, balanced(loads))
        names = [
            (group.params.name, group.keeps_tensors_whole, [s.name for s in group.params.layout.slots])
            for group in unit.groups
        ]
        assert names == [("u", False, ["a"]), ("u#1", True, ["wide"]), ("u#2", False, ["frozen"]), ("u#3", True, ["b"])]
        assert loads == [4, 2]  # the second went where there was less
        masters = _masters(unit)
        assert all(torch.equal(masters[name], value) for name, value in values.items())
        assert {name: masters[name].dtype for name in values} == {name: value.dtype for name, value in values.items()}
        for each in unit.groups:
            each.params.unshard()
        unit.wait_for_unshard()
        compute = {name: precision.compute_dtype(value.dtype) for name, value in values.items()}
        assert all(torch.equal(param, values[name].to(compute[name])) for name, param in params)
        before = list(unit.groups)
        lay_out_anew(unit, chosen, WHOLE, balanced(loads))
        assert unit.groups == before

    precision = precision or MixedPrecision()
    run_threads(go, 2)
