"""A process that has imported torch and forks a child for each run of pytest, so that a mutant costs a second or two.

It is started in a copy of the tree, imports nothing of zeroshard, and reads one run as a line of JSON at a time::

    {"args": [pytest's arguments], "timeout_s": 60}
    {"status": 1, "failed": {node id: seconds}, "cpu_s": 0.7, "output": "..."}    is the answer

``status`` is pytest's own exit status; None where the run took too long or a signal ended it. ``cpu_s`` are the
processor's seconds, which say more than the clock's where others use the machine.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

# What the tests import from elsewhere; a name that is not installed is left out.
PRELOAD = ["torch", "torch.distributed", "torch.distributed.nn", "torch.distributed.fsdp", "torch.distributed.optim"]
PRELOAD += ["torch.distributed.elastic.agent.server", "torch._dynamo", "torch.utils.checkpoint", "torch.nn.parallel"]
PRELOAD += ["numpy", "pytest", "xdist", "pytest_timeout", "pytest_cov", "hypothesis", "_hypothesis_pytestplugin"]
PRELOAD += ["anyio"]
PRELOAD += ["hypothesis.strategies", "pydantic", "rich.console", "rich.live", "safetensors.torch", "tiktoken"]
PRELOAD += ["tokenizers", "psutil", "pynvml", "xxhash", "pytest_cov.plugin", "xdist.plugin", "anyio.pytest_plugin"]
PRELOAD += ["pydantic.main", "pydantic.fields", "pydantic.functional_validators", "pydantic.type_adapter"]


class Failures:
    """A plugin of pytest that notes which tests failed, and how long each took.

    Tests of properties draw the same examples each time, so that whether a mutant is seen is no matter of luck, and do
    not look for a smaller example once one has failed.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def pytest_sessionstart(self) -> None:
        """Called by pytest after the tests' conftest has chosen its profile, and before it imports tests."""
        from hypothesis import Phase, settings

        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutants", settings.default, derandomize=True, phases=phases, database=None)
        settings.load_profile("mutants")

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Called by pytest after each phase of each test."""
        if report.failed:
            self.seconds[report.nodeid] = round(report.duration, 2)


def main() -> None:
    """Answer on standard output until standard input ends."""
    preload(PRELOAD)
    gc.freeze()  # pytest collects garbage several times a run, and need not look through torch
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    print(json.dumps("ready"), file=answers)
    for line in sys.stdin:
        run = json.loads(line)
        print(json.dumps(_run(run["args"], run["timeout_s"])), file=answers)


def preload(names: list[str]) -> None:
    """Import these modules, or those that are installed.

    ``torch._dynamo`` imports Triton, whose own functions are compiled or interpreted by what the environment says at
    that moment. So the environment says here already what the tests' conftest would.
    """
    import torch

    if torch.cuda.device_count() == 0:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _run(args: list[str], timeout_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="zeroshard-mutant-") as folder:
        output, failed = Path(folder) / "output", Path(folder) / "failed.json"
        child = os.fork()
        if child == 0:
            _child(args, output, failed)
        deadline = time.monotonic() + timeout_s
        status = None
        while time.monotonic() < deadline:
            ended, code, used = os.wait4(child, os.WNOHANG)
            if ended:
                status = os.WEXITSTATUS(code) if os.WIFEXITED(code) else None
                break
            time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # its ranks too, where it left any
        if not ended:
            _, _, used = os.wait4(child, 0)
        return {
            "status": status,
            "cpu_s": round(used.ru_utime + used.ru_stime, 2),
            "failed": json.loads(failed.read_text()) if failed.exists() else {},
            "output": output.read_text(errors="replace") if output.exists() else "",
        }


def _child(args: list[str], output: Path, failed: Path) -> None:
    status = 3  # pytest's for an error of its own
    try:
        os.setpgid(0, 0)
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        import pytest

        plugin = Failures()
        os.environ["TMPDIR"] = tempfile.tempdir = str(output.parent)
        status = int(pytest.main([*args, f"--basetemp={output.parent / 'pytest'}"], plugins=[plugin]))
        failed.write_text(json.dumps(plugin.seconds))
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001 -- it is told by the status
        output.open("a").write(traceback.format_exc())
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
