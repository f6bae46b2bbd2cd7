"""How a rank ends after Ctrl-C, wherever it is stuck."""

import subprocess
import sys

import pytest

# Ctrl-C, and then an exit that never comes: the main thread holds Python's lock in C, as a finalizer might.
STUCK = """
import atexit, ctypes, os, signal
from zeroshard.host.launch import rank_exit
rank_exit.INTERRUPT_GRACE_S = 5.0  # within which the main thread prints
if STUCK_WITH_THE_LOCK:
    atexit.register(ctypes.PyDLL(None).pause)
else:
    atexit.register(signal.pause)
with rank_exit.ended_with_launcher():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


@pytest.mark.redundant
@pytest.mark.parametrize("stuck_with_the_lock", [True, False])
def test_ctrl_c_ends_in_130_wherever_the_process_hangs(stuck_with_the_lock):
    code = STUCK.replace("STUCK_WITH_THE_LOCK", str(stuck_with_the_lock))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert (done.stdout, done.stderr) == ("interrupted\n", "")
    assert done.returncode == 130
