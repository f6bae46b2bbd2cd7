"""Networks of this machine, slowed by its kernel."""
