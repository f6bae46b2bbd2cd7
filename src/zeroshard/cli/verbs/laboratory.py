"""The verbs of the lab: plan, bench, sweep and report."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from pydantic import BaseModel

from zeroshard.cli.flags import Flag, flags_of, read_flags, take_option
from zeroshard.cli.verbs.base import Verb
from zeroshard.cli.verbs.help import default_in_words, help_of, named, usage, values_in_words, wrapped
from zeroshard.cli.verbs.training import require_there, written
from zeroshard.cli.verbs.waiting import waiting
from zeroshard.host import columns, process
from zeroshard.host.errors import ExitStatus, UserError, warn
from zeroshard.lab.planner.config import PlanConfig
from zeroshard.settings.validate import nearest, validate
from zeroshard.train.config.config import TrainConfig, merge
from zeroshard.train.config.toml import read_toml

SWEEP = "Train once for each combination of settings, and compare."


def plan(config: PlanConfig, argv: Sequence[str]) -> int:
    """Run `zeroshard plan`: prints the predictions of `zeroshard.lab.planner.plan`."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    with waiting(f"planning {config.model.name}"):
        from zeroshard.host.uncompiled import compiler_not_imported  # imports torch
        from zeroshard.lab.planner.command import answer_plan

        with compiler_not_imported():
            answer = answer_plan(config, width)
    print(answer.text if config.json else columns.wrapped(answer.text, width))
    return answer.status


def bench(config: None, words: Sequence[str]) -> int:
    """Run `zeroshard bench`: measures with one of the benches of `zeroshard.lab.bench`."""
    process.prepare_torch()
    from zeroshard.lab.bench.settings import BENCHES

    kind = words[0] if words else "--help"
    if kind in ("--help", "-h"):
        lines = named(((name, (bench.__doc__ or "").splitlines()[0]) for name, bench in BENCHES.items()), 12)
        print(usage("bench WHAT [FLAGS]"), "", *lines, "", "`zeroshard bench WHAT --help`: flags.", sep="\n")
        return ExitStatus.OK
    if kind not in BENCHES:
        raise UserError(kind, "there is no such bench", nearest(kind, BENCHES, f"choose one of {', '.join(BENCHES)}"))
    settings = BENCHES[kind]
    if "--help" in words or "-h" in words:
        about = (settings.__doc__ or "").splitlines()[0]
        about += " --json FILE writes all that was measured, with the environment."
        print(help_of(f"bench {kind}", Verb(about, bench, settings), {}))
        return ExitStatus.OK
    json_path, rest = take_option(words[1:], "--json")
    chosen = validate(settings, read_flags(rest, flags_of(settings)))
    for path in map(Path, filter(None, (json_path, getattr(chosen, "out", "")))):
        try:  # before minutes of measuring
            path.parent.mkdir(parents=True, exist_ok=True)
            was_there = path.exists()
            path.open("ab").close()
            if not was_there:
                path.unlink()
        except OSError as error:
            raise UserError(str(path), f"cannot be written ({error.strerror})", "name another file") from None
    report = import_module(f"zeroshard.lab.bench.{kind}").run(chosen)
    print(report.text())
    if json_path:
        report.write(Path(json_path))
    return ExitStatus.OK


def sweep(config: None, words: Sequence[str]) -> int:
    """Run `zeroshard sweep`.

    ``base`` and ``axes`` have the flags of a training run: ``--base.max-steps 30 --axes.strategy zero0 zero3``.
    """
    from zeroshard.lab.sweep.cases import SweepConfig, require_asked_cases
    from zeroshard.lab.sweep.sweep import run_sweep

    path, others = take_option(words, "--config")
    raw = read_toml(path) if path else {}
    if not raw and not others:
        what, todo = "nothing to compare is given", "write --axes.SETTING VALUE ..., as --axes.strategy zero0 zero3"
        raise UserError("sweep", f"{path}: {what}" if path else what, f"{todo}, or --config FILE.toml")
    words = others
    flags = {name: flag for name, flag in flags_of(SweepConfig).items() if name not in ("--base", "--axes")}
    if "--help" in words or "-h" in words:
        print(_sweep_help(SweepConfig))
        return ExitStatus.OK
    for name, flag in flags_of(TrainConfig).items():
        flags[f"--base.{name[2:]}"] = replace(flag, path=("base", *flag.path))
        if flag.switch_value:
            flags[f"--axes.{name[2:]}"] = Flag(("axes", ".".join(flag.path)), "many")
    given = read_flags(words, flags)
    asked = validate(SweepConfig, merge(raw, given))
    if path:
        require_asked_cases(asked, given, path)
    if not asked.axes:
        warn("axes: none is given, so there is one case to compare; write --axes.SETTING VALUE ...")
    return written(asked.out, lambda: run_sweep(asked))


def _sweep_help(kind: type[BaseModel]) -> str:
    flags = [
        ("--base.SETTING VALUE", "of every run; any flag of `zeroshard train`: --base.max-steps 30"),
        ("--axes.SETTING VALUE ...", "tried one after another: --axes.strategy zero0 zero3"),
    ]
    for name, field in kind.model_fields.items():
        if name not in ("base", "axes"):
            flag = f"--{name.replace('_', '-')} {values_in_words(field.annotation)}".rstrip()
            flags.append((flag, f"{field.description} (default: {default_in_words(field.default)})"))
    about = wrapped(f"{SWEEP} Started again, it resumes where it stopped.")
    return "\n".join([usage("sweep [--config FILE.toml] [FLAGS]"), "", *about, "", *named(flags, 29)])


def report(config: None, words: Sequence[str]) -> int:
    """Run `zeroshard report`: writes a page and figures of runs or sweeps, or sends runs to a tracker."""
    out, rest = take_option(words, "--out")
    to, folders = take_option(rest, "--to")
    flags = [word for word in folders if word.startswith("--")]
    if flags:
        raise UserError(flags[0], "there is no such flag", nearest(flags[0], ["--out", "--to"], "see --help"))
    for folder in folders:
        require_there("runs", folder, "give the folder of a run or of a sweep")
    if to:
        if out:
            raise UserError("out", "runs that are sent are not written", "leave out one of --out and --to")
        from zeroshard.lab.report.send import send_runs

        return written(folders[0] if folders else "runs", lambda: send_runs(folders, to))
    from zeroshard.lab.report.command import run_report

    return written(out or "report", lambda: run_report(folders, out))
