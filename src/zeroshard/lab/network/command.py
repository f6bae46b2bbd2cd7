"""The verb ``zeroshard lab``: removes leftover networks and shapes interfaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from zeroshard.errors import ExitStatus, UserError
from zeroshard.lab.network import network
from zeroshard.train.config.sizes import parse_bandwidth, parse_duration, parse_size
from zeroshard.train.config.validate import nearest

WORDS = ("command", "action", "device")  # in this order
OPTIONS = ("bandwidth", "latency", "burst")  # with a value; and the switch ``yes``
USAGE = (
    "clean | tc apply DEV --bandwidth RATE [--latency TIME] [--burst SIZE] [--yes] | tc status DEV "
    "| tc delete DEV [--yes]"
)


def run_lab(given: Mapping[str, str]) -> int:
    """Run ``zeroshard lab`` with the given words and options, and return the exit status.

    Args:
        given: those of `WORDS` and `OPTIONS` that were given, by name; and ``yes`` if that switch was.

    Raises:
        UserError: the words are no command, or the command is not possible on this machine.
    """
    command = given.get("command", "")
    if command == "clean":
        _refuse_others(given, ("command",))
        _clean()
        return ExitStatus.OK
    if command != "tc":
        what = f"{command!r} is not one of its commands" if command else "what to do is missing"
        raise UserError("lab", what, nearest(command, ("clean", "tc"), f"write one of {USAGE}"))
    action = given.get("action", "")
    if action not in _ACTIONS:
        what = f"{action!r} is not one of its actions" if action else "what to do is missing"
        raise UserError("lab tc", what, nearest(action, _ACTIONS, f"write one of {USAGE}"))
    takes, act = _ACTIONS[action]
    if "device" not in given:
        raise UserError("device", "is missing", f"write zeroshard lab tc {action} DEV")
    _refuse_others(given, (*WORDS, *takes))
    act(given)
    return ExitStatus.OK


def _refuse_others(given: Mapping[str, str], known: tuple[str, ...]) -> None:
    other = next((name for name in given if name not in known), None)
    if other is not None:
        raise UserError(other, "means nothing here", f"leave it out: {USAGE}")


def _clean() -> None:
    removed = network.clean()
    print(f"removed {', '.join(removed)}" if removed else "nothing was left behind")


def _apply(given: Mapping[str, str]) -> None:
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


def _status(given: Mapping[str, str]) -> None:
    found = network.status(given["device"])
    if not found:
        print(f"{given['device']}: not shaped by us")
        return
    rate = found["bytes_per_s"]
    print(
        f"{given['device']}: sends at most {rate * 8e-9:g} Gbit/s ({rate * 1e-6:g} MB/s), "
        f"{found['burst_bytes']} bytes at once after a pause, {found['latency_s'] * 1e6:g} us late"
    )


def _delete(given: Mapping[str, str]) -> None:
    removed = network.delete(given["device"], yes=bool(given.get("yes")))
    print(f"{given['device']}: {'as it was' if removed else 'was not shaped by us'}")


_ACTIONS: dict[str, tuple[tuple[str, ...], Callable[[Mapping[str, str]], None]]] = {
    "apply": ((*OPTIONS, "yes"), _apply),
    "status": ((), _status),
    "delete": (("yes",), _delete),
}
