"""Tiles as ranks: with ``reproducible`` one rank that computes N tiles has the bits of N ranks that share sequences."""

import hashlib

import pytest
import torch

import chats
from hf_models import text_model  # noqa: F401 -- a fixture
from tiny_runs import events_of, train_on
from zeroshard.comm import LocalCommunicator, run_threads
from zeroshard.errors import UserError
from zeroshard.lab.planner.run_plan import predict
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.config.validate import validate

LLAMA = {"name": "llama-tiny", "n_layer": 2, "n_embd": 64, "n_head": 4, "n_kv_head": 2, "ffn_hidden": 96}
GPT2 = {"name": "gpt2-demo", "n_layer": 2, "n_embd": 32, "n_head": 4}
FULL = {"activation_checkpointing": "full"}


def _digest(config, world):
    """Of all weights after the last step, and the losses, norms and evaluations on the way."""
    digests = run_threads(lambda comm: _digest_of_rank(comm, config), world)
    assert len(set(digests)) == 1
    return digests[0], _told(config)


def _digest_of_rank(comm, config):
    """Train, hold steps to their plan if that is enforced, and return the digest of the weights."""
    _, found = train_on(comm, config, predict=predict if config.plan.enforce else None)
    assert not config.plan.enforce or (found.contract.difference == "" and found.contract.num_checked > 0)
    digest = hashlib.sha256()
    for name, each in sorted(found.strategy.zero.state_dict().items()):
        digest.update(name.encode())
        digest.update(each.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _told(config):
    kept = ("step", "loss", "grad_norm", "val_loss")
    events = [event for event in events_of(config.out) if event["event"] in ("step", "eval")]
    return [[event.get(key) for key in kept] for event in events]


@pytest.fixture
def examples(tmp_path):
    """Settings of packed examples, of which the answers count: parts have unequal numbers of targets, or none."""
    path = chats.write_rows(tmp_path / "rows.jsonl", chats.pairs(80))
    data = {"source": "text", "path": (str(path),), "format": "prompt", "packing": True, "val_fraction": 0.2}
    return {"data": {**data, "dir": str(tmp_path / "tokens")}, "seq_len": 48}


def _pair(tiny_config, tmp_path, size, model, **changes):
    """Digests of one rank with ``size`` tiles, and of ``size`` ranks."""
    given = {"reproducible": 2, "max_steps": 2, "eval_interval": 2, "seq_len": 32, **changes}
    tiles = {**given, "model": {**model, **FULL}, "tiles": size}
    alone = _digest(tiny_config(**tiles, out=str(tmp_path / "tiles")), 1)
    shared = {**given, "model": {**model, **FULL}, "sequence_parallel": size}
    return alone, _digest(tiny_config(**shared, out=str(tmp_path / "ranks")), size)


@pytest.mark.redundant(but=["model1-zero3-4"])
@pytest.mark.pairwise("model")
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
@pytest.mark.parametrize("model", [LLAMA, GPT2, {**LLAMA, "n_kv_head": 1}])
def test_one_rank_with_tiles_has_the_bits_of_ranks_that_share_sequences(tiny_config, tmp_path, model, strategy, size):
    tiles, ranks = _pair(tiny_config, tmp_path, size, model, strategy=strategy)
    assert tiles == ranks


@pytest.mark.redundant(but=["changes0-zero1-2"])
@pytest.mark.pairwise("changes")
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lora": {"rank": 2}},
        {"dtype": "bfloat16", "lora": {"rank": 2, "targets": ("all-linear",)}},
        {"dtype": "float16", "grad_accum_steps": 2, "optim": {"label_smoothing": 0.1}},
    ],
)
def test_packed_documents_adapters_and_narrow_dtypes_have_the_same_bits(
    tiny_config, tmp_path, examples, changes, strategy, size
):
    given = {**examples, "micro_batch_size": 1, "strategy": strategy, **changes}
    tiles, ranks = _pair(tiny_config, tmp_path, size, LLAMA, **given)
    assert tiles == ranks


@pytest.mark.parametrize(("size", "changes"), [(2, {"lora": {"rank": 2}}), pytest.param(4, {}, marks=pytest.mark.soak)])
def test_a_model_of_transformers_has_the_same_bits(tiny_config, tmp_path, text_model, examples, size, changes):  # noqa: F811
    model = {"name": f"hf:{text_model}"}
    given = {**examples, "strategy": "zero3", "plan": {"enforce": True}, **changes}
    tiles, ranks = _pair(tiny_config, tmp_path, size, model, **given)
    assert tiles == ranks


def test_ranks_and_tiles_of_each_are_so_many_parts_together(tiny_config, tmp_path):
    """Four parts: 4 tiles on each of 2 ranks that share nothing, and 2 tiles on each of 2 ranks of a sequence."""
    given = {"reproducible": 2, "max_steps": 2, "eval_interval": 0, "strategy": "zero3", "plan": {"enforce": True}}
    found = []
    for name, tiles, size, world in (("replicas", 4, 1, 2), ("both", 2, 2, 2), ("ranks", 1, 4, 4)):
        cut = {"tiles": tiles} if tiles > 1 else {}
        changes = {"model": {**LLAMA, **FULL}, **cut, "sequence_parallel": size, "out": str(tmp_path / name)}
        found.append(_digest(tiny_config(**given, **changes), world))
    assert found[0] == found[1] == found[2]


def test_a_run_says_that_tiles_are_computed_as_ranks_and_refuses_what_would_differ(tiny_config, tmp_path):
    given = {"reproducible": 2, "max_steps": 2, "eval_interval": 0, "tiles": 2}
    model = {**GPT2, **FULL}
    train_on(LocalCommunicator(), tiny_config(model=model, **given))
    said = events_of(tmp_path / "run", "start")[0]["about"]["strategy"]
    assert said.endswith("bits on any number up to 4; 2 tiles of a sequence on each are computed as 2 ranks")
    config = tiny_config(model={**model, "n_head": 1}, out=str(tmp_path / "odd"), **given)
    with pytest.raises(UserError, match=r"tiles: 2 parts, each .*, do not divide 1 query heads; choose one of 1"):
        train_on(LocalCommunicator(), config)


@pytest.mark.parametrize("tiles", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_a_run_that_draws_keeps_its_plan_and_draws_what_ranks_draw(tiny_config, tmp_path, gloo_ranks, tiles):
    given = {"reproducible": 2, "max_steps": 2, "eval_interval": 2, "strategy": "zero3", "plan": {"enforce": True}}
    given["model"] = {**GPT2, **FULL, "dropout": 0.2}
    alone = tiny_config(**given, tiles=tiles, out=str(tmp_path / "tiles"))
    shared = tiny_config(**given, sequence_parallel=tiles, out=str(tmp_path / "ranks"))
    with torch.random.fork_rng():
        found = _digest_of_rank(LocalCommunicator(), alone)
    assert {found} == set(gloo_ranks(tiles).run(_digest_of_rank, shared))
    assert _told(alone) == _told(shared)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"tiles": 3}, r"tiles: 3 is no power of two, and reproducible divides by the number of parts"),
        ({"tiles": 32}, r"seq_len: 16 tokens are fewer than the 32 ranks that share them"),
    ],
)
def test_tiles_that_cannot_be_ranks_are_one_line(changes, line):
    given = {"seq_len": 16, "reproducible": 2, "model": {**LLAMA, **FULL}}
    with pytest.raises(UserError, match=line):
        validate(TrainConfig, {**given, **changes})
