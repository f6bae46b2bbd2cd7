"""Holds gloo's thread when it would abort the process, until a watch has said which operations the ranks issued.

If ranks issue different collectives, a message may be longer than the one that its receiver expects. Then gloo throws
on a thread of its own, where nobody catches it, and C++ calls its terminate handler: the process aborts in the middle
of what it does, and no rank can say why. The handler that is set here tells the watches, and blocks that thread. The
other threads run on, so the watches compare what the ranks have issued, and the operations that wait raise. After
`HOLD_S` the process aborts as it would have done. Whatever else ends in the handler aborts at once.
"""

from __future__ import annotations

import atexit
import ctypes
import time
import weakref
from threading import Event
from typing import Any

HOLD_S = 60.0  # a process that has raised the fault ends earlier
_THROWN = b"N4gloo"  # how the names of gloo's exceptions begin, as C++ encodes them
_watched: weakref.WeakSet[Event] = weakref.WeakSet()
_kept: list[Any] = []  # the handler, which C++ may call until the process ends


def hold_no_more(event: Event) -> None:
    """Hold gloo's thread no more for the sake of this event's watch, which has ended."""
    _watched.discard(event)


def hold_for(event: Event) -> None:
    """Set ``event`` when gloo's thread would abort the process, and hold that, until `hold_no_more`."""
    _watched.add(event)
    if _kept:
        return
    try:
        runtime = ctypes.CDLL("libstdc++.so.6")
        set_handler, type_of_exception = runtime["_ZSt13set_terminatePFvvE"], runtime["__cxa_current_exception_type"]
    except (OSError, AttributeError):  # another library of C++ than the one that torch for Linux has
        return
    set_handler.restype = type_of_exception.restype = ctypes.c_void_p
    handler = ctypes.CFUNCTYPE(None)
    before: list[int] = []

    def terminates() -> None:
        # a ``std::type_info`` is the address of its methods and that of its name
        type_info = type_of_exception()
        name = ctypes.c_char_p.from_address(type_info + ctypes.sizeof(ctypes.c_void_p)).value if type_info else None
        events = list(_watched)
        if events and name is not None and name.startswith(_THROWN):
            for each in events:
                each.set()
            time.sleep(HOLD_S)
        handler(before[0])()

    _kept.append(handler(terminates))
    before.append(set_handler(_kept[0]))
    atexit.register(set_handler, ctypes.c_void_p(before[0]))
