"""What a plan says of ways to train that zeroshard has no code for, and of weights kept in other ways."""

import json
from dataclasses import replace

import pytest
import torch

from zeroshard import Zero
from zeroshard.comm import NullCommunicator
from zeroshard.errors import UserError
from zeroshard.flags import flags_of, read_flags
from zeroshard.lab import plan
from zeroshard.lab.planner.command import answer_plan
from zeroshard.lab.planner.config import PlanConfig
from zeroshard.lab.planner.planner import planner_for
from zeroshard.lab.planner.price import dollars, duration
from zeroshard.lab.planner.show import heading, notes, seconds
from zeroshard.lab.predict.actions import Compute
from zeroshard.lab.predict.cut import cut
from zeroshard.lab.predict.memory import OPTIMIZER_STATES
from zeroshard.lab.predict.plan_only import FP8_TIME, PlanOnly
from zeroshard.models import build_model
from zeroshard.models.adapters import Lora
from zeroshard.profiling.devices import DEVICES
from zeroshard.train.config.sections import SHORTHANDS
from zeroshard.train.config.validate import validate

SMALL = {"n_layer": 4, "n_head": 8, "n_kv_head": 4, "n_embd": 256, "vocab_size": 1024, "seq_len": 128}


def _plan(model="llama-tiny", **changes):
    given = {"gpu": "h100-80gb", "micro_batch": 2, "overrides": SMALL, "stage": 3, **changes}
    if model != "llama-tiny":
        given["overrides"] = {key: value for key, value in SMALL.items() if key != "n_kv_head"}
    return plan(model, **given)


def _row(model="llama-tiny", **changes):
    return _plan(model, **changes).rows[0]


def _flops(row, *, attention=False):
    return sum(work.flops for work in _works(row) if work.attention == attention)


def _works(row):
    return [work for action in row.step.last if isinstance(action, Compute) for work in action.work]


def _padded(bytes_each, row, num_params):
    """Bytes of state for each parameter, but for padding and step counts."""
    return sum(row.step.before_update.values()) == pytest.approx(bytes_each * num_params, rel=0.01)


def test_fp8_makes_products_of_blocks_faster_and_changes_no_memory():
    plain, fast = _row(), _row(dtype="fp8")
    assert plain.step.peak == fast.step.peak
    assert _flops(plain) * FP8_TIME < _flops(fast) < _flops(plain)  # the head is not in 8 bits
    assert _flops(plain, attention=True) == _flops(fast, attention=True)


