"""`zeroshard plan`: what goes together, what it is told in, what it costs, and which of several GPUs to take."""

import json
from dataclasses import replace

import pytest

from zeroshard.cli.flags import flags_of, read_flags
from zeroshard.host.errors import UserError
from zeroshard.lab import plan
from zeroshard.lab.planner.command import answer_plan
from zeroshard.lab.planner.config import PlanConfig
from zeroshard.lab.planner.price import dollars, duration
from zeroshard.lab.planner.request import Request
from zeroshard.lab.predict.hardware import find_device, find_link
from zeroshard.settings.validate import validate

SMALL = {"n_layer": 4, "n_head": 8, "n_kv_head": 4, "n_embd": 256, "vocab_size": 1024, "seq_len": 128}
TINY = "--model gpt2-demo --model.n-layer 2 --model.n-head 2 --model.n-embd 64 --seq-len 64 --micro-batch 1"
EIGHT = "--model llama-tiny --gpus 8 --stage 1 --micro-batch 1 --seq-len 128"


def _answer(words):
    return answer_plan(validate(PlanConfig, read_flags(words.split(), flags_of(PlanConfig)))).text


def _json(words):
    return json.loads(_answer(f"{words} --json"))


# Words, and how the line begins that refuses them.
REFUSED = """
--dtype float32 --autocast | autocast: float32 weights are their own masters; choose dtype bfloat16 or float16
--price 2.5 | price: '2.5' is no price; write dollars an hour of one GPU, as 2.5/h
--price 0/h | price: '0/h' is no price of a GPU; give more than 0 and at most 1e+06/h
--gpu a100-80gb,l40s --price 1/h,2/h,3/h | price: 3 prices for 2 GPUs; give one for each of --gpu, or one for all
--gpu a100-80gb,l40s --explain | gpu: explain is of one device, and 2 are named; name one
--gpu a100-80gb,nothing | gpu: 'nothing' is not a known device; choose one of gb300-279gb, gb200-186gb, b300-270gb,
--price 2/h --ask fewest-gpus | price: it belongs to the table, which ask takes the place of; leave one of the two out
--gpu a100-80gb --attention flash-3 | attention: no rate of flash-3 on a100-80gb is known; choose flash-1 or flash-2
--gpu l40s --attention flash-1 | attention: no rate of flash-1 on l40s-48gb is known; choose flash-2
--gpu t4 | dtype: t4-16gb does not compute in bfloat16; choose float32, float16
--ask fewest-gpus --global-batch 64 | global_batch: 64 would change nothing: fewest-gpus looks at one micro-batch of
--ask longest-sequence --seq-len 64 | seq_len: 64 would change nothing: longest-sequence takes the longest that fits
--reproducible 4 --gpus 2 --accumulate local | reproducible: 4 is given, and accumulate adds up on each rank first,
--reproducible 4 --gpus 4 --shard-size 2 | reproducible: 4 is given, and shard_size adds up over two levels of ranks,
--reproducible 4 --gpus 3 | reproducible: 4 micro-batches cannot be shared out evenly to 3 ranks; use 1, 2, 4 ranks,
--reproducible 4 --gpus 2 --wire.grads int8 --stage 2 | reproducible: 4 is given, and wire.grads rounds what each
--gpus 2 --wire.grads int8 --wire.node-size 2 | wire.node_size: groups of 2 do not partition 2 ranks into several,
--gpus 8 --wire.grads int8 --wire.node-size 3 | wire.node_size: groups of 3 do not partition 8 ranks into several,
--gpus 8 --wire.grads int8 --wire.node-size 2 --shard-size 2 | wire.node_size: 2 is given, and with shard_size = 2
--gpus 8 --wire.grads int8 --wire.node-size 2 --ask fewest-gpus | wire.node_size: fewest-gpus changes the GPUs that
--gpus 2 --wire.grads int8 --stage 0 | wire.grads: int8 is given, and stage 0 has no wire format: no rank owns a
--gpus 8 --node-copy 2 --stage 2 | node_copy: 2 is given, and stage 2 has no sharded weights to gather again; leave
--gpus 8 --node-copy 3 | node_copy: groups of 3 do not partition 8 ranks into several, each in a node; choose one of
--gpus 24 --gpus-per-node 4 --node-copy 8 | node_copy: groups of 8 do not partition 24 ranks into several, each in a
--gpus 4 --node-copy 2 --shard-size 2 | node_copy: groups of 2 do not partition 2 ranks into several, each in a node;
--gpus 8 --node-copy 2 --no-reshard-after-forward | node_copy: 2 is given, and weights that stay unsharded for
--gpus 8 --node-copy 2 --ask fewest-gpus | node_copy: fewest-gpus changes the GPUs that it shares out; leave one of
--gpus 8 --local-steps.every 8 | local_steps.every: 8 needs several replicas, and without a shard_size all ranks form
--gpus 4 --global-batch 66 | global_batch: 66 sequences cannot be shared out to 4 GPUs; give a multiple of 4
--gpu h100-80bg | gpu: 'h100-80bg' is not a known device; did you mean h100-80gb?
--gpu a100 | gpu: 'a100' comes in several sizes; choose a100-80gb or a100-40gb
--gpu nowhere.json | gpu: cannot read nowhere.json (No such file or directory); give a file that `zeroshard bench
--network 400 | network: '400' is not a bandwidth; write a number and a unit, as 400Gbit/s or 1.25GB/s
--network infiniband-nrd | network: 'infiniband-nrd' is not a known link; did you mean infiniband-ndr?
"""


