"""What all else stands on: the process and the system below it, torch's internals, lines of text, starting ranks."""
