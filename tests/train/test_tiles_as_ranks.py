"""Tiles as ranks: with ``reproducible`` one rank that computes N tiles has the bits of N ranks that share sequences."""

import hashlib

import pytest
import torch

import chats
from tiny_runs import events_of, train_on
from zeroshard.comm import run_threads
from zeroshard.errors import UserError
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.config.validate import validate

LLAMA = {"name": "llama-tiny", "n_layer": 2, "n_embd": 64, "n_head": 4, "n_kv_head": 2, "ffn_hidden": 96}
GPT2 = {"name": "gpt2-demo", "n_layer": 2, "n_embd": 32, "n_head": 4}
FULL = {"activation_checkpointing": "full"}


def _digest(config, world):
    """Of all weights after the last step, and the losses, norms and evaluations on the way."""

    def run(comm):
        _, found = train_on(comm, config)
        weights = found.strategy.zero.state_dict()
        digest = hashlib.sha256()
        for name, each in sorted(weights.items()):
            digest.update(name.encode())
            digest.update(each.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    digests = run_threads(run, world)
    assert len(set(digests)) == 1
    kept = ("step", "loss", "grad_norm", "val_loss")
    events = [event for event in events_of(config.out) if event["event"] in ("step", "eval")]
    return digests[0], [[event.get(key) for key in kept] for event in events]


@pytest.fixture
def examples(tmp_path):
    """Settings of packed examples, of which the answers count: parts have unequal numbers of targets, or none."""
    path = chats.write_rows(tmp_path / "rows.jsonl", chats.pairs(80))
    data = {"source": "text", "path": (str(path),), "format": "prompt", "packing": True, "val_fraction": 0.2}
    return {"data": {**data, "dir": str(tmp_path / "tokens")}, "seq_len": 48}


def _pair(tiny_config, tmp_path, size, model, **changes):
    """Digests of one rank with ``size`` tiles, and of ``size`` ranks."""
    given = {"reproducible": 2, "max_steps": 5, "seq_len": 32, **changes}
    tiles = {**model, **FULL, "tiles": str(size)}
    alone = _digest(tiny_config(**given, model=tiles, out=str(tmp_path / "tiles")), 1)
    shared = {**given, "model": {**model, **FULL}, "sequence_parallel": size}
    return alone, _digest(tiny_config(**shared, out=str(tmp_path / "ranks")), size)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
@pytest.mark.parametrize("model", [LLAMA, GPT2, {**LLAMA, "n_kv_head": 1}])
def test_one_rank_with_tiles_has_the_bits_of_ranks_that_share_sequences(tiny_config, tmp_path, model, strategy, size):
    tiles, ranks = _pair(tiny_config, tmp_path, size, model, strategy=strategy)
    assert tiles == ranks
