"""`OnHost`: inputs of recomputed blocks wait on the host for backward, all but the last one's.

Full recomputation keeps each block's input [B, T, C]: with long sequences the largest part of what is left. Copies to
and from the host run on streams of their own, under the computation of a block:

    forward    block 0 | block 1, x 0 down | block 2, x 1 down | ... | block n-1, x n-2 down
    backward   block n-1, x n-2 up | block n-2, x n-3 up | ...

The last block's input, which backward needs first, never leaves. Slots of host memory are used again by the next
forward: a run has as many as blocks, less one, of exactly an input's size.

Which block is the last is not declared: it is the one that was called last on this thread. So a loop over blocks,
several models and several forwards before one backward need nothing else.

Source of the idea: Bekman et al. 2025, "Arctic Long Sequence Training", https://arxiv.org/abs/2506.13996, section 3.3,
after Unsloth's offloaded checkpoints. There the compute stream makes the copies; here it waits for their marks.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from zeroshard.comm.streams import NO_STREAMS, ByDevice, Mark, Streams
from zeroshard.host.finalizers import Finalizer
from zeroshard.host.slab import Slab, room
from zeroshard.host.torch_internals import breaks_graphs, storage_id, version_of
from zeroshard.kernels.launch import is_traced

CATEGORY = "host_inputs"  # of this memory, among the bytes that a run records
Slot = tuple[Slab, Tensor, Mark]  # host memory, its bytes, and a mark behind their last use


class Slots:
    """Host memory for inputs, one slot for each that is away at once; the blocks of a process share it.

    Attributes:
        num_bytes: bytes of all slots that exist.
        returned: what inputs that are gone have left: a slot, the mark behind the last copy, and the tensor on the
            device, if that copy may be under way.
    """

    def __init__(self) -> None:
        self._free: list[Slot] = []
        self.returned: deque[tuple[Slot, Mark, Tensor | None]] = deque()
        Finalizer(self, _wait_for_copies, self.returned)
        self._lock = threading.Lock()  # ranks may be threads
        self.streams = ByDevice()  # not those of an engine
        self.num_bytes = 0
        self.newest = threading.local()  # of each thread, the input that was packed last

    def take(self, num_bytes: int, device: torch.device) -> Slot:
        """Return a slot of at least ``num_bytes``, locked for copies if ``device`` is a GPU.

        Raises:
            UserError: the host does not have the memory.
        """
        with self._lock:
            while self.returned:
                (slab, all_bytes, _), copied, x = self.returned.popleft()
                if x is not None:  # it is freed on this stream
                    self.streams[x.device].wait(copied)
                self._free.append((slab, all_bytes, copied))
            fits = [slot for slot in self._free if slot[0].num_bytes >= num_bytes]
            if fits:
                slot = min(fits, key=lambda each: each[0].num_bytes)
                self._free.remove(slot)
                return slot
            if self._free:  # sequences have become longer: one that is too small goes
                self._drop(self._free.pop())
            slab = Slab(room(num_bytes), device=device, pinned=True)
            self.num_bytes += slab.num_bytes
            return slab, slab.take(slab.num_bytes, torch.uint8), None

    def _drop(self, slot: Slot) -> None:
        slab, _, used = slot
        if used is not None:
            used.synchronize()
        self.num_bytes -= slab.num_bytes
        slab.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Slots:
        return self

    def __reduce__(self) -> Any:
        return the_slots, ()


def _wait_for_copies(returned: deque[tuple[Slot, Mark, Tensor | None]]) -> None:
    for _, copied, x in returned:
        if x is not None and copied is not None:
            copied.synchronize()


_slots: weakref.ref[Slots] | None = None
_finding = threading.Lock()


def the_slots() -> Slots:
    """Return the slots that this process's blocks share, until the last of these blocks is gone."""
    global _slots
    with _finding:
        found = None if _slots is None else _slots()
        if found is None:
            found = Slots()
            _slots = weakref.ref(found)
        return found


