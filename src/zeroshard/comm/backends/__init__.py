"""Communicators without a transport of ours: over torch.distributed, of one rank, without peers, between threads."""
