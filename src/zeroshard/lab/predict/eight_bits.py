"""What an update with 8-bit states costs: the operations of `zeroshard.kernels.adamw8bit` on a chunk, traced.

The update runs operation by operation on chunks (`zeroshard.kernels.adamw8bit.chunk_numel`). So it moves many times the
bytes of its states, and about 50 launches are made for each chunk.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from zeroshard.kernels.adamw import AdamWOptions
from zeroshard.kernels.adamw8bit import CHUNK, Codes, adamw8bit
from zeroshard.lab.predict.recorder import StorageEvents
from zeroshard.lab.predict.work import Work, work_of


@lru_cache
def passes_of_chunk(dtype: torch.dtype, block: int) -> tuple[int, float]:
    """The operations on a chunk of a piece of ``dtype``, and the bytes that they read and write for each element."""
    found: list[Work] = []

    def ran(*operation: Any) -> None:
        work = work_of(*operation)
        if work is not None:
            found.append(work)

    with torch.device("meta"):
        piece, grad = torch.empty(2, CHUNK, dtype=dtype)
        codes, scales = torch.empty(CHUNK, dtype=torch.int8), torch.empty(CHUNK // block)
        states = Codes(codes, scales, codes.clone(), scales.clone())
    with StorageEvents(lambda storage, change: None, ran):
        adamw8bit(piece, grad, states, 1, AdamWOptions(1e-3, 0.9, 0.999, 1e-8, 0.1), block)
    return len(found), sum(work.num_bytes for work in found) / CHUNK
