"""Side streams of a GPU for collectives, which so overlap with computation: each waits only for the data that it reads.

On CUDA a collective starts after all work that was queued before it on the stream that is current when it is issued.
If the compute stream were current, an all-gather would wait for every kernel queued so far, however far ahead the host
is. So the engine issues its collectives from streams of its own, and uses events to say what each waits for:

    copy_in     allocates unsharded weights and copies this rank's shard there; waits for the optimizer step that wrote
                the shard, and for the last use of the weights that were freed last, whose memory is reused
    gather      all-gathers; each waits only for its copy_in
    reduce      reductions of gradients; each waits for the kernels that computed the gradients
    replicate   sums over replicas; each waits for the reduction before it, so that the compute stream need not
    save        copies of state to the host for a checkpoint; the next optimizer step waits for them
    to_host     copies of reduced gradients to the host, whose optimizer waits for them; each after its reduction
    to_device   copies of weights that the host has updated; each gather waits for its own

The compute stream waits for a gather before the weights' first use, and for a reduction before its buffer is freed or
overwritten.

[Note: No record_stream]
    The caching allocator returns freed memory to the stream that allocated it, which may reuse it at once. So each
    buffer here is freed only after the stream that allocated it has been made to wait for the buffer's last use:
    gradients after `Work.wait` on the compute stream, weights by `freed`. `record_stream` is not needed; it would keep
    memory back until the device has caught up with the host.

FSDP2 has the same first four (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, `FSDPCommContext`).
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, Protocol

import torch

from zeroshard.comm import Work
from zeroshard.comm.labels import on_side_stream

Lane = Literal["copy_in", "gather", "reduce", "replicate", "save", "to_host", "to_device"]
Mark = Any
"""A point in a stream for which other streams can wait (a CUDA event); None on a device without streams."""


class Streams(Protocol):
    """The streams of one device."""

    def mark(self) -> Mark:
        """Return a mark behind all work that is queued on the current stream so far."""

    def on(self, lane: Lane, *after: Mark) -> AbstractContextManager[None]:
        """Queue this block's work on the stream ``lane``, after these marks and after all work already queued there."""

    def wait(self, mark: Mark) -> None:
        """Make the current stream wait for the mark, without blocking the host."""

    def issued(self, work: Work) -> Work:
        """Wrap ``work``, which was just issued on the current stream: ``wait`` then waits for this stream too."""

    def freed(self) -> None:
        """Record that weights are freed that the current stream has read until now: `copy_in` may reuse them after."""


class NoStreams:
    """The streams of a device that has none, the CPU: all work runs in program order."""

    _here = nullcontext()

    def mark(self) -> Mark:
        """Return None."""
        return None

    def on(self, lane: Lane, *after: Mark) -> AbstractContextManager[None]:
        """Do nothing: the block runs in program order."""
        return self._here

    def wait(self, mark: Mark) -> None:
        """Return at once."""

    def issued(self, work: Work) -> Work:
        """Return ``work`` itself."""
        return work

    def freed(self) -> None:
        """Do nothing: no kernel still reads memory that the host frees."""


NO_STREAMS = NoStreams()


class _Issued:
    """A collective, with a mark of the stream on which it was issued.

    The collective's own ``wait`` orders the current stream after the communicator's stream. But some communicators
    compute on the stream from which they were called, which is a lane: hence the mark.
    """

    def __init__(self, work: Work, streams: DeviceStreams) -> None:
        self._work, self._streams, self._mark = work, streams, streams.mark()

    def wait(self) -> None:
        """Order the current stream after the collective and the mark."""
        self._work.wait()
        self._streams.wait(self._mark)


class DeviceStreams:
    """The streams of one GPU, made when they are first used.

    Args:
        api: ``torch.cuda``, or an object with its `Stream`, `Event`, `stream` and `current_stream`.
    """

    def __init__(self, device: torch.device, api: Any = torch.cuda) -> None:
        self._device, self._api = device, api
        self._lanes: dict[Lane, Any] = {}
        self._freed: dict[Any, Mark] = {}  # by the stream that read the weights before they were freed

    def mark(self) -> Mark:
        """Record an event on the current stream."""
        event = self._api.Event()
        event.record(self._api.current_stream(self._device))
        return event

    def wait(self, mark: Mark) -> None:
        """Make the current stream wait for the mark, without blocking the host."""
        self._api.current_stream(self._device).wait_event(mark)

    @contextmanager
    def on(self, lane: Lane, *after: Mark) -> Generator[None]:
        """See `Streams.on`; ``copy_in`` also waits for the last use of freed weights, whose memory it may be given."""
        stream = self._lanes.get(lane)
        if stream is None:
            stream = self._lanes[lane] = self._api.Stream(device=self._device, priority=-1)
        if lane == "copy_in":
            after = (*after, *self._freed.values())
            self._freed = {}
        for mark in after:
            if mark is not None:
                stream.wait_event(mark)
        with self._api.stream(stream), on_side_stream():
            yield

    def issued(self, work: Work) -> Work:
        """See `Streams.issued`."""
        return _Issued(work, self)

    def freed(self) -> None:
        """See `Streams.freed`."""
        self._freed[self._api.current_stream(self._device)] = self.mark()  # [Note: No record_stream]


class ByDevice:
    """The streams of each device on which weights of an engine lie."""

    def __init__(self) -> None:
        self._known: dict[torch.device, Streams] = {}

    def __getitem__(self, device: torch.device) -> Streams:
        """Return the streams of ``device``; `NO_STREAMS` unless it is a CUDA device."""
        if device not in self._known:
            self._known[device] = DeviceStreams(device) if device.type == "cuda" else NO_STREAMS
        return self._known[device]
