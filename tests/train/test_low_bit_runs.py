"""Runs of the trainer whose optimizer keeps 8-bit states: the same bits on any ranks, and other optimizers later."""

import hashlib
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from soak import soaking
from tiny_runs import built
from zeroshard import checkpoint
from zeroshard.cli import main
from zeroshard.comm import run_threads
from zeroshard.host.errors import ExitStatus, UserError
from zeroshard.kernels import cpu_loops
from zeroshard.kernels.adamw8bit import joined
from zeroshard.train.inference.generate import load_weights
from zeroshard.train.loop.loop import train
from zeroshard.train.setup.assemble import serving
from zeroshard.train.setup.build import build_run

DTYPES = {"adamw8bit": "float32", "flash-adamw": "bfloat16", "muon": "float32", "adamw": "float32"}


def run(config, num_ranks):
    """Run to the end; returns what the last checkpoint has."""

    def on_rank(comm):
        built = build_run(config, comm, torch.device("cpu"))
        try:
            assert train(built) == ExitStatus.OK
        finally:
            built.close()

    run_threads(on_rank, num_ranks)
    return checkpoint.consolidate(checkpoint.latest(f"{config.out}/checkpoints"))


def digest(saved):
    """One sha256 of weights and states."""
    found = hashlib.sha256()
    states = {f"{name}/{kind}": value for name, s in saved["optimizer"]["state"].items() for kind, value in s.items()}
    for name, value in sorted({**saved["model"], **states}.items()):
        found.update(name.encode())
        found.update(torch.as_tensor(value).contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@pytest.mark.redundant
@pytest.mark.parametrize("optimizer", ["adamw8bit", "flash-adamw"])
def test_a_reproducible_run_has_one_sha256_at_each_stage_and_number_of_ranks(tiny_config, tmp_path, optimizer):
    given = {"optimizer": optimizer, "dtype": DTYPES[optimizer], "reproducible": 8, "max_steps": 2, "eval_interval": 0}
    found = {}
    more = [(1, 3), (2, 1), (8, 0), (8, 2), (8, 3)] if soaking() else []
    for num_ranks, stage in [(1, 0), (2, 2), (4, 3), *more]:
        out = str(tmp_path / f"{num_ranks}-{stage}")
        found[num_ranks, stage] = digest(run(tiny_config(strategy=f"zero{stage}", out=out, **given), num_ranks))
    assert len(set(found.values())) == 1, found


@pytest.mark.redundant(but=["adamw-adamw8bit", "adamw8bit-flash-adamw"])
@pytest.mark.parametrize(
    ("before", "after"), [("adamw", "adamw8bit"), ("adamw8bit", "flash-adamw"), ("flash-adamw", "adamw")]
)
def test_a_run_goes_on_with_another_of_these_optimizers(tiny_config, capsys, caplog, before, after):
    how = {"checkpoint_interval": 2, "eval_interval": 0, "decay_steps": 4}
    first = run(tiny_config(optimizer=before, dtype=DTYPES[before], strategy="zero3", max_steps=2, **how), 4)
    capsys.readouterr()
    given = {"optimizer": after, "dtype": DTYPES[after], "strategy": "zero1", "resume": "auto", "max_steps": 4}
    second = run(tiny_config(**given, **how), 2)
    said = capsys.readouterr().err.splitlines()
    assert f"resume: optimizer was {before}, now it is {after}" in said
    assert [line.partition(": ")[0] for line in caplog.messages] == ["load"]
    keeps = {"adamw": 3, "adamw8bit": 5, "flash-adamw": 6}
    for name, state in second["optimizer"]["state"].items():
        assert len(state) == keeps[after]
        assert int(state["step"]) == 4
        assert second["model"][name].dtype == getattr(torch, DTYPES[after])
        weight, earlier = second["model"][name].float(), first["model"][name].float()
        assert 0 < (weight - earlier).abs().max() < 0.05  # two steps of warm-up
    if before == "flash-adamw":
        name, state = next(iter(first["optimizer"]["state"].items()))
        assert not torch.equal(joined(first["model"][name], state["correction"]), first["model"][name].float())


def test_weights_that_are_read_alone_have_their_further_bits(tiny_config, tmp_path):
    """To begin another run, to export and to generate; an optimizer of fp32 weights trains on from all 24 bits."""
    saved = run(tiny_config(optimizer="flash-adamw", dtype="bfloat16", max_steps=2, eval_interval=0), 2)
    states = saved["optimizer"]["state"]
    bits = {name: state["correction"].clamp(min=-127) for name, state in states.items()}  # -128 is half way to a number
    exact = {name: joined(saved["model"][name], each) for name, each in bits.items()}
    assert any(not torch.equal(weight, weight.bfloat16().float()) for weight in exact.values())
    of_run = {"init_from": str(tmp_path / "run")}
    wide = tiny_config(optimizer="adamw", dtype="float32", strategy="zero3", out=str(tmp_path / "wide"), **of_run)
    begun = built(wide).strategy.state_dict()
    assert all(torch.equal(begun[name], weight) for name, weight in exact.items())
    low = {"optimizer": "flash-adamw", "dtype": "bfloat16", "out": str(tmp_path / "narrow")}
    narrow = built(tiny_config(**low, **of_run)).strategy.state_dict()
    assert all(torch.equal(narrow[name], saved["model"][name]) for name in exact)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "hf"), "--dtype", "float32"]) == 0
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(exported["transformer.wte.weight"], exact["wte.weight"])
    path = checkpoint.latest(tmp_path / "run" / "checkpoints")
    alone = dict(load_weights(wide, exact["wte.weight"].shape[0], path).named_parameters())
    assert all(torch.equal(alone[name], weight) for name, weight in exact.items())


def test_a_run_does_not_go_on_with_another_rule(tiny_config):
    run(tiny_config(optimizer="muon", max_steps=2, eval_interval=0, decay_steps=4), 1)
    with pytest.raises(UserError, match="optimizer: the checkpoint was saved with muon, now it is adamw8bit"):
        run(tiny_config(optimizer="adamw8bit", resume="auto", max_steps=4, eval_interval=0, decay_steps=4), 1)


def test_the_start_says_what_updates_states_in_8_bits(tiny_config):
    model, cpu = SimpleNamespace(operations=()), torch.device("cpu")
    by_loop = "reference" if cpu_loops.loop("adamw8bit") is None else "C++ loop"
    for kernels, found in (("auto", by_loop), ("reference", "reference")):
        config = tiny_config(optimizer="adamw8bit", kernels=kernels)
        assert serving(config, model, cpu) == {"AdamW8bit": found}
