"""What users say of their cluster, and the links that it comes to."""

import json
from dataclasses import replace

import pytest

from zeroshard.errors import ExitStatus, UserError
from zeroshard.lab.planner.command import answer_plan
from zeroshard.lab.planner.config import PlanConfig
from zeroshard.lab.planner.plan import plan
from zeroshard.lab.planner.request import Request
from zeroshard.lab.predict.cluster import Fabric
from zeroshard.lab.predict.hardware import DEVICES, LINKS, find_device, find_link
from zeroshard.lab.predict.rates import SPREAD_UNCALIBRATED, spread
from zeroshard.train.config.validate import validate

SMALL = {"n_layer": 1, "n_head": 4, "n_embd": 32, "vocab_size": 61, "seq_len": 32}


def _cluster(**given):
    asked = Request(**given)
    return asked.cluster(asked.calibration)


def test_a_node_s_gpus_share_its_cards():
    shared = _cluster(world_size=64, network="400Gbit/s", rails=4)
    each = _cluster(world_size=64, network="200Gbit/s")
    assert shared.between.bytes_per_s == each.between.bytes_per_s == 25e9
    for replicas in (False, True):
        assert shared.collective_s("all_reduce", 10**8, 8, replicas=replicas) == each.collective_s(
            "all_reduce", 10**8, 8, replicas=replicas
        )
    assert shared.between.source.startswith("4 cards of 50 GB/s for the 8 GPUs of a node; ")
    assert _cluster(world_size=64, rails=8) == _cluster(world_size=64)
    assert _cluster(world_size=64, rails=16).between.bytes_per_s == 100e9  # two for each GPU
    # GPUs of a tensor have one place in the cluster, and each its own part of the cards
    assert _cluster(world_size=64, rails=4, tensor_parallel=4).between == shared.between


def test_the_command_plans_with_cards_and_pods_and_says_so():
    given = {"model": {"name": "gpt2-demo", **SMALL}, "gpus": 32, "stage": "3", "micro_batch": 1, "network": "10Gbit/s"}
    wide, narrow = (
        json.loads(answer_plan(validate(PlanConfig, {**given, "json": True, **more})).text)
        for more in ({}, {"rails": 4, "oversubscription": 2, "pod_nodes": 1})
    )
    assert narrow["fabric"] == {"oversubscription": 2.0, "pod_nodes": 1}
    assert narrow["between_nodes"]["bytes_per_s"] == wide["between_nodes"]["bytes_per_s"] / 2
    assert narrow["rows"][0]["comm_s"] > wide["rows"][0]["comm_s"]
    assert Fabric(2.0).told() == "1 / 2 of it out of each node"
    told = answer_plan(validate(PlanConfig, {**given, "oversubscription": 2, "pod_nodes": 2, "explain": True})).text
    assert "1 / 2 of it out of pods of 2 nodes" in told
    assert "LL: 13.6 us a call, 2.7 us a step" in told


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rails": -1}, r"^rails: -1 is not a whole number of at least 0; give 0 or more$"),
        ({"rails": 1.5}, r"^rails: 1.5 is not a whole number"),
        ({"oversubscription": 0.5}, r"^oversubscription: 0.5 is no ratio .*; give 1 \(none\) to 1000, as 2 for 2 : 1$"),
        ({"oversubscription": float("nan")}, r"^oversubscription: nan is no ratio"),
        ({"oversubscription": float("inf")}, r"^oversubscription: inf is no ratio"),
        ({"oversubscription": "2:1"}, r"^oversubscription: '2:1' is no ratio"),
        ({"oversubscription": True}, r"^oversubscription: True is no ratio"),
        ({"pod_nodes": 4}, r"^pod_nodes: 4 changes nothing .*; give --oversubscription too, or leave it out$"),
        ({"pod_nodes": -4, "oversubscription": 2}, r"^pod_nodes: -4 is not a whole number"),
        ({"gpu": "tpu-v5e", "world_size": 60}, r"^gpus_per_node: with 60 chips .*; give --gpus-per-node 64, the chips"),
        (
            {"gpu": "tpu-v6e", "world_size": 512, "gpus_per_node": 512},
            r"^gpus_per_node: 512 chips .*; give 256 or fewer$",
        ),
        (
            {"gpu": "tpu-v6e", "offload": "optimizer"},
            r"^offload: the host of a tpu-v6e-32gb is not known; leave it out",
        ),
        ({"gpu": "tpu-v6e", "dtype": "fp8"}, r"^dtype: tpu-v6e-32gb has no products of 8-bit floating point"),
        (
            {"gpu": "tpu-v6e", "dtype": "float16"},
            r"^dtype: tpu-v6e-32gb does not compute in float16; choose bfloat16$",
        ),
    ],
)
def test_what_is_no_cluster_is_refused_in_a_line(given, said):
    with pytest.raises(UserError, match=said):
        plan("gpt2-demo", overrides=SMALL, **given)


def test_a_slice_of_tpus_is_a_node_and_a_whole_pod_a_torus():
    part, whole = (_cluster(gpu="tpu-v5e", world_size=size, gpus_per_node=256) for size in (64, 256))
    assert part.within.bytes_per_s == whole.within.bytes_per_s / 2 == 100e9
    assert whole.within == LINKS["ici-v5e"]
    # two rings of 16 chips, one after the other
    assert whole.fastest("all_gather", 0, 256).latency_s == pytest.approx(10e-6 + 2 * 15 * 1e-6)
    pods = _cluster(gpu="tpu-v5e", world_size=512, gpus_per_node=256, network="25Gbit/s")
    assert not pods.between.protocols
    assert pods.num_nodes(512) == 2


def test_a_plan_for_tpus_is_an_estimate_and_says_so():
    given = {"model": {"name": "gpt2-demo", **SMALL}, "gpus": 16, "gpu": "tpu-v6e", "gpus_per_node": 16, "stage": "3"}
    answer = answer_plan(validate(PlanConfig, {**given, "micro_batch": 1}))
    assert answer.status == ExitStatus.OK
    assert "zeroshard does not do this, plan only: tpu-v6e-32gb." in answer.text
    assert spread(DEVICES["tpu-v6e-32gb"]) == SPREAD_UNCALIBRATED


@pytest.mark.parametrize(
    "name",
    [
        "rtx-3090",
        "rtx-4090",
        "rtx-5090",
        "rtx-a6000",
        "l40s",
        "a10g",
        "v100-16gb",
        "v100-32gb",
        "b200",
        "mi300x",
        "h100-80gb",
        "h100-96gb-500w",
        "h100-pcie",
        "h100-nvl",
        "tpu-v5e",
        "tpu-v6e",
    ],
)
def test_what_people_rent_is_a_row(name):
    assert find_device(name).device in DEVICES.values()


def test_a_measured_link_and_a_cpu_have_no_protocol_of_nccl_s():
    found = find_device("h100-80gb")
    on_cpu = replace(found, device=replace(found.device, device_type="cpu"))
    assert Request(world_size=64).cluster(found).between == find_link("400Gbit/s")
    assert not Request(world_size=64).cluster(on_cpu).between.protocols
