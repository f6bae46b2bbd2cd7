"""Predicts the memory of a process besides the tensors that the engine and the model allocate; most of it is a GPU's.

    context     the CUDA context and its libraries, outside of torch's allocator. On an A100 of 39.5 GiB 14.25 GiB were
                in use, of which torch had allocated 12.87 and reserved 0.89 more (TianheWu/CoSeR, issue 10).
    comm_buffers  of a communicator, also outside of the allocator. NCCL on 4 A100 with NVLink: 544 MB for a group of
                two, 688 MB for a larger one, and the same again for each further group (NVIDIA/nccl, issue 964); 8
                H100: 1.06 GB with the context, PyTorch's own left out (NVIDIA/nccl, issue 1685). Our own, on a CPU:
                exactly (`comm_buffer_bytes`).
    workspace   cuBLAS's workspace, in the allocator: 32 MiB on Hopper and later, 8 MiB before (PyTorch's default).
    logits      logits that the loss keeps beyond those in the model's trace; depends on how the loss is computed.
    compiled    torch.compile does not keep the output of a block's last product, which selective recomputation keeps,
                because backward does not read it (counted in the saved tensors of one of our blocks through
                torch.compile). What else it keeps is in the model's trace: `zeroshard.lab.predict.fusion`.
    freed       sharded gradients that were freed after the update. Most activations are larger than a shard and do not
                fit into the gap that it leaves; the gap of unsharded gradients is used again.
    fragments   memory that the allocator has reserved and that no tensor uses: a share of the memory that is allocated
                and freed during a step.

`torch.cuda.max_memory_allocated` includes workspace, logits and compiled; `max_memory_reserved` also freed and
fragments; `nvidia-smi` also context and NCCL. The figures are fitted to the calibration set of
``benchmarks/claims/published/``, or come from the named reports; docs/plan-accuracy.md compares them with other runs.
None of them enters the exact count of the engine's own memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from zeroshard.comm.ring.ring import chunk_bytes
from zeroshard.comm.ring.small import is_small
from zeroshard.comm.shm.slots import NUM_SLOTS, SLOT_BYTES
from zeroshard.lab.predict.actions import Issue, Step
from zeroshard.lab.predict.rates import Software
from zeroshard.train.profiling.devices import Device

CONTEXT_BYTES = 2**29
NCCL_PAIR_BYTES, NCCL_BYTES = 544 * 10**6, 688 * 10**6
WORKSPACE_BYTES = dict.fromkeys(("h100", "h200", "b200", "b300", "gb200", "gb300"), 2**25)
USUAL_WORKSPACE_BYTES = 2**23
# From the ratio of reserved to allocated bytes, both without training state, in nanotron's logs of LLaMA-1B on 8 H100
# (huggingface.co/nanotron/old_bench: dp-2 tp-4 and dp-4 tp-2 with micro-batches of 8, dp-2 tp-2 pp-2 with 1): 1.06,
# 1.02, 1.13.
FRAGMENTS = 0.06
# Ratio of predicted to published peaks on the validation set of ``benchmarks/claims/published/``: four of five runs lie
# in this range.
SPREAD = (0.97, 1.10)
STATES = ("params", "master", "grads", "optimizer")
# Bytes per logit if the loss is compiled separately from the model: PyTorch 2.5 to 2.7, lightning-thunder's runs of
# LitGPT with full recomputation in ``benchmarks/claims/published/thunder.toml``: 7.2, 8.6, 8.7.
COMPILED_LOGIT_BYTES = 8
# Bytes per logit of a plain loss: in backward the log-softmax in fp32, its gradient, and the gradient of the fp32
# logits. The 16-bit logits are freed by then, and the gap that they leave is too small for any of these.
PLAIN_LOGIT_BYTES, PLAIN_LOGIT_HOLE_BYTES = 12, 2


@dataclass(frozen=True)
class ProcessMemory:
    """Bytes by purpose; the module's docstring explains each."""

    # context, comm_buffers: bytes outside of torch's allocator
    context: int = 0
    comm_buffers: int = 0
    # workspace, logits, compiled: allocated bytes; the last may be negative
    workspace: int = 0
    logits: int = 0
    compiled: int = 0
    # freed, fragments: bytes that are reserved but unused
    freed: int = 0
    fragments: int = 0

    @property
    def total(self) -> int:
        """All bytes that come on top of the engine's and the model's tensors."""
        return self.context + self.comm_buffers + self.reserved

    @property
    def allocated(self) -> int:
        """Bytes of these that ``torch.cuda.max_memory_allocated`` would include."""
        return self.workspace + self.logits + self.compiled

    @property
    def reserved(self) -> int:
        """Bytes of these that ``torch.cuda.max_memory_reserved`` would include."""
        return self.allocated + self.freed + self.fragments

    def as_dict(self) -> dict[str, int]:
        """The bytes under their names in a plan's JSON."""
        return {
            "comm_buffers": self.comm_buffers,
            "cuda_context": self.context,
            "cublas_workspace": self.workspace,
            "logits": self.logits,
            "compiled_code": self.compiled,
            "freed_gradients": self.freed,
            "fragments": self.fragments,
        }


