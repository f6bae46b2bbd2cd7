"""What dropped objects leave is closed, once, by none of the code in whose midst the garbage collector ran."""

import ast
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

import zeroshard
from forked import run
from zeroshard.host.finalizers import Finalizer, settle

PACKAGE = Path(zeroshard.__file__).parent

# Each object is dropped in a cycle, and found by a collection inside `Thread.start`, which holds locks of the
# interpreter there; then another one by a collection in code that holds a lock of the object's. The program prints what
# was closed after that, and if it waits for a minute, where.
IN_THE_START_OF_A_THREAD = """
import faulthandler, gc, sys, threading
from contextlib import nullcontext
from pathlib import Path
import torch
from zeroshard import Zero
from zeroshard.host import finalizers
from zeroshard.host import slab
from zeroshard.comm import LocalCommunicator, NullCommunicator
from zeroshard.comm.queued.worker import Worker
from zeroshard.comm.ring.sockets import thread_transports
from zeroshard.comm.shm.arena import Arena
from zeroshard.comm.shm.mapped import LOST, Segment
from zeroshard.comm.wrappers.sentinel import SentinelCommunicator
from zeroshard.models.inputs_on_host import BlockInput, Slots
from zeroshard.train.profiling.memory import AllocationRecorder
from zeroshard.zero import Offload
from zeroshard.zero.offload.disk import DiskStates

faulthandler.dump_traceback_later(60, exit=True)
gc.disable()

class Collects:  # what `Thread.start`, and on some versions the new thread, fills while it holds a lock
    def __setitem__(self, *item):
        super().__setitem__(*item)
        gc.collect()
    def add(self, item):
        super().add(item)
        gc.collect()

threading._limbo = type("Limbo", (Collects, dict), {})()
if hasattr(threading, "_shutdown_locks"):
    threading._shutdown_locks = type("Locks", (Collects, set), {})(threading._shutdown_locks)

class Box:
    pass

def threads(name):
    return not any(each.name.startswith(name) for each in threading.enumerate())

def worker():
    made = Worker("made")
    made.submit(lambda: None)
    return made, nullcontext(), lambda: threads("made")

def transports():
    made = thread_transports(2)
    sent = made[0].send(torch.zeros(1), 1)
    made[1].recv(torch.zeros(1), 0).wait()
    lines = made[0]._lines
    return made, lines._came, lambda: threads("ring-sender") and lines._is_closed

def sentinel():
    class Board:
        post = read = lambda self, *_: None
    made = SentinelCommunicator(NullCommunicator(2), Board(), print)
    return made, made._watch._closed._cond, lambda: threads("sentinel")

def states():
    path = Path(sys.argv[1]) / "folder" / "states"
    made, unit = DiskStates(path), Box()
    made.add(unit, [torch.zeros(1 << 20)])
    made.read(unit)
    made.write(unit)
    return made, made._keeps_slots, lambda: threads("offload-disk") and not path.parent.exists()

def locked_pages():
    locked = set()
    class Cudart:
        cudaHostRegister = lambda self, address, *_: locked.add(address) or 0
        cudaHostUnregister = lambda self, address: locked.remove(address)
    torch.cuda.cudart, torch.cuda.device, torch.cuda.synchronize = Cudart, nullcontext, lambda: None
    slab.host_memory.node_of = lambda device: None
    made = slab.Slab(5000, device=torch.device("cuda", 0), pinned=True).take(1, torch.uint8)
    assert locked
    return made, nullcontext(), lambda: not locked

def block_input():
    slots = Slots()
    made = BlockInput(slots, torch.zeros(5, requires_grad=True), None)
    made.copy_down()
    num_bytes = slots.num_bytes
    return made, slots._lock, lambda: slots.take(20, torch.device("cpu")) and slots.num_bytes == num_bytes

def shared_memory():
    arena = Arena(Segment.create(0, LOST + 1, 4096))
    made = arena.empty(4096, torch.float32)
    there = arena.place_of(made)
    return made, nullcontext(), lambda: arena.place_of(arena.empty(4096, torch.float32)) == there

def recorded_storage():
    model = torch.nn.Linear(4, 4)
    zero = Zero(model, 1, comm=LocalCommunicator(), offload=Offload())
    optim = zero.optimizer(torch.optim.AdamW)
    recorder = AllocationRecorder(zero.holdings)
    with recorder:
        model(torch.ones(1, 4)).sum().backward()
        optim.step()
        made = torch.zeros(1 << 20)
    update = zero.units[0].groups[0].params.update
    update.wait()
    update.begin()  # from now on it is under way
    live = recorder.live_bytes
    return made, update._lock, lambda: update.end(None) or recorder.live_bytes == live - (4 << 20)

def drop(made):
    box = Box()
    box.made, box.box = made, box

for make in (worker, transports, sentinel, states, locked_pages, block_input, shared_memory, recorded_storage):
    made, _, is_closed = make()
    drop(made)
    del made
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    finalizers.settle()
    assert is_closed(), make
    made, lock, is_closed = make()
    with lock:
        drop(made)
        del made
        gc.collect()
    finalizers.settle()
    assert is_closed(), make
    print(make.__name__, flush=True)
"""


