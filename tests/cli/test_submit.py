"""A job on a cluster: what SLURM is asked for, and a run that is pre-empted, queued again and goes on.

There is no SLURM here: `sbatch`, `srun` and `scontrol` are programs of the test, and submitit's own executor for one
machine stands in for the cluster's queue.
"""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from importlib.util import find_spec

import psutil
import pytest

import forked
from zeroshard.cli import main
from zeroshard.cli.submit import SubmitConfig, TrainJob, submit
from zeroshard.host.errors import ExitStatus

pytestmark = pytest.mark.skipif(find_spec("submitit") is None, reason="needs submitit")
PATIENCE_S, NUM_STEPS = 600.0, 100_000  # more than it takes


@pytest.fixture(autouse=True)
def _nothing_stays_set(monkeypatch):
    monkeypatch.setenv("SUBMITIT_PREEMPT_SIGNAL", "USR1")  # taken back at the end, whoever has changed it


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A cluster of names alone; returns the batch file that `sbatch` was given."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, body in {"srun": "exit 0", "sbatch": f'cp "$1" {tmp_path}/asked; echo Submitted batch job 42'}.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "asked"


def test_the_batch_file_asks_for_what_was_said(slurm, capsys):
    asked = "--nodes 2 --gpus-per-node 8 --cpus-per-task 6 --time-min 90 --partition big --account me --name gpt"
    assert main(["submit", *asked.split(), "--setup", "module load cuda", "train", "--max-steps", "50"]) == 0
    assert "job 42" in capsys.readouterr().out
    text = slurm.read_text()
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    expected = """nodes=2 gpus-per-node=8 ntasks-per-node=8 cpus-per-task=6 time=90 partition=big account=me
        job-name=gpt signal=USR1@120 requeue open-mode=append"""
    assert set(expected.split()) <= set(lines)
    assert not [line for line in lines if line.startswith(("qos", "mem", "constraint"))]  # the cluster's own choice
    assert "module load cuda" in text
    assert "--kill-on-bad-exit=1 --cpus-per-task=6 " in text  # srun does not take them from sbatch


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_run_whose_peer_was_lost_is_queued_again_as_often_as_was_said(tmp_path, monkeypatch):
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "local")
    monkeypatch.setenv("SUBMITIT_LOCAL_JOB_ID", "7")
    monkeypatch.setenv("SUBMITIT_LOCAL_GLOBALID", "0")
    lost = tmp_path / "lost"
    lost.write_text(f"#!/bin/sh\nexit {int(ExitStatus.PEER_LOST)}\n")
    lost.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(lost))
    job, queued = TrainJob(["--max-steps", "2"], 2), []
    monkeypatch.setattr("signal.raise_signal", lambda _: queued.append(job.checkpoint().function))
    for left in (1, 0):
        assert job() == ExitStatus.PEER_LOST
        job = pickle.loads(pickle.dumps(queued[-1]))
        assert (job.words, job.restarts) == (["--max-steps", "2"], left)
    with pytest.raises(SystemExit, match=r"^4$"):
        job()
    assert len(queued) == 2


def test_what_is_queued_goes_on_where_it_stopped(slurm, monkeypatch):
    queued = []
    monkeypatch.setattr("zeroshard.cli.submit.submit", lambda config, words: queued.append(words) or "")
    assert main(["submit", "train", "--max-steps", "50"]) == 0
    assert main(["submit", "train", "--max-steps", "50", "--resume", "runs/x"]) == 0
    assert queued == [["--max-steps", "50", "--resume", "auto"], ["--max-steps", "50", "--resume", "runs/x"]]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["submit"], "there is nothing to submit"),
        (["submit", "--node", "2", "train"], "did you mean --nodes"),
        (["submit", "train", "--max-step", "2"], "did you mean --max-steps"),
        (["submit", "train", "--nproc", "2"], "--tasks-per-node"),
    ],
)
def test_a_mistake_is_told_before_anything_is_queued(words, said, slurm, capsys):
    assert main(words) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert not slurm.exists()


def test_without_slurm_it_says_so(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["submit", "--folder", str(tmp_path / "jobs"), "train"]) == 2
    assert "there is no SLURM on this machine" in capsys.readouterr().err


def test_a_cluster_that_refuses_the_job_is_quoted(slurm, capsys, tmp_path):
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/sh\necho 'invalid partition specified: big' >&2; exit 1\n")
    assert main(["submit", "--partition", "big", "train"]) == 2
    err = capsys.readouterr().err
    assert err.splitlines()[-1].startswith("error: submit: the job was refused (invalid partition")


def _events(out, kind):
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    return [event for event in events if event["event"] == kind]


def _tasks_and_ranks(folder, out):
    """The processes that submitit has started for the job in ``folder``, and those that they have."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if ("submitit.core._submit" in words and str(folder) in words) or {"train", str(out)} <= set(words):
            found.append(process)
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # submitit leaves its process to itself
def test_a_run_that_is_pre_empted_saves_is_queued_again_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    forked.start_server()  # of ranks; submitit's own processes know each other by the ids of real ones
    own_start = f"import sys\nif 'submitit.core._submit' in sys.orig_argv: sys.executable = {forked.PYTHON!r}\n"
    (tmp_path / "sitecustomize.py").write_text(own_start)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    out, folder = tmp_path / "run", tmp_path / "jobs"
    words = f"""--data synthetic --data.dir {tmp_path / "data"} --data.max-tokens 6000 --model gpt2-demo
        --model.n-layer 1 --model.n-embd 16 --model.n-head 2 --seq-len 16 --micro-batch-size 2 --max-steps {NUM_STEPS}
        --warmup-steps 2 --eval-interval 0 --eval-batches 1 --device cpu --comm ring --resume auto""".split()
    words += ["--out", str(out)]
    config = SubmitConfig(cluster="local", tasks_per_node=2, folder=str(folder), time_min=5)
    assert submit(config, words).startswith("job ")
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not _events(out, "step"):
            assert time.monotonic() < deadline, [path.read_text() for path in folder.glob("*.err")]
            time.sleep(0.05)
        for process in _tasks_and_ranks(folder, out):  # as SLURM does: every process of the job
            process.send_signal(signal.SIGUSR1)
        while len(starts := _events(out, "start")) < 2 or _events(out, "step")[-1]["step"] <= starts[1]["step"]:
            assert time.monotonic() < deadline, [path.read_text() for path in folder.glob("*.err")]
            time.sleep(0.1)
    finally:
        for process in _tasks_and_ranks(folder, out):
            process.kill()
    assert [event["world_size"] for event in starts] == [2, 2]
    assert 0 < starts[1]["step"] < NUM_STEPS
    assert "Requeued job" in "".join(path.read_text() for path in folder.glob("*_0_log.out"))


def test_a_run_that_fails_passes_its_status_on(tmp_path):
    program = "import sys; from zeroshard.cli.submit import TrainJob; TrainJob(['--max-step', '1'])()"
    env = os.environ | {"SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_JOB_ID": "7", "SUBMITIT_LOCAL_GLOBALID": "0"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "did you mean --max-steps?" in done.stderr
