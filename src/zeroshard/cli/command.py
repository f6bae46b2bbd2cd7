"""The `zeroshard` command: reads and checks the arguments, and only then imports what the verb needs.

All errors that can be found without torch are reported here, in the process that the user started, so a mistake costs a
tenth of a second. Torch and the layers below are imported inside the verbs.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NoReturn

import zeroshard
from zeroshard.cli.flags import refuse_no_text, take_option
from zeroshard.cli.verbs import VERBS, read_file, say
from zeroshard.cli.verbs.base import checked_settings
from zeroshard.cli.verbs.help import help_of, named, usage, wrapped
from zeroshard.host import gc_frequency
from zeroshard.host.errors import ExitStatus, UserError, is_out_of_memory, is_out_of_threads, memory_line, path_line
from zeroshard.settings.validate import nearest

# Advice if memory runs out: in a training run, and in any other command (`_NEEDS_OTHERS_LESS`).
_NEEDS_LESS = (
    "use a higher --strategy over more ranks, --model.activation-checkpointing, or a smaller --micro-batch-size or "
    "--seq-len; `zeroshard plan` says how much memory that needs"
)
_NAME_WIDTH = 15  # columns for a verb's name in the overview
_NEEDS_OTHERS_LESS = "end other programs, or use a machine with more"
_NONE_LEFT_BYTES = 16 * 2**20  # below what one allocation may ask for
_NEEDS_HIGHER_LIMITS = (
    "raise the limits on memory and processes (`ulimit -d`, `ulimit -v`, `ulimit -u`), or start fewer ranks"
)


class _TerminatedError(BaseException):
    """SIGTERM, SIGHUP or SIGUSR1 arrived. Like KeyboardInterrupt no Exception: ``except Exception`` does not catch it.

    ``status`` is the exit status.
    """

    def __init__(self, status: ExitStatus) -> None:
        self.status = status
        super().__init__(status)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status; see `zeroshard.host.errors.ExitStatus`.

    Args:
        argv: the arguments after ``zeroshard``; None: those of the process.
    """
    own_process = argv is None
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as by >&-: no file of a run may be opened in its place
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 -- for the process
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        with gc_frequency.rare_collections() if own_process else nullcontext(), _stop_signals_exit():
            status = _dispatch(argv)
            sys.stdout.flush()  # so that a BrokenPipeError is raised here and not at the interpreter's exit
            return status
    except BrokenPipeError:
        if not _stdout_is_gone():
            raise
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return ExitStatus.INTERRUPTED
    except _TerminatedError as stop:
        # A rank that cleans up after an error is asked to end, once its peers have noticed: the error is what counts.
        cause = stop.__context__
        reported = _reported(cause, argv) if isinstance(cause, Exception) else None
        return stop.status if reported is None else reported
    except Exception as error:
        status = _reported(error, argv)
        if status is None:
            raise
        return status


def _reported(error: Exception, argv: Sequence[str]) -> int | None:
    """Say in one line what went wrong and return the exit status; None for an error that needs its traceback."""
    if isinstance(error, UserError):
        say(str(error))
        return ExitStatus.USAGE
    if isinstance(error, OSError) and (refused := path_line(error)) is not None:
        say(refused[1])
        return refused[0]
    if is_out_of_threads(error):
        say(f"threads: no more can be started; {_NEEDS_HIGHER_LIMITS}")
        return ExitStatus.FAILED
    if isinstance(error, OSError | RuntimeError | MemoryError | ImportError) and is_out_of_memory(error):
        less = argv[:1] == ["train"] and not isinstance(error, OSError)
        say(memory_line(error, _NEEDS_LESS if less else _NEEDS_OTHERS_LESS))
        return ExitStatus.FAILED
    if isinstance(error, SystemError) and _is_at_a_limit():
        say(f"memory: ran out at a limit of this process; {_NEEDS_HIGHER_LIMITS}")
        return ExitStatus.FAILED
    return None


