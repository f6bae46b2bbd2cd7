"""The table of commands (verbs) of `zeroshard`. Verbs import torch themselves, after all settings are checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zeroshard.cli.submit import SubmitConfig
from zeroshard.cli.verbs.base import Verb, read_file, say
from zeroshard.cli.verbs.help import PLAN, TRAIN
from zeroshard.cli.verbs.laboratory import SWEEP, bench, plan, report, sweep
from zeroshard.cli.verbs.training import (
    evaluate,
    export,
    generate,
    import_config,
    import_model,
    look_at_checkpoints,
    prepare,
    submit,
    train,
)
from zeroshard.host.errors import ExitStatus, UserError
from zeroshard.lab.planner.config import PlanConfig
from zeroshard.train.config.command_settings import (
    EvalConfig,
    ExportConfig,
    GenerateConfig,
    ImportConfig,
    PrepareConfig,
)
from zeroshard.train.config.config import TrainConfig

__all__ = ["VERBS", "Verb", "read_file", "say"]


def look_around(config: None, words: Sequence[str]) -> int:
    """Run `zeroshard doctor`: prints what `zeroshard.cli.doctor` reports."""
    from zeroshard.cli import doctor

    if words:
        raise UserError(words[0], "`zeroshard doctor` takes nothing", "leave it out")
    print(doctor.report())
    return ExitStatus.OK


def complete(verbs: Mapping[str, Verb], words: Sequence[str]) -> int:
    """Run `zeroshard completion`: prints a shell's completion script."""
    from zeroshard.cli.verbs import completion

    if len(words) != 1:
        what = f"{len(words)} are given where 1 is wanted" if words else "is missing"
        raise UserError("shell", what, "write `zeroshard completion bash`, zsh or fish")
    print(completion.script(words[0], verbs))
    return ExitStatus.OK


VERBS: dict[str, Verb] = {
    "train": Verb("Train a language model, on one rank or many.", train, TrainConfig, reads_file=True, common=TRAIN),
    "prepare": Verb("Cut text into tokens once, for later runs.", prepare, PrepareConfig, reads_file=True),
    "generate": Verb("Write text with the model of a run.", generate, GenerateConfig, ("run",)),
    "eval": Verb("Measure loss, perplexity and bits per byte on prepared text.", evaluate, EvalConfig, ("run",)),
    "export": Verb("Write a model for Hugging Face's transformers.", export, ExportConfig, ("source", "out")),
    "import": Verb(
        "Make a run of a Hugging Face GPT-2 or LLaMA, or of nanoGPT's ckpt.pt.",
        import_model,
        ImportConfig,
        ("source", "out"),
    ),
    "import-config": Verb(
        "Print settings of DeepSpeed as ours, with what became of each of them.",
        import_config,
        usage="deepspeed FILE.json",
        words=("deepspeed",),
    ),
    "plan": Verb(
        "Say before a run what fits, how fast it will be and what to choose; status 3 if nothing fits.",
        plan,
        PlanConfig,
        common=PLAN,
    ),
    "checkpoint": Verb(
        "ls: the checkpoints of a run. show: what one holds. verify: whether every byte is what was written; status 3 "
        "if not. diff: what differs between two; status 3 if anything does.",
        look_at_checkpoints,
        usage="ls RUN | show PATH | verify PATH | diff PATH PATH",
        words=("ls", "show", "verify", "diff"),
    ),
    "bench": Verb(
        "Measure on this machine: a training step beside DDP; the device, for `zeroshard plan`. A table, a JSON file.",
        bench,
        usage="step | device [FLAGS]",
        words=("step", "device"),
    ),
    "sweep": Verb(SWEEP, sweep),
    "report": Verb(
        "Make one page and PNGs of runs or a sweep: OUT/report.html opens offline, OUT/figures/ holds the figures. OUT "
        "is the folder itself, or `report` where several are given. With --to, send the runs to a tracker instead "
        "(tensorboard, wandb, trackio), those that it did not follow while they trained.",
        report,
        usage="RUN... | SWEEP [--out OUT | --to TRACKER]",
    ),
    "doctor": Verb(
        "Say what is installed, what is found, and what would be used; for bug reports.",
        look_around,
    ),
    "completion": Verb(
        "Print a script that lets a shell complete this command.",
        lambda config, words: complete(VERBS, words),
        usage="bash | zsh | fish",
        words=("bash", "zsh", "fish"),
    ),
    "submit": Verb(
        "Queue a training run on a SLURM cluster, and again whenever it is pre-empted: submit [FLAGS] train [FLAGS].",
        submit,
        SubmitConfig,
        before="train",
    ),
}
