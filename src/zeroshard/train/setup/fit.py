"""``--fit``: makes a run fit before it begins, and pulls a further lever each time that memory runs out all the same.

A planner (from `zeroshard.lab`; the command line passes it in) chooses flags that need less memory and change nothing
that is trained: `zeroshard.lab.planner.fit_run`. The run goes on as if they had been given.

A plan does not know all that a process allocates, so a rank may still run out of memory. That rank writes the flags of
the next start into ``fit.json`` in the run folder and ends, in the middle of a collective perhaps. The launcher starts
all ranks again, in processes of their own, and they resume from the last checkpoint, or begin anew if there is none.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from zeroshard.comm import Communicator, PeerError
from zeroshard.comm.agree import first_rank_does, largest, send_bytes
from zeroshard.comm.registry import name_of
from zeroshard.host import host_memory
from zeroshard.host.errors import ExitStatus, UserError, is_out_of_memory, is_out_of_threads, memory_line
from zeroshard.host.launch.environment import has_launcher
from zeroshard.host.launch.rank_exit import end_at_once
from zeroshard.host.regular_files import json_of, read_text, write_inside
from zeroshard.settings.flags_given import with_flags
from zeroshard.settings.validate import by_path
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.profiling.devices import Device, device_by_driver_name
from zeroshard.train.records.records import Callback
from zeroshard.train.setup.assemble import attention_boundary_setting
from zeroshard.train.setup.corpus import vocab_size_of
from zeroshard.train.setup.numerics import on_device
from zeroshard.train.setup.offloading import neighbours_of, room_for_files

FILE = "fit.json"
HEADROOM = 0.1  # of a CPU's free memory, which must stay free: code, fragments, buffers of libraries
RESERVE_BYTES = 160 * 2**20  # of each rank on a CPU for the same, however little is free; stacks of threads: 8 MiB each


@dataclass(frozen=True)
class FitJob:
    """What a planner needs to know to make a run fit.

    Attributes:
        config: the run as given, with dtype and compile resolved.
        kept: the settings in it that must stay, as they were given.
        vocab_size, document_mask: of its data.
        world_size, ranks_per_node, backend: of its communicator.
        device: of each rank; its ``memory_bytes`` are those that are free, on the rank that has fewest.
        has_rates: whether the rates of ``device`` are known; if not, they stand for nothing.
        host_bytes: free memory of the host, for all its ranks; on a CPU it is the device's.
        disk_bytes: free bytes for a rank's file of states.
        start: flags that an earlier start of the run has chosen.
    """

    config: TrainConfig
    kept: frozenset[tuple[str, ...]]
    vocab_size: int
    document_mask: bool
    world_size: int
    ranks_per_node: int
    backend: str
    device: Device
    has_rates: bool
    host_bytes: int
    disk_bytes: int
    start: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fitted:
    """What a planner has chosen.

    Attributes:
        flags: those that it adds, as they are written on the command line.
        fits: whether the run then fits; else ``flags`` are those with which it needs least.
        needed_bytes: of a rank, by the plan.
        next_flags: those to take if memory runs out all the same; None: nothing is left.
        said: two lines for the user: what was chosen, and what it costs.
        table: what was tried, and the plan; for ``--dry-run``, else empty.
    """

    flags: Sequence[str]
    fits: bool
    needed_bytes: int
    next_flags: Sequence[str] | None
    said: Sequence[str]
    table: str


Fit = Callable[[FitJob], Fitted]


class FitEndsRunError(Exception):
    """There is nothing to train: it was a dry run, or nothing fits. Raised on every rank.

    ``status`` is the exit status, ``said`` what rank 0 prints: on stderr unless the status is 0.
    """

    def __init__(self, status: ExitStatus, said: str) -> None:
        self.status, self.said = status, said
        super().__init__(said)


class Fitting:
    """What a run that was made to fit does where memory runs out.

    Args:
        out: the run folder.
        rank: of this process.
        state: what is in ``fit.json``.
    """

    def __init__(self, out: str, rank: int, state: Mapping[str, Any]) -> None:
        self._out, self._rank, self._state = out, rank, state
        self._oom_kills = host_memory.num_oom_kills()

    def as_dict(self) -> dict[str, Any]:
        """For ``summary.json``, beside the plan."""
        return {name: value for name, value in self._state.items() if name != "next_flags"}

    @contextmanager
    def pulls_next_lever(self, where: Callable[[], str]) -> Generator[None]:
        """Inside, end this process if memory runs out; ``where``: what it does, as ``in step 3``.

        A rank that the kernel has killed leaves this to those that miss it, unless a launcher of ours does it.
        """
        try:
            yield
        except PeerError as error:
            if has_launcher() or host_memory.num_oom_kills() == self._oom_kills:
                raise
            speaks = self._rank == 0 or str(error).startswith("rank 0")
            self._end(where(), f"the kernel killed a rank of this machine, as memory ran out {where()}", speaks=speaks)
        except (RuntimeError, MemoryError, OSError) as error:
            if not (is_out_of_memory(error) or is_out_of_threads(error)):
                raise
            traceback.clear_frames(error.__traceback__)  # what they hold is needed to write and speak
            lacked = memory_line(error, "").removeprefix("memory: ran out").removesuffix("; ").removeprefix(", where ")
            what = f"rank {self._rank} ran out of memory {where()}{f', where {lacked}' * bool(lacked)}"
            self._end(where(), what, lacked)

    def _end(self, where: str, what: str, lacked: str = "", *, speaks: bool = True) -> NoReturn:
        """Leave the flags of the next start in the run folder, and end without waiting for other ranks."""
        status, line = _next_start(self._out, self._state, what, rank=self._rank, where=where, lacked=lacked)
        todo = "; start again with --resume auto" if status == ExitStatus.OUT_OF_MEMORY and not has_launcher() else ""
        end_at_once(line + todo if speaks else "", status)


def after_oom_kill(out: str, rank: int) -> tuple[ExitStatus, str] | None:
    """Leave the flags of the next start in the run folder of a rank that the kernel has killed, as memory ran out.

    Returns:
        The exit status, and what to print; None if this start of the run was not planned yet.
    """
    state, what = _left(Path(out)), f"the kernel killed rank {rank}, as memory ran out"
    return _next_start(out, state, what, rank=rank) if "next_flags" in state else None


def _next_start(
    out: str, state: Mapping[str, Any], what: str, *, rank: int, where: str = "", lacked: str = ""
) -> tuple[ExitStatus, str]:
    if state["next_flags"] is None:
        return ExitStatus.CHECK_FAILED, f"fit: {what}, and no lever is left; {_TODO}"
    missing = {name: state[name] for name in ("flags", "needed_bytes", "free_bytes")}
    missing |= {"rank": rank, "where": where or "not known", "lacked": lacked or "not known"}
    _write(out, {"flags": state["next_flags"], "ran_out": [*state["ran_out"], missing]})
    return ExitStatus.OUT_OF_MEMORY, f"fit: {what}; next is {' '.join(state['next_flags'])}"


class FitRecord(Callback):
    """Adds to the summary what a run was made to fit by, and what it lacked."""

    def __init__(self, fitting: Fitting) -> None:
        self._fitting = fitting

    def before_end(self, summary: dict[str, Any]) -> None:
        """Add it."""
        summary["fit"] = self._fitting.as_dict()


_TODO = "use a smaller --micro-batch-size or --seq-len, more ranks, or --fit states (with adapters base,states)"


def made_to_fit(
    config: TrainConfig, comm: Communicator, device: torch.device, fit: Fit | None
) -> tuple[TrainConfig, Fitting | None]:
    """Return ``config`` with what ``fit`` chooses, and what to do if memory runs out; None: it is not asked to fit.

    Rank 0 plans, for the rank that has least memory, and prints what it has chosen. Collective.

    Raises:
        FitEndsRunError: nothing fits, or it is a dry run.
        UserError: no plan can be made of the run.
    """
    if config.fit == "off" or fit is None:
        return config, None
    left = _left(Path(config.out)) if config.resume != "none" else {}
    job = replace(_job(config, comm, device), start=tuple(left.get("flags", ())))
    found: list[Fitted] = []
    first_rank_does(comm, lambda: found.append(fit(job)))
    sent = send_bytes(comm, json.dumps([asdict(each) for each in found]).encode(), 0)
    chosen = Fitted(**json.loads(sent)[0])
    said = "\n".join(chosen.said)
    if config.dry_run:
        status = ExitStatus.OK if chosen.fits else ExitStatus.CHECK_FAILED
        raise FitEndsRunError(status, f"{said}\n\n{chosen.table}")
    if not chosen.fits:
        raise FitEndsRunError(ExitStatus.CHECK_FAILED, f"error: fit: {chosen.said[0]}; {_TODO}")
    state = {name: getattr(chosen, name) for name in ("flags", "next_flags", "needed_bytes")}
    state |= {"free_bytes": job.device.memory_bytes, "ran_out": left.get("ran_out", [])}
    if comm.rank == 0:
        print(said, flush=True)
        _write(config.out, state)
    # what was resolved for this machine may follow from the flags, and is resolved again
    changed = on_device(with_flags(config, [*chosen.flags, f"--out {config.out}"]), device)
    return changed, Fitting(config.out, comm.rank, state)


def _job(config: TrainConfig, comm: Communicator, device: torch.device) -> FitJob:
    """What this run is, and what each rank has. Collective."""
    import torch._dynamo  # torch's optimizers import it at their first step: it is in memory, not to be planned

    vocab_size = vocab_size_of(config, comm)
    num_neighbours = largest(comm, len(neighbours_of(comm)))
    known = None
    if device.type == "cpu":
        torch.ones(256, 256).mm(torch.ones(256, 256))  # its threads and the buffers of its library are there
        free = free_bytes_of_cpu(num_neighbours)
    else:
        free = torch.cuda.mem_get_info(device)[0]
        known = device_by_driver_name(torch.cuda.get_device_name(device))
    free = -largest(comm, -free)
    host_bytes = -largest(comm, -(host_memory.available_bytes() or 0))
    unknown = Device("this machine", free, dict.fromkeys(("float32", "bfloat16", "float16"), 1.0), 1.0, "free now")
    return FitJob(
        config,
        frozenset(by_path(config.model_dump(exclude_unset=True))),
        vocab_size,
        bool(attention_boundary_setting(config)),
        comm.world_size,
        num_neighbours,
        name_of(comm),
        replace(known or unknown, memory_bytes=free, device_type=device.type, host_memory_bytes=host_bytes),
        known is not None,
        host_bytes,
        -largest(comm, -(room_for_files(config) // num_neighbours)),
    )


def free_bytes_of_cpu(num_ranks: int) -> int:
    """Bytes that this process may still allocate, of a machine that ``num_ranks`` share, and of its own limits."""
    shared, own = host_memory.available_bytes(), host_memory.bytes_within_limits()
    known = [each for each in (None if shared is None else shared // num_ranks, own) if each is not None]
    free = min(known, default=2**60)
    return max(int(free * (1 - HEADROOM)) - RESERVE_BYTES, 0)


def _left(folder: Path) -> dict[str, Any]:
    """What an earlier start of the run has left in ``fit.json``; empty: it has left nothing."""
    path = folder / FILE
    if not path.exists():
        return {}
    try:
        left = json_of(read_text(path, follow=False))
        return left | {
            "flags": [str(each) for each in left["flags"]],
            "ran_out": [dict(each) for each in left["ran_out"]],
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError("fit", f"{path} cannot be read ({error})", "delete it") from None


def _write(out: str, state: Mapping[str, Any]) -> None:
    write_inside(out, FILE, json.dumps(state, indent=2))
