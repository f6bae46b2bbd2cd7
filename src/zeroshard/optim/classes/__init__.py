"""What is known of an optimizer class without an engine: how far gradients reach in it, what it keeps, its settings."""
