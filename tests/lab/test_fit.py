"""`plan --fit`: levers are pulled in their order until the job fits, and those that it can do without are let go."""

import json
from functools import cache
from itertools import accumulate

import pytest

from lab.small_plans import small_gpu
from zeroshard.host.errors import UserError
from zeroshard.lab.planner.command import answer_plan, arguments
from zeroshard.lab.planner.config import PlanConfig
from zeroshard.lab.planner.fit import chosen, fitted, levers_in_words
from zeroshard.lab.planner.levers import levers
from zeroshard.lab.planner.planner import planner_for
from zeroshard.lab.planner.ways import Ways
from zeroshard.lab.predict import workload
from zeroshard.lab.predict.model_trace import trace_language_model
from zeroshard.settings.validate import validate

LLAMA = {"name": "llama-tiny", "n_layer": 3, "n_head": 4, "n_kv_head": 2, "n_embd": 64, "vocab_size": 512}
FLAGS = [
    "--model.activation-checkpointing full",
    "--model.activation-checkpointing offload",
    "--tiles auto",
    "--sequence-parallel 2",
]


@pytest.fixture(autouse=True)
def _each_job_is_traced_once(monkeypatch):
    """Plans of one job differ here in the memory that there is."""
    monkeypatch.setattr(workload, "trace_language_model", _trace)


_traces = {}


def _trace(model, rows, seq_len, precision, **how):
    key = repr((model.config, model.lora, rows, seq_len, precision, sorted(how.items())))
    if key not in _traces:
        _traces[key] = trace_language_model(model, rows, seq_len, precision, **how)
    return _traces[key]


def tried_in(num_bytes, **changes):
    """What is tried on two GPUs of so many bytes."""
    config = validate(PlanConfig, {"model": LLAMA, "gpus": 2, "seq_len": 512, "stage": "3", **changes})
    planner = planner_for(**{**arguments(config), "gpu": small_gpu(num_bytes)})
    return fitted(planner, Ways([int(config.stage)], 1))


@cache
def needed():
    """Bytes of the job with each lever beside those before it, as given first."""
    given = arguments(validate(PlanConfig, {"model": LLAMA, "gpus": 2, "seq_len": 512}))
    planner = planner_for(**{**given, "gpu": small_gpu(2**40)})
    pulled = accumulate(levers(planner), lambda job, lever: lever.pull(job), initial=planner)
    return [each.row(3, 1).needed_bytes for each in pulled]


@pytest.mark.redundant(but=["3"])
@pytest.mark.parametrize("place", range(5))
def test_the_first_levers_that_are_enough_are_pulled_and_no_others(place):
    by_place = needed()
    assert sorted(by_place, reverse=True) == by_place
    tried = tried_in(by_place[place] / 0.98 + 1)
    assert [each.fits for each in tried[:place]] == [False] * place
    assert [each.row.needed_bytes for each in tried[: place + 1]] == by_place[: place + 1]
    last = chosen(tried)
    assert last.fits
    assert set(last.flags) <= set(FLAGS[:place])
    if place:
        assert FLAGS[place - 1] in last.flags
        assert f"It fits with {' '.join(last.flags)}." in levers_in_words(tried)


def test_a_lever_that_is_not_needed_is_let_go():
    """Tiles free more than inputs of blocks do: with them inputs may stay, on two GPUs that share them."""
    tried = tried_in(needed()[4] * 1.15)
    assert tried[4].flags == ("--model.activation-checkpointing offload", "--tiles auto", "--sequence-parallel 2")
    last = chosen(tried)
    assert len(last.flags) < 3
    assert last.row.needed_bytes > tried[4].row.needed_bytes
    assert last.row.timing.step_s <= tried[4].row.timing.step_s


def test_state_leaves_first_where_it_does_not_fit_alone():
    given = {"gpu": "t4-16gb", "dtype": "float16", "fit": True, "seq_len": 128, "micro_batch": 1}
    model = {"name": "llama-tiny", "n_layer": 2, "n_embd": 8192, "n_head": 64}
    answer = answer_plan(validate(PlanConfig, {**given, "model": model}))
    assert answer.status == 0
    assert "It fits with --offload optimizer.\n" in answer.text
    assert "zeroshard train --model llama-tiny" in answer.text
    assert "--offload optimizer" in answer.text.splitlines()[-1]
    content = json.loads(answer_plan(validate(PlanConfig, {**given, "model": model, "json": True})).text)
    assert [each["flags"] for each in content["fit"]] == [[], ["--offload optimizer"]]
    assert content["fit"][-1]["flags"] == ["--offload optimizer"]
    assert content["fit"][-1]["needed_bytes"] == content["rows"][content["best"]]["needed_bytes"]


@pytest.mark.redundant
def test_where_no_lever_is_enough_the_plan_says_what_else_to_change(monkeypatch):
    monkeypatch.setattr("zeroshard.lab.planner.plan.changes_that_fit", lambda *_: "Nothing fits: buy one.")
    model = {"name": "llama-tiny", "n_layer": 2, "n_embd": 16384, "n_head": 64}
    given = {"model": model, "gpu": "t4-16gb", "dtype": "float16", "fit": True, "seq_len": 128, "micro_batch": 1}
    answer = answer_plan(validate(PlanConfig, given))
    assert answer.status == 3
    assert "None of these is enough." in answer.text
    assert "Nothing fits: buy one." in answer.text


def test_what_fits_as_given_pulls_nothing():
    answer = answer_plan(validate(PlanConfig, {"model": LLAMA, "seq_len": 64, "micro_batch": 1, "fit": True}))
    assert answer.status == 0
    assert "It fits with what is given." in answer.text


def test_levers_that_the_settings_do_not_go_with_are_not_tried():
    """A sequence of an odd number of tokens is not cut in two; tiles do not go with compiled blocks, and both not with
    reproducible steps."""
    for given in ({"seq_len": 1025, "impl": "compile"}, {"reproducible": 2}):
        assert [each.flags for each in tried_in(2**20, **given)] == [(), (FLAGS[0],), (FLAGS[1],)]


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"ask": "fewest-gpus"}, "fit: it is of the table, which ask takes the place of; leave one of the two out"),
        ({"explain": True}, "fit: it is of the table, which explain takes the place of; leave one of the two out"),
        ({"gpu": "l40s,h100-80gb"}, "fit: it is of one device; name one --gpu"),
    ],
)
def test_what_it_does_not_go_with_is_one_line(given, line):
    with pytest.raises(UserError, match=line):
        validate(PlanConfig, {"fit": True, **given})
