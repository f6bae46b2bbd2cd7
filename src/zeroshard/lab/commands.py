"""What ``zeroshard lab`` does: clean up after networks, shape interfaces, probe links."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zeroshard.errors import ExitStatus, UserError
from zeroshard.flags import Flag, read_flags
from zeroshard.lab import network
from zeroshard.train.sizes import parse_bandwidth, parse_duration, parse_size
from zeroshard.train.validate import nearest

USAGE = "clean | tc apply DEV --bandwidth RATE [--latency TIME] [--burst SIZE] [--yes] | tc status DEV | tc delete DEV"


def run_lab(words: Sequence[str]) -> int:
    """Do what ``zeroshard lab WORDS`` asks for, and return the exit status.

    Raises:
        UserError: words that mean nothing, or something that cannot be done here.
    """
    commands: dict[str, Callable[[Sequence[str]], None]] = {"clean": _clean, "tc": _tc}
    word = words[0] if words else ""
    if word not in commands:
        raise UserError("lab", f"{word!r} is not one of its commands", nearest(word, commands, f"use {USAGE}"))
    commands[word](words[1:])
    return ExitStatus.OK


def _clean(words: Sequence[str]) -> None:
    read_flags(words, {})
    removed = network.clean()
    print(f"removed {', '.join(removed)}" if removed else "nothing was left behind")


def _tc(words: Sequence[str]) -> None:
    actions = {"apply": _apply, "status": _status, "delete": _delete}
    action = words[0] if words else ""
    if action not in actions:
        raise UserError("lab tc", f"{action!r} is not one of its actions", nearest(action, actions, f"use {USAGE}"))
    flags = {"--yes": Flag(("yes",), "switch")}
    if action == "apply":
        flags |= {f"--{name}": Flag((name,), "one") for name in ("bandwidth", "latency", "burst")}
    given = read_flags(words[1:], flags if action != "status" else {}, ("device",))
    if "device" not in given:
        raise UserError("device", "is missing", f"write zeroshard lab tc {action} DEV")
    actions[action](given)


def _apply(given: dict[str, str]) -> None:
    if "bandwidth" not in given:
        raise UserError("bandwidth", "is missing", "add --bandwidth 1Gbit/s")
    network.apply(
        given["device"],
        parse_bandwidth("bandwidth", given["bandwidth"]),
        parse_duration("latency", given.get("latency", "0s")),
        parse_size("burst", given["burst"]) if "burst" in given else 0,
        yes=bool(given.get("yes")),
    )
    _status(given)


def _status(given: dict[str, str]) -> None:
    found = network.status(given["device"])
    if not found:
        print(f"{given['device']}: not shaped by us")
        return
    rate = found["bytes_per_s"]
    print(
        f"{given['device']}: sends at most {rate * 8e-9:g} Gbit/s ({rate * 1e-6:g} MB/s), "
        f"{found['burst_bytes']} bytes at once after a pause, {found['latency_s'] * 1e6:g} us late"
    )


def _delete(given: dict[str, str]) -> None:
    removed = network.delete(given["device"], yes=bool(given.get("yes")))
    print(f"{given['device']}: {'as it was' if removed else 'was not shaped by us'}")