@pytest.mark.parametrize(("name", "bits", "block"), [("AdamW8bit", 8, 256), ("AdamW4bit", 4, 128)])
def test_quantised_states_are_blocks_with_a_scale_each(name, bits, block):
    state = OPTIMIZER_STATES[name]
    assert state.num_bytes((4096 * 10,), 4) == 2 * (40960 * bits // 8 + 4 * 40960 // block)
    assert state.num_bytes((4095,), 4) == 2 * 4 * 4095  # too small to be quantised
    found = _plan(optimizer=name)
    assert found.plan_only == (name,)
    assert _padded(10 + 2 * (bits / 8 + 4 / block), found.rows[0], found.workload.num_params)


def test_an_optimizer_inside_backward_leaves_two_units_gradients():
    plain, inside = _row(), _row(optimizer_in_backward=True)
    assert inside.step.peak.by_category["grads"] < 0.5 * plain.step.peak.by_category["grads"]
    assert inside.needed_bytes < plain.needed_bytes
    assert inside.step.before_update["grads"] == 0


def test_an_optimizer_on_the_host_leaves_16_bit_weights():
    found = _plan(offload="optimizer")
    row, num_params = found.rows[0], found.workload.num_params
    assert _padded(2, row, num_params)
    assert row.step.host_bytes == pytest.approx((4 + 8 + 4) * num_params, rel=0.01)
    assert "of masters, states and gradients" in " ".join(notes(found))
    assert row.timing.exposed_by["offload"] > 0
    sharded = _plan(offload="optimizer", world_size=4)
    assert _padded(2 / 4, sharded.rows[0], num_params)  # a shard in 16 bits, where ours keeps the master's


def test_autocast_keeps_fp32_and_computes_in_16_bits():
    found = _plan(autocast=True)
    assert _padded(16, found.rows[0], found.workload.num_params)
    assert found.workload.dtype == "bfloat16"
    works = [w for action in found.rows[0].step.last if isinstance(action, Compute) for w in action.work]
    assert {work.dtype for work in works if work.shape} == {"bfloat16"}


@pytest.mark.parametrize("stage", [0, 3])
def test_16_bit_weights_without_masters_are_held_as_the_engine_does(stage):
    row = _row(world_size=4, stage=stage, master_weights=False, overrides={**SMALL, "n_layer": 2})
    model = build_model("llama-tiny", overrides={**SMALL, "n_layer": 2}).bfloat16()
    zero = Zero(model, stage, comm=NullCommunicator(4), units=model.units)
    optim = zero.optimizer(torch.optim.AdamW, lr=1e-3)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    for _ in range(2):
        optim.zero_grad()
        model(tokens, tokens).backward()
        held = zero.memory_bytes()
        optim.step()
    planned = dict(row.step.before_update)
    # On CUDA a replicated optimizer has whole tensors, and so fewer step counts than on this machine.
    slack = abs(planned.pop("optimizer") - held["optimizer"])
    assert slack < 1000
    assert all(held[name] == num_bytes for name, num_bytes in planned.items())


@pytest.mark.parametrize("model", ["llama-tiny", "gpt2-demo"])
def test_a_tensor_s_ranks_share_out_weights_and_products(model):
    whole, part = _row(model, stage=0), _row(model, stage=0, world_size=4, tensor_parallel=4)
    assert _flops(part) == pytest.approx(_flops(whole) / 4, rel=0.01)
    assert _flops(part, attention=True) == _flops(whole, attention=True) / 4
    params = [sum(row.step.before_update.values()) for row in (whole, part)]
    assert params[0] / 4 < params[1] < params[0] / 3  # norms and positions are everybody's
    assert part.timing.exposed_by["tensor_parallel"] > 0
    assert part.step.tokens == whole.step.tokens


def test_a_sequence_s_ranks_share_out_its_attention():
    whole, part = _row(stage=0), _row(stage=0, world_size=4, context_parallel=4)
    assert _flops(part, attention=True) == _flops(whole, attention=True) / 4
    assert part.step.tokens == whole.step.tokens / 4
    assert part.tokens_per_s / part.step.tokens * part.timing.step_s == pytest.approx(4)


def test_a_pipeline_idles_while_it_fills():
    short, long = (
        _row(stage=0, world_size=2, pipeline_parallel=2, global_batch=2 * num, micro_batch=2) for num in (1, 8)
    )
    share = [row.timing.exposed_by["pipeline_parallel"] / row.timing.compute_s for row in (short, long)]
    assert share[0] > 1
    assert 1 / 8 < share[1] < 0.5
    one = _plan(stage=0, overrides={**SMALL, "n_layer": 2}).workload.trace(2, "cuda").activation_bytes
    kept = long.step.peak.by_category["activations"]
    assert kept == pytest.approx(2 * one, rel=1e-3)  # as many micro-batches under way as stages


def test_a_tensor_of_two_nodes_sends_between_them():
    sizes = {**SMALL, "n_head": 16, "n_kv_head": 16}
    inside, across = (
        _plan(stage=0, world_size=16, tensor_parallel=16, gpus_per_node=size, overrides=sizes) for size in (16, 8)
    )
    assert across.rows[0].timing.exposed_by["tensor_parallel"] > inside.rows[0].timing.exposed_by["tensor_parallel"]
    assert across.as_dict()["gpus_per_node"] == 8
    assert "\n8 in a node over nvlink4" in heading(across)
    assert "nodes over 50 GB/s" in heading(across)
    assert "micro-batch 2, one replica:" in across.advice


def test_ranks_of_a_context_are_in_other_nodes_where_a_tensor_fills_one():
    def took(**changes):
        return _row(stage=0, world_size=16, gpus_per_node=8, **changes).timing.exposed_by["context_parallel"]

    whole = took(context_parallel=2, tensor_parallel=1, overrides={**SMALL, "n_head": 8, "n_kv_head": 8})
    # An eighth of the keys and values, over a link that is slower by more than that.
    assert took(context_parallel=2, tensor_parallel=8, overrides={**SMALL, "n_head": 8, "n_kv_head": 8}) > whole


def test_the_host_of_a_node_keeps_the_states_of_all_its_gpus():
    found = _plan(offload="optimizer", stage=0, world_size=16, tensor_parallel=4, gpus_per_node=8)
    total = 8 * found.rows[0].step.host_bytes / 2**30
    assert f"The host of a node holds {total:,.1f} GiB" in " ".join(notes(found))


LORA = Lora(8, targets=("all-linear",))


def _numel(workload, *, trained):
    return sum(param.numel() for param in workload.model.parameters() if param.requires_grad == trained)


def _lora(model="llama-tiny", **changes):
    sizes = {key: value for key, value in SMALL.items() if model == "llama-tiny" or key != "n_kv_head"}
    return planner_for(model, **{"lora": LORA, **changes, "overrides": {**sizes, **changes.get("overrides", {})}})


@pytest.mark.parametrize("model", ["llama-tiny", "gpt2-demo"])
def test_a_tensor_s_parts_of_adapters_add_up_to_all_of_them(model):
    whole, part = _lora(model), _lora(model, world_size=4, tensor_parallel=4).part
    plain = _lora(model, world_size=4, tensor_parallel=4, lora=None).part
    assert _numel(part, trained=False) == _numel(plain, trained=True)  # the model's own matrices as without adapters
    shared = summed = 0
    for name, param in whole.workload.model.named_parameters():
        loses_columns = any(layer in name for layer in ("o_proj", "down_proj", "c_proj"))
        if "lora_" in name:
            is_whole = ("lora_B" in name) if loses_columns else ("lora_A" in name)
            shared, summed = shared + (not is_whole) * param.numel(), summed + is_whole * param.numel()
    assert _numel(part, trained=True) == shared // 4 + summed
    assert shared % 4 == 0


@pytest.mark.parametrize("how", ["tensor_parallel", "context_parallel", "pipeline_parallel"])
def test_adapters_of_one_rank_alone_are_as_without_it(how):
    plain, alone = _lora(world_size=2), _lora(world_size=2, **{how: 1})
    assert plain.row(3, 2) == alone.row(3, 2)
    assert plain.part is plain.workload


def test_stages_of_a_pipeline_share_out_adapters():
    whole, part = _lora(), _lora(world_size=2, pipeline_parallel=2).part
    assert 2 * _numel(part, trained=True) == _numel(whole.workload, trained=True)
    outside = _numel(_lora(overrides={"n_layer": 1}).workload, trained=False)
    outside -= _numel(_lora(overrides={"n_layer": 2}).workload, trained=False) - outside
    assert 2 * _numel(part, trained=False) - outside == _numel(whole.workload, trained=False)  # each has both ends


def test_a_context_s_ranks_have_all_adapters():
    whole, part = _row(lora=LORA, stage=0), _row(lora=LORA, stage=0, world_size=4, context_parallel=4)
    assert part.step.before_update == whole.step.before_update
    assert _flops(part, attention=True) == _flops(whole, attention=True) / 4
    assert part.step.tokens == whole.step.tokens / 4


@pytest.mark.parametrize("stage", [0, 3])
def test_a_tensor_s_part_with_adapters_is_held_as_the_engine_does(stage):
    sizes = {**SMALL, "n_layer": 2}
    row = _row(world_size=8, stage=stage, tensor_parallel=4, dtype="float32", lora=LORA, overrides=sizes)
    model = build_model("llama-tiny", overrides=sizes, lora=LORA)
    cut(model, 4)
    zero = Zero(model, stage, comm=NullCommunicator(2), units=model.units)
    optim = zero.optimizer(torch.optim.AdamW, lr=1e-3)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    for _ in range(2):
        optim.zero_grad()
        model(tokens, tokens).backward()
        held = zero.memory_bytes()
        optim.step()
    planned = dict(row.step.before_update)
    assert abs(planned.pop("optimizer") - held["optimizer"]) < 1000  # step counts, of tensors or of buffers
    assert all(held[name] == num_bytes for name, num_bytes in planned.items())


def test_a_tensor_s_ranks_sum_what_is_between_the_factors_of_each_adapter():
    with_ = _lora(world_size=4, tensor_parallel=4)
    stream, inner = with_.part.stream(2, 1), 2 * 128 * 8 * 2  # rows, tokens, rank, bytes
    assert stream.adapter_bytes == inner
    assert stream.adapters == (2 * 4, 5 * 4)  # o and down; q, k, v, gate and up, of four blocks
    row, reduced = with_.row(0, 2), with_.wires.collective_s
    took = 4 * 4 * reduced("all_reduce", stream.residual_bytes, 4) + 7 * 4 * reduced("all_reduce", inner, 4)
    assert row.timing.exposed_by["tensor_parallel"] == pytest.approx(took)


def test_compiled_code_is_fused_under_autocast_and_from_the_reference():
    plain, compiled = _row(autocast=True), _row(autocast=True, impl="compile")
    assert sum(a.num_bytes for a in _works(compiled)) < 0.8 * sum(a.num_bytes for a in _works(plain))
    ours, reference = (_row(impl="compile", kernels=kernels) for kernels in ("auto", "reference"))
    assert (ours.needed_bytes, ours.timing.step_s) == (reference.needed_bytes, reference.timing.step_s)


def test_a_module_of_others_is_issued_operation_by_operation():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    given = {"world_size": 2, "inputs": lambda rows: (torch.zeros(rows, 8),), "stage": 1, "micro_batch": 1}
    assert plan(model, **given).software.impl == "eager"
    assert plan(model, impl="compile", **given).software.impl == "compile"
    assert _plan().software.impl == "kernels"


def test_a_device_computes_in_8_bits_under_its_driver_s_name():
    for name, serves in (("NVIDIA H100 80GB HBM3", True), ("NVIDIA L4", True), ("NVIDIA A100-SXM4-40GB", False)):
        device = replace(DEVICES["h100-80gb"], name=name)
        if serves:
            PlanOnly(fp8=True).check(1, device)
        else:
            with pytest.raises(UserError, match="no products of 8-bit"):
                PlanOnly(fp8=True).check(1, device)


def test_whole_tensors_on_many_gpus_are_said_to_be_padding():
    found = _plan(optimizer="muon", world_size=16)
    assert found.rows[0].padding > 2
    assert "Muon keeps tensors whole" in " ".join(notes(found))
    assert not notes(_plan(optimizer="adamw", world_size=64))


def test_explain_tells_what_comes_on_top():
    words = "--model llama-tiny --gpus 2 --tensor-parallel 2 --stage 3 --micro-batch 1 --seq-len 128"
    told = _answer(f"{words} --explain").text
    assert "On top, plan only: tensor_parallel " in told
    row = json.loads(_answer(f"{words} --json").text)["rows"][0]
    assert told.startswith(f"One step of micro-batch 1, one replica: {seconds(row['step_s'])}, ")
    assert f" and {seconds(row['exposed_s'])} waiting;" in told
    assert "One rank sends nothing." in told
    assert "among 1 ranks" not in told


def _answer(words):
    return answer_plan(validate(PlanConfig, read_flags(words.split(), flags_of(PlanConfig, SHORTHANDS))))


def test_what_zeroshard_does_not_do_is_said():
    said = _answer("--model llama-tiny --gpus 8 --tensor-parallel 2 --dtype fp8 --stage 1 --micro-batch 1").text
    assert "zeroshard does not do this, plan only: tensor_parallel 2." in said


@pytest.mark.parametrize(
    ("words", "field", "what"),
    [
        ("--gpus 8 --tensor-parallel 3", "tensor_parallel", "do not divide 8 GPUs"),
        (
            "--model llama-tiny --model.n-head 4 --model.n-kv-head 2 --gpus 4 --tensor-parallel 4",
            "tensor_parallel",
            "n_kv",
        ),
        (
            "--model llama-tiny --lora 8 --lora.targets blocks.0.self_attn.q_proj --gpus 2 --pipeline-parallel 2",
            "pipeline_parallel",
            "in some blocks alone",
        ),
        ("--gpus 3 --context-parallel 3 --seq-len 128", "context_parallel", "does not divide 128 tokens"),
        ("--model llama-1b --gpus 3 --pipeline-parallel 3", "pipeline_parallel", "does not divide 16 blocks"),
        ("--gpu a100-80gb --dtype fp8", "dtype", "no products of 8-bit"),
        ("--dtype float32 --autocast", "autocast", "their own masters"),
        ("--autocast --no-master-weights", "autocast", "keeps fp32 weights"),
        ("--optimizer-in-backward --gpus 2 --global-batch 8", "optimizer_in_backward", "cannot add up"),
        ("--offload optimizer --optimizer-in-backward", "offload", "not inside it"),
        ("--compile --impl eager", "compile", "impl is eager"),
        ("--dtype fp8 --dry-run", "dtype", "a dry run has"),
        ("--price 2.5", "price", "is no price"),
        ("--price 0/h", "price", "is no price of a GPU"),
        ("--gpu a100-80gb,l40s --price 1/h,2/h,3/h", "price", "3 prices for 2 GPUs"),
        ("--gpu a100-80gb,l40s --explain", "gpu", "explain is of one device"),
        ("--gpu a100-80gb,nothing", "gpu", "not a known device"),
        ("--price 2/h --ask fewest-gpus", "price", "takes the place of"),
        ("--gpu a100-80gb --attention flash-3", "attention", "no rate of flash-3 on a100-80gb is known"),
        ("--gpu l40s --attention flash-1", "attention", "no rate of flash-1"),
        ("--gpus 24 --tensor-parallel 3", "tensor_parallel", "do not fill nodes of 8"),
        ("--gpus 16 --tensor-parallel 2 --shard-size 16", "shard_size", "8 groups of 2 GPUs"),
        ("--ask fewest-gpus --global-batch 64", "global_batch", "would change nothing"),
        ("--gpus 16 --ask crossover --stage 3 --shard-size 8", "shard_size", "over all GPUs"),
        ("--ask largest-micro-batch --micro-batch 2", "micro_batch", "would change nothing"),
        ("--gpus 2 --ask lowest-bandwidth --global-batch 8 --micro-batch 3", "global_batch", "no multiple of 3"),
    ],
)
def test_what_does_not_go_together_is_one_line(words, field, what):
    with pytest.raises(UserError, match=what) as raised:
        _answer(words)
    assert raised.value.field == field
    assert "\n" not in str(raised.value)


def test_a_thousand_million_micro_batches_are_counted_and_not_listed():
    row = json.loads(_answer("--gpus 2 --stage 2 --micro-batch 1 --global-batch 2000000000 --json").text)["rows"][0]
    few = json.loads(_answer("--gpus 2 --stage 2 --micro-batch 1 --global-batch 2000 --json").text)["rows"][0]
    assert row["grad_accum_steps"] == 10**9
    scattered = [each["messages"]["bytes_by_op"]["reduce_scatter"] for each in (row, few)]
    assert scattered[0] == 10**6 * scattered[1]
    assert row["messages"]["count"] > 10**9


def test_a_plan_names_its_figures_in_units_that_show_them():
    told = _answer("--model gpt2-demo --gpus 2 --gpus-per-node 1 --micro-batch 1 --stage 1").text
    assert told.startswith("gpt2-demo: 842k parameters, ")
    assert "in a node" not in told


def test_a_price_is_for_all_gpus_and_all_tokens():
    found = _plan(world_size=8)
    cost = found.cost(10**10, 2.5)
    assert cost.hours == pytest.approx(1e10 / found.best.tokens_per_s / 3600)
    assert cost.dollars == pytest.approx(cost.hours * 8 * 2.5)
    assert cost.dollars_per_billion == pytest.approx(cost.dollars / 10)
    assert "10B tokens take" in cost.sentence()
    assert _plan(gpu="t4", dtype="float16", overrides={**SMALL, "n_embd": 16384, "n_head": 64}).cost(1, 1.0) is None


def test_several_gpus_are_compared_by_dollars_and_else_by_speed():
    words = "--model llama-tiny --gpus 8 --stage 1 --micro-batch 1 --gpu h100-80gb,a100-80gb"
    cheap = _answer(f"{words} --price 100/h,0.01/h --tokens 1B").text
    assert "The cheapest is a100-80gb" in cheap
    assert "may as well be" not in cheap
    assert "The fastest is h100-80gb" in _answer(words).text


def test_of_gpus_whose_ranges_of_rates_overlap_it_is_said_that_either_may_be_the_cheapest():
    words = "--model llama-tiny --gpus 8 --stage 1 --micro-batch 1 --gpu h100-80gb,l40s-48gb --seq-len 128"
    rates = [plan["rows"][0]["tokens_per_s"] for plan in json.loads(_answer(f"{words} --json").text)["plans"]]
    told = _answer(f"{words} --price {10 * rates[0] / rates[1]:.3f}/h,9/h").text  # a tenth less for the same
    assert "The cheapest is l40s-48gb" in told
    assert "By the ranges of their rates it may as well be h100-80gb." in told
    least, most = rates[1] / 1.6, rates[1] / 0.85
    assert f"{least:,.0f} to {most:,.0f}" in told


def test_a_gpu_without_bfloat16_is_compared_in_float16():
    words = "--model llama-tiny --gpus 8 --stage 1 --micro-batch 1 --seq-len 128"
    both = f"{words} --gpu v100-32gb,h100-80gb"
    old, new = json.loads(_answer(f"{both} --json").text)["plans"]
    assert (old["dtype"], new["dtype"]) == ("float16", "bfloat16")
    assert old["rows"] == json.loads(_answer(f"{words} --gpu v100-32gb --dtype float16 --json").text)["rows"]
    told = _answer(both).text
    assert "\n  v100-32gb, float16  yes " in told
    assert told.endswith("v100-32gb does not compute in bfloat16: planned in float16.")


def test_a_gpu_that_cannot_be_planned_leaves_the_others_and_says_why():
    words = "--model llama-tiny --gpus 8 --stage 1 --micro-batch 1 --seq-len 128 --dtype fp8"
    both = f"{words} --gpu a100-80gb,h100-80gb --price 1/h,2/h"
    found = json.loads(_answer(f"{both} --json").text)
    assert (found["plans"][0]["refused"][:5], found["best"]) == ("dtype", "h100-80gb")
    assert found["plans"][1]["cost"]["dollars_per_h"] == 2
    assert "a100-80gb is not planned: dtype: a100-80gb has no products of 8-bit" in _answer(both).text
    with pytest.raises(UserError, match="no products of 8-bit"):
        _answer(f"{words} --gpu a100-80gb,v100-32gb")


@pytest.mark.parametrize(
    ("hours", "value", "told"),
    [(72, 1633.4, "3.0 days $1,633"), (0.5, 5.126, "30 minutes $5.13"), (0.001, 0.00123, "3.6 seconds $0.0012")],
)
def test_times_and_prices_are_told_in_units_that_show_them(hours, value, told):
    assert f"{duration(hours)} {dollars(value)}" == told
