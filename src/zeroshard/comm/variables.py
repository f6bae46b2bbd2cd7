"""The environment variables that configure the network between ranks, and what each does: for `zeroshard doctor`.

Sources: NCCL's user guide, https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html, and torch's pages
"ProcessGroupNCCL Environment Variables" and "Distributed communication package".
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        "GLOO_SOCKET_IFNAME": "Network interface of gloo and of our ring, for CPU tensors and control messages. Set it "
        "if a machine has several networks or its name resolves to 127.0.0.1; --rdzv-endpoint sets it to the interface "
        "that reaches that address.",
        "NCCL_SOCKET_IFNAME": "Network interfaces for NCCL's rendezvous, and for data if there is nothing faster: a "
        "prefix (eth), =eth0 exactly, ^docker0 all but that.",
        "NCCL_IB_DISABLE": "1: TCP in place of InfiniBand or RoCE, to find out whether these fail.",
        "NCCL_IB_HCA": "Which InfiniBand adapters, as mlx5_0,mlx5_1; the others stay unused.",
        "NCCL_IB_GID_INDEX": "RoCE: which address of an adapter; 3 is RoCE v2 on many clusters.",
        "NCCL_NET_GDR_LEVEL": "How far from a GPU an adapter may read its memory directly: LOC, PIX, PXB, PHB, SYS.",
        "NCCL_P2P_DISABLE": "1: GPUs of a machine do not copy to each other directly; slow, but works around bad "
        "virtualisation (PCIe access control).",
        "NCCL_SHM_DISABLE": "1: no shared memory between GPUs of a machine. Containers give 64 MiB of /dev/shm unless "
        "told otherwise: give more rather than set this.",
        "NCCL_ALGO": "Forces Ring, Tree, ...: other orders of summation, so other last bits.",
        "NCCL_DEBUG": "WARN or INFO: what NCCL found and chose; INFO first where machines do not meet.",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0: a collective that failed does not end its process. Leave it out.",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "Collectives that torch remembers (2000, say), written out when one times out.",
        "MASTER_ADDR": "Where ranks meet, with MASTER_PORT; launchers set both, and RANK, LOCAL_RANK, WORLD_SIZE.",
        "CUDA_VISIBLE_DEVICES": "GPUs that this process may use, by number; the rest are not there for it.",
        "OMP_NUM_THREADS": "CPU threads of a rank. Our launcher shares the cores out; torchrun sets 1.",
        "TORCH_CPP_LOG_LEVEL": "What torch says of its connections; the command sets ERROR, INFO tells all.",
    }
)
