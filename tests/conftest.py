"""What every test starts from: a process that no launcher has put in a world."""

import fcntl
import gc
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch

if torch.cuda.device_count() == 0:
    # Triton decides when a kernel is imported whether it is compiled or interpreted.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Tests start some thousand processes; where nothing may keep bytecode, each of them compiles the whole package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Under nohup SIGHUP is ignored, and SIGINT in what a script starts in the background; so they would be in every run
# that a test starts. By a handler they are not, here alone.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import bytecode
import forked
import zeroshard.host.launch.forked
from made_once import folder_of_all, made_once  # noqa: F401 -- fixtures
from ranks import gloo_ranks, pytest_addoption  # noqa: F401 -- a fixture, and the option that it brings
from tiny_runs import data_folder, process_group, refusal, text_config, tiny_config  # noqa: F401 -- fixtures
from zeroshard.comm import ThreadCommunicator
from zeroshard.host import gc_frequency
from zeroshard.host.process import num_cpus

MANY_MODULES = 20
_WORLD = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE")
_SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_STEP_ID")
_OURS = ("ZEROSHARD_LAUNCHER_PID", "ZEROSHARD_IS_RANK")


def pytest_xdist_auto_num_workers(config):
    """Two for each processor, for ``-n auto``: tests of launchers and ranks mostly wait."""
    return 2 * num_cpus()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """For all workers, which are started after this: a server that forks them and their programs, and bytecode."""
    if hasattr(config, "workerinput"):
        sys.executable = config.workerinput["python"]  # what a test starts with it is no fork, and so is the worker
        zeroshard.host.launch.forked._forked = False
    elif config.getoption("numprocesses", None):
        forked.start_server()
        config.option.tx = [f"popen//python={forked.PYTHON}"] * len(config.option.tx)
        bytecode.make(config, Path(__file__).parent)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Called by xdist for each worker."""
    node.workerinput["python"] = sys.executable


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Modules and tests live to the end: the collector need not go over a million of their objects again and again."""
    with gc_frequency.rare_collections():
        collected = yield
    gc_frequency.default_collections()
    return collected


@pytest.fixture(autouse=True)
def _imports_are_not_collected():
    """What a test has imported lives to the end too: a collection, which many tests ask for, costs a third of a second
    with transformers' modules in it."""
    before = len(sys.modules)
    yield
    if len(sys.modules) > before + MANY_MODULES:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _in_no_world(monkeypatch):
    for name in (*_WORLD, *_SLURM, *_OURS):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, request):
    """What others have kept is none of a test's; of these tests one worker compiles a loop, and all of them read it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(request.getfixturevalue("folder_of_all") / ".cache"))


@pytest.fixture(autouse=True)
def _one_thread():
    """Models this small are slower on several threads, which spin while they wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def _thread_ranks_on_one_processor(request):
    """Ranks that are threads take turns at the GIL: on one processor they need half of the time, for none is woken on
    another. With ``--soak`` they run beside each other."""
    if request.config.getoption("soak") or not hasattr(os, "sched_setaffinity"):
        yield
        return
    processors = sorted(os.sched_getaffinity(0))
    of_the_run = sum(os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid())).encode())  # other runs have others
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ours, construct = {processors[(of_the_run + worker) % len(processors)]}, ThreadCommunicator.__init__

    def on_its_rank(self, *args):
        if threading.current_thread().name.startswith("rank"):
            os.sched_setaffinity(0, ours)  # of this thread alone
        construct(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ThreadCommunicator, "__init__", on_its_rank)
        yield


@pytest.fixture(autouse=True)
def _no_mode_stays():
    """A mode or a stance that outlives its test has torch.compile do nothing in those after it, and say nothing."""
    yield
    if "torch._dynamo.eval_frame" in sys.modules:
        assert sys.modules["torch._dynamo.eval_frame"]._stance.stance == "default"
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._len_torch_function_stack() == 0


@pytest.fixture
def alone_with_networks():
    """No other test makes or removes networks of this machine meanwhile, in whichever worker or checkout it runs."""
    with Path(f"/tmp/zeroshard-tests-{os.getuid()}.lock").open("w") as file:  # one for all TMPDIRs
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


pytest_plugins = ["soak"]  # --soak and --shuffle
