"""The templates of examples/cluster/: their commands are commands, and what they say of signals is so."""

import os
import re
import shlex
import subprocess
import tomllib

import pytest
import yaml

from pages import ROOT
from zeroshard.cli import VERBS
from zeroshard.cli.flags import flags_of, read_flags
from zeroshard.settings.validate import validate
from zeroshard.train.config.config import TrainConfig, merge

CLUSTER = ROOT / "examples" / "cluster"


def _config(words):
    """Of the words after `zeroshard`, or the error that they would give."""
    assert words[0] == "train"
    assert VERBS["train"].config is TrainConfig
    return validate(TrainConfig, merge({}, read_flags(words[1:], flags_of(TrainConfig))))


@pytest.fixture
def programs(tmp_path):
    """`programs(name=body)`: shell programs, first on PATH; each adds a line of its words to `calls`."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def make(**bodies):
        for name, body in bodies.items():
            (folder / name).write_text(f'#!/bin/bash\necho "{name} $*" >> {tmp_path}/calls\n{body}\n')
            (folder / name).chmod(0o755)
        return os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}

    return make


@pytest.mark.parametrize(
    ("status", "count", "requeued"),
    [(0, 0, False), (138, 30, True), (143, 0, False), (2, 0, False), (4, 9, True), (4, 10, False)],
)
def test_the_batch_file_queues_again_what_was_pre_empted_or_lost(status, count, requeued, programs, tmp_path):
    env = programs(srun=f"exit {status}", scontrol="")
    env |= {"SLURM_JOB_ID": "42", "SLURM_RESTART_COUNT": str(count), "SLURM_CPUS_PER_TASK": "8"}
    done = subprocess.run(["bash", CLUSTER / "train.sbatch", "--seed", "3"], env=env, cwd=tmp_path, check=False)
    assert done.returncode == status
    calls = (tmp_path / "calls").read_text().splitlines()
    assert ("scontrol requeue 42" in calls) == requeued
    words = shlex.split(calls[0])
    config = _config(words[words.index("zeroshard") + 1 :])
    assert (config.resume, config.nproc, config.seed) == ("auto", 0, 3)  # srun starts the ranks
    assert "--cpus-per-task=8" in words


def test_the_batch_file_has_slurm_send_the_signal_that_runs_save_upon():
    lines = (CLUSTER / "train.sbatch").read_text().splitlines()
    assert "#SBATCH --signal=USR1@120" in lines
    assert "#SBATCH --requeue" in lines
    nodes = [line for line in lines if line.startswith(("#SBATCH --ntasks-per-node", "#SBATCH --gpus-per-node"))]
    assert len({line.rpartition("=")[2] for line in nodes}) == 1  # a rank a GPU


def test_the_image_is_built_of_files_that_are_there_and_of_all_that_the_package_names():
    lines = [line.split() for line in (CLUSTER / "Dockerfile").read_text().splitlines()]
    copied = {word for line in lines if line[:1] == ["COPY"] for word in line[1:-1]}
    assert [name for name in sorted(copied) if not (ROOT / name).exists()] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    built_from = {"pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "src"}
    assert built_from | {"constraints.txt"} == copied
    (extras,) = [
        re.findall(r"\w+", line[-1].partition("[")[2]) for line in lines if line[:3] == ["RUN", "pip", "install"]
    ]
    assert set(extras) <= set(project["optional-dependencies"])


def test_the_pytorchjob_starts_our_launcher_in_each_pod():
    job = yaml.safe_load((CLUSTER / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert set(replicas) == {"Master", "Worker"}
    for spec in replicas.values():
        assert spec["restartPolicy"] == "ExitCode"  # 138 and 143 are worth a new pod, 2 is not
        (container,) = spec["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"  # the operator looks for it
        command = container["command"]
        assert command[:4] == ["env", "--unset=RANK", "--unset=WORLD_SIZE", "zeroshard"]
        config = _config(command[4:])
        assert config.nproc == container["resources"]["limits"]["nvidia.com/gpu"]
        assert config.rdzv_endpoint == f"{job['metadata']['name']}-master-0:29400"
        assert config.resume == "auto"
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        assert mounts == {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
    assert sum(spec["replicas"] for spec in replicas.values()) == 2


def test_the_skypilot_task_meets_at_its_first_node(programs, tmp_path):
    task = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())
    assert task["num_nodes"] == 2
    env = programs(zeroshard="") | {
        "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    }
    subprocess.run(["bash", "-e", "-c", task["run"]], env=env, cwd=tmp_path, check=True)
    (call,) = (tmp_path / "calls").read_text().splitlines()
    config = _config(shlex.split(call)[1:])
    assert (config.nnodes, config.nproc, config.rdzv_endpoint) == ("2", 8, "10.0.0.4:29400")
    assert config.out.startswith(next(iter(task["file_mounts"])))
    assert config.resume == "auto"
