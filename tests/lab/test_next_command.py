import json
import shlex

import pytest

from zeroshard.cli.flags import flags_of, read_flags
from zeroshard.host.columns import wrapped
from zeroshard.lab.planner.command import answer_plan
from zeroshard.lab.planner.config import PlanConfig
from zeroshard.settings.validate import validate
from zeroshard.train.config.config import TrainConfig

SMALL = "--model llama-tiny --seq-len 128 --stage 2 --micro-batch 2"


def _plan(words):
    return answer_plan(validate(PlanConfig, read_flags(shlex.split(words), flags_of(PlanConfig)))).text


def _command(words):
    return json.loads(_plan(f"{words} --json"))["command"]


def test_the_command_trains_what_was_planned():
    words = f"{SMALL} --gpus 16 --shard-size 8 --global-batch 64 --reduce-dtype bfloat16 --impl compile --lora 8"
    command = _command(f"{words} --lora.targets q_proj v_proj --no-reshard-after-forward --tokens 1M")
    assert command.startswith(
        "zeroshard train --model llama-tiny --lora 8 --lora.targets q_proj v_proj --init-from RUN "
    )
    run = validate(TrainConfig, read_flags(shlex.split(command)[2:], flags_of(TrainConfig)))
    assert (run.model.name, run.lora.rank, run.strategy, run.nproc, run.nnodes) == ("llama-tiny", 8, "zero2", 8, "2")
    assert (run.shard_size, run.micro_batch_size, run.grad_accum_steps, run.dtype) == (8, 2, 2, "bfloat16")
    assert (run.seq_len, run.reduce_dtype, run.compile) == (128, "bfloat16", "on")
    assert run.max_steps == -(-(10**6) // (64 * 128))


@pytest.mark.redundant
def test_adapters_are_of_weights_that_a_run_or_a_folder_has():
    lines = _plan(f"{SMALL} --gpus 2 --lora 8").splitlines()
    begun = "RUN is one whose weights the adapters change, or give --model hf:FOLDER"
    assert lines[-2] == f"Start it, with --data and --out of yours; {begun}:"


def test_the_command_is_said_under_the_plan():
    lines = _plan(f"{SMALL} --gpus 2").splitlines()
    assert lines[-2] == "Start it, with --data and --out of yours:"
    assert lines[-1] == f"  {_command(f'{SMALL} --gpus 2')}"
    assert "on each of 2 nodes, HOST one of them" in _plan(f"{SMALL} --gpus 16")


@pytest.mark.redundant
def test_the_command_has_the_wire_formats_of_its_row():
    wire = "--wire.grads int8 --wire.node-size 8 --network 1Gbit/s"
    inside = _command(f"{SMALL} --gpus 16 {wire}")  # the row that is fastest is over a node's GPUs
    assert "--shard-size 8" in inside
    assert "--wire.grads int8" in inside
    assert "--wire.node-size" not in inside
    flat = _command("--model llama-7b --gpus 32 --stage 3 --micro-batch 3 --gpu a100-40gb " + wire)
    assert "--wire.node-size 8" in flat
    assert "--shard-size" not in flat
    assert "--wire" not in _command("--model gpt2-demo --gpus 2 --wire.grads int8 --micro-batch 1")  # stage 0


@pytest.mark.parametrize(
    "words",
    [
        "--gpus 9",  # nodes of 8 and of 1
        "--optimizer lion",  # not the trainer's
        "--autocast",
    ],
)
def test_there_is_no_command_where_no_run_is_what_was_planned(words):
    assert _command(f"{SMALL} {words}") is None
    assert "zeroshard train --model" not in _plan(f"{SMALL} {words}")


def test_a_last_node_that_is_not_full_is_said_to_be_slow():
    assert "The last node has 1 of 8 GPUs, and so 1 link to the others" in _plan(f"{SMALL} --gpus 9")
    assert "The last node" not in _plan(f"{SMALL} --gpus 16")


def test_a_narrow_terminal_has_fewer_columns_and_broken_sentences():
    config = validate(PlanConfig, read_flags(f"{SMALL} --gpus 16".split(), flags_of(PlanConfig)))
    wide, narrow = answer_plan(config).text, answer_plan(config, 80).text
    assert "headroom" in wide
    assert "headroom" not in narrow
    shown = wrapped(narrow, 80).splitlines()
    assert max(len(line) for line in shown if "zeroshard train" not in line) <= 80
    assert wrapped(wide, 0) == wide
