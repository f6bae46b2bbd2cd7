"""What the parameters of one buffer show: unsharded weights, or NaN while those are freed or older than the master."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zeroshard.torch_internals import as_plain, storage_id, versions_of
from zeroshard.zero.core.layout import FlatLayout


class ParamViews:
    """The ``.data`` of all parameters of one buffer; they show nothing yet.

    Args:
        layout: names and shapes of the parameters.
        params: the parameters, in its order.
        dtype, device: of the weights.

    Attributes:
        views: what the parameters show, each in its shape, if they show weights.
        visible: whether they do.
        placeholder: the 0-dim NaN (0 for integers) that they show otherwise.
    """

    def __init__(
        self, layout: FlatLayout, params: Sequence[nn.Parameter], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._layout, self._params = layout, params
        self.placeholder = torch.full((), float("nan") if dtype.is_floating_point else 0, dtype=dtype, device=device)
        self.views = self._hidden = [self.placeholder.expand(slot.shape) for slot in layout.slots]
        self.visible = False
        self._versions = 0

    def show_weights(self, views: list[Tensor]) -> None:
        """Make the parameters these views."""
        self.views, self.visible = views, True
        for param, view in zip(self._params, views, strict=True):
            param.data = view
        self.accept()

    def show_placeholder(self) -> None:
        """Show the placeholder."""
        for param, hidden in zip(self._params, self._hidden, strict=True):
            param.data = hidden
        self.visible = False

    def name_of(self, param: Tensor) -> str:
        """Return the name of one of the parameters."""
        return next(slot.name for slot, each in zip(self._layout.slots, self._params, strict=True) if each is param)

    def accept(self) -> None:
        """Count writes into the parameters from here on."""
        self._versions = self._count()

    @property
    def written(self) -> bool:
        """Whether autograd has seen a write into a parameter since `accept`."""
        return self._versions != self._count()

    def _count(self) -> int:
        with as_plain():
            return versions_of(self._params)

    def _elsewhere(self) -> list[tuple[str, nn.Parameter, Tensor]]:
        """Return ``(name, parameter, expected .data)`` of parameters to whose ``.data`` a tensor was assigned."""
        expected = self.views if self.visible else self._hidden
        home = storage_id(expected[0])  # all are views of one buffer, or of one placeholder
        with as_plain():
            triples = zip(self._layout.slots, self._params, expected, strict=True)
            return [(slot.name, p, view) for slot, p, view in triples if storage_id(p) != home]

    def take_assigned(self) -> bool:
        """Copy tensors that were assigned to visible parameters' ``.data`` to their places; return if any were."""
        elsewhere = self._elsewhere() if self.visible else []
        for name, param, view in elsewhere:
            if (param.dtype, param.device) != (view.dtype, view.device):
                raise RuntimeError(
                    f"{name}: its .data is {param.dtype} on {param.device} now; a parameter under an engine stays "
                    f"{view.dtype} on {view.device}"
                )
            if param.shape != view.shape:
                raise RuntimeError(
                    f"{name}: its .data is a tensor of shape {tuple(param.shape)} now; a parameter under an engine "
                    f"keeps its shape, {tuple(view.shape)}"
                )
            with torch.no_grad():
                view.copy_(param.data)
            param.data = view
        return bool(elsewhere)

    def drop_assigned(self) -> bool:
        """Make parameters with another ``.data`` show what they showed before; return if values differ."""
        elsewhere = self._elsewhere()
        with as_plain():
            differs = any(self.visible and not torch.equal(param.detach(), view) for _, param, view in elsewhere)
            for _, param, view in elsewhere:
                param.data = view
        return differs

    def refuse_assigned(self) -> None:
        """Raise RuntimeError if a tensor was assigned to ``.data`` of hidden weights."""
        for name, param, freed in self._elsewhere():
            with as_plain():
                param.data = freed
            raise RuntimeError(
                f"{name}: its .data was assigned to while the weights were sharded; "
                "do it inside zero.full_params(write_back=True)"
            )

    def refuse_touched(self, name: str) -> None:
        """Raise RuntimeError if hidden weights were assigned, or (on the CPU: no sync with a GPU) written to.

        ``name``: of the buffer.
        """
        self.refuse_assigned()
        nan = self.placeholder
        if nan.device.type != "cpu" or not nan.is_floating_point() or nan.isnan():
            return
        nan.fill_(float("nan"))
        raise RuntimeError(
            f"{name}: weights were written to while they were sharded or older than the last step; "
            "do it inside zero.full_params(write_back=True)"
        )
