"""Settings of a run: typed, checked, written back."""
