"""The engine at run time: hooks on forward and backward, and the order in which ranks issue their collectives."""
