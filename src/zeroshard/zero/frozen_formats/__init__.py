"""Frozen weights as codes of few bits between their uses: an argument of `zeroshard.Zero` that attaches itself."""
