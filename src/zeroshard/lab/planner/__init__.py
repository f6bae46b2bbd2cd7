"""`plan`: predicts a step's memory, traffic and time at each stage, and recommends a stage."""
