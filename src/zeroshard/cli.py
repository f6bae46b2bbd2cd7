"""The `zeroshard` command: read the words, check them, and only then import what the verb needs.

Everything that can be refused without torch is refused here, in the process that the user started, so a
mistake costs a tenth of a second. Torch and the layers below are imported inside the verbs.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

from pydantic import BaseModel

import zeroshard
from zeroshard.errors import ExitStatus, UserError
from zeroshard.flags import Flag, flags_of, read_flags, take_option
from zeroshard.lab.config import PlanConfig
from zeroshard.submit import SubmitConfig
from zeroshard.train.config import (
    SHORTHANDS,
    EvalConfig,
    ExportConfig,
    GenerateConfig,
    ImportConfig,
    PrepareConfig,
    TrainConfig,
    merge,
    parse_nnodes,
    read_toml,
)
from zeroshard.train.validate import nearest, validate

if TYPE_CHECKING:
    from zeroshard.comm.launch import Nodes

NUM_STAGES = 4


@dataclass(frozen=True, slots=True)
class Verb:
    """A word after `zeroshard`, the class of its settings, and what it does with them."""

    summary: str
    run: Callable[[Any, Sequence[str]], int]
    config: type[BaseModel] | None = None
    positionals: tuple[str, ...] = ()
    reads_file: bool = False  # takes --config
    usage: str = ""  # of the words that a verb without settings takes
    words: tuple[str, ...] = ()  # those of them that a shell may complete
    before: str = ""  # another verb, with its words, follows after this one's own


class _TerminatedError(BaseException):
    """SIGTERM or SIGUSR1 came; like KeyboardInterrupt no Exception, so that nothing on the way takes it for an error.

    ``status`` is what to exit with.
    """

    def __init__(self, status: ExitStatus) -> None:
        self.status = status
        super().__init__(status)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status; see `zeroshard.errors.ExitStatus`.

    Args:
        argv: the words after ``zeroshard``; the process's own where None.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        with _stop_signals_exit():
            status = _dispatch(argv)
            sys.stdout.flush()  # here, where a reader that has gone is met, and not at the interpreter's exit
            return status
    except BrokenPipeError:
        if not _stdout_is_gone():
            raise
        return 128 + signal.SIGPIPE
    except UserError as error:
        _say(str(error))
        return ExitStatus.USAGE
    except KeyboardInterrupt:
        return ExitStatus.INTERRUPTED
    except _TerminatedError as stop:
        return stop.status


def _stdout_is_gone() -> bool:
    """Whether who read our output has stopped, as ``head`` does; then what is left of it goes nowhere."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # errors alone
    if not poll.poll(0):
        return False
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    return True


def _dispatch(argv: list[str]) -> int:
    word = argv[0] if argv else "--help"
    if word in ("--help", "-h"):
        print(_overview())
        return ExitStatus.OK
    if word == "--version":
        print(f"zeroshard {zeroshard.__version__}")
        return ExitStatus.OK
    verb = VERBS.get(word)
    if verb is None:
        choices = ", ".join(VERBS)
        raise UserError(word, "there is no such command", nearest(word, VERBS, f"choose one of {choices}"))
    words = argv[1:]
    if verb.config is None:
        if words and words[0] in ("--help", "-h") and verb.usage:
            print(f"usage: zeroshard {word} {verb.usage}".rstrip() + f"\n\n{verb.summary}")
            return ExitStatus.OK
        return verb.run(None, words)
    if verb.before and verb.before in words:
        at = words.index(verb.before)
        words, argv = words[:at], words[at:]
    elif verb.before and not {"--help", "-h"} & set(words):
        raise UserError(word, f"there is nothing to {word}", f"write `zeroshard {word} [FLAGS] {verb.before} ...`")
    path, words = take_option(words, "--config") if verb.reads_file else ("", words)
    raw = _read_file(path, verb.config) if path else {}
    if "--help" in words or "-h" in words:
        _help(word, verb, raw)
        return ExitStatus.OK
    given = read_flags(words, flags_of(verb.config, SHORTHANDS, verb.positionals), verb.positionals)
    return verb.run(validate(verb.config, merge(raw, given)), argv)


def _read_file(path: str, kind: type[BaseModel]) -> dict[str, Any]:
    """Raw values for `kind`; a training run's file serves other commands too, which take their part."""
    raw = read_toml(path)
    if kind is not TrainConfig:
        validate(TrainConfig, raw)
        raw = {key: value for key, value in raw.items() if key in kind.model_fields}
    return raw


