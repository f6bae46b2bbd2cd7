"""How far a gradient reaches in an optimizer's step, found by experiment, if nobody has declared it."""