@dataclass(frozen=True)
class Process:
    """The facts about a training process that its memory depends on."""

    num_logits: int = 0  # tokens of a micro-batch times the vocabulary; 0 for a model that is no language model
    group_sizes: tuple[int, ...] = ()  # number of ranks of each group that the process communicates in
    world_size: int = 1  # number of all ranks
    own_loss: bool = False  # whether the trace has our own loss, which keeps only a chunk of the logits at a time
    shards_grads: bool = False  # whether gradients are sharded between a backward and the update
    unread_bytes: int = 0  # bytes of activations that are kept although backward does not read them
    backend: str = ""  # of the ranks of a CPU, as `zeroshard.comm.registry` names it; empty: not known


SOURCES: Mapping[str, str] = {
    "cuda_context": "measured by a user of an A100",
    "cublas_workspace": "PyTorch's default",
    "logits": "by how the loss is computed: runs of LitGPT on H100, compiled; PyTorch's operations, plain",
    "compiled_code": "what selective recomputation keeps and the compiler does not",
    "freed_gradients": "the gradients' shards, which activations do not fit into",
    "fragments": f"{FRAGMENTS:.0%} of what comes and goes: reserved over allocated in nanotron's logs",
    "comm_buffers": "NCCL: measured by a user of four A100; ours: by their sizes",
}


def process_memory(step: Step, device: Device, software: Software, what: Process) -> ProcessMemory:
    """The memory of a process that runs ``step`` with ``software`` on ``device``; of a CPU, communicators' alone."""
    if device.device_type != "cuda":
        groups = what.world_size, what.group_sizes
        return ProcessMemory(comm_buffers=comm_buffer_bytes(what.backend, *groups, step) or 0)
    kept_bytes, hole_bytes = _logit_bytes(software, own_loss=what.own_loss)
    fullest, logits, freed = step.peak, 0, 0
    if step.at_loss is not None:
        there = step.at_loss.total + kept_bytes * what.num_logits
        if there >= fullest.total:
            fullest, logits, freed = step.at_loss, there - fullest.total, hole_bytes * what.num_logits
    if what.shards_grads:
        freed += max(step.before_update.get("grads", 0) - fullest.by_category.get("grads", 0), 0)
    compiled = -what.unread_bytes if software.impl == "compile" else 0
    coming = step.peak.total + logits + compiled - sum(fullest.by_category.get(name, 0) for name in STATES)
    return ProcessMemory(
        context=CONTEXT_BYTES,
        comm_buffers=sum(NCCL_PAIR_BYTES if size == 2 else NCCL_BYTES for size in what.group_sizes if size > 1),
        workspace=WORKSPACE_BYTES.get(device.sustained, USUAL_WORKSPACE_BYTES),
        logits=logits,
        compiled=compiled,
        freed=freed,
        fragments=round(FRAGMENTS * coming),
    )


def comm_buffer_bytes(backend: str, world_size: int, group_sizes: Iterable[int], step: Step) -> int | None:
    """Bytes of the buffers that a rank's communicators have of their own, once ``step`` was taken.

    Args:
        backend: ``shm``, ``ring``, or another one, of which they are not known: None.
        world_size: number of all ranks, which have a communicator in any case.
        group_sizes: number of ranks of each group that the process communicates in.
        step: its collectives.
    """
    if world_size == 1:
        return 0
    sizes = [size for size in group_sizes if size > 1]
    if backend == "shm":
        return (len(sizes) + (world_size not in sizes)) * NUM_SLOTS * SLOT_BYTES
    if backend != "ring":
        return None
    largest: dict[tuple[str, int], int] = {}  # a ring receives what it adds up in two chunks, and all else in place
    for issue in (each for actions, _ in step.parts for each in actions if isinstance(each, Issue)):
        sent, key = issue.message, (issue.group, issue.message.world_size)
        adds = sent.world_size > 1 and sent.op in ("all_reduce", "reduce_scatter")
        if adds and not is_small(sent.num_bytes, sent.world_size):
            largest[key] = max(largest.get(key, 0), sent.num_bytes)
    return sum(2 * chunk_bytes(num_bytes, size) for (_, size), num_bytes in largest.items())


def _logit_bytes(software: Software, *, own_loss: bool) -> tuple[int, int]:
    """Bytes per logit that the loss allocates beyond the trace, and those of a gap that stays unused."""
    in_trace = own_loss or software.impl == "compile"  # by chunks, or compiled with the model
    loss = software.loss or ("chunked" if in_trace else "plain")
    if loss == "plain":
        return (PLAIN_LOGIT_BYTES if own_loss else 0), PLAIN_LOGIT_HOLE_BYTES
    return (COMPILED_LOGIT_BYTES if loss == "compiled" and own_loss else 0), 0
