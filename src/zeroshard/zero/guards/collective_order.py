"""How ranks detect that they did not issue the same collectives in the same order.

[Note: Diverged]
    A schedule cannot foresee that one rank calls a unit more often than the others do: that rank would gather alone.
    A backend may pair its gather with another rank's next one of the same size; then nothing fails, and the weights are
    wrong. So each rank keeps a digest of the gathers that it has issued. It is sent with the all-reduce at the end of
    each backward, which tells which parameters had gradients. If the digests of ranks that gather together differ,
    all of them raise, before any step. Steps are in the digest too: if one rank runs more backwards than the others
    before its step, their reductions are paired nevertheless, and at stage 0 the ranks' weights would differ. So are
    the optimizers' classes and settings, as they are at each step and at the end of each backward: no collective would
    fail if ranks stepped with different learning rates, or if one rank alone clipped its gradients at stage 0. What one
    rank alone writes into weights, or each rank with random numbers of its own, no collective would notice either:
    weights that any rank has written to are compared. If it did so between a backward and the step, their digest is in
    the next message, as the step has changed them by then. So is that of some elements of unsharded gradients that a
    user has changed in place (where they are on a GPU, that they were changed).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from zeroshard.comm import PeerError
from zeroshard.comm.agree import agreement, both_ends, digest_of, first_other, is_one, maxima, require_same, send_bytes
from zeroshard.comm.every_rank import call_of_every_rank
from zeroshard.comm.operation_log import OperationLog, first_difference
from zeroshard.host.torch_internals import as_plain
from zeroshard.zero.buffers.changed_values import bit_sums
from zeroshard.zero.buffers.flat_params import FlatParams
from zeroshard.zero.buffers.unit import FlatGroup
from zeroshard.zero.core.ranks import RankGroups
from zeroshard.zero.runtime.calls import Calls

_STEPS = (
    "backward: ranks ran a different number of backwards before a step of the optimizer, so their weights may differ; "
    "run equally many on every rank, and step on all of them or on none"
)
_STEP, _NOTHING = "a step of an optimizer", "nothing more"
REMEMBERED = 4096  # gathers and steps that are kept, to name the first one that differs


class CollectiveOrder(Calls):
    """Records the gathers and steps of this rank, and compares them with those of others at the end of a backward.

    Args:
        rank_groups: the communicators of all ranks (`world`) and of those that gather together (`shard_group`).
        settings: describes the engine's optimizers, which ranks must have in common.
    """

    def __init__(self, rank_groups: RankGroups, settings: Callable[[], list[str]] = list) -> None:
        super().__init__(rank_groups)
        self.gathers = []
        self._log = OperationLog(REMEMBERED)
        self._settings = settings
        self._settings_digest = b""
        self._now: list[str] = []  # the last settings that were noted
        self._at_step: list[str] | None = None  # those of the last step since ranks agreed

    def take_gathers(self) -> None:
        """Record the gathers that this rank has issued since: once a forward and a backward, as there may be many."""
        assert self.gathers is not None
        for unit in self.gathers:
            self._log.add(unit.name)
        self.gathers.clear()

    def note_step(self) -> None:
        """Record that this rank has stepped an optimizer, and with which settings."""
        if self.comm.world_size > 1:
            self.take_gathers()
            self._log.add(_STEP)
            self._note_settings()
            self._at_step = self._now

    def note_call(self, what: str) -> None:
        """Record that this rank has made a call that every rank must make with the same arguments."""
        if self.comm.world_size > 1:
            call_of_every_rank(self.comm, what)
            self.calls.append(what)
            self._settings_digest = digest_of(self._settings_digest + what.encode())

    def note_writes(self, groups: Iterable[FlatGroup]) -> None:
        """Record what this rank has written to the groups' unsharded weights."""
        for group in groups:
            self.note_call(f"a write to {_values_of(group.params)}")

    def note_grad_writes(self, groups: Iterable[FlatGroup]) -> None:
        """Record a few elements of the groups' gradients, into which this rank has written: a whole pass costs time."""
        for group in groups:
            group.grads.has_writes, reduced = False, group.grads.reduced
            # elsewhere the host would wait for the device
            on_host = reduced is not None and reduced.device.type == "cpu" and not isinstance(reduced, FakeTensor)
            values = f", with the digest {digest_of(group.params.changes.sample(reduced)).hex()}" if on_host else ""
            self.note_call(f"a change in place of gradients of {group.params.name}{values}")

    def _note_settings(self) -> None:
        self._now = self._settings()
        self._settings_digest = digest_of(self._settings_digest + "\n".join(self._now).encode())

    def votes(self) -> list[int]:
        """A digest of gathers, steps, calls and settings, of which ranks take the maxima."""
        if self.comm.world_size == 1:
            return []
        self._note_settings()
        self.take_gathers()
        gathers = self._log.digest if self._gathering is self.comm else b""  # replicas may issue different gathers
        return both_ends(digest_of(gathers + self._settings_digest))

    def agreed(self, votes: list[int]) -> None:
        """Check that ranks issued the same gathers, by their `votes`. Collective.

        Raises:
            RuntimeError: ranks that gather together have issued different gathers, or stepped at different backwards;
                on each of them. [Note: Diverged]
            PeerError: ranks have made different calls since the last backward, or written other values to weights.
            ValueError: ranks have different optimizers or settings of optimizers; on each of them.
        """
        if not votes:
            return
        self._require_same_settings(votes)
        all_gather_together = self._gathering is self.comm
        if not is_one(votes):
            self._require_same_calls()
            if all_gather_together:
                self._raise_divergence()
            self._forget()
            raise RuntimeError(_STEPS)
        if not all_gather_together and not is_one(maxima(self._gathering, both_ends(digest_of(self._log.digest)))):
            self._raise_divergence()
        self._forget()

    def require_same_grads(self, grads: Iterable[tuple[str, Tensor]]) -> None:
        """Raise ValueError on every rank if ranks have assigned different gradients. Collective."""
        todo = "backward() averages gradients over ranks; average what you assign by torch.distributed.all_reduce"
        if self.comm.world_size > 1:
            with agreement(self.comm, "param.grad", todo) as lines:
                for name, grad in grads:
                    lines.append(f"{name}.grad assigned with the digest {_digest([grad])}")

    def require_same_weights(self, groups: Iterable[FlatGroup]) -> None:
        """Raise ValueError on every rank if unsharded weights of the groups differ between ranks. Collective.

        Otherwise the engine takes what was written.
        """
        if self.comm.world_size == 1:
            return
        weights = [group.params for group in groups]
        stale = maxima(self.comm, [not each.state.readable for each in weights])  # ranks may not call the same units
        with agreement(
            self.comm, "weights", "write the same values on every rank, or have rank 0 broadcast them"
        ) as lines:
            for each, flag in zip(weights, stale, strict=True):
                if not flag:
                    lines.append(_values_of(each))

    def _forget(self) -> None:
        self._log, self.calls = OperationLog(REMEMBERED), []
        self._settings_digest = b""
        self._at_step = None

    def _require_same_settings(self, agreed: Sequence[int]) -> None:
        try:
            require_same(self.comm, agreed, [*self._now, *(self._at_step or self._now)])
        except ValueError:
            self._forget()
            raise

    def _require_same_calls(self) -> None:
        """Raise PeerError if ranks have made different calls. Collective."""
        found = first_other(self.comm, json.dumps(self.calls))
        if found is None:
            return
        self._forget()
        rank, ours, theirs = found[0], json.loads(found[1]), json.loads(found[2])
        one, other = next(pair for pair in zip_longest(ours, theirs, fillvalue=_NOTHING) if pair[0] != pair[1])
        raise PeerError(
            f"backward: ranks diverged: since the last backward rank 0 made {one}, rank {rank} made {other}; "
            "do the same on every rank, with the same values"
        )

    def _raise_divergence(self) -> None:
        """Raise with the first gather or step that differs between the first rank and this one. Collective."""
        ours = self._log.recent()
        theirs = json.loads(send_bytes(self._gathering, json.dumps(ours).encode(), 0))
        difference = first_difference(ours, theirs)
        if difference is None and len(ours) != len(theirs):  # the longer one goes on alike, then alone
            lines = [line for _, _, line in max(ours, theirs, key=len)][min(len(ours), len(theirs)) :]
            mine, other = (lines[0], _NOTHING) if len(ours) > len(theirs) else (_NOTHING, lines[0])
            difference = min(len(ours), len(theirs)), mine, other
        self._forget()
        if any(maxima(self._gathering, [difference is not None and _STEP in difference])):
            raise RuntimeError(_STEPS)
        what = "another rank saw it"
        if difference is not None:
            what = f"this rank called {difference[1]}, another rank {difference[2]}"
        raise RuntimeError(
            f"backward: ranks called units a different number of times or in a different order ({what}), so a gather "
            "may have brought the wrong unit's weights; call units in the same order on every rank, or choose stage 2"
        )


def _values_of(weights: FlatParams) -> str:
    """Describe the values of unsharded weights by a digest of what parameters show.

    An assigned ``.data`` is not in the buffer yet.
    """
    with as_plain():
        return f"values of {weights.name} with the digest {_digest(weights.params)}"


def _digest(tensors: Iterable[Tensor]) -> str:
    sums = [bit_sums(each.detach().reshape(-1)) for each in tensors if not isinstance(each, FakeTensor)]
    return digest_of(b"".join(each.cpu().numpy().tobytes() for each in sums)).hex()
