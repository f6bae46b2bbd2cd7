"""What a training process is told before torch comes; whoever has set a variable keeps it."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
OURS = ("THP_MEM_ALLOC_ENABLE", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
KEPT = """
import ctypes
libc = ctypes.CDLL(None)
for name in ("malloc", "sbrk"):
    getattr(libc, name).restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
for _ in range(2):  # what was once mapped and freed is cut from the heap the next time
    blocks = [libc.malloc(20 << 20) for _ in range(20)]
    end_of_heap = libc.sbrk(0)
    while blocks:
        libc.free(blocks.pop())
print(end_of_heap - libc.sbrk(0))
"""  # bytes that left the process when 400 MiB were freed


def run(code: str, **env: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name not in (*OURS, *ALLOCATORS)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=clean | env, capture_output=True, text=True, timeout=600, check=True).stdout


def variables(**env: str) -> list[str]:
    shown = f"import os; print(*[os.environ.get(name, 'unset') for name in {OURS!r}])"
    return run(f"from zeroshard.host.process import prepare_torch; prepare_torch(); {shown}", **env).split()


@pytest.mark.redundant
@pytest.mark.skipif(not HUGE_PAGES.exists(), reason="this kernel has no transparent huge pages")
def test_huge_pages_come_where_a_training_run_allocates():
    if "[never]" in HUGE_PAGES.read_text():
        pytest.skip("huge pages are off on this machine")
    code = (
        "import sys, pathlib; from zeroshard import cli; from zeroshard.host import process\n"
        "assert 'torch' not in sys.modules, 'it came before it was told'\n"
        "process.prepare_torch()\n"
        "import torch; x = torch.zeros(64 << 20, dtype=torch.uint8)\n"
        "text = pathlib.Path('/proc/self/smaps_rollup').read_text()\n"
        "print([int(line.split()[1]) for line in text.splitlines() if line.startswith('AnonHugePages')][0])"
    )
    assert int(run(code)) >= 32 << 10


@pytest.mark.redundant
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc's thresholds are glibc's")
def test_freed_tensors_stay_with_the_process_and_with_those_it_starts():
    prepared = "from zeroshard.host import process; process.prepare_torch()\n"
    child = f"import subprocess, sys; print(subprocess.check_output([sys.executable, '-c', {KEPT!r}], text=True))"
    assert int(run(KEPT)) > 300 << 20
    assert int(run(prepared + KEPT)) == 0
    assert int(run(prepared + child)) == 0


def test_memory_of_gpus_is_taken_in_segments_that_grow_unless_the_allocator_was_told_otherwise():
    shown = "print(os.environ.get(process.ALLOCATOR), process.allocator_settings())"
    told = f"import os; from zeroshard.host import process; process.prepare_torch(); {shown}"
    assert run(told).split() == ["expandable_segments:True"] * 2
    assert run(told, PYTORCH_ALLOC_CONF="backend:native").split() == ["backend:native"] * 2
    assert run(told, PYTORCH_CUDA_ALLOC_CONF="backend:native").split() == ["None", "backend:native"]


@pytest.mark.redundant
def test_who_has_spoken_is_heard():
    glibc = platform.libc_ver()[0] == "glibc"
    assert variables() == ["1", *([str(1 << 30), str(32 << 20)] if glibc else ["unset", "unset"]), "unset"]
    assert variables(THP_MEM_ALLOC_ENABLE="0")[0] == "0"
    assert variables(MALLOC_TRIM_THRESHOLD_="65536")[1:] == ["65536", "unset", "unset"]
    assert variables(GLIBC_TUNABLES="glibc.malloc.trim_threshold=65536")[1:3] == ["unset", "unset"]


WITHOUT_COMPILER = """
import sys
from zeroshard.cli import main
from zeroshard.zero.core import hooks
assert main(["plan", "--model", "llama-tiny", "--gpu", "h100-80gb", "--model.activation-checkpointing", "full"]) == 0
assert not [name for name in sys.modules if name == "torch._dynamo" or name.startswith("torch._inductor")]
import torch
left = torch.utils.checkpoint.checkpoint.__wrapped__
assert not hasattr(left, "__dynamo_disable")
assert hasattr(hooks._hook_of_unit().__call__, "_torchdynamo_disable")
assert torch._dynamo.is_compiling() is False
"""


def test_a_plan_does_not_import_the_compiler_which_is_as_ever_afterwards():
    assert "micro-batch" in run(WITHOUT_COMPILER)
