"""State of the engine off the device: in memory of the host, or in a file."""
