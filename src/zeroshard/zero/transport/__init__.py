"""Ways of weights and gradients beside the plain ones: wire formats, second copies in nodes, exact sums."""
