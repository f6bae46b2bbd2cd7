"""The command line: help without torch, one line for every mistake, and the end of all ranks."""

import errno
import gc
import io
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

import psutil
import pytest

import forked
import zeroshard
from tiny_runs import events_of
from zeroshard.cli import VERBS, main
from zeroshard.cli.flags import flags_of, read_flags
from zeroshard.cli.verbs.training import written
from zeroshard.cli.verbs.waiting import waiting
from zeroshard.host import host_memory
from zeroshard.host.errors import ExitStatus, UserError
from zeroshard.settings.base import SHORTHANDS
from zeroshard.settings.validate import NAMES_OF_OTHERS, fields_by_name, nested, validate
from zeroshard.train import start
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.records.console import ERASE

ZEROSHARD = [sys.executable, "-m", "zeroshard"]
ENDLESS = ["train", "--nproc", "2", "--max-steps", "100000", "--eval-interval", "0", "--model.n-layer", "1"]
DATA = ["--data", "synthetic"]
SLOW_TO_IMPORT = {"torch", "numpy", "triton", "datasets", "transformers", "matplotlib", "plotly", "pandas", "scipy"}
NOTHING_THERE = [["generate", "nowhere"], ["export", "nowhere", "out"], ["report", "nowhere"]]
PATIENCE_S = 600.0  # where others hold the processors; a run that hangs is ended by the time limit of the test


@pytest.fixture
def trained(monkeypatch):
    """What `main` hands to the training loop, which is left out."""
    configs: list[TrainConfig] = []

    def run_training(config: TrainConfig, *planners: object) -> int:
        configs.append(config)
        return 0

    monkeypatch.setattr(start, "run_training", run_training)
    return configs


@contextmanager
def running(tmp_path: Path, *argv: str):
    """A real run of two ranks that has taken its first steps; yields it and its workers."""
    command = [*ZEROSHARD, *argv, *DATA, "--data.dir", str(tmp_path / "data"), "--out", str(tmp_path / "run")]
    process = forked.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    workers: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not metrics.exists() or metrics.read_text().count('"step"') < 3:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "no step"
            time.sleep(0.05)
        workers = psutil.Process(process.pid).children()
        assert len(workers) == 2
        yield process, workers
    finally:
        for worker in workers or psutil.Process(process.pid).children():  # also those that outlived their launcher
            with suppress(psutil.NoSuchProcess):
                worker.kill()
        process.kill()
        process.communicate()


def test_version_and_overview_which_leave_the_caller_its_garbage_collector(capsys):
    before = gc.get_threshold(), gc.get_freeze_count()
    assert main(["--version"]) == 0
    assert (gc.get_threshold(), gc.get_freeze_count()) == before
    assert capsys.readouterr().out == f"zeroshard {zeroshard.__version__}\n"
    assert main([]) == 0
    overview = capsys.readouterr().out
    assert all(f"  {verb} " in overview for verb in VERBS)


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_no_line_of_a_help_is_wider_than_the_terminal(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    for words in ([], *([verb, "--help"] for verb in VERBS), ["bench", "step", "--help"]):
        assert main(words) == 0
        assert max(map(len, capsys.readouterr().out.splitlines())) <= columns, words


def test_a_file_in_the_place_of_the_folder_to_write_is_named_and_a_full_disk_is_told_of(capsys, tmp_path):
    (tmp_path / "file").touch()
    assert written(str(tmp_path / "file"), lambda: (tmp_path / "file" / "figures").mkdir()) == 5
    line = f"error: {tmp_path}/file/figures: Not a directory; name a path that can be used\n"
    assert capsys.readouterr().err == line

    def full() -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "file")

    assert written("out", full) == 5
    assert capsys.readouterr().err.startswith("error: out: it was not written (No space left on device); free space")