@pytest.mark.parametrize("row", REFUSED.strip().splitlines())
def test_what_does_not_go_together_is_one_line(row):
    words, line = row.split(" | ")
    with pytest.raises(UserError) as raised:
        _answer(words)
    assert str(raised.value).startswith(line)
    assert "\n" not in str(raised.value)


def test_a_thousand_million_micro_batches_are_counted_and_not_listed():
    many, few = (
        _json(f"--gpus 2 --stage 2 --micro-batch 1 --global-batch {rows}")["rows"][0] for rows in (2 * 10**9, 2000)
    )
    assert many["grad_accum_steps"] == 10**9
    scattered = [each["messages"]["bytes_by_op"]["reduce_scatter"] for each in (many, few)]
    assert scattered[0] == 10**6 * scattered[1]
    assert many["messages"]["count"] > 10**9


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--gpus 7", "--network is not used: all 7 GPUs are in one node"),
        ("--gpus 7 --explain", "--network is not used"),
        ("--gpus 7 --gpu a100-80gb,h100-80gb", "--network is not used"),
        ("--gpus 1", "--network is not used: one GPU sends nothing."),
        ("--gpus 9", None),
        ("--gpus 7 --gpus-per-node 2", None),
        ("--gpus 7 --network 400Gbit/s", None),
    ],
)
def test_a_network_that_no_plan_passes_is_named(words, told):
    answer = _answer(f"{TINY} --gpu a100-80gb --network 100Mbit/s {words}")
    assert "not used" not in answer if told is None else answer.splitlines()[-1].startswith(told)


def test_json_names_an_unused_network_too():
    assert _json(f"{TINY} --gpus 7 --network 100Mbit/s")["unused"] == ["network"]
    assert "unused" not in _json(f"{TINY} --gpus 9 --network 100Mbit/s")


def test_a_measured_link_and_a_cpu_have_no_protocol_of_nccl_s():
    found = find_device("h100-80gb")
    on_cpu = replace(found, device=replace(found.device, device_type="cpu"))
    assert Request(world_size=64).cluster(found).between == find_link("400Gbit/s")
    assert not Request(world_size=64).cluster(on_cpu).between.protocols


def test_a_price_is_for_all_gpus_and_all_tokens():
    given = {"gpu": "h100-80gb", "micro_batch": 2, "overrides": SMALL, "stage": 3}
    found = plan("llama-tiny", world_size=8, **given)
    cost = found.cost(10**10, 2.5)
    assert cost.hours == pytest.approx(1e10 / found.best.tokens_per_s / 3600)
    assert cost.dollars == pytest.approx(cost.hours * 8 * 2.5)
    assert cost.dollars_per_billion == pytest.approx(cost.dollars / 10)
    assert "10B tokens take" in cost.sentence()
    large = {**given, "gpu": "t4", "dtype": "float16", "overrides": {**SMALL, "n_embd": 16384, "n_head": 64}}
    assert plan("llama-tiny", **large).cost(1, 1.0) is None


@pytest.mark.redundant
def test_several_gpus_are_compared_by_dollars_and_else_by_speed():
    words = f"{EIGHT} --gpu h100-80gb,a100-80gb"
    cheap = _answer(f"{words} --price 100/h,0.01/h --tokens 1B")
    assert "The cheapest is a100-80gb" in cheap
    assert "may as well be" not in cheap
    assert "The fastest is h100-80gb" in _answer(words)


def test_of_gpus_whose_ranges_of_rates_overlap_it_is_said_that_either_may_be_the_cheapest():
    words = f"{EIGHT} --gpu h100-80gb,l40s-48gb"
    rates = [plan["rows"][0]["tokens_per_s"] for plan in _json(words)["plans"]]
    told = _answer(f"{words} --price {10 * rates[0] / rates[1]:.3f}/h,9/h")  # a tenth less for the same
    assert "The cheapest is l40s-48gb" in told
    assert "By the ranges of their rates it may as well be h100-80gb." in told
    least, most = rates[1] / 1.6, rates[1] / 0.85
    assert f"{least:,.0f} to {most:,.0f}" in told


@pytest.mark.redundant
def test_a_gpu_without_bfloat16_is_compared_in_float16():
    both = f"{EIGHT} --gpu v100-32gb,h100-80gb"
    old, new = _json(both)["plans"]
    assert (old["dtype"], new["dtype"]) == ("float16", "bfloat16")
    assert old["rows"] == _json(f"{EIGHT} --gpu v100-32gb --dtype float16")["rows"]
    told = _answer(both)
    assert "\n  v100-32gb, float16  yes " in told
    assert told.endswith("v100-32gb does not compute in bfloat16: planned in float16.")


def test_a_gpu_that_cannot_be_planned_leaves_the_others_and_says_why():
    words = f"{EIGHT} --attention flash-3"
    both = f"{words} --gpu a100-80gb,h100-80gb --price 1/h,2/h"
    found = _json(both)
    assert (found["plans"][0]["refused"].partition(":")[0], found["best"]) == ("attention", "h100-80gb")
    assert found["plans"][1]["cost"]["dollars_per_h"] == 2
    assert "a100-80gb is not planned: attention: no rate of flash-3 on a100-80gb is known" in _answer(both)
    with pytest.raises(UserError, match="no rate of flash-3"):
        _answer(f"{words} --gpu a100-80gb,v100-32gb")


@pytest.mark.parametrize(
    ("hours", "value", "told"),
    [(72, 1633.4, "3.0 days $1,633"), (0.5, 5.126, "30 minutes $5.13"), (0.001, 0.00123, "3.6 seconds $0.0012")],
)
def test_times_and_prices_are_told_in_units_that_show_them(hours, value, told):
    assert f"{duration(hours)} {dollars(value)}" == told
