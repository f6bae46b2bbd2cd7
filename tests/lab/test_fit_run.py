"""`train --fit` plans a run on what is free here: the levers of ``plan --fit``, and what is next if memory runs out."""

from dataclasses import replace

from zeroshard.lab.planner.fit_run import fit_run
from zeroshard.settings.validate import by_path, validate
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.profiling.devices import Device
from zeroshard.train.setup.fit import FitJob

SMALL = {"name": "llama-tiny", "n_layer": 10, "n_head": 4, "n_kv_head": 2, "n_embd": 64}
FULL, DISK_ALL = "--model.activation-checkpointing full", "--offload disk-all"


def job(free_bytes=2**40, world_size=1, start=(), disk_bytes=2**40, **given):
    """A run on CPUs without rates, of which each rank may use so many bytes."""
    config = validate(TrainConfig, {"model": SMALL, "seq_len": 128, "micro_batch_size": 2, "fit": "on", **given})
    kept = frozenset(by_path(config.model_dump(exclude_unset=True)))
    rates = dict.fromkeys(("float32", "bfloat16", "float16"), 1.0)
    device = Device("this machine", free_bytes, rates, 1.0, "", device_type="cpu", host_memory_bytes=free_bytes)
    config = config.resolved(dtype="float32", compile="off")
    of_ranks = world_size, world_size, "shm" if world_size > 1 else ""
    return FitJob(config, kept, 256, False, *of_ranks, device, False, free_bytes, disk_bytes, tuple(start))


def test_the_levers_that_are_needed_are_pulled_and_the_next_one_is_known():
    """As given; one lever; several; nothing: by budgets that are plans themselves."""
    given = fit_run(job())
    assert (given.flags, given.fits) == ((), True)
    one = fit_run(job(given.needed_bytes - 1, checkpoint_async=False))
    assert (one.flags, one.fits) == ((FULL,), True)
    assert "more FLOPs a step, which are recomputed" in one.said[1]
    several = fit_run(job(one.needed_bytes - 1))
    assert several.fits
    assert len(several.flags) > 1
    assert several.needed_bytes < one.needed_bytes < given.needed_bytes
    nothing = fit_run(job(1))
    assert not nothing.fits
    assert nothing.needed_bytes < several.needed_bytes
    assert nothing.said[0].startswith("nothing fits: with ")
    # what comes next where memory runs out needs less, and ends
    flags, needed = given.next_flags, [given.needed_bytes]
    while flags is not None:
        again = fit_run(job(start=flags))
        assert again.flags[: len(flags)] == tuple(flags)
        needed.append(again.needed_bytes)
        flags = again.next_flags
    assert needed == sorted(needed, reverse=True)
    assert len(set(needed)) == len(needed) > 2


def test_a_dry_run_has_the_plan_of_its_choice_and_seconds_only_where_rates_are_known():
    asked = job(dry_run=True)
    tried, plan = fit_run(asked).table.split("\n\n", 1)
    assert tried.splitlines()[0].split() == ["with", "memory", "step", "fits"]
    assert ("1 x this machine" in plan, "headroom" in plan, "tokens/s" in plan) == (True, True, False)
    _, plan = fit_run(replace(asked, has_rates=True)).table.split("\n\n", 1)
    assert "Take micro-batch 2" in plan[plan.index("tokens/s") :]
    assert fit_run(job()).table == ""


def test_what_was_given_stays_and_so_does_a_disk_without_room():
    stays = {"activation_checkpointing": "none", **SMALL}
    found = fit_run(job(1, model=stays, offload="none", sequence_parallel=1, world_size=2, strategy="zero2"))
    assert (list(found.flags), found.fits) == (["--checkpoint-async=false"], False)
    assert DISK_ALL in " ".join(fit_run(job(1)).flags)
    assert "--offload" not in " ".join(fit_run(job(1, disk_bytes=0)).flags)


def test_a_stage_that_was_not_given_is_raised():
    needed = fit_run(job(world_size=2, strategy="zero3")).needed_bytes
    free = {"checkpoint_async": False, "world_size": 2}
    assert fit_run(job(needed, **free)).flags == ("--strategy zero3",)
    assert fit_run(job(**free, start=("--strategy zero3",))).flags == ("--strategy zero3",)


def test_a_step_has_as_many_sequences_where_ranks_come_to_share_them():
    shared = {"world_size": 2, "start": ("--sequence-parallel 2",)}
    assert fit_run(job(**shared, micro_batch_size=3)).flags == ("--sequence-parallel 2", "--global-batch-size 6")
    assert fit_run(job(**shared, grad_accum_steps=2)).flags == ()  # their number was given


def test_fewer_bits_come_last_and_only_where_they_are_allowed():
    kept = {"model": {**SMALL, "activation_checkpointing": "none"}, "offload": "none", "tiles": "none"}
    as_given = fit_run(job(checkpoint_async=False, **kept))
    assert as_given.next_flags is None
    fewer = fit_run(job(as_given.needed_bytes - 1, fit="states", checkpoint_async=False, **kept))
    assert (fewer.flags, fewer.next_flags, fewer.fits) == (("--state-format bf16",), ("--state-format int8",), True)
    both = fit_run(job(start=("--base nf4",), fit="base,states", lora=4, checkpoint_async=False, **kept))
    assert (both.flags, both.next_flags) == (("--base nf4",), ("--base nf4", "--state-format bf16"))