# Words, and how the line begins that refuses them.
REFUSED = """
verify | verify: there is no such command; write `zeroshard checkpoint verify`
train --seq-lenn 4 | --seq-lenn: there is no such flag; did you mean --seq-len?
train --max-tokens 4 | --max-tokens: there is no such flag; did you mean --data.max-tokens?
train --stratgy zero2 | --stratgy: there is no such flag; did you mean --strategy?
plan --gpsu 8 | --gpsu: there is no such flag; did you mean --gpus?
trian | trian: there is no such command; did you mean train?
train fast | fast: belongs to no flag; write --FLAG VALUE, see --help
train --lr | --lr: has no value; write --lr VALUE
train --lr --seed 1 | --lr: has no value; write --lr VALUE
train --no-compile=yes | --no-compile: takes no value; write --no-compile alone
generate none | run: there is no folder none; give a run folder, as runs/NAME
generate | run: is missing; give a value
generate --run x | --run: there is no such flag; see --help
completion | shell: is missing; write `zeroshard completion bash`, zsh or fish
completion powershell | shell: there is no completion for 'powershell'; choose one of bash, zsh, fish
completion bash zsh | shell: 2 are given where 1 is wanted; write `zeroshard completion bash`, zsh or fish
doctor now | now: `zeroshard doctor` takes nothing; leave it out
bench speed | speed: there is no such bench; choose one of step, device
bench step --round 2 | --round: there is no such flag; did you mean --rounds?
bench step --nproc 1 --contestants ddp | contestants: ddp needs several ranks; use plain, or --nproc 2
bench step --contestants zero9 | contestants: 'zero9' is unknown; write plain, ddp, zero2, zero2@ring,
bench step --json /proc/nowhere/x.json | /proc/nowhere/x.json: cannot be written (No such file or directory); name
bench device --out /proc/nowhere/x.json | /proc/nowhere/x.json: cannot be written (No such file or directory); name
checkpoint | checkpoint: what to do is missing; add one of ls, show, verify, diff
checkpoint verfy x | verfy: `zeroshard checkpoint` does not know it; did you mean verify?
checkpoint ls | checkpoint ls: 0 paths are given where 1 is wanted; write zeroshard checkpoint ls PATH
checkpoint diff x | checkpoint diff: 1 path is given where 2 are wanted; write zeroshard checkpoint diff PATH PATH
checkpoint show --all | --all: `zeroshard checkpoint show` takes no flags; leave it out
checkpoint show /nowhere | /nowhere: there is no such folder; give a run folder or a checkpoint
report --to trackiO | to: 'trackiO' is not a tracker; did you mean trackio?
report --to trackio --out x | out: runs that are sent are not written; leave out one of --out and --to
export nowhere out | source: there is no folder nowhere; give a run folder or a checkpoint
import nowhere out | source: there is no folder nowhere; give a model's folder, or nanoGPT's ckpt.pt
report nowhere | runs: there is no folder nowhere; give the folder of a run or of a sweep
report nowhere --to tensorboard | runs: there is no folder nowhere; give the folder of a run or of a sweep
import-config | import-config: it takes the word deepspeed and one file; write import-config deepspeed FILE.json
import-config nanogpt c.py | import-config: it takes the word deepspeed and one file; write import-config deepspeed
import-config deepspeed nowhere.json | nowhere.json: cannot be read (No such file or directory); give DeepSpeed's JSON
"""