def _train(config: TrainConfig, argv: Sequence[str]) -> int:
    from zeroshard.comm import launch, machines

    launch.prepare_torch()
    world = launch.world_from_env()
    several = config.nnodes != "1"
    if world is None and (config.nproc > 1 or several):
        launch.end_with_starter()
        max_moves = NUM_STAGES - 1 if config.strategy == "auto" else 0
        meeting = machines.meeting_at(config.rdzv_endpoint, *parse_nnodes(config.nnodes)) if several else None
        nproc = max(1, config.nproc)
        with _nodes(config) as nodes:
            ending = launch.launch_workers(
                argv, nproc, config.port, config.max_restarts, max_moves, meeting=meeting, nodes=nodes
            )
        if ending.line:
            _say(ending.line)
        return ending.status
    if world is not None and not several and config.nproc not in (0, world.world_size):
        raise UserError(
            "nproc",
            f"{config.nproc} ranks in a world of {world.world_size}",
            "leave --nproc out under a launcher",
        )
    faulthandler.enable(2)  # what ends in C, as a mapped file that was cut off does, says at least where
    with launch.ended_with_launcher():
        from zeroshard.comm import PeerError
        from zeroshard.train.loop import run_training

        try:
            return run_training(config, _choose_stage if config.strategy == "auto" else None, _predict)
        except PeerError as error:
            lost_first = str(error).startswith("rank 0")
            _say(f"rank {world.rank if world else 0}: {error}; start again with --resume auto", all_ranks=lost_first)
            return ExitStatus.PEER_LOST


def _nodes(config: TrainConfig) -> AbstractContextManager[Nodes | None]:
    """Where the ranks of a run live: in namespaces, if its links are to be slow so."""
    if config.link.mode != "netns":
        return nullcontext()
    from zeroshard.lab.network import nodes
    from zeroshard.train.sizes import parse_bandwidth, parse_duration, parse_size

    link = config.link
    return nodes(
        config.nproc // link.node_size,
        link.node_size,
        parse_bandwidth("link.bandwidth", link.bandwidth),
        parse_duration("link.latency", link.latency or "0s"),
        parse_size("link.burst", link.burst) if link.burst else 0,
    )


def _choose_stage(*facts: Any) -> tuple[int, str]:
    from zeroshard.lab.fit import fitting_stage

    return fitting_stage(*facts)


def _predict(job: Any) -> Any:
    from zeroshard.lab.contract import predict

    return predict(job)


def _prepare(config: PrepareConfig, argv: Sequence[str]) -> int:
    from zeroshard.train.prepare import run_prepare

    return _written(config.data.dir or "data", lambda: run_prepare(config.data))


def _generate(config: GenerateConfig, argv: Sequence[str]) -> int:
    from zeroshard.train.generate import run_generate

    return run_generate(config)


def _eval(config: EvalConfig, argv: Sequence[str]) -> int:
    from zeroshard.comm import launch

    launch.prepare_torch()
    if config.tasks:
        from zeroshard.train.harness import run_tasks

        if config.nproc > 1 or config.strategy != "none":
            raise UserError("tasks", "they run in one process, on whole weights", "leave out --nproc and --strategy")
        return run_tasks(config)
    if launch.world_from_env() is None and config.nproc > 1:
        ending = launch.launch_workers(argv, config.nproc, config.port)
        if ending.line:
            _say(ending.line)
        return ending.status
    with launch.ended_with_launcher():
        from zeroshard.train.evaluation import run_eval

        return run_eval(config)


def _export(config: ExportConfig, argv: Sequence[str]) -> int:
    from zeroshard.train.hf_export import run_export

    return _written(config.out, lambda: run_export(config))


def _import(config: ImportConfig, argv: Sequence[str]) -> int:
    from zeroshard.train.hf_import import run_import

    return _written(config.out, lambda: run_import(config))


def _written(out: str, write: Callable[[], int]) -> int:
    """What ``write`` returns; a disk that fails is told in a line."""
    try:
        return write()
    except OSError as error:
        _say(f"{out}: it was not written ({error.strerror or error}); free space, or name another folder")
        return ExitStatus.STORAGE


def _plan(config: PlanConfig, argv: Sequence[str]) -> int:
    from zeroshard.lab.command import run_plan

    return run_plan(config)


