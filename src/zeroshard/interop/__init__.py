"""Import of other programs' settings and weights, and export of ours in their formats."""
