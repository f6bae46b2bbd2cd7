"""Models of `transformers` behind ours: the same function, the same weights, trained sharded as in one process."""

from __future__ import annotations

import pytest
import torch

from hf_models import ARCHITECTURES, SEQ_LEN, VOCAB_SIZE, hf_folder, make_model, require_transformers  # noqa: F401
from zeroshard.comm import run_threads
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.setup.assemble import sharded

NUM_STEPS, WORLD_SIZE = 5, 2
CPU = torch.device("cpu")
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


def batches(num_rows=2 * WORLD_SIZE):
    """Tokens and targets of each step; some positions have no target, as many in each row."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(NUM_STEPS):
        tokens, targets = (torch.randint(3, VOCAB_SIZE, (num_rows, SEQ_LEN), generator=generator) for _ in range(2))
        targets[:, 2:4] = -100
        yield tokens, targets


def trained_by_transformers(folder):
    """Losses and logits of one process with `transformers`' own model and loss."""
    transformers = require_transformers()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    decayed = [param for param in model.parameters() if param.dim() > 1]
    rest = [param for param in model.parameters() if param.dim() <= 1]
    groups = [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, **ADAMW)
    losses = []
    for tokens, targets in batches():
        loss = model(input_ids=tokens, labels=targets, shift_labels=targets).loss
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return losses, model.eval()(input_ids=tokens).logits, model


def run_config(folder, strategy="zero3", **changes):
    model = {"name": f"hf:{folder}", **changes.pop("model", {})}
    data = {"source": "synthetic"}
    settings = {"lr": 1e-3, "fused": False, "device": "cpu", "strategy": strategy, "seq_len": SEQ_LEN, "out": "x"}
    return TrainConfig.model_validate({"model": model, "data": data, **settings, **changes})


def trained(comm, config, num_steps=NUM_STEPS):
    """Losses averaged over ranks, the model and its strategy; each rank takes its rows."""
    model, strategy = sharded(config, VOCAB_SIZE, None, comm, CPU)
    model.train()
    losses = []
    for _, (tokens, targets) in zip(range(num_steps), batches(), strict=False):
        rows = slice(comm.rank * 2, comm.rank * 2 + 2)
        loss = strategy.model(tokens[rows], targets[rows])
        loss.backward()
        strategy.optimizer.step()
        strategy.optimizer.zero_grad()
        mean = loss.detach().clone()
        comm.all_reduce(mean).wait()
        losses.append(float(mean) / comm.world_size)
    return losses, model, strategy


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_each_architecture_trains_at_each_stage_as_one_process_of_transformers(hf_folder, kind):  # noqa: F811
    folder = hf_folder(kind)
    expected, logits, _ = trained_by_transformers(folder)
    tokens = list(batches())[-1][0]

    def rank_main(comm, stage):
        losses, model, strategy = trained(comm, run_config(folder, f"zero{stage}"))
        with strategy.full_params(), torch.no_grad():
            return losses, model.eval()(tokens)

    for stage in (1, 2, 3):
        for losses, found in run_threads(lambda comm, stage=stage: rank_main(comm, stage), WORLD_SIZE):
            torch.testing.assert_close(losses, expected, rtol=0, atol=1e-5)
            torch.testing.assert_close(found, logits, rtol=0, atol=2e-4)