def _checkpoint(config: None, words: Sequence[str]) -> int:
    from zeroshard.train.checkpoints import run_checkpoint

    try:
        status = run_checkpoint(words)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads has seen enough, as `head` does; what is left goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitStatus.OK
    return status


def _bench(config: None, words: Sequence[str]) -> int:
    from zeroshard.comm import launch

    launch.prepare_torch()
    from zeroshard.lab.bench.settings import BENCHES

    kind = words[0] if words else "--help"
    if kind in ("--help", "-h"):
        lines = [f"  {name:<12}{(bench.__doc__ or '').splitlines()[0]}" for name, bench in BENCHES.items()]
        print(
            "\n".join(["usage: zeroshard bench WHAT [FLAGS]", "", *lines, "", "`zeroshard bench WHAT --help`: flags."])
        )
        return ExitStatus.OK
    if kind not in BENCHES:
        raise UserError(kind, "there is no such bench", nearest(kind, BENCHES, f"choose one of {', '.join(BENCHES)}"))
    settings = BENCHES[kind]
    if "--help" in words or "-h" in words:
        about = (settings.__doc__ or "").splitlines()[0]
        about += " --json FILE writes all that was measured, with the environment; --plot FILE.png draws it."
        _help(f"bench {kind}", Verb(about, _bench, settings), {})
        return ExitStatus.OK
    json_path, rest = take_option(words[1:], "--json")
    plot_path, rest = take_option(rest, "--plot")
    chosen = validate(settings, read_flags(rest, flags_of(settings, {})))
    from zeroshard.lab.bench.command import run_bench

    return run_bench(chosen, json_path, plot_path)


def _sweep(config: None, words: Sequence[str]) -> int:
    """``base`` and ``axes`` have the flags of a training run: ``--base.max-steps 30 --axes.strategy zero0 zero3``."""
    from zeroshard.lab.cases import SweepConfig
    from zeroshard.lab.sweep import run_sweep

    def predicted(*asked: Any) -> int:
        from zeroshard.lab.fill import largest_micro_batch  # with torch, which no other sweep needs

        return largest_micro_batch(*asked)

    path, words = take_option(words, "--config")
    raw = read_toml(path) if path else {}
    flags = {name: flag for name, flag in flags_of(SweepConfig, {}).items() if name not in ("--base", "--axes")}
    if "--help" in words or "-h" in words:
        print(_sweep_help(SweepConfig))
        return ExitStatus.OK
    for name, flag in flags_of(TrainConfig, SHORTHANDS).items():
        flags[f"--base.{name[2:]}"] = replace(flag, path=("base", *flag.path))
        if flag.says:
            flags[f"--axes.{name[2:]}"] = Flag(("axes", ".".join(flag.path)), "many")
    return run_sweep(validate(SweepConfig, merge(raw, read_flags(words, flags))), largest_micro_batch=predicted)


def _sweep_help(kind: type[BaseModel]) -> str:
    lines = [
        "usage: zeroshard sweep [--config FILE.toml] [FLAGS]",
        "",
        f"{VERBS['sweep'].summary} Started again, it goes on where it stopped.",
        "",
        "  --base.SETTING VALUE         of every run; any flag of `zeroshard train`: --base.max-steps 30",
        "  --axes.SETTING VALUE ...     tried one after another: --axes.strategy zero0 zero3",
    ]
    for name, field in kind.model_fields.items():
        if name not in ("base", "axes"):
            lines.append(f"  --{name.replace('_', '-'):<27}{field.description} (default: {field.default or 'none'})")
    return "\n".join(lines)


def _report(config: None, words: Sequence[str]) -> int:
    folders, out = _folders_and_out(words)
    from zeroshard.lab.report.command import run_report

    return _written(out or "report", lambda: run_report(folders, out))


def _dashboard(config: None, words: Sequence[str]) -> int:
    host, words = take_option(words, "--host")
    port, words = take_option(words, "--port")
    if len(words) != 1 or words[0].startswith("--"):
        wrong = next((word for word in words if word.startswith("--")), words[1] if len(words) > 1 else "dir")
        raise UserError(wrong, "needs one folder, of runs", "write zeroshard dashboard DIR [--host ADDRESS] [--port N]")
    if port and not (port.isascii() and port.isdecimal() and int(port) < 2**16):
        raise UserError("port", f"{port!r} is no port", "give a number below 65536; 0: any that is free")
    from zeroshard.lab.report.command import require

    require("dashboard", ("dash",))
    from zeroshard.lab.dashboard.server import serve

    serve(words[0], host or "127.0.0.1", int(port or 8050))
    return ExitStatus.OK


