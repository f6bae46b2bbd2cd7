"""`ShardedOptimizer`: any per-tensor optimizer, with each parameter's state on one rank only.

Weights and gradients stay unsharded on every rank, as DDP or averaging by hand leaves them. One rank owns each
parameter. Every rank runs the user's optimizer on the parameters that it owns and broadcasts the new weights:

    rank 0   update a | send a ->      | update c | send c ->      |
    rank 1   update b | <- receive a   | send b -> | update d ...

Tensors stay whole, so an optimizer that works tensor by tensor does the same arithmetic as without sharding, and gives
the same bits; it need not work element by element. Source: optimizer state sharding ("P_os") of Rajbhandari et al.
2020, ZeRO, https://arxiv.org/abs/1910.02054, section 5.1.

[Note: Update in parts]
    This rank's parameters are updated bucket by bucket, while earlier buckets are in flight. For that the inner
    optimizer steps once per bucket, on the parameters in it alone. This is exact if everything that a step counts is
    counted per parameter, as in every class of `torch.optim`. A class from elsewhere may count steps in itself or in
    a group, so it steps once, on all parameters, before this rank sends its first bucket; other ranks' buckets are
    not delayed. An optimizer with step hooks of its own also steps once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.comm import CONTROL, Communicator, labelled
from zeroshard.comm.agree import agreement, both_ends, digest_of, require_same
from zeroshard.comm.backends.torch_dist import communicator
from zeroshard.comm.every_rank import by_every_rank
from zeroshard.comm.tensor_broadcast import PendingBroadcasts, gather_to
from zeroshard.host.lazily import loaded
from zeroshard.host.torch_internals import hooks_of
from zeroshard.optim.classes.description import described
from zeroshard.optim.classes.kept_states import ParamFacts, require_kept
from zeroshard.optim.classes.plain_states import flat, nested
from zeroshard.optim.classes.saved_states import may_need_conversion
from zeroshard.zero.optimizers.state_dict import of_no_param
from zeroshard.zero.sharded_optimizer.acceptance import (
    PER_RANK,
    check_class,
    check_param,
    check_reach,
    describe,
)
from zeroshard.zero.sharded_optimizer.ownership import Bucket, assign, pack

BUCKET_BYTES = 16 << 20


class ShardedOptimizer(Optimizer):
    """An ``optimizer_cls`` whose state is distributed over the ranks: a parameter's is on the rank that owns it.

    A drop-in for the optimizer itself: `param_groups` holds all of the user's parameters, and edits of a group's
    settings (by hand or by a scheduler) take effect at the next step. After `step` the parameters are the same objects
    as before, unsharded and equal on every rank. For Adam a rank has about 2/N of the parameters' bytes as state.

    The constructor, `add_param_group`, `step` and `consolidate_state_dict` are collective. As with DDP, training starts
    from rank 0's weights. Before `step`, a parameter's gradient must be averaged at least on its owner. A parameter
    without gradient there is not sent, because torch's classes skip it; nor is a frozen one. Each step has one control
    collective of a byte per parameter, from host to host: see `TorchCommunicator`. In it ranks compare their settings.

    Args:
        params: parameters, named or not, or group dicts of them, as for any optimizer.
        optimizer_cls: a class that works tensor by tensor (`requirements.classify` says which do): all of
            `torch.optim` but LBFGS.
        process_group: among which ranks; None: `torch.distributed`'s default group, as for `zeroshard.Zero`.
        comm: a `Communicator` instead of a process group.
        bucket_bytes: parameters smaller than this are packed into broadcasts of at most so many bytes. Of these
            `MAX_PENDING_BROADCASTS` are in flight, which is all the memory that a step takes. A larger parameter is
            broadcast alone and in place (through a copy if it is not contiguous).
        **kwargs: for ``optimizer_cls``; ``fused`` and ``foreach`` too.

    Raises:
        TypeError: ``optimizer_cls`` is no optimizer class; ``params`` is a tensor or a set.
        ValueError: an optimizer that needs all parameters at once (named, with the reason), or is differentiable; no
            parameters; one that is sharded already, sparse, or on the meta device; ranks whose parameters differ.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[Optimizer],
        process_group: dist.ProcessGroup | None = None,
        *,
        comm: Communicator | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        **kwargs: Any,
    ) -> None:
        check_class(optimizer_cls, kwargs)
        if issubclass(optimizer_cls, ShardedOptimizer):
            raise ValueError(
                "optimizer_cls: a ShardedOptimizer cannot be sharded again; give the optimizer's own class"
            )
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
        if comm is not None and process_group is not None:
            raise ValueError("comm: process_group is given too, and both name the ranks; give one of the two")
        self.comm, self.bucket_bytes = communicator(comm, process_group), bucket_bytes
        self.optim: Optimizer
        self._owners: dict[Tensor, int] = {}
        self._loads = [0] * self.comm.world_size
        # All ranks' states, on the rank that a consolidation brought them to, until the next change
        self._unsharded_state: dict[Any, Any] | None = None
        self._consolidated_to: int | None = None
        with agreement(self.comm) as compared:
            super().__init__(params, {})
            added, self._kwargs = self._assign(self.param_groups, compared), kwargs
            self._no_closure = check_reach(optimizer_cls, kwargs, self.param_groups)
            self.optim = optimizer_cls([self._own_part(group) for group in self.param_groups], **kwargs)
            self._take_options()
            compared += self._settings()
        self._start_from_rank_0(added)

    # -- groups -----------------------------------------------------------------------------------------------

    def owner(self, param: Tensor) -> int:
        """The rank that holds a parameter's state, updates it and needs its gradient.

        Raises:
            KeyError: no parameter of this optimizer.
        """
        return self._owners[param]

    @by_every_rank
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its parameters go to the ranks that own fewest bytes, and no other moves. Collective.

        Raises:
            TypeError, ValueError: as for any optimizer, or for parameters that differ between ranks. In that case
                nothing has changed.
        """
        if not hasattr(self, "optim"):  # called by Optimizer.__init__
            super().add_param_group(param_group)
            return
        num_groups, owners, loads = len(self.param_groups), dict(self._owners), list(self._loads)
        try:
            with agreement(self.comm) as compared:
                super().add_param_group(param_group)
                added = self._assign(self.param_groups[num_groups:], compared)
                no_closure = check_reach(type(self.optim), self._kwargs, [param_group])
                self._no_closure = self._no_closure or no_closure
                self.optim.add_param_group(self._own_part(self.param_groups[-1]))
                _set_options(self.param_groups[-1], self.optim.param_groups[-1])
                compared += self._settings()
        except BaseException:
            del self.param_groups[num_groups:], self.optim.param_groups[num_groups:]
            self._owners, self._loads = owners, loads
            raise
        self._state_has_changed()
        self._start_from_rank_0(added)

    def _assign(self, groups: list[dict[str, Any]], compared: list[str]) -> list[Tensor]:
        """Assign owners to the parameters of new groups; return these parameters, and describe them in the list."""
        added = list(dict.fromkeys(param for group in groups for param in group["params"]))
        compared.append(f"{len(added)} parameters, in groups of {[len(group['params']) for group in groups]}")
        for number, param in enumerate(added):
            check_param(param)
            compared.append(f"as number {number} {describe(param)}")
        owners = assign([param.nbytes for param in added], [param.requires_grad for param in added], self._loads)
        self._owners.update(zip(added, owners, strict=True))
        self._numbers = {param: number for number, param in enumerate(self._owners)}
        return added

    def _own_part(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inner optimizer's group: the same settings, with only this rank's parameters."""
        try:
            mine = [i for i, param in enumerate(group["params"]) if self._owners[param] == self.comm.rank]
        except KeyError:
            raise ValueError("params: a group holds a parameter that no rank owns; use add_param_group") from None
        return {key: [value[i] for i in mine] if key in PER_RANK else value for key, value in group.items()}

    def _take_options(self) -> None:
        """Copy settings from the inner optimizer, which fills in defaults and may change settings."""
        self.defaults, self.state = self.optim.defaults, self.optim.state
        for group, inner in zip(self.param_groups, self.optim.param_groups, strict=True):
            _set_options(group, inner)

    def _give_options(self) -> None:
        """Copy settings, as the user and schedulers have left them, and current parameters to the inner optimizer."""
        if len(self.param_groups) != len(self.optim.param_groups):
            raise ValueError("param_groups: a group was added or removed by hand; use add_param_group")
        for group, inner in zip(self.param_groups, self.optim.param_groups, strict=True):
            part = self._own_part(group)
            _set_options(inner, part)
            inner.update({key: part[key] for key in PER_RANK if key in part})

    def _start_from_rank_0(self, added: list[Tensor]) -> None:
        buckets = pack(
            range(len(added)), [0] * len(added), [p.nbytes for p in added], _devices(added), self.bucket_bytes, 1
        )
        pending = PendingBroadcasts(self.comm, "optimizer/start")
        with torch.no_grad():
            for bucket in buckets:
                pending.issue([added[i] for i in bucket.members], 0)
            pending.wait()

    # -- the step ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update this rank's parameters and exchange the new weights; on return all are in place. Collective.

        Args:
            closure: computes gradients (averaged over ranks) and returns the loss. The inner optimizer calls it on
                every rank, and must not have changed any weight before. With a closure all of this rank's parameters
                are updated before any is sent.
            **kwargs: for the inner optimizer's step.

        Returns:
            The result of the inner optimizer's step with a closure, which is the loss; else None.
        """
        loss = None
        if closure and self._no_closure:
            name = type(self.optim).__name__
            raise ValueError(f"step: {name} may not have a closure: {self._no_closure}; call step() without one")
        self._state_has_changed()
        self._give_options()
        if closure:  # as in torch's ZeroRedundancyOptimizer: any false value means no closure
            loss = self.optim.step(closure=torch.enable_grad()(closure), **kwargs)
        buckets = self._buckets()
        params = list(self._owners)
        mine = [{params[i] for i in bucket.members} for bucket in buckets if bucket.owner == self.comm.rank]
        updates = iter(()) if closure else self._update_in_parts(mine, kwargs)
        pending = PendingBroadcasts(self.comm, "optimizer/weights")
        for bucket in buckets:
            next(updates, None)  # overlaps with earlier broadcasts; updates our next bucket before it is sent
            pending.issue([params[i] for i in bucket.members], bucket.owner)
        for _ in updates:
            pass
        pending.wait()
        self._take_options()
        return loss

    def _buckets(self) -> list[Bucket]:
        """Return the buckets of parameters that may have changed: with a gradient on their owner. Collective."""
        if self.comm.world_size == 1:
            return []
        params, owners = list(self._owners), list(self._owners.values())
        listed = {param for group in self.param_groups for param in group["params"]}
        may_move = {p for p in listed if p.grad is not None or (p.requires_grad and not self._of_torch)}
        moves = [owners[i] == self.comm.rank and p in may_move for i, p in enumerate(params)]
        settings = both_ends(digest_of("\n".join(self._settings()).encode()))
        flags = torch.tensor([*moves, *settings], dtype=torch.uint8, device=self.comm.control_device)
        with labelled(CONTROL):
            self.comm.all_reduce(flags, "max").wait()
        agreed = flags.tolist()
        require_same(self.comm, agreed[len(moves) :], self._settings())
        moved = [index for index, one in enumerate(agreed[: len(moves)]) if one]
        sizes = [param.nbytes for param in params]
        return pack(moved, owners, sizes, _devices(params), self.bucket_bytes, self.comm.world_size)

    def _settings(self) -> list[str]:
        def is_everywhere(index: int) -> bool:
            return len({self._owners[param] for param in self.param_groups[index]["params"]}) == self.comm.world_size

        return described(self.optim, (len(group["params"]) for group in self.param_groups), is_everywhere)

    @property
    def _of_torch(self) -> bool:
        """Whether the class is torch's own: these skip parameters without gradients, and count steps per parameter."""
        return type(self.optim).__module__.startswith("torch.optim.")

    def _update_in_parts(self, mine: list[set[Tensor]], kwargs: dict[str, Any]) -> Iterator[None]:
        """At each `next`, update this rank's next bucket, or all its parameters at once: [Note: Update in parts]."""
        hooked = hooks_of(self.optim, "step_pre") or hooks_of(self.optim, "step_post")
        if self.comm.world_size == 1 or hooked or not self._of_torch:
            self.optim.step(**kwargs)
            yield
        else:
            for members in mine:
                with _only(members, self.optim.param_groups):
                    self.optim.step(**kwargs)
                yield

    # -- state ------------------------------------------------------------------------------------------------

    @by_every_rank
    def consolidate_state_dict(self, to: int = 0) -> None:
        """Bring all ranks' states to rank ``to``, on the CPU, for its `state_dict`. Collective.

        Raises:
            ValueError: a rank outside the world.
            RuntimeError: a state that cannot be sent.
        """
        if not 0 <= to < self.comm.world_size:
            raise ValueError(f"to: rank {to} is outside a world of {self.comm.world_size}; ranks count from 0")
        params = list(self._owners)
        number = {param: i for i, param in enumerate(params)}
        by_param = {number[key]: flat(state) for key, state in self.optim.state.items() if isinstance(key, Tensor)}
        others = of_no_param(self.optim.state), self._added_by_class()
        gathered = gather_to(self.comm, (by_param, others), to, self.bucket_bytes)
        self._unsharded_state, self._consolidated_to = None, to
        if self.comm.rank == to:
            found = {i: nested(state) for states, _ in gathered for i, state in states.items()}
            self._unsharded_state = {params[i]: found[i] for i in sorted(found)} | gathered[to][1][0]
            self._added = gathered[to][1][1]

    def state_dict(self) -> dict[str, Any]:
        """Return the dict that the unsharded optimizer would return and loads, with states as of the consolidation.

        Raises:
            RuntimeError: before `consolidate_state_dict`, on another rank than it named, or after a further step.
        """
        if self._unsharded_state is None:
            here, there = self.comm.rank, self._consolidated_to
            if there is not None:
                where = f"the state was brought to rank {there}, this is rank {here}"
                raise RuntimeError(f"state_dict: {where}; ask there, or call consolidate_state_dict(to={here}) first")
            what = "each rank has a part of the state, not consolidated since it last changed"
            raise RuntimeError(f"state_dict: {what}; call consolidate_state_dict(to={here}) on every rank first")
        self.state = defaultdict(dict, self._unsharded_state)
        try:
            return {**self._added, **super().state_dict()}
        finally:
            self.state = self.optim.state

    def _added_by_class(self) -> dict[str, Any]:
        """What the class's own ``state_dict`` adds to torch's."""
        found = {} if type(self.optim).state_dict is Optimizer.state_dict else self.optim.state_dict()
        return {key: value for key, value in found.items() if key not in ("state", "param_groups")}

    def _state_has_changed(self) -> None:
        self._unsharded_state = self._consolidated_to = None

    @by_every_rank
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the settings, and copies of the states that this rank owns. Not collective: every rank loads the dict.

        Args:
            state_dict: of the unsharded optimizer, or of a `ShardedOptimizer` at any world size.

        Raises:
            ValueError: other groups than this optimizer's, or states that its class does not keep.
        """
        state_dict = state_dict.copy()
        for hook in hooks_of(self, "load_state_dict_pre").values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        saved_groups = state_dict["param_groups"]
        here, there = ([len(group["params"]) for group in groups] for groups in (self.param_groups, saved_groups))
        if here != there:
            raise ValueError(f"state_dict: its groups are of {there} parameters, this optimizer's of {here}")
        make = partial(type(self.optim), **self._kwargs)
        pairs = zip(self.param_groups, saved_groups, strict=True)
        numbered = [pair for own, saved in pairs for pair in zip(saved["params"], own["params"], strict=True)]
        facts = {n: ParamFacts(f"parameter {n}", tuple(p.shape), p.dtype, p.device, True, 1, None) for n, p in numbered}
        others = {key: value for key, value in state_dict["state"].items() if key not in facts}
        state_dict["state"] = {key: flat(state) for key, state in state_dict["state"].items() if key in facts}
        if any(may_need_conversion(make, state) for state in state_dict["state"].values()):
            # by its address: it imports kernels
            as_kept = loaded("zeroshard.optim.state_conversion", "state_dict_as_kept")
            state_dict = as_kept(make, self.param_groups, state_dict, facts)
            saved_groups = state_dict["param_groups"]
        named = {f"parameter {number}": state for number, state in state_dict["state"].items()}
        in_groups = [[facts[number] for number in saved["params"]] for saved in saved_groups]
        require_kept(make, self.param_groups, saved_groups, in_groups, named)
        owners: dict[Any, int] = {}  # by the saved number
        own_groups = []
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            if "param_names" in saved:  # if not, a group keeps its own
                group["param_names"] = list(saved["param_names"])
            owners.update((number, self._owners[p]) for number, p in zip(saved["params"], group["params"], strict=True))
            own_groups.append({**saved, **self._own_part({key: group[key] for key in PER_RANK if key in group})})
            own_groups[-1]["params"] = [number for number in saved["params"] if owners[number] == self.comm.rank]
        own = {key: nested(state) for key, state in state_dict["state"].items() if owners[key] == self.comm.rank}
        added = {key: value for key, value in state_dict.items() if key not in ("state", "param_groups")}
        content = {**deepcopy(added), "state": deepcopy({**own, **others}), "param_groups": own_groups}
        self.optim.load_state_dict(content)
        self._take_options()
        self._state_has_changed()
        for hook in hooks_of(self, "load_state_dict_post").values():
            hook(self)

    # -- copies -----------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a ShardedOptimizer holds a process group and one rank's state, and cannot be copied; "
            "call consolidate_state_dict() on every rank and save state_dict()"
        )

    def __repr__(self) -> str:
        return f"{type(self.optim).__name__} on rank {self.comm.rank} of {self.comm.world_size}: {super().__repr__()}"


def _devices(params: list[Tensor]) -> list[int]:
    """Each parameter's device as a number that is the same on every rank, whatever the rank's devices are called."""
    numbers: dict[torch.device, int] = {}
    return [numbers.setdefault(param.device, len(numbers)) for param in params]


def _set_options(target: dict[str, Any], source: Mapping[str, Any]) -> None:
    """Make all settings of the group ``target`` those of ``source``, but for the keys in `PER_RANK`."""
    for key in [key for key in target if key not in PER_RANK and key not in source]:
        del target[key]
    target.update((key, value) for key, value in source.items() if key not in PER_RANK)


@contextmanager
def _only(params: set[Tensor], groups: list[dict[str, Any]]) -> Generator[None]:
    """In this block the groups hold only those of their parameters that are in ``params``."""
    whole = [group["params"] for group in groups]
    try:
        for group in groups:
            group["params"] = [param for param in group["params"] if param in params]
        yield
    finally:
        for group, members in zip(groups, whole, strict=True):
            group["params"] = members
