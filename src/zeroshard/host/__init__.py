"""The process and the operating system below it: memory of the host, files, finalizers, the garbage collector."""