def test_none_waits_in_the_start_of_a_thread(tmp_path):
    done = run([sys.executable, "-c", IN_THE_START_OF_A_THREAD, tmp_path], capture_output=True, text=True, check=False)
    found = "worker transports sentinel states locked_pages block_input shared_memory recorded_storage"
    assert (done.stdout.split(), done.returncode) == (found.split(), 0), done.stderr


@pytest.mark.redundant
def test_what_the_collector_calls_is_known():
    """A further finalizer, ``__del__`` or callback of a weak reference is a `Finalizer`, or a row of the test above."""
    found = Counter()
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "weakref" in text or "__del__" in text else ():
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func).removeprefix("weakref.")
                calls = name == "finalize" or (name in ("ref", "WeakMethod", "proxy") and len(node.args) > 1)
            else:
                calls = isinstance(node, ast.FunctionDef) and node.name == "__del__"
            found[path.relative_to(PACKAGE).as_posix()] += calls
    assert +found == {
        "comm/shm/arena.py": 1,
        "host/finalizers.py": 1,
        "lab/predict/recorder.py": 1,  # counts bytes
        "models/inputs_on_host.py": 1,
        "train/profiling/memory.py": 1,
        "zero/offload/disk.py": 1,  # appends to a list
    }


class Owner:
    pass


def test_each_is_closed_once_in_the_order_of_their_ends_and_the_thread_ends_with_the_last():
    before, closed = threading.active_count(), []
    owners = {name: Owner() for name in "abcd"}
    made = {name: Finalizer(owner, closed.append, name) for name, owner in owners.items()}
    made["c"]()
    for name in "bdca":
        del owners[name]
    settle()
    made["b"]()
    assert closed == ["c", "b", "d", "a"]
    assert not any(each.alive for each in made.values())
    assert threading.active_count() == before


def test_a_close_that_fails_is_reported_and_the_next_one_is_done(monkeypatch):
    closed, told = [], []
    monkeypatch.setattr(threading, "excepthook", lambda told_of: told.append(told_of.exc_type))
    owner = Owner()
    Finalizer(owner, lambda: 1 / 0)
    Finalizer(owner, closed.append, 1)
    failing = Finalizer(Owner(), lambda: 1 / 0)
    del owner
    settle()
    assert (closed, told) == ([1], [ZeroDivisionError] * 2)
    with pytest.raises(ZeroDivisionError):
        Finalizer(test_a_close_that_fails_is_reported_and_the_next_one_is_done, lambda: 1 / 0)()
    assert not failing.alive


AT_THE_END = """
import os, sys
from zeroshard.host.finalizers import Finalizer
class Owner: pass
owners = [Owner() for _ in range(3)]
made = [Finalizer(owner, print, name) for owner, name in zip(owners, "abc")]
child = os.fork()
if child:
    os.waitpid(child, 0)
else:
    assert not any(each.alive for each in made)
    made.pop()()
    del owners[1]
    own = Finalizer(owners[0], print, "the child's own")
sys.stdout.flush()
"""


def test_the_end_of_a_process_closes_the_newest_first_and_a_fork_nothing_of_its_parents():
    done = run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["the child's own", "c", "b", "a"]
