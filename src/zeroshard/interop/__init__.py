"""Settings and weights of other programs as ours, and ours as theirs."""
