"""`Ways`: which stages, micro-batches and shard sizes were asked for, and the rows that they make of a job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zeroshard.host.errors import UserError
from zeroshard.lab.planner.advice import MICRO_BATCHES, recommended
from zeroshard.lab.planner.plan_rows import Row
from zeroshard.lab.planner.planner import Planner
from zeroshard.zero import LocalSteps, ShardingStrategy


@dataclass(frozen=True)
class Ways:
    """The ways to run that a plan compares.

    Attributes:
        stages: the stages, in the order of the rows; the first alone is planned where stages do not differ.
        micro_batch: rows of a rank in one forward; None: powers of two, as many as fit.
        shard_size: number of ranks that shard together; None: all ranks, and with several nodes also fewer.
        local_steps: how replicas of ``shard_size`` ranks synchronise; None: they reduce gradients at each step.
        files: whether state of a CPU may go to files, of which only a run here knows the room.
        kept: settings that stay as given, so that no lever may change them.
    """

    stages: Sequence[int | ShardingStrategy]
    micro_batch: int | None = None
    shard_size: int | None = None
    local_steps: LocalSteps | None = None
    kept: frozenset[tuple[str, ...]] = frozenset()
    files: bool = False

    def rows(self, planner: Planner, *, only_fitting: bool = False) -> Iterator[Row]:
        """Plan them: sharding over all ranks first, stage by stage, until a micro-batch does not fit.

        Then the largest micro-batch that fits with each smaller shard size, or the smallest one if none does.
        ``only_fitting``: leave out rows that do not fit, most of which need not be planned to know it.

        Raises:
            UserError: the given micro-batch is below 1, or does not divide a rank's rows of the global batch.
        """
        candidates = self.micro_batches(planner)
        largest: dict[int | ShardingStrategy, int] = {}

        def row(stage: int | ShardingStrategy, micro_batch: int, shard_size: int | None) -> Row | None:
            if only_fitting and not planner.fits(stage, micro_batch, shard_size, self.local_steps):
                return None
            return planner.row(stage, micro_batch, shard_size, self.local_steps)

        for stage in self._shown(planner):
            for candidate in candidates:
                found = row(stage, candidate, self.shard_size)
                if found is not None:
                    yield found
                if found is None or not found.fits:
                    break
                largest[stage] = candidate
        for size in planner.smaller_groups() if self.shard_size is None else ():
            for stage in self._shown(planner):
                fitting = [each for each in candidates if each <= largest.get(stage, candidates[0])]
                for candidate in reversed(fitting if stage != 0 else ()):
                    found = row(stage, candidate, size)
                    if found is not None and (found.fits or candidate == fitting[0]):
                        yield found
                        break

    def state_fits(self, planner: Planner) -> bool:
        """Whether weights and states that stay on the device fit alone, in any of `rows`."""
        smallest = self.micro_batches(planner)[0]
        every = self._every(planner)
        return any(planner.leaves_room(planner.held_bytes(stage, smallest, size)) for stage, size in every)

    def fit(self, planner: Planner) -> bool:
        """Whether any of `rows` fits, without their times.

        Raises:
            UserError: as `rows`.
        """
        smallest = self.micro_batches(planner)[0]
        return any(planner.fits(stage, smallest, size, self.local_steps) for stage, size in self._every(planner))

    def best(self, planner: Planner) -> Row:
        """The recommended one of `rows`; if none fits, that which needs least.

        Raises:
            UserError: as `rows`.
        """
        if self.fit(planner):
            found = recommended(self.rows(planner, only_fitting=True))
            assert found is not None
            return found
        smallest, least = self.micro_batches(planner)[0], None
        for stage, size in self._every(planner):  # a way that certainly needs more than another one is not planned
            if least is None or planner.least_bytes(stage, smallest, size) <= least.needed_bytes:
                row = planner.row(stage, smallest, size, self.local_steps)
                least = row if least is None or row.needed_bytes <= least.needed_bytes else least
        assert least is not None
        return least

    def _every(self, planner: Planner) -> list[tuple[int | ShardingStrategy, int | None]]:
        """Each stage with each shard size, those first that need least."""
        found = [(stage, self.shard_size) for stage in self._shown(planner)]
        if self.shard_size is None:
            found += [
                (stage, size) for size in planner.smaller_groups() for stage in self._shown(planner) if stage != 0
            ]
        return found[::-1]

    def _shown(self, planner: Planner) -> Sequence[int | ShardingStrategy]:
        return self.stages if planner.stages_differ else self.stages[:1]

    def micro_batches(self, planner: Planner) -> list[int]:
        """The micro-batch sizes to plan.

        Raises:
            UserError: the given size is below 1, or does not divide a rank's rows of the global batch.
        """
        given = self.micro_batch
        if given is None:
            return [size for size in MICRO_BATCHES if planner.num_micro(size)]
        if given < 1:
            raise UserError("micro_batch", f"{given} is below 1", "give 1 or more sequences")
        if not planner.num_micro(given):
            _, groups = planner.workload.groups(planner.cluster.world_size)
            what = f"{planner.asked.global_batch} is no multiple of {given} (micro_batch) x {groups}"
            raise UserError("global_batch", what, "change one of the three")
        return [given]
