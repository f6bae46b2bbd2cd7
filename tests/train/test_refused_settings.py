"""Settings that are wrong, alone or together: each is refused in one line that names field, fault and remedy."""

import pytest

from zeroshard.cli.flags import flags_of, read_flags
from zeroshard.host.errors import UserError
from zeroshard.lab.planner.config import PlanConfig
from zeroshard.settings.validate import validate
from zeroshard.train.config.config import TrainConfig, merge

# Flags, and how the line begins that refuses them.
REFUSED = """
--lr -1 | lr: -1 is not above 0; give a number above 0
--lr nan | lr: nan is not a finite number; give a finite number
--lr fast | lr: 'fast' is not a number; give a number
--seq-len 5.5 | seq_len: '5.5' is not a whole number; give a whole number
--seq-len 0 | seq_len: 0 is below 1; give 1 or more
--beta1 1 | beta1: 1 is not below 1; give a number below 1
--port 70000 | port: 70000 is above 65535; give 65535 or less
--compile=perhaps | compile: 'perhaps' is not a choice; choose one of auto, on, off
--model= | model.name: is empty; give a name
--model.n-embd 100 --model.n-head 3 | model.n_head: 3 heads do not divide a width of 100; choose n_head so that n_embd
--model.n-head 6 --model.n-kv-head 4 | model.n_kv_head: 4 key heads do not divide 6 heads; choose n_kv_head so that
--warmup-steps 20 --max-steps 10 | warmup_steps: 20 is above max_steps = 10; lower it
--decay-steps 5 | decay_steps: 5 is below warmup_steps = 20; raise it, or leave it out: max_steps
--lr 1e-4 --min-lr 1e-3 | min_lr: 0.001 is above lr = 0.0001; lower it, or raise lr
--global-batch-size 8 --grad-accum-steps 2 | global_batch_size: 8 already sets how many micro-batches a step has; give
--strategy zero9 | strategy: 'zero9' is not a choice; choose one of zero0, zero1, zero2, zero3, ddp,
--strategy zero0 --shard-size 2 | shard_size: zero0 does not shard with zeroshard's engine; leave it out, or use
--strategy zero2 --no-reshard-after-forward | reshard_after_forward: zero2 keeps unsharded weights all the time; leave
--strategy fsdp2 --no-overlap | overlap: fsdp2 communicates by torch.distributed, which decides itself what overlaps;
--strategy ddp --prefetch 2 | prefetch: ddp does not use zeroshard's engine, and only that has this setting; leave it
--strategy ddp --accumulate local | accumulate: ddp does not use zeroshard's engine, and only that has this setting;
--strategy ddp --reduce-dtype bfloat16 | reduce_dtype: ddp does not use zeroshard's engine, and only that has this
--strategy ddp --plan.enforce | plan.enforce: ddp has no plan to be held to; leave it out, or use --strategy zero0,
--eval-interval 0 --keep-best | keep_best: there is one evaluation, at the end; set eval_interval, or leave it out
--eval-rows 0 | eval_rows: 0 sequences give no validation loss; give 1 or more, or leave it out: 160
--keep-every 2 --checkpoint-interval 1 | keep_every: 2 has no effect, because keep_checkpoints = 0 keeps all
--track tensorboard --track.group widths | track.group: wandb and trackio alone have such; add --track wandb, or leave
--track wandbb | track.to: 'wandbb' is not a tracker; choose of tensorboard, wandb, trackio
--nnodes 2:4 --rdzv-endpoint a:1 --nproc 2 --micro-batch-size 2 --global-batch-size 16 | global_batch_size: 16 is no
--nnodes 2:4 --rdzv-endpoint a:1 --nproc 2 --shard-size 4 | shard_size: groups of 4 ranks do not partition a world of
--model llama-tiny --tiles 2 | tiles: 2 with activation_checkpointing 'none', which keeps what tiles
--model.activation-checkpointing every:0 | model.activation_checkpointing: 'every:0' is not a choice; choose none,
--local-steps.every 0 | local_steps.every: 0 is below 1; give 1 or more
--local-steps.every 8 | local_steps.every: 8 needs several replicas, and without a shard_size all ranks form one; give
--local-steps.outer-lr 0.5 | local_steps.outer_lr: 0.5 is given, and local_steps.every is 1: replicas take no local
--shard-size 1 --local-steps.every 8 --local-steps.outer-lr 0 | local_steps.outer_lr: 0 is not above 0; give a number
--shard-size 1 --local-steps.every 8 --local-steps.outer-momentum 1 | local_steps.outer_momentum: 1 is not below 1;
--shard-size 1 --local-steps.every 4 --local-steps.fragments 5 | local_steps.fragments: 5 fragments cannot synchronise
--shard-size 1 --local-steps.every 4 --local-steps.wire int7 | local_steps.wire: 'int7' is not a choice; choose one of
--shard-size 1 --local-steps.every 4 --strategy ddp | local_steps.every: ddp cannot take local steps: it does not use
--shard-size 1 --local-steps.every 4 --ema-decay 0.9 | ema_decay: 0.9 averages the weights of each step, which
--shard-size 1 --local-steps.every 4 --dtype float16 | dtype: float16 needs one loss scale on all ranks at each step,
--strategy ddp --wire.grads int8 | wire.grads: int8 is given, and ddp does not use zeroshard's engine; leave it out,
--strategy zero0 --wire.grads int8 | wire.grads: int8 is given, and stage 0 has no wire format: no rank owns a shard
--strategy auto | strategy: auto has left; name a stage, as zero2; train --fit raises it until the run fits
--wire.grads int8 --wire.block 100 | wire.block: blocks of 100 elements do not pack; give a multiple of 16 from 16 to
--wire.grads bfloat16 --wire.block 64 | wire.block: 64 is given, and no wire format has blocks; add --wire.grads int8,
--wire.node-size 2 | wire.node_size: 2 is given, and gradients have no wire format; add --wire.grads int8, or leave it
--wire.grads int8 --wire.node-size 1 | wire.node_size: 1 GPU has nothing to add up; give the GPUs of a node, or leave
--wire.grads int8 --wire.node-size -1 | wire.node_size: -1 is below 0; give 0 or more
--shard-size 2 --nproc 4 --wire.grads int8 --wire.node-size 2 | wire.node_size: 2 is given, and with shard_size = 2
--strategy zero2 --node-copy 2 | node_copy: 2 is given, and zero2 has no sharded weights to gather again; leave it
--strategy zero3 --node-copy 2 --no-reshard-after-forward | node_copy: 2 is given, and weights that stay unsharded for
--reproducible 6 | reproducible: 6 is no power of two; give the most ranks that you will use, as 8
--reproducible 8 --strategy ddp | reproducible: ddp adds gradients up in an order that depends on the number of ranks;
--reproducible 8 --wire.grads int8 | reproducible: 8 is given, and wire.grads rounds what each rank sends; leave one
--reproducible 8 --shard-size 2 | reproducible: 8 is given, and shard_size adds up over two levels of ranks, with a
--reproducible 8 --accumulate local | reproducible: 8 is given, and accumulate adds up on each rank first, with a
--reproducible 8 --shard-size 2 --local-steps.every 4 | reproducible: 8 is given, and local_steps lets replicas take
--reproducible 8 --tiles 2 --model.activation-checkpointing full | reproducible: 8 is given, and tiles cuts sequences:
--reproducible 8 --sequence-parallel 2 | reproducible: 8 is given, and sequence_parallel cuts sequences: parts round
--reproducible 4 --nnodes 2:3 --nproc 2 --rdzv-endpoint a:1 | reproducible: 4 micro-batches cannot be shared out
--offload cloud | offload.state: 'cloud' is not a choice; choose one of none, optimizer, all, disk, disk-all
--offload.fraction 0.5 | offload.fraction: 0.5 is given, and offload is none: no state leaves the device; add
--offload optimizer --offload.fraction nan | offload.fraction: nan is no share of the elements; give auto, or a number
--offload all --offload.pinned 4 | offload.pinned: '4' is not a size; write a number and a unit, as 5GB or 512MiB
--offload optimizer --offload.path x | offload.path: x is given, and offload = optimizer keeps state in memory; use
--base nf4 | base.format: nf4 is for weights that are not trained, and without adapters all are; add --lora 16, or leave
--base nf5 --lora 4 | base.format: 'nf5' is not a choice; choose one of none, nf4, int8, int4, e4m3
--base int8 --lora 4 --strategy fsdp2 | base.format: int8 is given, and fsdp2 does not use zeroshard's engine; leave
--lora 4 --base.double | base.double: is given, and base is none; add --base nf4, or leave it out
--base nf4 --lora 4 --base.block 24 | base.block: blocks of 24 elements do not pack; give a multiple of 16 from 16 to
--base nf4 --lora 4 --base.only= | base.only: one of them is empty; name weights, as *.mlp.*
--base nf4 --lora 4 --strategy zero3 --node-copy 2 | node_copy: 2 with base = nf4, and codes have no second copy; leave
--state-format int8 --optimizer muon | state_format: int8 is for states of torch's AdamW, and optimizer is muon; leave
--state-format bf16 --strategy ddp | state_format: ddp does not run its optimizer unit by unit, for which states are
--state-format int4 | state_format: 'int4' is not a choice; choose one of fp32, bf16, int8
--state-format int8 --offload disk --plan.enforce | plan.enforce: no plan predicts a file of int8 states; leave it out
--offload disk --optimizer flash-adamw --plan.enforce | plan.enforce: no plan predicts a file of flash-adamw's states;
--optimizer flash-adamw --dtype float32 | dtype: float32, and weights of flash-adamw are bfloat16; leave it out, or use
--optimizer flash-adamw --ema-decay 0.9 | ema_decay: flash-adamw keeps weights in bfloat16, and an average of such
--optimizer flash-adamw --shard-size 1 --local-steps.every 2 | local_steps.every: flash-adamw keeps a part of each
--optimizer flash-adamw --strategy fsdp2 | optimizer: flash-adamw needs unsharded blocks of parameters, and fsdp2 shards
--optimizer muon8bit | optimizer: muon8bit has left; use muon, or adamw8bit
--optimizer muon --plan.enforce | plan.enforce: muon needs unsharded matrices, which no plan predicts; leave it
--offload optimizer --strategy ddp | offload.state: optimizer is given, and ddp does not use zeroshard's engine; leave
--offload all --shard-size 1 --local-steps.every 2 | offload.state: all is given, and outer steps of local_steps.every
--link.bandwidth 1Gbit/s | link.bandwidth: is given, and no link is slowed; add --link.mode simulated or netns
--link.node-size 2 | link.node_size: is given, and no link is slowed; add --link.mode simulated or netns
--link.mode simulated | link.mode: simulated has no bandwidth or latency; add --link.bandwidth 1Gbit/s, or a latency
--link.mode simulated --link.bandwidth 1000 | link.bandwidth: '1000' is not a bandwidth; write a number and a unit, as
--link.mode simulated --link.bandwidth 1Gb/s | link.bandwidth: '1Gb/s' is not a bandwidth; write a number and a unit,
--link.mode simulated --link.latency 50 | link.latency: '50' is not a duration; write a number and a unit, as 5us or
--link.mode simulated --link.bandwidth 1Gbit/s --strategy ddp | link.mode: simulated slows only zeroshard's
--link.mode simulated --link.bandwidth 1Gbit/s --nproc 3 --link.node-size 2 | link.node_size: groups of 2 do not
--link.mode netns --link.latency 1ms | link.bandwidth: netns shapes a bandwidth; give one, as 1Gbit/s
--link.mode netns --link.bandwidth 1Gbit/s | nproc: netns joins nodes, and no ranks of 1 to a node are fewer than two;
--link.mode netns --link.bandwidth 1Gbit/s --nproc 2 --comm shm | comm: shm passes no network that netns could slow;
--link.mode netns --link.bandwidth 1Gbit/s --nproc 2 --max-restarts 1 | max_restarts: 1 restarts ranks, and inside
--data.val-path a=rows.jsonl a=other.jsonl | data.val_path: two sets have the name a; give each its own
--data.val-path rows.jsonl | data.val_path: 'rows.jsonl' is no NAME=FILE; write each as code=code.jsonl
--data.format chat --data.streaming | data.streaming: is given, and data.format is chat; leave it out, or add
--data.format chat --data.document-mask | data.document_mask: is given, and data.format is chat; leave it out, or add
--data.format prompt --data.max-tokens 9 | data.max_tokens: is given, and data.format is prompt; leave it out, or add
--data.template chatml | data.template: is given, and data.format is text; leave it out, or add --data.format chat
--data.format chat --data.prompt x | data.prompt: is given, and data.format is chat; leave it out, or add
--data.packing | data.packing: is given, and data.format is text; leave it out, or add --data.format chat or prompt
--data.format talk | data.format: 'talk' is not a choice; choose one of text, chat, prompt
--lora.rank -1 | lora.rank: -1 is below 0; give 0 or more
--lora many | lora.rank: 'many' is not a whole number; give a whole number
--lora.alpha 8 | lora.alpha: is given, and lora.rank is 0; add --lora.rank 16, or leave it out
--lora 4 --lora.dropout 1 | lora.dropout: 1 is not below 1; give a number below 1
--lora 4 --optimizer muon | optimizer: muon is made for whole matrices, and lora.rank = 4 trains narrow ones; use adamw
--lora.r 4 | --lora.r: there is no such flag; here it is --lora.rank
--lora-alpha 4 | --lora-alpha: there is no such flag; here it is --lora.alpha
--lora.target-modules q_proj | --lora.target-modules: there is no such flag; here it is --lora.targets
--model gpt2-demo --model.from-config | model.from_config: is given, and gpt2-demo is no model of transformers; leave
"""


