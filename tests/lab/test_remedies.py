"""Remedies by name, and the axis of a sweep that they are."""

from __future__ import annotations

import pytest

from zeroshard.errors import UserError
from zeroshard.lab.sweep.cases import SweepConfig, cases_of
from zeroshard.lab.sweep.remedies import settings_of
from zeroshard.train.config.validate import validate


def sweep(**kwargs) -> SweepConfig:
    return validate(SweepConfig, {"base": {"nproc": 2, "max_steps": 40, **kwargs.pop("base", {})}, **kwargs})


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("none", {}),
        ("int8", {"wire.weights": "int8", "wire.grads": "int8"}),
        ("int8, int4", {"wire.weights": "int8", "wire.grads": "int4"}),
        ("bf16,block=64", {"wire.weights": "bfloat16", "wire.grads": "bfloat16", "wire.block": 64}),
        ("every=32,int8", {"replicas.every": 32, "replicas.wire": "int8"}),
        (
            "every=32,fragments=4,overlap=2",
            {"replicas.every": 32, "replicas.fragments": 4, "replicas.overlap_steps": 2},
        ),
        ("int8,node-copy=2", {"wire.weights": "int8", "wire.grads": "int8", "node_copy": 2}),
        ("every=8,outer-lr=0.5", {"replicas.every": 8, "replicas.outer_lr": 0.5}),
    ],
)
def test_a_remedy_is_settings_by_name(name, settings):
    assert settings_of(name) == settings


@pytest.mark.parametrize(
    ("kwargs", "line"),
    [
        ({"remedies": ["int9"]}, r"remedies: 'int9': there is no 'int9'; did you mean int"),
        ({"remedies": ["every"]}, r"remedies: 'every': there is no 'every'"),
        ({"remedies": ["none,int8"]}, r"remedies: 'none,int8': there is no 'none'"),
        ({"remedies": ["every=x"]}, r"remedies: 'every=x': 'x' is not a whole number; write every=32"),
        ({"remedies": ["every=1"]}, r"remedies: 'every=1': replicas that meet at each step take no local steps"),
        ({"remedies": ["every=8,every=9"]}, r"remedies: 'every=8,every=9' has every twice"),
        ({"remedies": ["int8,int4,int8"]}, r"remedies: 'int8,int4,int8' has 3 formats; give at most 2"),
        ({"remedies": ["every=8,int8,int4"]}, r"has 2 formats; give at most 1: local steps send differences"),
        ({"remedies": ["int8", "int8,int8"]}, r"remedies: 'int8,int8' is 'int8' in other words"),
        ({"remedies": ["int8", "int8"]}, r"remedies: 'int8' is given twice; leave one of both out"),
        ({"remedies": ["none"], "base": {"wire": {"grads": "int8"}}}, r"base\.wire\.grads: remedies set it"),
        ({"remedies": ["none"], "axes": {"replicas.every": [1, 2]}}, r"axes\.replicas\.every: remedies set it"),
        ({"remedies": ["none"], "axes": {"x": [{"node_copy": 2}]}}, r"axes\.node_copy: remedies set it"),
        ({"axes": {"remedy": ["int8"]}}, r"axes\.remedy: there is no such setting; write remedies beside the table"),
    ],
)
def test_a_remedy_that_means_nothing_is_refused_in_a_line(kwargs, line):
    with pytest.raises(UserError, match=line):
        cases_of(sweep(**kwargs))


def test_remedies_are_an_axis_and_local_steps_take_a_nodes_ranks_as_a_replica():
    link = {"mode": "simulated", "bandwidth": "1Gbit/s", "node_size": 2}
    asked = sweep(remedies=["none", "every=4"], axes={"strategy": ["zero2", "zero3"]}, base={"link": link, "nproc": 4})
    found = [(case.axes, case.config.replicas.every, case.config.shard_size) for case in cases_of(asked)]
    assert found == [
        ({"strategy": "zero2", "remedy": "none"}, 1, 0),
        ({"strategy": "zero2", "remedy": "every=4"}, 4, 2),
        ({"strategy": "zero3", "remedy": "none"}, 1, 0),
        ({"strategy": "zero3", "remedy": "every=4"}, 4, 2),
    ]
    (own,) = cases_of(sweep(remedies=["every=4"], base={"shard_size": 1}))
    assert own.config.shard_size == 1
