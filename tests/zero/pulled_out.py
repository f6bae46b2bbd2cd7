"""Runs tests in copies of the package: ``python pulled_out.py FOLDER``, with ``{copy: [tests]}`` as JSON on its input.

Each copy, a folder in FOLDER, gets a fork of this process, which has imported what costs seconds and nothing of the
package. Prints what the tests of a copy said where they failed, and exits with how many copies failed.
"""

import gc
import json
import os
import sys
import traceback
from pathlib import Path

import pytest
import torch._dynamo  # noqa: F401 -- once, for all forks; optimizers import it


def run(copied: Path, tests: list[str]) -> int:
    """Run the tests with the package in the folder ``copied``, and return pytest's exit status."""
    sys.path.insert(0, str(copied))
    code = pytest.main(["-q", "-x", "-n", "0", "-p", "no:cacheprovider", *tests])
    import zeroshard

    assert Path(zeroshard.__file__).is_relative_to(copied), zeroshard.__file__
    return int(code)


def forked(copied: Path, tests: list[str]) -> int:
    """Begin to run the tests in a fork, whose output is the file ``copied``.txt; return its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with open(f"{copied}.txt", "wb", buffering=0) as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        code = run(copied, tests)
    except BaseException:  # noqa: BLE001 -- nothing of this process may go on in the fork
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    gc.freeze()  # what was imported here is in every fork, whose collector need not look through it
    running = {name: forked(folder / name, tests) for name, tests in json.load(sys.stdin).items()}
    failed = [name for name, pid in running.items() if os.waitpid(pid, 0)[1] != 0]
    for name in failed:
        print(f"-- {name}:\n{(folder / f'{name}.txt').read_text(encoding='utf-8')[-3000:]}")
    sys.exit(len(failed))
