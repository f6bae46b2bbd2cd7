"""Where the main thread of this process is: the line of the user's code, and a collective of torch.distributed.

Any thread may ask, also while the main thread is blocked.
"""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
import torch.distributed as dist

_NOT_THE_USERS = (str(Path(__file__).parents[2]), str(Path(torch.__file__).parent))
_C10D = str(Path(dist.__file__).parent / "distributed_c10d.py")
_COLLECTIVE = re.compile("barrier|all_|broadcast|gather|reduce|scatter")  # of functions of torch.distributed


class Place(NamedTuple):
    """A place in a program."""

    at: str  # file, line and function of the user's code; "" if there is none
    inside: str  # the function of torch.distributed that is called there, if it is a collective of all ranks; else ""

    def __str__(self) -> str:
        at = self.at or "no line of its own"
        return f"in torch.distributed.{self.inside} at {at}" if self.inside else f"at {at}"


def place_of_main_thread() -> Place:
    """Return where the main thread is."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    inside = ""
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        if frame.f_code.co_filename == _C10D and _COLLECTIVE.search(frame.f_code.co_name):
            is_of_all = frame.f_locals.get("group") in (None, dist.group.WORLD)
            inside = frame.f_code.co_name if is_of_all else ""
        frame = frame.f_back
    if frame is None:
        return Place("", inside)
    return Place(f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}", inside)
