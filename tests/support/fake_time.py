"""A clock for tests: time stands still in them unless somebody sleeps, so that what they measure is exact."""


class Clock:
    """Stands for the module `time`: it moves when somebody sleeps, or when a test moves ``now``."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        return self.now - 900.0  # another clock than the one that ranks share

    def monotonic_ns(self) -> int:
        return round(self.now * 1e9)

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 1e-6)
