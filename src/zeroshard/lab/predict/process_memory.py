"""What a process on a GPU holds beside the tensors that the engine and the model allocate.

    context     the CUDA context and its libraries, outside of torch's allocator. An A100 of 39.5 GiB: 14.25 GiB in use,
                of which torch had allocated 12.87 and reserved 0.89 (TianheWu/CoSeR, issue 10).
    nccl        buffers of a communicator, outside of the allocator as well. 4 A100 with NVLink: 544 MB for a group of
                two, 688 MB for more, alike for each further group (NVIDIA/nccl, issue 964); 8 H100: 1.06 GB with the
                context, PyTorch's own left out (NVIDIA/nccl, issue 1685).
    workspace   of cuBLAS, in the allocator: 32 MiB on Hopper and later, 8 MiB before (PyTorch's default).
    logits      what the loss keeps of all logits beyond what the model's trace has, by how it is computed.
    compiled    code that a compiler has fused keeps more of a block than kernels that were written for it. But it does
                not keep what a block's last product gave, as selective recomputation does, because backward does not
                read it (saved tensors of a block of ours, counted through torch.compile).
    freed       pieces of gradients that were freed after the update. A shard is smaller than most activations, so none
                of these lies there; whole gradients leave room that is used again.
    fragments   what the allocator has reserved and nothing lies in, a share of what comes and goes.

The allocator's peak (`torch.cuda.max_memory_allocated`) has workspace, logits and compiled; what it has reserved
(`max_memory_reserved`) freed and fragments as well; the card (`nvidia-smi`) has context and NCCL on top. The figures
are fitted to the calibration set of ``benchmarks/published/`` or were measured by those who are named;
docs/plan-accuracy.md has how far they are from other runs. Nothing of it enters the engine's own exact account.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zeroshard.lab.predict.actions import Step
from zeroshard.lab.predict.rates import Software
from zeroshard.profiling.devices import Device

CONTEXT_BYTES = 2**29
NCCL_PAIR_BYTES, NCCL_BYTES = 544 * 10**6, 688 * 10**6
WORKSPACE_BYTES = dict.fromkeys(("h100", "h200", "b200", "b300", "gb200", "gb300"), 2**25)
USUAL_WORKSPACE_BYTES = 2**23
# Reserved over allocated bytes, less states: nanotron's logs of LLaMA-1B on 8 H100 (huggingface.co/nanotron/old_bench:
# dp-2 tp-4 and dp-4 tp-2 with micro-batches of 8, dp-2 tp-2 pp-2 with 1): 1.06, 1.02, 1.13.
FRAGMENTS = 0.06
# Predicted / published peaks of the validation set of ``benchmarks/published/``: four of five runs lie between.
SPREAD = (0.97, 1.10)
STATES = ("params", "master", "grads", "optimizer")
# Bytes of a logit where a loss is compiled apart from the model: PyTorch 2.5 to 2.7, lightning-thunder's runs of
# LitGPT with full recomputation in ``benchmarks/published/thunder.toml``: 7.2, 8.6, 8.7.
COMPILED_LOGIT_BYTES = 8
# A plain loss: in backward the logarithm of softmax in fp32, its gradient, and the gradient of the fp32 logits. The
# 16-bit logits were freed by then, and are too small a piece for any of these.
PLAIN_LOGIT_BYTES, PLAIN_LOGIT_HOLE_BYTES = 12, 2
KEPT_BY_COMPILED = 0.08  # of activations; the same runs without recomputation


@dataclass(frozen=True)
class ProcessMemory:
    """Bytes, by what they are for; the module's docstring says what each is.

    Attributes:
        context, nccl: outside of torch's allocator.
        workspace, logits, compiled: allocated; the last may be negative.
        freed, fragments: reserved, and nothing lies in them.
    """

    context: int = 0
    nccl: int = 0
    workspace: int = 0
    logits: int = 0
    compiled: int = 0
    freed: int = 0
    fragments: int = 0

    @property
    def total(self) -> int:
        """Bytes beside the engine's account."""
        return self.context + self.nccl + self.reserved

    @property
    def allocated(self) -> int:
        """Of them, what ``torch.cuda.max_memory_allocated`` would show."""
        return self.workspace + self.logits + self.compiled

    @property
    def reserved(self) -> int:
        """Of them, what ``torch.cuda.max_memory_reserved`` would show."""
        return self.allocated + self.freed + self.fragments

    def as_dict(self) -> dict[str, int]:
        """By the names that a plan's JSON has; NCCL's are a row's ``comm_buffers``."""
        return {
            "cuda_context": self.context,
            "cublas_workspace": self.workspace,
            "logits": self.logits,
            "compiled_code": self.compiled,
            "freed_gradients": self.freed,
            "fragments": self.fragments,
        }


