from pathlib import Path

import pytest

from zeroshard.host.errors import UserError
from zeroshard.lab.sweep.cases import SweepConfig, case_name, cases_of, in_words, make_case
from zeroshard.settings.validate import validate
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.config.toml import read_toml


def sweep(**kwargs):
    return validate(SweepConfig, kwargs)


SWEEPS = sorted((Path(__file__).parents[2] / "configs" / "sweeps").glob("*.toml"))


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_each_sweep_of_the_repository_can_run(path):
    config = validate(SweepConfig, read_toml(path))
    assert config.out == f"sweeps/{path.stem}"
    assert [case.refusal for case in cases_of(config) if case.refusal] == []


def test_cases_are_all_combinations_the_last_axis_fastest():
    cases = cases_of(sweep(base={"max_steps": 30}, axes={"strategy": ["zero0", "zero3"], "nproc": [1, 2]}))
    assert [tuple(case.axes.values()) for case in cases] == [("zero0", 1), ("zero0", 2), ("zero3", 1), ("zero3", 2)]
    assert [(case.config.strategy, case.config.nproc, case.config.max_steps) for case in cases] == [
        ("zero0", 1, 30),
        ("zero0", 2, 30),
        ("zero3", 1, 30),
        ("zero3", 2, 30),
    ]


def test_a_name_is_the_hash_of_the_resolved_configuration():
    (one,) = cases_of(sweep(base={"seed": 3, "model": "gpt2-demo"}))
    (same,) = cases_of(sweep(axes={"seed": ["3"]}, base={"out": "elsewhere", "log_interval": 7}))
    (other,) = cases_of(sweep(base={"seed": 4}))
    assert one.name == same.name == case_name(TrainConfig(seed=3))
    assert other.name != one.name
    assert one.name.isalnum()


def test_two_ways_to_say_one_thing_are_one_case():
    assert len(cases_of(sweep(axes={"seed": [1, "1", 2]}))) == 2


def test_a_name_of_a_model_leaves_its_other_settings():
    (case,) = cases_of(sweep(base={"model": {"n_layer": 2}}, axes={"model": ["llama-tiny"]}))
    assert (case.config.model.name, case.config.model.n_layer) == ("llama-tiny", 2)


def test_axes_may_be_nested_and_values_may_be_tables():
    axes = {
        "link": {"bandwidth": ["1Gbit/s"]},
        "model": [{"n_layer": 1}, {"n_layer": 2}],
        "size": [{}, {"model.n_embd": 64, "micro_batch_size": 4}],
    }
    usual, first, _, second = cases_of(sweep(base={"link": {"mode": "simulated"}}, axes=axes))
    assert in_words(usual.axes) == "link.bandwidth 1Gbit/s  n_layer 1  size as in base"
    assert (first.config.model.n_layer, second.config.model.n_layer) == (1, 2)
    assert (second.config.model.n_embd, second.config.micro_batch_size) == (64, 4)
    assert second.config.link.bandwidth == "1Gbit/s"
    assert in_words(second.axes) == "link.bandwidth 1Gbit/s  n_layer 2  model.n_embd 64 micro_batch_size 4"


def test_what_cannot_run_is_refused_alone():
    axes = {"strategy": ["zero2", "ddp"]}
    good, bad = cases_of(sweep(base={"link": {"mode": "simulated", "bandwidth": "1Gbit/s"}}, axes=axes))
    assert good.refusal == ""
    assert bad.config is None
    assert bad.refusal.startswith("link.mode: simulated slows only zeroshard's communicators, and ddp")
    assert make_case({}, {"seed": "x"}).refusal.startswith("seed: 'x' is not a whole number")


@pytest.mark.parametrize(
    ("kwargs", "line"),
    [
        ({"axes": {"stratgy": ["zero0"]}}, r"axes\.stratgy: there is no such setting; did you mean strategy\?"),
        ({"axes": {"strategy": []}}, r"axes\.strategy: has no values"),
        ({"axes": {"strategy": ["zero9"]}}, "axes: no case can run, the first because of strategy: 'zero9'"),
        ({"repeats": 0}, "repeats: 0 is below 1"),
        ({"axes": {"out": ["a", "b"]}}, r"axes\.out: a sweep gives each run a folder of its own; leave it out"),
    ],
)
def test_a_sweep_that_means_nothing_is_refused_in_a_line(kwargs, line):
    with pytest.raises(UserError, match=line):
        cases_of(sweep(**kwargs))
