"""What a user sets, below all that acts on it: rules of what goes with what, sizes, formats on the wire."""
