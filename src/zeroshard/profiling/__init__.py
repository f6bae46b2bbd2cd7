"""What the hardware could do, and what a run made of it."""