@pytest.mark.parametrize("row", REFUSED.strip().splitlines())
def test_a_setting_that_cannot_be_is_refused_in_one_line(row):
    words, line = row.split(" | ")
    with pytest.raises(UserError) as said:
        validate(TrainConfig, merge({}, read_flags(words.split(), flags_of(TrainConfig))))
    assert str(said.value).startswith(line)
    assert said.value.todo
    assert "\n" not in str(said.value)


@pytest.mark.parametrize(
    "words",
    [
        "--reproducible 6",
        "--base nf4",
        "--base nf4 --lora 4 --node-copy 2",
        "--reproducible 8 --tiles 2 --model.activation-checkpointing full",
        "--reproducible 8 --sequence-parallel 2",
        "--reproducible 8 --wire.grads int8",
        "--reproducible 8 --accumulate local",
        "--shard-size 2 --wire.grads int8 --wire.node-size 2",
        "--shard-size 1 --local-steps.every 4 --sequence-parallel 2",
        "--offload optimizer --shard-size 1 --local-steps.every 4",
    ],
)
def test_a_plan_refuses_what_a_run_does_in_the_same_line(words):
    lines = []
    for kind in (TrainConfig, PlanConfig):
        with pytest.raises(UserError) as said:
            validate(kind, merge({}, read_flags(words.split(), flags_of(kind))))
        lines.append(str(said.value))
    assert lines[0] == lines[1]
