"""``--fit``: a run goes on with what makes it fit, and with less where memory runs out all the same."""

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import forked
from tiny_runs import events_of
from zeroshard.comm import LocalCommunicator, PeerError
from zeroshard.host import host_memory
from zeroshard.host.errors import ExitStatus, UserError
from zeroshard.settings.validate import validate
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.config.toml import load_config
from zeroshard.train.setup import fit
from zeroshard.train.setup.build import build_run
from zeroshard.train.setup.fit import Fitted, after_oom_kill, made_to_fit
from zeroshard.train.start import run_training

CPU = torch.device("cpu")
FULL = "--model.activation-checkpointing full"
NO_LEVER = "no lever is left; use a smaller --micro-batch-size or --seq-len, more ranks, or --fit states (with adapters"
TILES = "--tiles auto"

# Ranks whose memory runs out in the third step on rank 1 alone, unless blocks are recomputed; with a FILE the kernel
# kills the rank, and counts that there.
PROGRAM = """
import os, signal, sys
from pathlib import Path
from zeroshard import cli
from zeroshard.host import host_memory, process
process.prepare_torch()
import torch
from zeroshard.train.loop import loop

take_step = loop.take_step

def short_of_memory(run, step, stop_wanted):
    if step == 2 and run.config["model"]["activation_checkpointing"] == "none" and os.environ["RANK"] == "1":
        if "FILE" in os.environ:
            Path(os.environ["FILE"]).write_text("1")
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 134217728 bytes.")
    return take_step(run, step, stop_wanted)

loop.take_step = short_of_memory  # and in the ranks, which are forked
if "FILE" in os.environ:
    host_memory.num_oom_kills = lambda: int(Path(os.environ["FILE"]).read_text())
sys.exit(cli.main(["train", *sys.argv[1:]]))
"""


def choosing(*flags, fits=True, next_flags=(TILES,), jobs=None):
    """A planner that chooses these flags; what it is asked is appended to ``jobs``."""

    def planner(job):
        (jobs if jobs is not None else []).append(job)
        first = f"fit: {' '.join(flags)}" if fits else "nothing fits: it needs 2 MiB and may use 1 MiB"
        return Fitted(flags, fits, 10, next_flags, (first, "fit: that costs no time"), "the plan")

    return planner


def test_the_run_is_the_one_that_is_given_these_flags(tiny_config, capsys):
    """So it has the same bits; its config.toml has them too, and what was given is not asked to change."""
    jobs = []
    config = tiny_config(fit="on", global_batch_size=4)
    run = build_run(config, LocalCommunicator(), CPU, fit=choosing(FULL, "--checkpoint-async=false", jobs=jobs))
    run.close()
    model = {**config.model.model_dump(exclude_unset=True), "activation_checkpointing": "full"}
    plain = {**config.model_dump(exclude_unset=True), "model": model, "checkpoint_async": False}
    directly = validate(TrainConfig, plain).resolved(compile="off")
    assert load_config(Path(config.out) / "config.toml") == directly
    assert run.config == directly.model_dump(mode="json")
    assert capsys.readouterr().out.startswith(f"fit: {FULL} --checkpoint-async=false\nfit: that costs no time\n")
    assert {("micro_batch_size",), ("model", "n_layer")} <= jobs[0].kept
    assert ("model", "activation_checkpointing") not in jobs[0].kept
    summary = {}
    for each in run.callbacks:
        each.before_end(summary) if isinstance(each, fit.FitRecord) else None
    assert summary["fit"]["flags"] == [FULL, "--checkpoint-async=false"]
    # a resumed run goes on with what an earlier start has chosen
    made_to_fit(config.model_copy(update={"resume": "auto"}), LocalCommunicator(), CPU, choosing(jobs=jobs))
    assert [job.start for job in jobs] == [(), (FULL, "--checkpoint-async=false")]


@pytest.mark.parametrize(
    ("changes", "fits", "status", "said"),
    [
        (
            {},
            False,
            ExitStatus.CHECK_FAILED,
            "error: fit: nothing fits: it needs 2 MiB and may use 1 MiB; use a smaller",
        ),
        ({"dry_run": True}, True, ExitStatus.OK, "fit: --tiles auto\nfit: that costs no time\n\nthe plan\n"),
        ({"dry_run": True}, False, ExitStatus.CHECK_FAILED, "nothing fits: it needs"),
    ],
)
def test_a_dry_run_and_a_run_that_does_not_fit_leave_nothing_behind(tiny_config, capsys, changes, fits, status, said):
    config = tiny_config(fit="on", **changes)
    assert run_training(config, fit=choosing(TILES, fits=fits)) == status
    printed = capsys.readouterr()
    assert (printed.err if status else printed.out).startswith(said)
    assert not Path(config.out).exists()


