"""Collectives over TCP connections between neighbours."""