def _folders_and_out(words: Sequence[str]) -> tuple[list[str], str]:
    """Words without a flag, and what ``--out`` says."""
    out, rest = take_option(words, "--out")
    flags = [word for word in rest if word.startswith("--")]
    if flags:
        raise UserError(flags[0], "there is no such flag", nearest(flags[0], ["--out"], "see --help"))
    return rest, out


def _lab(config: None, words: Sequence[str]) -> int:
    from zeroshard.lab.commands import OPTIONS, WORDS, run_lab

    flags = {"--yes": Flag(("yes",), "switch"), **{f"--{name}": Flag((name,), "one") for name in OPTIONS}}
    return run_lab(read_flags(words, flags, WORDS))


def _import_config(config: None, words: Sequence[str]) -> int:
    from zeroshard.train.migrate import run_import_config

    return run_import_config(words)


def _doctor(config: None, words: Sequence[str]) -> int:
    from zeroshard import doctor

    if not words:
        print(doctor.report())
    elif words[0] == "--optimizers":
        print(doctor.optimizers(words[1:]))
    elif list(words) == ["--environment"]:
        print(doctor.environment())
    else:
        raise UserError(words[0], "`zeroshard doctor` does not know it", "ask for --optimizers or --environment")
    return ExitStatus.OK


def _submit(config: SubmitConfig, argv: Sequence[str]) -> int:
    from zeroshard.submit import submit

    words = list(argv[1:])
    path, flags = take_option(words, "--config")
    given = read_flags(flags, flags_of(TrainConfig, SHORTHANDS))
    run = validate(TrainConfig, merge(_read_file(path, TrainConfig) if path else {}, given))
    if run.nproc or run.nnodes != "1":
        raise UserError("nproc", "ranks are the cluster's to start", "say --nproc 0, and give submit --tasks-per-node")
    if run.resume == "none":
        words += ["--resume", "auto"]
    print(submit(config, words))
    return ExitStatus.OK


def _completion(config: None, words: Sequence[str]) -> int:
    from zeroshard import completion

    if len(words) != 1:
        raise UserError("shell", f"{len(words)} given", "write `zeroshard completion bash`, zsh or fish")
    print(completion.script(words[0], VERBS, SHORTHANDS))
    return ExitStatus.OK