def test_memory_that_runs_out_leaves_the_next_levers_to_the_next_start(tiny_config, monkeypatch):
    ended = []

    def end(*line_and_status):
        ended.append(line_and_status)
        raise SystemExit

    monkeypatch.setattr(fit, "end_at_once", end)
    config = tiny_config(fit="on")
    Path(config.out).mkdir()
    of_torch = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    errors = [of_torch, MemoryError(), RuntimeError("std::bad_alloc"), RuntimeError("can't start new thread")]
    for number, error in enumerate(errors, 1):
        resumed = config.model_copy(update={"resume": "auto" if number > 1 else "none"})
        _, fitting = made_to_fit(resumed, LocalCommunicator(), CPU, choosing(FULL, next_flags=(FULL, TILES)))
        with pytest.raises(SystemExit), fitting.pulls_next_lever(lambda: "in step 3"):
            raise error
        left = json.loads((Path(config.out) / fit.FILE).read_text())
        assert (left["flags"], len(left["ran_out"])) == ([FULL, TILES], number)
    what = "fit: rank 0 ran out of memory in step 3"
    todo = f"next is {FULL} {TILES}; start again with --resume auto"
    assert ended == [
        (f"{what}, where 2.00 GiB more were asked for; {todo}", ExitStatus.OUT_OF_MEMORY),
        *[(f"{what}; {todo}", ExitStatus.OUT_OF_MEMORY)] * 3,
    ]
    _, fitting = made_to_fit(config, LocalCommunicator(), CPU, choosing(next_flags=None))
    with pytest.raises(SystemExit), fitting.pulls_next_lever(lambda: "in step 3"):
        raise MemoryError
    assert ended[-1][0].startswith(f"{what}, and no lever is left; use a smaller")
    assert ended[-1][1] == ExitStatus.CHECK_FAILED
    with pytest.raises(RuntimeError, match="shape"), fitting.pulls_next_lever(str):
        raise RuntimeError("shape mismatch")


def test_a_rank_that_the_kernel_has_killed_ran_out_of_memory(tiny_config, monkeypatch):
    """Whoever misses it leaves the next levers: a launcher of ours, or else ranks that were told of its loss."""
    kills, ended = [0], []
    monkeypatch.setattr(host_memory, "num_oom_kills", lambda: kills[0])
    monkeypatch.setattr(fit, "end_at_once", lambda *line_and_status: ended.append(line_and_status))
    config = tiny_config(fit="on")
    out = Path(config.out)
    assert after_oom_kill(config.out, 1) is None  # nothing was planned yet
    out.mkdir()
    _, fitting = made_to_fit(config, LocalCommunicator(), CPU, choosing(FULL, next_flags=(FULL, TILES)))
    with pytest.raises(PeerError), fitting.pulls_next_lever(str):  # lost, and not for lack of memory
        raise PeerError("rank 1 is gone")
    kills[0] = 1
    with fitting.pulls_next_lever(lambda: "in step 3"):
        raise PeerError("rank 1 is gone")
    what = "fit: the kernel killed a rank of this machine, as memory ran out in step 3"
    assert ended == [(f"{what}; next is {FULL} {TILES}; start again with --resume auto", ExitStatus.OUT_OF_MEMORY)]
    assert json.loads((out / fit.FILE).read_text())["flags"] == [FULL, TILES]
    assert after_oom_kill(config.out, 1) is None  # the start with these was not planned yet
    for next_flags, ending in [
        ((TILES,), (ExitStatus.OUT_OF_MEMORY, f"fit: the kernel killed rank 1, as memory ran out; next is {TILES}")),
        (None, (ExitStatus.CHECK_FAILED, f"fit: the kernel killed rank 1, as memory ran out, and {NO_LEVER}")),
    ]:
        made_to_fit(config, LocalCommunicator(), CPU, choosing(next_flags=next_flags))
        status, line = after_oom_kill(config.out, 1)
        assert (status, line.removesuffix(" base,states)")) == ending


