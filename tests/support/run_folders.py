"""Run folders as the trainer writes them, without training."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from zeroshard.lab.sweep.cases import SweepConfig, cases_of
from zeroshard.lab.sweep.results import SWEEP_FORMAT, run_folder
from zeroshard.settings.sizes import parse_bandwidth
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.config.toml import dump_toml

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


def write_run(
    folder: Path,
    num_steps: int = 10,
    status: str = "ok",
    link: dict | None = None,
    named: Mapping[str, float] | None = None,
    lr: float = 1e-3,
) -> Path:
    """A run folder as the trainer writes it; ``named``: losses of further validation sets; losses fall with ``lr``."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(dump_toml(TrainConfig(max_steps=num_steps, warmup_steps=0, lr=lr, min_lr=0)))
    lines = [{"event": "start", "step": 0, "world_size": 2, "tokens_per_step": 64, "link": link or {}}]
    for step in range(1, num_steps + 1):
        facts = {
            "loss": 5.0 - step / 10 - lr + 1e-3,
            "grad_norm": 1.0,
            "lr": lr,
            "step_s": 0.1 if step > 2 else 9.0,
            "mfu": None,
        }
        lines.append({"event": "step", "step": step, "tokens": 64 * step, "tokens_per_s": 640.0, **facts})
        lines[-1] |= {"memory_bytes": {"params": 100, "grads": 50 + step}, "comm": {"all_reduce": 8}}
        lines[-1] |= {"exposed_s": {"grads/backward": 0.02, "control": 0.01}, "skipped": False}
    more = {f"val_loss/{name}": value for name, value in (named or {}).items()}
    lines.append({"event": "eval", "step": num_steps, "loss": 4.0, **more})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "summary.json").write_text(json.dumps({"status": status, "step": num_steps, "val_loss": 4.0}))
    return folder


FACTORS = {"zero0": 1.0, "zero1": 1.02, "zero2": 1.05, "zero3": 1.5}  # of what each sends
SHARES = {"zero0": (1, 1, 1), "zero1": (1, 1, 4), "zero2": (1, 4, 4), "zero3": (4, 4, 4)}  # divisors of what each holds


def write_sweep(
    folder: Path,
    bandwidths: Sequence[str] = ("100Mbit/s", "1Gbit/s", "10Gbit/s"),
    layers: Sequence[int] = (2,),
    repeats: int = 1,
    num_steps: int = 8,
) -> Path:
    """A sweep's folder, all cases done: strategies x bandwidths x depths, with times by a formula."""
    sweep = SweepConfig(
        out=str(folder),
        repeats=repeats,
        base={"nproc": 4, "max_steps": num_steps, "warmup_steps": 0, "link": {"mode": "simulated"}},
        axes={"link.bandwidth": [*bandwidths], "model.n_layer": [*layers], "strategy": [*FACTORS]},
    )
    entries = []
    for case in cases_of(sweep):
        assert case.config is not None, case.refusal
        entries.append({"name": case.name, "axes": case.axes, "repeats": repeats, "refusal": ""})
        for repeat in range(repeats):
            write_case(run_folder(folder, case.name, repeat), case.config, repeat, num_steps)
    facts = {"format": SWEEP_FORMAT, **sweep.model_dump(mode="json"), "cases": entries}
    (folder / "sweep.json").write_text(json.dumps(facts))
    return folder


def write_case(folder: Path, config: TrainConfig, repeat: int = 0, num_steps: int = 8) -> Path:
    """A run of four ranks, done, with all that a run may measure of itself."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(dump_toml(config.model_copy(update={"out": str(folder)})))
    bytes_per_s = parse_bandwidth("link.bandwidth", config.link.bandwidth) if config.link.bandwidth else 1e10
    comm_s = 4e6 * FACTORS[config.strategy] / bytes_per_s
    exposed_s = max(0.2 * comm_s, comm_s - 0.03)
    step_s = (0.05 + exposed_s) * (1 + 0.01 * repeat)
    whole = {"params": 4_000_000, "grads": 4_000_000, "optimizer": 8_000_000}
    memory = {name: n // share for (name, n), share in zip(whole.items(), SHARES[config.strategy], strict=True)}
    link = {**LINK, "mode": config.link.mode, "asked_bytes_per_s": bytes_per_s, "achieved_bytes_per_s": bytes_per_s}
    link |= {"comparable": True, "why_not_comparable": ""}
    start = {"event": "start", "step": 0, "world_size": 4, "device": "cpu", "torch": "2.13.0", "link": link}
    lines = [{**start, "tokens_per_step": 512, "num_params": 1_000_000}]
    for step in range(1, num_steps + 1):
        facts = {"loss": 5.0 / step**0.3, "grad_norm": 1.0, "lr": 1e-3, "step_s": step_s, "mfu": None, "skipped": False}
        lines.append({"event": "step", "step": step, "tokens": 512 * step, "tokens_per_s": 512 / step_s, **facts})
        lines[-1] |= {"memory_bytes": memory, "comm": {"all_reduce": 8}, "exposed_s": {"grads/backward": exposed_s}}
    lines.append({"event": "eval", "step": num_steps, "loss": 2.9})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    held = sum(memory.values())
    pairs = {name: {"predicted": n, "measured": n, "ratio": 1.0} for name, n in memory.items()}
    summary = {
        "status": "ok",
        "step": num_steps,
        "memory_peak": {"bytes": 2 * held},
        "plan": {
            "num_broken": 0,
            "difference": "",
            "memory_bytes": pairs,
            "peak_bytes": {"predicted": 1.9 * held, "measured": 2 * held},
            "step_s": {"predicted": step_s * 0.93, "measured": step_s},
        },
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder
