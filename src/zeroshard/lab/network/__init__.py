"""Slow networks on this machine, made with the kernel's network namespaces and traffic shaping."""
