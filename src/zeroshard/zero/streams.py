"""Streams of a GPU beside the one that computes: a collective waits for what it reads, and for nothing else.

On CUDA a collective begins when all is over that was queued before it on the stream that is current when it is issued.
Issued from the stream that computes, an all-gather would wait for every kernel queued so far, however far ahead the
host is. So the engine issues its collectives from streams of its own, and says by events what each waits for:

    copy_in     takes memory for unsharded weights and copies this rank's shard there; waits for the optimizer's step
                that wrote the shard, and for the last use of the weights that were freed last: their memory comes back
    gather      all-gathers; each waits for its copy alone
    reduce      reductions of gradients; each waits for what computed these
    replicas    sums over replicas; each waits for the reduction before it, and nothing that computes waits for that
    save        copies of state to the host for a checkpoint, which the next optimizer's step waits for

The stream that computes waits for a gather before the weights' first use, and for a reduction before its buffer is
freed or written again.

[Note: No record_stream]
    Memory goes back to the stream that it was taken from, and may be taken again there at once. Each buffer here is
    freed where the stream that it came from has been made to wait for its last use: gradients after `Work.wait` on the
    stream that computes, weights by `freed`. So the allocator need not be told of further streams, which would keep
    memory back until the device had caught up with the host.

FSDP2 has the same first four (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, `FSDPCommContext`).
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, Protocol

import torch

from zeroshard.comm import Work
from zeroshard.comm.labels import beside

Lane = Literal["copy_in", "gather", "reduce", "replicas", "save"]
Mark = Any
"""A point of a stream that others may wait for; None where there are no streams."""


class Streams(Protocol):
    """The streams of one device."""

    def mark(self) -> Mark:
        """What has been queued on the current stream so far."""
        ...

    def on(self, lane: Lane, *after: Mark) -> AbstractContextManager[None]:
        """Queue what this block does on ``lane``, after these marks; after what was there before in any case."""
        ...

    def wait(self, mark: Mark) -> None:
        """Have the current stream wait for the mark; the host does not."""
        ...

    def issued(self, work: Work) -> Work:
        """``work``, which was issued on the current stream just now; who waits for it waits for this stream too."""
        ...

    def freed(self) -> None:
        """Weights that the current stream has read until now are freed: their memory may be taken after this point."""
        ...


class NoStreams:
    """Where everything is done in the order in which it is said: on the CPU."""

    _here = nullcontext()

    def mark(self) -> Mark:
        """None."""
        return None

    def on(self, lane: Lane, *after: Mark) -> AbstractContextManager[None]:
        """Do it here and now."""
        return self._here

    def wait(self, mark: Mark) -> None:
        """Return at once."""

    def issued(self, work: Work) -> Work:
        """``work`` itself."""
        return work

    def freed(self) -> None:
        """Nothing reads behind the host's back."""


NO_STREAMS = NoStreams()


class _Issued:
    """A collective, and the point of a stream behind which it was issued.

    A communicator's own ``wait`` orders the current stream after what runs on a stream of the communicator's; one that
    computes on the stream from which it was called has done so on a lane.
    """

    def __init__(self, work: Work, streams: DeviceStreams) -> None:
        self._work, self._streams, self._mark = work, streams, streams.mark()

    def wait(self) -> None:
        """Order the current stream after both."""
        self._work.wait()
        self._streams.wait(self._mark)


class DeviceStreams:
    """The streams of one GPU, made when they are first used.

    Args:
        device: an indexed one.
        api: ``torch.cuda``, or what has its `Stream`, `Event`, `stream` and `current_stream`.
    """

    def __init__(self, device: torch.device, api: Any = torch.cuda) -> None:
        self._device, self._api = device, api
        self._lanes: dict[Lane, Any] = {}
        self._freed: dict[Any, Mark] = {}  # by the stream that had read what was freed

    def mark(self) -> Mark:
        """An event on the current stream."""
        event = self._api.Event()
        event.record(self._api.current_stream(self._device))
        return event

    def wait(self, mark: Mark) -> None:
        """Have the current stream wait for the mark; the host does not."""
        self._api.current_stream(self._device).wait_event(mark)

    @contextmanager
    def on(self, lane: Lane, *after: Mark) -> Generator[None]:
        """See `Streams.on`; what takes memory for weights waits for those that were freed."""
        stream = self._lanes.get(lane)
        if stream is None:
            stream = self._lanes[lane] = self._api.Stream(device=self._device, priority=-1)
        if lane == "copy_in":
            after = (*after, *self._freed.values())
            self._freed = {}
        for mark in after:
            if mark is not None:
                stream.wait_event(mark)
        with self._api.stream(stream), beside():
            yield

    def issued(self, work: Work) -> Work:
        """See `Streams.issued`."""
        return _Issued(work, self)

    def freed(self) -> None:
        """See `Streams.freed`."""
        self._freed[self._api.current_stream(self._device)] = self.mark()


class ByDevice:
    """The streams of each device that an engine's weights lie on."""

    def __init__(self) -> None:
        self._known: dict[torch.device, Streams] = {}

    def __getitem__(self, device: torch.device) -> Streams:
        """Those of ``device``; of a CPU `NO_STREAMS`."""
        if device not in self._known:
            self._known[device] = DeviceStreams(device) if device.type == "cuda" else NO_STREAMS
        return self._known[device]
