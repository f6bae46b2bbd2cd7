"""Ranks that a process beside the launcher forks."""

from __future__ import annotations

import subprocess
import sys

import psutil

import forked

PREPARED = """
import os, runpy, signal, sys, threading, time
from zeroshard.launch import environment, fork_server

def rank(*ignored, **also):
    environment.end_with_starter()
    if sys.argv[1] == "stays":
        print("rank", os.getpid(), os.getppid(), os.environ["WHO"], sorted(signal.pthread_sigmask(0, ())), flush=True)
        time.sleep(600)
    sys.exit(int(sys.argv[1]))

runpy.run_module = rank
os.environ["ZEROSHARD_LAUNCHER_PID"] = str(os.getpid())
server = fork_server.ForkServer()
env = {**os.environ, "WHO": "you"}
"""


def _says(program):
    done = forked.run([sys.executable, "-c", PREPARED + program], capture_output=True, text=True, check=False)
    assert not done.stderr
    return done.stdout.split()


def test_a_rank_has_its_own_words_and_its_exit_code_is_heard_of():
    program = """
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()  # a launcher has threads
print(server.fork(["7"], env).wait(60))
killed = server.fork(["stays"], env)
killed.send_signal(signal.SIGKILL)
print(killed.wait(60), killed.poll())
server.close()
"""
    said = _says(program)
    assert said[-3:] == ["7", "-9", "-9"]  # the second rank may have said something before it was killed


def test_where_the_server_is_killed_its_ranks_are_and_it_is_said():
    program = """
ranks = [server.fork(["stays"], env) for _ in range(2)]
os.kill(server.pid, signal.SIGKILL)
print(*[rank.wait(60) for rank in ranks])
try:
    server.fork(["stays"], env)
except fork_server.ForkServerLostError as error:
    print(error)
"""
    said = " ".join(_says(program))
    assert "-9 -9 the process that forks the ranks of this machine was killed" in said


def test_where_the_launcher_is_killed_its_server_and_ranks_are():
    program = (
        PREPARED
        + """
server.fork(["stays"], env)
time.sleep(600)
"""
    )
    launcher = forked.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    _, rank, parent, who, mask = launcher.stdout.readline().split()
    assert (who, mask) == ("you", "[]")
    processes = [psutil.Process(int(pid)) for pid in (rank, parent)]
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    assert not forked.still_running(processes)
