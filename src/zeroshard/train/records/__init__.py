"""What a run says of itself: events, trackers, its plan beside what was measured."""
