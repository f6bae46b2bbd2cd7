"""ZeRO: the engine without what is attached to it, in files that a reader can read in one sitting."""
