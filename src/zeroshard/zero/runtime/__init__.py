"""The engine while it runs: what it hears of forward and backward, and the order in which it communicates."""
