"""`zeroshard bench`: training steps, and the device itself, measured on this machine.

Each bench prints a table; on request it writes JSON, with the environment and the spread of the measurements.
Contestants are measured interleaved: each round visits all of them in a shuffled order, so that a machine whose speed
drifts affects all of them alike.
"""