def test_what_does_not_go_together_is_refused_in_a_line(tiny_config):
    cases = [
        ({"fit": "everything"}, "fit: 'everything' is not a choice; choose one of off, on, base, states, base,states"),
        ({"fit": "on", "strategy": "fsdp2"}, "fit: no plan knows the memory of fsdp2; use --strategy zero0"),
        ({"fit": "base"}, "fit: base may have fewer bits where it is frozen, and without adapters all weights are"),
        ({"fit": "states", "optimizer": "muon"}, "fit: states may have fewer bits where they are those of adamw, and"),
        ({"dry_run": True}, "dry_run: it prints what fit chooses, and fit is off; add --fit"),
    ]
    for given, said in cases:
        with pytest.raises(UserError) as refused:
            validate(TrainConfig, given)
        assert str(refused.value).startswith(said)
    assert validate(TrainConfig, {"fit": "states,base", "lora": 4}).fit == "base,states"
    config = tiny_config(fit="on", resume="no-checkpoint")
    with pytest.raises(UserError, match="resume: "):
        run_training(config, fit=choosing())
    assert not Path(config.out).exists()
    config = tiny_config(fit="on", resume="auto")
    Path(config.out).mkdir()
    (Path(config.out) / fit.FILE).write_text("{}")
    with pytest.raises(UserError, match=r"fit\.json cannot be read"):
        made_to_fit(config, LocalCommunicator(), CPU, choosing())


def test_a_limit_of_the_process_bounds_what_is_free(monkeypatch):
    in_use = host_memory._entries(Path("/proc/self/status"))
    limits = {resource.RLIMIT_DATA: in_use["VmData:"] * 1024 + 2**30, resource.RLIMIT_AS: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits[which], limits[which]))
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 2**40)
    assert host_memory.bytes_within_limits() == pytest.approx(2**30, abs=2**26)
    assert fit.free_bytes_of_cpu(2) == pytest.approx(2**30 * 0.9 - fit.RESERVE_BYTES, abs=2**26)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 2**30)
    assert fit.free_bytes_of_cpu(2) == int(2**29 * 0.9) - fit.RESERVE_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("by", ["an error", "the kernel"])
def test_ranks_of_which_one_runs_out_of_memory_go_on_together_with_the_next_lever(by, tmp_path):
    size = "--model.n-layer 2 --model.n-embd 16 --model.n-head 2 --seq-len 64 --micro-batch-size 8 --max-steps 4"
    saves = "--checkpoint-interval 1 --no-checkpoint-async --eval-interval 0 --data.max-tokens 6000"
    places = f"--data synthetic --data.dir {tmp_path / 'data'} --out {tmp_path / 'run'}"
    words = f"--fit --nproc 2 --comm ring {size} {saves} {places}".split()
    command, env = [sys.executable, "-c", PROGRAM, *words], os.environ | {"OMP_NUM_THREADS": "1"}
    if by == "the kernel":
        (tmp_path / "kills").write_text("0")
        env["FILE"] = str(tmp_path / "kills")
    done = forked.run(command, env=env, capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, done
    (again,) = [line for line in done.stderr.splitlines() if line.startswith("started again")]
    lacked = "fit: rank 1 ran out of memory in step 3, where 0.12 GiB more were asked for"
    lacked = lacked if by == "an error" else "fit: the kernel killed rank 1, as memory ran out"
    assert again == f"started again: {lacked}; next is {FULL}"
    assert "Traceback" not in done.stderr
    assert [event["step"] for event in events_of(tmp_path / "run", "start")] == [0, 2]
    assert [event["step"] for event in events_of(tmp_path / "run", "step")] == [1, 2, 3, 4]
    found = json.loads((tmp_path / "run" / "summary.json").read_text())["fit"]
    assert (found["flags"], [each["flags"] for each in found["ran_out"]]) == ([FULL], [[]])
    assert load_config(tmp_path / "run" / "config.toml").model.activation_checkpointing == "full"


def _under(limit_bytes, *words, module="zeroshard", **env):
    """A program each of whose processes may have so much private memory."""
    code = f"import resource, runpy; resource.setrlimit(resource.RLIMIT_DATA, ({limit_bytes},) * 2); "
    command = [sys.executable, "-c", f"{code}runpy.run_module('{module}', run_name='__main__')", *words]
    env = os.environ | {"OMP_NUM_THREADS": "1"} | env
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=3600, check=False)


