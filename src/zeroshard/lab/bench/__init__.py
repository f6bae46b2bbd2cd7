"""`zeroshard bench`: memory, steps, collectives, kernels and the device itself, measured on this machine.

Each prints a table, writes JSON with its environment and the spread of what it saw, and draws a figure. What is compared
is interleaved: a round visits all contestants in a shuffled order, so that a machine whose speed drifts is equally
unkind to all.
"""
