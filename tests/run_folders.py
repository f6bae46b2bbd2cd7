"""Run folders as the trainer writes them, without training."""

from __future__ import annotations

import json
from pathlib import Path

from zeroshard.train.config import TrainConfig, dump_toml

LINK = {
    "mode": "netns",
    "node_size": 1,
    "asked_bytes_per_s": 1.25e8,
    "achieved_bytes_per_s": 1e8,
    "asked_latency_s": 0.0,
    "achieved_latency_s": 2e-4,
    "probe_s": 1.0,
    "comparable": False,
    "why_not_comparable": "bandwidth: off",
}


def write_run(folder: Path, num_steps: int = 10, status: str = "ok", link: dict | None = None) -> Path:
    """A run folder as the trainer writes it."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(dump_toml(TrainConfig(max_steps=num_steps, warmup_steps=0)))
    lines = [{"event": "start", "step": 0, "world_size": 2, "tokens_per_step": 64, "link": link or {}}]
    for step in range(1, num_steps + 1):
        facts = {"loss": 5.0 - step / 10, "grad_norm": 1.0, "lr": 1e-3, "step_s": 0.1 if step > 2 else 9.0, "mfu": None}
        lines.append({"event": "step", "step": step, "tokens": 64 * step, "tokens_per_s": 640.0, **facts})
        lines[-1] |= {"memory_bytes": {"params": 100, "grads": 50 + step}, "comm": {"all_reduce": 8}}
        lines[-1] |= {"exposed_s": {"grads/backward": 0.02, "control": 0.01}, "skipped": False}
    lines.append({"event": "eval", "step": num_steps, "loss": 4.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "summary.json").write_text(json.dumps({"status": status, "step": num_steps, "val_loss": 4.0}))
    return folder