class BlockInput:
    """A block's input ``x`` from its forward to the end of its backward, wherever it is; autograd holds it.

    Args:
        before: the input of the block before it, which backward needs next.
    """

    def __init__(self, slots: Slots, x: Tensor, before: BlockInput | None) -> None:
        self._slots, self._device, self._dtype = slots, x.device, x.dtype
        self._streams: Streams = slots.streams[x.device]
        self._here: Tensor | None = x
        self._version = version_of(x)
        self._before = _nothing if before is None else weakref.ref(before)
        self._slot: Slot | None = None
        self._copied: Mark = None  # behind the copy that uses the slot
        self._fetched: Tensor | None = None  # while the copy up may be under way
        self._shape = x.shape
        self._strides = _dense_strides(x)
        self._has_values = x.device.type != "meta" and not isinstance(x, FakeTensor)
        self._has_left = self._is_changed = False
        self._is_copying = False  # a copy may be under way for which the current stream does not wait yet

    @property
    def before(self) -> BlockInput | None:
        """The input of the block before it, unless its backward is over."""
        return self._before()

    def copy_down(self) -> None:
        """Begin to copy it to the host; on a device without streams it has then left."""
        if self._here is None or self._has_left:
            return
        self._has_left = True
        used = None
        if self._has_values:
            self._slot = self._slots.take(self._num_bytes, self._device)
            used = self._slot[2]
        with self._streams.on("to_host", self._streams.mark(), used), torch.no_grad():
            if self._slot is not None:
                self._on_host(self._slot).copy_(self._here, non_blocking=True)
            self._copied, self._is_copying = self._streams.mark(), True
        if self._streams is NO_STREAMS and not is_traced():
            self.leave()

    def leave(self) -> None:
        """Free it on the device if a copy has begun; the current stream waits for that copy."""
        if self._here is not None and self._has_left:
            self._note_changes(self._here)
            self._wait_for_copy()  # [Note: No record_stream] in `zeroshard.comm.streams`
            self._here = None

    def fetch(self) -> None:
        """Begin to copy it up, unless it is there."""
        if self._here is not None or self._fetched is not None:
            return
        # allocated by the stream that will use it and free it; the copy waits for what that stream has queued so far,
        # and so for the copy down, for which `leave` has made that stream wait
        x = torch.empty_strided(self._shape, self._strides, dtype=self._dtype, device=self._device)
        with self._streams.on("copy_in", self._streams.mark()), torch.no_grad():
            if self._slot is not None:
                x.copy_(self._on_host(self._slot), non_blocking=True)
            self._copied, self._is_copying = self._streams.mark(), True
        self._fetched = x

    def value(self) -> Tensor:
        """Return it, on the device, and begin to fetch the input of the block before.

        Raises:
            RuntimeError: it was written to since its block began.
        """
        x = self._here
        if x is not None:
            self._note_changes(x)
        else:
            self.fetch()
            x, self._fetched = self._fetched, None
        assert x is not None
        self._wait_for_copy()  # up, or of the last block but one down: this stream frees it
        if self._is_changed:
            what = "the input of a block was written to, and the block is recomputed from it"
            raise RuntimeError(f"offload_inputs: {what}; compute a new tensor (x = x + y, and not x += y)")
        if self.before is not None:
            self.before.fetch()
        return x

    @property
    def _num_bytes(self) -> int:
        return self._shape.numel() * self._dtype.itemsize

    def _on_host(self, slot: Slot) -> Tensor:
        return slot[1][: self._num_bytes].view(self._dtype).as_strided(self._shape, self._strides)

    def _wait_for_copy(self) -> None:
        if self._is_copying:
            self._streams.wait(self._copied)
            self._is_copying = False

    def _note_changes(self, x: Tensor) -> None:
        """Note whether it was written to; who needs it is told, since this may be in another model's forward."""
        self._is_changed = self._is_changed or version_of(x) != self._version

    def __del__(self) -> None:
        # The collector may call it: on any thread, with any stream current, and in code that has the lock of the slots.
        if self._slot is not None:
            x = self._here if self._fetched is None else self._fetched
            self._slots.returned.append((self._slot, self._copied, x if self._is_copying else None))


def _dense_strides(x: Tensor) -> list[int]:
    """Strides of ``x`` without gaps, its dimensions in the same order in memory."""
    strides, numel = [1] * x.dim(), 1
    for dim in sorted(range(x.dim()), key=lambda dim: (x.stride(dim), -dim)):
        strides[dim], numel = numel, numel * x.shape[dim]
    return strides


def _nothing() -> None:
    return None


class OnHost:
    """A recomputed block's forward, ``run``, whose first argument waits on the host for backward.

    It is outermost, around a compiled forward too: the input is then one of the tensors that the compiled graph saves.
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run, self._slots = run, the_slots()

    @breaks_graphs  # of a compiled model around the block: hooks of saved tensors are no part of a graph
    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Run the block on its input, ``inputs[0]``, and whatever else it takes."""
        if not torch.is_grad_enabled():
            return self.run(*inputs, **named)
        if not inputs or not isinstance(inputs[0], Tensor):
            raise TypeError("offload_inputs: a block was called without a tensor; give its input first, by position")
        of = (inputs[0].shape, storage_id(inputs[0]))  # autograd keeps the hook, which must not keep the input
        with saved_tensors_hooks(partial(self._pack, of), _unpack):
            return self.run(*inputs, **named)

    def _pack(self, of: tuple[torch.Size, int], saved: Tensor) -> Tensor | BlockInput:
        if (saved.shape, storage_id(saved)) != of:
            return saved
        before = getattr(self._slots.newest, "input", _nothing)()
        if before is not None:
            before.copy_down()
            if before.before is not None:
                before.before.leave()
        packed = BlockInput(self._slots, saved, before)
        self._slots.newest.input = weakref.ref(packed)
        return packed


def _unpack(packed: Tensor | BlockInput) -> Tensor:
    return packed.value() if isinstance(packed, BlockInput) else packed


def planned_slot_bytes(num_blocks: int, input_bytes: int) -> int:
    """Bytes of host memory in which inputs of ``input_bytes`` of all blocks but the last one wait."""
    return max(num_blocks - 1, 0) * room(input_bytes)


def slot_bytes() -> int:
    """Bytes of host memory in which inputs of blocks wait now, in this process."""
    found = None if _slots is None else _slots()
    return 0 if found is None else found.num_bytes
