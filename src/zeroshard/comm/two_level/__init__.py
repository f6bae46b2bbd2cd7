"""Shared memory inside a host and a ring across hosts."""
