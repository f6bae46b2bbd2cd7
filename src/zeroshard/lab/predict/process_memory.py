"""What a process on a GPU holds beside the tensors that the engine and the model allocate.

    context     the CUDA context and its libraries, outside of torch's allocator. An A100 of 39.5 GiB: 14.25 GiB in use,
                of which torch had allocated 12.87 and reserved 0.89 (TianheWu/CoSeR, issue 10).
    fragments   what the allocator has reserved and nothing lies in: a share of what comes and goes. Fitted to one run
                of the calibration set: 99 GiB reserved, Llama 3.1 8B on 8 H200 (benchmarks/published/bekman.toml).
    logits      compiled code without a fused loss keeps all logits, and their gradient, in 16 bits and once in fp32,
                while our own kernels keep a chunk of them.

What NCCL holds is `zeroshard.lab.planner.planner.NCCL_BYTES`. Nothing of it enters the engine's own exact account.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroshard.lab.predict.actions import Moment
from zeroshard.lab.predict.rates import Impl

CONTEXT_BYTES = 2**29
FRAGMENTS = 0.08
COMING_AND_GOING = ("activations", "temporaries", "unit_buffers", "prefetch")
LOGIT_BYTES = 8


@dataclass(frozen=True)
class ProcessMemory:
    """Bytes, by what they are for."""

    context: int = 0
    fragments: int = 0
    logits: int = 0

    @property
    def total(self) -> int:
        """Bytes."""
        return self.context + self.fragments + self.logits

    def as_dict(self) -> dict[str, int]:
        """By the names that a plan's JSON has."""
        return {"cuda_context": self.context, "fragments": self.fragments, "logits": self.logits}

    @property
    def in_allocator(self) -> int:
        """Of them, what torch's own counters would show."""
        return self.fragments + self.logits


def process_memory(peak: Moment, num_logits: int, impl: Impl) -> ProcessMemory:
    """Of a process on a GPU.

    Args:
        peak: the fullest moment of a step.
        num_logits: tokens of a micro-batch times the vocabulary; 0 for a model that is no language model.
        impl: who computes.
    """
    coming = sum(peak.by_category[name] for name in COMING_AND_GOING)
    logits = 0
    if impl == "compile":  # they are gone before units are reduced, so the two peaks do not add up
        others = sum(peak.by_category[name] for name in ("temporaries", "unit_buffers", "prefetch"))
        logits = max(LOGIT_BYTES * num_logits - others, 0)
    return ProcessMemory(CONTEXT_BYTES, round(FRAGMENTS * coming), logits)
