"""Communicators that need no code of ours between ranks: torch.distributed, one rank, no peers, threads."""
