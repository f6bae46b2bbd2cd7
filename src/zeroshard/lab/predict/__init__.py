"""A step as data: what it allocates, computes and sends, and how long that takes."""
