"""What a run keeps and goes on from."""
