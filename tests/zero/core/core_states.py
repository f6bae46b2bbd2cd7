"""The states of an optimizer of the core, unsharded, for comparisons and as a checkpoint of its own."""

from io import BytesIO
from itertools import chain

import torch

from zeroshard.comm.agree import gather_bytes
from zeroshard.zero.core.optimizer import pieces_in


def unsharded_states(optim):
    """All states on the CPU, by parameters' names: tensors ``[numel]``, and numbers ``[]``. Collective."""
    found = {}
    for group in optim.slots:
        slots, file = group.params.layout.slots, BytesIO()
        pairs = zip(group.params.pieces, group.shards, strict=True)
        torch.save([(slots[piece.slot].name, optim.optimizer.state.get(own, {})) for piece, own in pairs], file)
        sent = gather_bytes(group.params.comm, file.getvalue()) if group.params.shard_optim else [file.getvalue()]
        for name, state in chain.from_iterable(torch.load(BytesIO(each), "cpu") for each in sent):
            whole = found.setdefault(name, {})
            for kind, value in ((kind, torch.as_tensor(value)) for kind, value in state.items()):
                whole[kind] = torch.cat([whole[kind], value]) if kind in whole and value.dim() else value
    return found


def load_unsharded_states(optim, states):
    """Load what `unsharded_states` returned, in any world; the settings of param groups do not change."""
    loaded = []
    for group, slot in (optim.homes[param] for param in chain.from_iterable(optim.by_group)):
        whole = states.get(group.params.layout.slots[slot].name, {}).items()
        parts = [slice(*piece.interval) for piece, _ in pieces_in(group, slot)]
        loaded += [{kind: (each[part] if each.dim() else each).clone() for kind, each in whole} for part in parts]
    optim.optimizer.load_state_dict({**optim.optimizer.state_dict(), "state": dict(enumerate(loaded))})