@dataclass(frozen=True)
class Process:
    """What a process trains, as far as its memory goes.

    Attributes:
        num_logits: tokens of a micro-batch times the vocabulary; 0 for a model that is no language model.
        group_sizes: ranks of each group that it communicates in.
        own_loss: whether the trace has our own loss, which keeps a chunk of the logits, and not all of them.
        shards_grads: whether gradients are shards between a backward and the update.
        recomputes: whether blocks recompute activations.
        unread_bytes: of activations that are kept and that backward does not read.
    """

    num_logits: int = 0
    group_sizes: tuple[int, ...] = ()
    own_loss: bool = False
    shards_grads: bool = False
    recomputes: bool = False
    unread_bytes: int = 0


SOURCES: Mapping[str, str] = {
    "cuda_context": "measured by a user of an A100",
    "cublas_workspace": "PyTorch's default",
    "logits": "by how the loss is computed: runs of LitGPT on H100, compiled; PyTorch's operations, plain",
    "compiled_code": "fitted to runs of LitGPT on H100",
    "freed_gradients": "the gradients' shards, which activations do not fit into",
    "fragments": f"{FRAGMENTS:.0%} of what comes and goes: reserved over allocated in nanotron's logs",
    "comm_buffers": "measured by a user of four A100",
}


def process_memory(step: Step, device: Device, software: Software, what: Process) -> ProcessMemory:
    """Of a process that does ``step``, by ``software`` on ``device``; nothing on a CPU."""
    if device.device_type != "cuda":
        return ProcessMemory()
    kept_bytes, hole_bytes = _logit_bytes(software, own_loss=what.own_loss)
    fullest, logits, freed = step.peak, 0, 0
    if step.at_loss is not None:
        there = step.at_loss.total + kept_bytes * what.num_logits
        if there >= fullest.total:
            fullest, logits, freed = step.at_loss, there - fullest.total, hole_bytes * what.num_logits
    if what.shards_grads:
        freed += max(step.before_update.get("grads", 0) - fullest.by_category.get("grads", 0), 0)
    compiled = 0
    if software.impl == "compile":
        more = 0.0 if what.recomputes else KEPT_BY_COMPILED
        compiled = round(more * fullest.by_category.get("activations", 0)) - what.unread_bytes
    coming = step.peak.total + logits + compiled - sum(fullest.by_category.get(name, 0) for name in STATES)
    return ProcessMemory(
        context=CONTEXT_BYTES,
        nccl=sum(NCCL_PAIR_BYTES if size == 2 else NCCL_BYTES for size in what.group_sizes if size > 1),
        workspace=WORKSPACE_BYTES.get(device.sustained, USUAL_WORKSPACE_BYTES),
        logits=logits,
        compiled=compiled,
        freed=freed,
        fragments=round(FRAGMENTS * coming),
    )


def _logit_bytes(software: Software, *, own_loss: bool) -> tuple[int, int]:
    """Bytes of a logit that the loss has allocated beside the trace, and those that it leaves unused."""
    loss = software.loss or ("compiled" if software.impl == "compile" else "chunked" if own_loss else "plain")
    if loss == "plain":
        return (PLAIN_LOGIT_BYTES if own_loss else 0), PLAIN_LOGIT_HOLE_BYTES
    return (COMPILED_LOGIT_BYTES if loss == "compiled" and own_loss else 0), 0