# Rank 1 takes all memory that the kernel lets it have, before the third step, unless blocks are recomputed.
HUNGRY = """
import os
import torch
from zeroshard.train.records.records import Callback

class Hungry(Callback):
    def before_step(self, step):
        taken = []
        given = self.run.config["model"]["activation_checkpointing"] == "none"
        while step == 3 and os.environ["RANK"] == "1" and given:
            taken.append(torch.ones(2**22))
"""


@pytest.mark.soak
def test_a_run_of_torchrun_that_ran_out_of_memory_is_started_again_with_the_next_lever(tmp_path):
    (tmp_path / "hungry.py").write_text(HUNGRY)
    size = "--model.n-layer 2 --model.n-embd 16 --model.n-head 2 --seq-len 64 --micro-batch-size 8 --max-steps 4"
    saves = "--checkpoint-interval 1 --no-checkpoint-async --eval-interval 0 --data.max-tokens 6000"
    places = f"--data synthetic --data.dir {tmp_path / 'data'} --out {tmp_path / 'run'} --callback hungry:Hungry"
    words = f"--standalone --nproc_per_node 2 -m zeroshard train --fit --comm shm {size} {saves} {places}".split()
    first, second = (
        _under(2 * 2**30, *words, *more, module="torch.distributed.run", PYTHONPATH=str(tmp_path))
        for more in ([], ["--resume", "auto"])
    )
    said = r"fit: rank 1 ran out of memory in step 3, where [\d.]+ MiB more were asked for; next is "
    (line,) = [each for each in first.stderr.splitlines() if each.startswith("fit: ")]
    assert re.fullmatch(f"{said}{FULL}; start again with --resume auto", line)
    assert "exitcode  : 7" in first.stderr
    assert second.returncode == 0, second
    assert [event["step"] for event in events_of(tmp_path / "run", "step")] == [1, 2, 3, 4]
    found = json.loads((tmp_path / "run" / "summary.json").read_text())["fit"]
    assert (found["flags"], found["ran_out"][0]["rank"]) == ([FULL], 1)


@pytest.mark.soak
def test_runs_under_four_limits_of_their_memory(tmp_path):
    """As given, one lever, several levers, nothing: limits follow from plans, and from what a process has without."""
    mib, most = 2**20, 8 * 2**30
    size = "--model.n-layer 8 --model.n-embd 256 --model.n-head 4 --seq-len 128 --micro-batch-size 8 --max-steps 2"
    once = f"--no-checkpoint-async --eval-interval 0 --data synthetic --data.dir {tmp_path / 'data'}"
    words = [*f"train --fit {size} {once} --data.max-tokens 20000".split(), "--out"]

    def planned(limit_bytes):
        done = _under(limit_bytes, *words, str(tmp_path / "dry"), "--dry-run")
        found = re.search(r"fit: (.*): ([\d.]+) MiB of ([\d.,]+) MiB that the run may use", done.stdout)
        assert found, done.stdout
        return found[1], float(found[2]) * mib, float(found[3].replace(",", "")) * mib

    planned(most)  # it prepares the data, and has more memory after that than a run that finds it there
    _, needed, free = planned(most)
    in_use = most - (free + fit.RESERVE_BYTES) / (1 - fit.HEADROOM)

    def limit(num_bytes):
        return round(in_use + (num_bytes + fit.RESERVE_BYTES) / (1 - fit.HEADROOM))

    between, chosen = 10 * mib, []
    limits = [limit(needed + between)]
    while len(limits) < 3:
        flags, needed, _ = planned(limit(needed - between))
        limits.append(limit(needed + between))
        chosen.append(flags)
    assert (chosen[0], chosen[1].count("--")) == (FULL, 2)
    for place, (limit_bytes, flags) in enumerate(zip(limits, ["as given", *chosen], strict=True)):
        done = _under(limit_bytes, *words, str(tmp_path / f"{place}"))
        assert done.returncode == 0, done
        assert done.stdout.startswith(f"fit: {flags}: "), done
        assert "started again" not in done.stderr
    done = _under(limit(between), *words, str(tmp_path / "nothing"))
    assert (done.returncode, done.stdout) == (3, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: fit: nothing fits: with ")
    assert not (tmp_path / "nothing").exists()