VERBS: dict[str, Verb] = {
    "train": Verb("Train a language model, on one rank or many.", _train, TrainConfig, reads_file=True),
    "prepare": Verb("Cut text into tokens once, for later runs.", _prepare, PrepareConfig, reads_file=True),
    "generate": Verb("Write text with the model of a run.", _generate, GenerateConfig, ("run",)),
    "eval": Verb("Measure loss, perplexity and bits per byte on prepared text.", _eval, EvalConfig, ("run",)),
    "export": Verb("Write a model for Hugging Face's transformers.", _export, ExportConfig, ("source", "out")),
    "import": Verb(
        "Make a run of a Hugging Face GPT-2 or LLaMA, or of nanoGPT's ckpt.pt.",
        _import,
        ImportConfig,
        ("source", "out"),
    ),
    "import-config": Verb(
        "Print settings of nanoGPT or DeepSpeed as ours, with what became of each of them.",
        _import_config,
        usage="nanogpt [FILE.py] [--key=value ...] | deepspeed FILE.json",
    ),
    "plan": Verb(
        "Say before a run what fits, how fast it will be and what to choose; status 3 if nothing fits.",
        _plan,
        PlanConfig,
    ),
    "checkpoint": Verb(
        "ls: the checkpoints of a run. show: what one holds. verify: whether every byte is what was written; status 3 "
        "if not. diff: what differs between two; status 3 if anything does.",
        _checkpoint,
        usage="ls RUN | show PATH | verify PATH | diff PATH PATH",
        words=("ls", "show", "verify", "diff"),
    ),
    "bench": Verb(
        "Measure on this machine: memory, step, collectives, device, kernels; a table, a JSON file, a figure.",
        _bench,
        usage="memory | step | collectives | device | kernels [FLAGS]",
        words=("memory", "step", "collectives", "device", "kernels"),
    ),
    "sweep": Verb(
        "Train once for each combination of settings, and compare.",
        _sweep,
    ),
    "report": Verb(
        "Make one page and PNGs of runs or a sweep: OUT/report.html opens offline, OUT/figures/ holds the figures. OUT "
        "is the folder itself, or `report` where several are given.",
        _report,
        usage="RUN... | SWEEP [--out OUT]",
    ),
    "dashboard": Verb(
        "Show the runs below a folder live, with a planner: a page on 127.0.0.1, or on --host; port 8050, --port 0: "
        "any.",
        _dashboard,
        usage="DIR [--host ADDRESS] [--port N]",
    ),
    "lab": Verb(
        "clean: remove networks whose runs have died. tc: slow what leaves a network interface, say how slow it is, "
        "let it go; --yes even where your own session may pass through it.",
        _lab,
        usage="clean | tc apply DEV --bandwidth RATE [--latency TIME] [--burst SIZE] [--yes] | tc status DEV "
        "| tc delete DEV [--yes]",
        words=("clean", "tc"),
    ),
    "doctor": Verb(
        "Say what is installed, what is found, and what would be used; for bug reports. With --optimizers: which "
        "optimizers of torch, and classes of your own, may be sharded, and what difference sharding makes. With "
        "--environment: the variables that steer NCCL and gloo, and what each does.",
        _doctor,
        usage="[--optimizers [module:Class ...] | --environment]",
        words=("--optimizers", "--environment"),
    ),
    "submit": Verb(
        "Queue a training run on a SLURM cluster, and again whenever it is pre-empted: submit [FLAGS] train [FLAGS].",
        _submit,
        SubmitConfig,
        before="train",
    ),
    "completion": Verb(
        "Print a script that lets a shell complete this command.",
        _completion,
        usage="bash | zsh | fish",
        words=("bash", "zsh", "fish"),
    ),
}


def _overview() -> str:
    lines = [
        "usage: zeroshard COMMAND [FLAGS]",
        "",
        *(f"  {name:<15}{verb.summary}" for name, verb in VERBS.items()),
        "",
        "  --version  Print the version.",
        "",
        "`zeroshard COMMAND --help` names each setting, its unit and its default.",
    ]
    return "\n".join(lines)


def _help(name: str, verb: Verb, raw: dict[str, Any]) -> None:
    import tyro

    assert verb.config is not None
    text = verb.summary
    if verb.reads_file:
        text += " Settings: defaults < --config FILE.toml < flags."
    for table, key in SHORTHANDS.items():
        if table in verb.config.model_fields:
            text += f" --{table} NAME stands for --{table}.{key} NAME."
    markers = (tyro.conf.PositionalRequiredArgs,)
    # what has no default has no instance to show defaults from
    default = tyro.MISSING_NONPROP if verb.positionals else validate(verb.config, raw)
    prog = f"zeroshard {name}"
    with _returns_from_help():
        tyro.cli(verb.config, prog=prog, description=text, args=["--help"], default=default, config=markers)


@contextmanager
def _returns_from_help() -> Generator[None]:
    """tyro exits after its help; a verb returns."""
    try:
        yield
    except SystemExit as stop:
        if stop.code:
            raise


def _say(line: str, *, all_ranks: bool = False) -> None:
    """One line on stderr, from one rank: the launcher prints for its workers, else rank 0 does, if it still can."""
    from zeroshard.comm import launch

    line = " ".join(line.split())
    if launch.tell_launcher(line):
        return
    try:
        world = launch.world_from_env()
    except UserError:
        world = None
    if world is None or world.rank == 0 or all_ranks:
        print(f"error: {line}", file=sys.stderr, flush=True)
    else:
        time.sleep(1.0)  # a launcher ends the others when one exits: let rank 0 speak first


@contextmanager
def _stop_signals_exit() -> Generator[None]:
    """SIGTERM and SIGUSR1 unwind the stack like Ctrl-C does, and end in exit statuses of their own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    statuses = {signal.SIGTERM: ExitStatus.TERMINATED, signal.SIGUSR1: ExitStatus.PREEMPTED}

    def leave(signum: int, frame: object) -> NoReturn:
        raise _TerminatedError(statuses[signal.Signals(signum)])

    before = {number: signal.signal(number, leave) for number in statuses}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