def _is_at_a_limit() -> bool:
    """Whether a limit of this process leaves it no memory: Python's own C code may then fail without saying why."""
    if "torch" not in sys.modules:
        return False
    from zeroshard.host import host_memory

    left_bytes = host_memory.bytes_within_limits()
    return left_bytes is not None and left_bytes < _NONE_LEFT_BYTES


def _stdout_is_gone() -> bool:
    """Whether the reader of our output has stopped, as ``head`` does; if so, the rest of the output is discarded."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # no events but errors
    if not poll.poll(0):
        return False
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    return True


def _dispatch(argv: list[str]) -> int:
    refuse_no_text(argv)
    word = argv[0] if argv else "--help"
    if word in ("--help", "-h"):
        print(_overview())
        return ExitStatus.OK
    if word == "--version":
        print(f"zeroshard {zeroshard.__version__}")
        return ExitStatus.OK
    verb = VERBS.get(word)
    if verb is None:
        owner = next((name for name in VERBS if word in VERBS[name].words), None)
        todo = f"write `zeroshard {owner} {word}`" if owner else f"choose one of {', '.join(VERBS)}"
        raise UserError(word, "there is no such command", todo if owner else nearest(word, VERBS, todo))
    words = argv[1:]
    if verb.config is None:
        # A sweep and each bench have flags, and a help, of their own.
        helps_itself = word == "sweep" or (word == "bench" and words[:1] != words[-1:])
        if {"--help", "-h"} & set(words) and not helps_itself:
            print(usage(f"{word} {verb.usage}".rstrip()), "", *wrapped(verb.summary), sep="\n")
            return ExitStatus.OK
        return verb.run(None, words)
    if verb.before and verb.before in words:
        at = words.index(verb.before)
        words, argv = words[:at], words[at:]
    elif verb.before and not {"--help", "-h"} & set(words):
        raise UserError(word, f"there is nothing to {word}", f"write `zeroshard {word} [FLAGS] {verb.before} ...`")
    path, words = take_option(words, "--config") if verb.reads_file else ("", words)
    raw = read_file(path, verb.config) if path else {}
    if "--help" in words or "-h" in words:
        asked = words.index("--help" if "--help" in words else "-h")
        every = words[asked + 1 : asked + 2] == ["all"] or not sys.stdout.isatty()
        print(help_of(word, verb, raw, every=every))
        return ExitStatus.OK
    return verb.run(checked_settings(verb.config, raw, words, path, verb.positionals), argv)


def _overview() -> str:
    more = (
        "`zeroshard COMMAND --help` names each setting, its unit and its default: on a terminal those that most people "
        "use, in a pipe or file, and by `--help all`, every one."
    )
    what = (
        "Memory-efficient data-parallel training of language models: ZeRO stages 0 to 3, and what fits before you run."
    )
    lines = [
        usage("COMMAND [FLAGS]"),
        "",
        *wrapped(f"{what} Documentation: docs/index.md of the repository, or `make docs` there."),
        "",
        *named(((name, verb.summary) for name, verb in VERBS.items()), _NAME_WIDTH),
        "",
        "  --version  Print the version.",
        "",
        *wrapped(more),
    ]
    return "\n".join(lines)


@contextmanager
def _stop_signals_exit() -> Generator[None]:
    """Inside this block SIGTERM, SIGHUP and SIGUSR1 unwind the stack as Ctrl-C does, with exit statuses of their own.

    A signal that is ignored stays ignored: ``nohup`` ignores SIGHUP, for a run that outlives its terminal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    statuses = {
        signal.SIGTERM: ExitStatus.TERMINATED,
        signal.SIGHUP: ExitStatus.TERMINATED,
        signal.SIGUSR1: ExitStatus.PREEMPTED,
    }

    def leave(signum: int, frame: object) -> NoReturn:
        raise _TerminatedError(statuses[signal.Signals(signum)])

    handled = (number for number in statuses if signal.getsignal(number) != signal.SIG_IGN)
    before = {number: signal.signal(number, leave) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
