"""One of two gloo ranks, started by test_ddp.py: trains with DDP and with the engine, resumes, reports as JSON."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from zeroshard.comm import TorchCommunicator
from zeroshard.launch.process_group import shutdown
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.loop.loop import train
from zeroshard.train.setup.build import build_run

CPU = torch.device("cpu")


def _config(folder, strategy, **changes):
    values = {
        "model": {"name": "gpt2-demo", "n_layer": 2, "n_embd": 16, "n_head": 2, "dropout": 0.1},
        "data": {"source": "synthetic", "dir": str(folder / "tokens"), "max_tokens": 6000},
        "strategy": strategy,
        "seq_len": 16,
        "micro_batch_size": 2,
        "grad_accum_steps": 2,
        "max_steps": 4,
        "warmup_steps": 2,
        "eval_interval": 0,
        "out": str(folder / strategy),
    }
    return TrainConfig.model_validate({**values, **changes})


def _train(config, until=None):
    run = build_run(config, TorchCommunicator(), CPU)
    if until is not None:
        run = replace(run, schedule=replace(run.schedule, max_steps=until))
    train(run)
    run.close()
    return run.strategy.state_dict()


def _same(one, other):
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def main(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    whole = _train(_config(folder, "ddp"))
    parts = str(folder / "parts")
    _train(_config(folder, "ddp", out=parts), until=2)
    resumed = _train(_config(folder, "ddp", out=parts, resume="auto"))
    ours = _train(_config(folder, "zero1"))
    report = {
        "resumed_is_whole": _same(whole, resumed),
        "largest_difference_from_ours": max(float((ours[k] - whole[k]).abs().max()) for k in whole),
    }
    (folder / f"report-{rank}.json").write_text(json.dumps(report))
    shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