@pytest.mark.parametrize("row", REFUSED.strip().splitlines())
def test_words_that_cannot_be_are_refused_in_a_line(row, refusal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words, line = row.split(" | ")
    assert refusal(*words.split()).startswith(f"error: {line}")


@pytest.mark.parametrize("verb", [name for name, verb in VERBS.items() if verb.config])
def test_help_names_every_flag_that_is_taken_and_no_other_the_common_ones_first(verb, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main([verb, "--help", "all"]) == main([verb, "--help"]) == 0  # in a pipe both are the same
    said = capsys.readouterr().out
    assert said[: len(said) // 2] == said[len(said) // 2 :]
    kind = VERBS[verb].config
    assert kind is not None
    flags = flags_of(kind, VERBS[verb].positionals)
    lines = re.findall(r"^  (--[a-z].*)", said[: len(said) // 2], re.MULTILINE)
    named = [flag for line in lines for flag in re.findall(r"--[a-z][a-z0-9.-]*", line)]
    assert set(named) == set(flags) - {f"--{table}.{key}" for table, key in SHORTHANDS.items()}
    settings = [*dict.fromkeys(".".join(flags[name].path) for name in named)]
    common = [*chain(*VERBS[verb].common.values())]
    assert settings[: len(common)] == common
    assert sorted([*settings, *VERBS[verb].positionals]) == sorted(fields_by_name(kind))
    assert " ".join(said.split()).count("(default: ") == 2 * len(settings)


@pytest.mark.parametrize("level", [(), ("all",)])
def test_help_shows_what_the_file_has_set(level, capsys, tmp_path):
    (tmp_path / "a.toml").write_text("seq_len = 77\n")
    assert main(["train", "--config", str(tmp_path / "a.toml"), "--help", *level]) == 0
    assert "Tokens in a sequence. (default: 77)" in capsys.readouterr().out


@pytest.mark.parametrize("verb", [name for name, verb in VERBS.items() if verb.common])
def test_short_help_names_the_common_flags_alone_and_how_to_see_all(verb, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main([verb, "--help"]) == 0
    said = capsys.readouterr().out
    kind = VERBS[verb].config
    assert kind is not None
    flags = flags_of(kind, VERBS[verb].positionals)
    named = re.findall(r"^  (--[a-z][a-z0-9.-]*)", said, re.MULTILINE)
    assert [".".join(flags[name].path) for name in named] == [*chain(*VERBS[verb].common.values())]
    assert len(named) <= 25
    assert f"`zeroshard {verb} --help all` names all" in said
    assert max(map(len, said.splitlines())) <= 60


@pytest.mark.parametrize("word", ["--help", "-h"])
@pytest.mark.parametrize(
    "words",
    [
        ("checkpoint", "verify"),
        ("checkpoint", "ls", "runs/x"),
        ("doctor",),
        ("completion", "bash"),
        ("report", "runs/x"),
        ("bench",),
    ],
)
def test_help_may_come_after_other_words(words, word, capsys):
    assert main([*words, word]) == 0
    assert capsys.readouterr().out.startswith(f"usage: zeroshard {words[0]}")


@pytest.mark.parametrize(
    "argv", [["--help"], ["train", "--help"], ["train", "--help", "all"], ["train", "--sed", "1"], *NOTHING_THERE]
)
def test_help_and_a_typing_mistake_import_nothing_that_takes_seconds(argv):
    code = f"import sys; from zeroshard.cli import main; main({argv}); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stderr.splitlines()[-1].split()}
    assert "zeroshard" in loaded
    assert not loaded & SLOW_TO_IMPORT


def test_flags_reach_the_run(trained):
    argv = "train --model llama-tiny --data text --data.path a b --seq_len=64 --no-fused --model.no-bias --lr 3e-4"
    assert main(argv.split()) == 0
    (config,) = trained
    assert (config.model.name, config.model.bias) == ("llama-tiny", False)
    assert (config.data.source, config.data.path) == ("text", ("a", "b"))
    assert (config.seq_len, config.fused, config.lr) == (64, False, 3e-4)


def test_a_file_that_does_not_parse_or_holds_an_unknown_key_is_refused(refusal, tmp_path):
    file = tmp_path / "a.toml"
    file.write_text("lr = 0.1\nseq_len 5\n")
    assert "(at line 2, column 9)" in refusal("train", "--config", str(file))
    file.write_text("seq_length = 5\n")
    assert refusal("prepare", "--config", str(file)).endswith("did you mean seq_len?")


def test_a_port_in_use_is_refused(refusal):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refusal("train", "--nproc", "2", "--port", str(port))
    assert line == f"error: port: {port} cannot be used (Address already in use); choose another, or 0 for any free one"


def test_more_ranks_than_the_launchers_world_are_refused(refusal, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert refusal("train", "--nproc", "3").startswith("error: nproc: 3 ranks in a world of 1")


def test_more_ranks_than_the_machine_can_hold_are_refused_before_any_starts(refusal, monkeypatch):
    def started(*args: object, **kwargs: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr("zeroshard.host.launch.start_ranks.launch_workers", started)
    for verb in (["train"], ["eval", "runs/x"]):
        line = refusal(*verb, "--nproc", "99999999")
        assert re.match(r"error: nproc: 99,999,999 ranks do not fit into this machine's [\d,]+ GiB; give ", line)


def test_ctrl_c_sigterm_and_sigusr1_have_statuses_of_their_own(monkeypatch):
    def interrupted(*args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(start, "run_training", interrupted)
    assert main(["train"]) == 130

    for number, status in ((signal.SIGTERM, 143), (signal.SIGHUP, 143), (signal.SIGUSR1, 138)):

        def stopped(*args: object, number: int = number) -> int:
            os.kill(os.getpid(), number)
            time.sleep(60)
            raise AssertionError("nobody heard the signal")

        monkeypatch.setattr(start, "run_training", stopped)
        before = signal.getsignal(number)
        assert main(["train"]) == status
        assert signal.getsignal(number) == before


def test_doctor_reports_versions_and_what_would_be_used(capsys, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert main(["doctor"]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["zeroshard"] == zeroshard.__version__
    assert rows["NCCL_DEBUG"] == "INFO"
    assert {"python", "torch", "numpy", "os", "cpus", "memory", "gloo", "nccl"} <= set(rows)
    assert re.fullmatch(r"auto +(\w+: (reference|triton)(, |$)){5,}", rows["kernels"])


def test_doctor_lists_extras_and_what_the_others_lack(capsys, monkeypatch):
    required = ["torch>=2", "matplotlib>=3 ; extra == 'report'", 'jinja2>=3; extra == "report"', "ruff; extra == 'dev'"]
    required += ["no-such-package>=1; extra == 'rare'", "torch; extra == 'rare'"]
    monkeypatch.setattr("zeroshard.cli.doctor.metadata.requires", lambda name: required)
    assert main(["doctor"]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["extras"] == "report; missing: rare (no-such-package)"


def test_the_last_line_of_a_run_names_the_next_command(capsys, tmp_path):
    (tmp_path / "text.txt").write_text("some words\n" * 3000)
    words = ["--seq-len", "16", "--max-steps", "1", "--eval-rows", "1", "--device", "cpu", "--model.n-layer", "1"]
    for data, verb in ((["text", "--data.path", str(tmp_path / "text.txt")], "generate"), (["synthetic"], "report")):
        out = str(tmp_path / f"run of {verb}")
        assert main(["train", *words, "--data", *data, "--data.dir", str(tmp_path / verb), "--out", out]) == 0
        ended, last = capsys.readouterr().out.splitlines()[-2:]
        assert ended.startswith("status ok")
        command = shlex.split(last.partition("next: zeroshard ")[2])
        assert command == [verb, out]
    assert main(["generate", str(tmp_path / "run of generate"), "--max-new-tokens", "2"]) == 0


WITHOUT_A_STREAM = """
import os, sys
name = sys.argv.pop(1)
os.close({"stdout": 1, "stderr": 2}[name])
setattr(sys, name, None)  # as Python starts where it is closed
setattr(sys, f"__{name}__", None)
from zeroshard.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_ranks_train_where_a_stream_is_closed(tmp_path, closed):
    flags = ["--max-steps", "2", "--eval-interval", "0", "--seq-len", "16", "--model.n-layer", "1"]
    words = ["train", "--nproc", "2", *DATA, *flags, "--out", str(tmp_path / "run")]
    done = forked.run([sys.executable, "-c", WITHOUT_A_STREAM, closed, *words], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "run" / "checkpoints" / "step-00000002").is_dir()


def test_ctrl_c_ends_all_ranks_after_a_checkpoint_and_says_how_to_continue(tmp_path):
    with running(tmp_path, *ENDLESS) as (process, workers):
        process.send_signal(signal.SIGINT)
        assert forked.still_running(workers) == []
        out, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 130
        assert err == ""
    *_, saved, end = events_of(tmp_path / "run")
    assert (saved["event"], end["event"], end["status"]) == ("checkpoint", "end", "interrupted")
    go_on = f"zeroshard train --config {tmp_path / 'run' / 'config.toml'} --resume auto"
    assert out.endswith(f"\nstopped at step {saved['step']}, saved; continue with: {go_on}\n")
    again = [*ZEROSHARD, *go_on.split()[1:], "--max-steps", str(saved["step"] + 1), "--warmup-steps", "0"]
    assert forked.run(again, capture_output=True, timeout=PATIENCE_S, check=False).returncode == 0
    assert events_of(tmp_path / "run")[-1]["step"] == saved["step"] + 1


STEPS_FOR_EVER = """
import sys, time
from zeroshard import cli
from zeroshard.train.loop import loop

def take_step(*ignored):
    print("it steps", flush=True)
    time.sleep(3600)

loop.take_step = take_step
sys.exit(cli.main(sys.argv[1:]))
"""


def test_a_second_ctrl_c_ends_a_run_at_once_also_after_sigterm(tmp_path):
    words = [sys.executable, "-c", STEPS_FOR_EVER, "train", *DATA, "--model.n-layer", "1", "--eval-interval", "0"]
    words += ["--data.dir", str(tmp_path / "data"), "--out", str(tmp_path / "run")]
    process = forked.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert "it steps\n" in iter(process.stdout.readline, "")
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):  # it waits for the end of its step
            process.wait(2)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert (process.returncode, err) == (130, "")
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_killed_launcher_leaves_no_rank_behind(tmp_path):
    with running(tmp_path, *ENDLESS) as (process, workers):
        process.kill()
        assert forked.still_running(workers) == []


def brackets(count: int) -> str:
    return "[" * count


# A file with this content, or none, and the words after which it is read: what once ended in a traceback.
BAD_INPUT: dict[str, tuple[str | None, list[str]]] = {
    "toml-nested": ("a = " + brackets(5000), ["train", "--config", "FILE"]),
    "toml-digits": ("seed = " + "9" * 5000, ["train", "--config", "FILE"]),
    "toml-bits": ("seed = 0x" + "f" * 5000, ["train", "--config", "FILE"]),
    "toml-nul": ('out = "a\\u0000b"', ["train", "--config", "FILE"]),
    "name-not-utf-8": (None, ["train", "--config", "\udcff.toml"]),
    "prompt-not-utf-8": (None, ["generate", "runs/x", "--prompt", "\udcff"]),
    "seed": (None, ["generate", "runs/x", "--seed", str(2**70)]),
    "width": (None, ["plan", "--model.n-embd", str(2**40)]),
    "tensor": (
        None,
        ["plan", "--model.n-embd", str(2**20), "--model.seq-len", str(2**27), "--micro-batch", str(2**30)],
    ),
    "deepspeed-betas": ('{"optimizer": {"params": {"betas": [1]}}}', ["import-config", "deepspeed", "FILE"]),
    "deepspeed-count": ('{"scheduler": {"params": {"warmup_num_steps": "x"}}}', ["import-config", "deepspeed", "FILE"]),
    "deepspeed-nested": (brackets(100_000), ["import-config", "deepspeed", "FILE"]),
    "long-path": (None, ["checkpoint", "ls", "a" * 5000]),
    "device": ('{"format": "zeroshard device 1", "device": 3, "link": {}}', ["plan", "--gpu", "FILE"]),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_of_any_kind_is_one_line(case, refusal, tmp_path, trained):
    content, words = BAD_INPUT[case]
    path = tmp_path / "file.json"
    if content is not None:
        path.write_text(content)
    assert len(refusal(*(str(path) if word == "FILE" else word for word in words))) < 2000
    assert not trained


def test_a_failed_import_keeps_its_words(monkeypatch):
    def broken(name: str) -> None:
        raise AttributeError("torch's own words")

    monkeypatch.setattr("zeroshard.host.lazily.import_module", broken)
    monkeypatch.delitem(zeroshard.__dict__, "STAGES", raising=False)
    with pytest.raises(ImportError, match="torch's own words"):
        from zeroshard import STAGES  # noqa: F401


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (OSError(28, "No space left on device"), 5, "the disk: No space left on device; free space, or "),
        (PermissionError(13, "Permission denied", "/x"), 2, "/x: Permission denied; name a path that can be used"),
        (RuntimeError("can't start new thread"), 1, "threads: no more can be started; raise the limits on memory "),
        (RuntimeError("unable to start watchdog thread"), 1, "threads: no more can be started; raise the limits on "),
        (OSError(12, "Cannot allocate memory"), 1, "memory: ran out; "),
    ],
)
def test_what_the_machine_refuses_is_one_line(error, status, line, monkeypatch, capsys):
    def fails(*args: object) -> int:
        raise error

    monkeypatch.setattr(start, "run_training", fails)
    assert main(["train"]) == status
    assert capsys.readouterr().err.startswith(f"error: {line}")


def test_python_that_fails_at_a_limit_of_its_memory_is_one_line(monkeypatch, capsys):
    def fails(*args: object) -> int:
        raise SystemError("error return without exception set")

    monkeypatch.setattr(start, "run_training", fails)
    left = [2**20]
    monkeypatch.setattr(host_memory, "bytes_within_limits", lambda: left[0])
    assert main(["train"]) == 1
    assert capsys.readouterr().err.startswith("error: memory: ran out at a limit of this process; raise the limits on")
    for left[0] in (2**30, None):
        with pytest.raises(SystemError):
            main(["train"])


def test_an_error_is_told_even_where_its_clean_up_is_cut_short(monkeypatch, capsys):
    """A rank that ran out of memory closes its communicator; its peers fail, and the launcher has it end."""

    def fails(*args: object) -> int:
        try:
            raise MemoryError
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)

    monkeypatch.setattr(start, "run_training", fails)
    assert main(["train"]) == 1
    assert capsys.readouterr().err.startswith("error: memory: ran out; ")


def test_a_bug_of_ours_keeps_its_traceback(monkeypatch):
    def fails(*args: object) -> int:
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(start, "run_training", fails)
    with pytest.raises(OSError, match="Bad file descriptor"):
        main(["train"])


def test_a_hangup_that_is_ignored_stays_so(monkeypatch):
    def hung_up(*args: object) -> int:
        os.kill(os.getpid(), signal.SIGHUP)
        return 0

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup has it
    try:
        monkeypatch.setattr(start, "run_training", hung_up)
        assert main(["train"]) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_reader_that_stops_reading_ends_the_command_in_silence():
    reader, writer = os.pipe()
    os.close(reader)  # as `| head` does, here before anything was written
    process = forked.Popen([*ZEROSHARD, "doctor"], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(600) == 128 + signal.SIGPIPE


# -- plan ------------------------------------------------------------------------------------------------------------


class _Screen(io.StringIO):
    """A terminal that knows when something has been shown."""

    def __init__(self):
        super().__init__()
        self.shown = threading.Event()

    def isatty(self):
        return True

    def write(self, text):
        super().write(text)
        self.shown.set()


def test_a_verb_that_takes_long_says_so_on_a_terminal_and_leaves_no_trace():
    screen, pipe = _Screen(), io.StringIO()
    with waiting("planning llama-8b", silence_s=1e-3, stream=screen):
        assert screen.shown.wait(600)
    assert screen.getvalue().startswith(f"{ERASE}planning llama-8b: ")
    assert screen.getvalue().endswith(f" s{ERASE}")
    with waiting("planning llama-8b", silence_s=1e-3, stream=pipe):
        pass
    assert pipe.getvalue() == ""


def test_plan_where_nothing_fits_ends_with_status_3_and_the_nearest_change_and_no_command(capsys):
    words = "--model llama-tiny --model.n-layer 2 --model.n-embd 8192 --model.n-head 64 --optimizer muon"
    assert main(["plan", *words.split(), "--gpu", "t4-16gb", "--dtype", "float16"]) == ExitStatus.CHECK_FAILED
    said = capsys.readouterr().out
    assert "GPUs would fit" in said
    assert "zeroshard train --model" not in said


def test_a_flag_that_is_called_otherwise_elsewhere_is_named():
    flags, settings = flags_of(TrainConfig), fields_by_name(TrainConfig)
    assert not set(NAMES_OF_OTHERS) & set(settings)
    for theirs, ours in NAMES_OF_OTHERS.items():
        flag, known = (f"--{name}".replace("_", "-") for name in (theirs, ours))
        with pytest.raises(UserError, match=f"^{flag}: there is no such flag; here it is {known}$"):
            read_flags([flag, "1"], flags)
        with pytest.raises(UserError, match=f"^{theirs}: there is no such key; here it is {ours}$"):
            validate(TrainConfig, nested({tuple(theirs.split(".")): "1"}))
