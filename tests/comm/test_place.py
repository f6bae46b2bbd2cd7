"""Where the main thread is: the user's line, and whether it is in a collective of torch.distributed of all ranks."""

import threading

import pytest
import torch.distributed as dist

from zeroshard.comm.wrappers import place
from zeroshard.comm.wrappers.place import place_of_main_thread


def inside(name, group, ask):
    """The answer to ``ask``, as if asked while torch's function of that name runs."""
    made = {}
    exec(compile(f"def {name}(group, ask): return ask()", place._C10D, "exec"), made)
    return made[name](group, ask)


def test_it_is_the_line_of_the_users_code_from_any_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(place_of_main_thread()))
    thread.start()
    thread.join()
    assert found[0].inside == ""
    here = place_of_main_thread()
    assert here.at.startswith(f"{__file__}:")
    assert here.at.endswith(", in test_it_is_the_line_of_the_users_code_from_any_thread")


@pytest.mark.parametrize(
    ("name", "group", "expected"),
    [
        ("barrier", dist.group.WORLD, "barrier"),
        ("all_gather_object", None, "all_gather_object"),
        ("barrier", "a group of some ranks", ""),
        ("recv", None, ""),
    ],
)
def test_only_collectives_of_all_ranks_count(name, group, expected):
    found = inside(name, group, place_of_main_thread)
    assert found.inside == expected
    assert str(found).startswith(f"in torch.distributed.{expected} at " if expected else f"at {__file__}:")


def test_the_outermost_function_of_torch_is_named():
    made = {}
    inner = "def all_gather(group, ask): return ask()"
    outer = "def all_gather_object(group, ask): return all_gather(group, ask)"
    exec(compile(f"{inner}\n{outer}", place._C10D, "exec"), made)
    assert made["all_gather_object"](None, place_of_main_thread).inside == "all_gather_object"
