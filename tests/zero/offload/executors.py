"""Executors that run updates as late as anybody can, or as soon: the bits must not depend on it."""

from __future__ import annotations

from zeroshard.zero.offload.executor import Executor


class Late(Executor):
    """Runs an update when somebody waits for it, and no sooner: what does not wait sees the state before the step."""

    def _begin(self, jobs):
        self.left = list(jobs)

    def wait(self, update):
        while update.pending:
            self._run(*self.left.pop(0))


class AtOnce(Executor):
    """Runs all updates before ``step()`` returns."""

    def _begin(self, jobs):
        self._walk(jobs)


EXECUTORS = {"late": Late, "at once": AtOnce, "thread": Executor}
