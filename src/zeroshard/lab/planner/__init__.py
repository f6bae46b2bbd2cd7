"""`plan`: what a step will hold, send and take at each stage, and which stage to choose."""
