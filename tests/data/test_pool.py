import os
import signal
import subprocess
import sys
import time

import pytest

from zeroshard.data.pool import in_order
from zeroshard.host.errors import UserError


def maker(kind):
    return {"square": _square, "user": _user_error, "bug": _bug, "die": _die}[kind]


def _square(number):
    return number * number


def _user_error(number):
    raise UserError("field", f"{number} is wrong", "mend it")


def _bug(number):
    return 1 // 0


def _die(number):
    os.kill(os.getpid(), signal.SIGKILL)


def results(kind, tasks):
    return in_order(maker, (kind,), tasks, 2)


@pytest.mark.redundant
def test_tasks_are_taken_only_so_far_ahead():
    taken = []

    def tasks():
        for number in range(100):
            taken.append(number)
            yield number

    found = results("square", tasks())
    assert next(found) == 0
    assert len(taken) < 12
    assert list(found) == [number * number for number in range(1, 100)]


def test_what_a_task_raises_is_raised_here_and_a_killed_worker_is_told():
    with pytest.raises(UserError, match="field: 0 is wrong; mend it"):
        list(results("user", [0]))
    with pytest.raises(ZeroDivisionError) as bug:
        list(results("bug", [0]))
    assert "return 1 // 0" in str(bug.value.__cause__)  # the worker's traceback
    with pytest.raises(RuntimeError, match=r"ended from outside; if memory ran out, use fewer by --data\.workers"):
        list(results("die", [0]))


@pytest.mark.redundant
def test_no_worker_outlives_a_killed_parent():
    code = (
        "import os, time; from zeroshard.data.pool import in_order\n"
        "if __name__ == '__main__':\n"
        '    task = \'lambda number: (__import__("time").sleep(0.2), __import__("os").getpid())\'\n'
        "    results = in_order(eval, (task,), range(10_000), 2)\n"
        "    print(*{next(results)[1] for _ in range(8)}, flush=True)\n"
        "    list(results)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 600
    while any(_lives(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_lives(pid) for pid in pids)


def _lives(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().split()[2] != "Z"
    except OSError:
        return False
