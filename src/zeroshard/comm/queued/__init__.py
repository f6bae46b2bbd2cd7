"""What our own collectives have in common: messages, pieces, and a thread that runs operations in order."""
