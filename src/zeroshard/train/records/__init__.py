"""Records of a run: events, console output, log files, trackers, and its plan compared with what was measured."""
