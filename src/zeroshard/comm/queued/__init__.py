"""The base of our own collectives: messages, flat views of tensors, and a thread that runs operations in order."""
