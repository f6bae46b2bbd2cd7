"""An optimizer that finds its learning rate itself, by the rule of Prodigy: one number for all tensors."""

import torch


class Estimates(torch.optim.Optimizer):
    """``d`` grows while gradients agree with the way that weights have come, which independent gradients never do.

    Source: Mishchenko and Defazio 2023, Prodigy, https://arxiv.org/abs/2306.06101; signs in place of Adam's moments.
    """

    def __init__(self, params, lr=1.0, d0=1e-4):
        super().__init__(params, {"lr": lr, "d0": d0, "d": d0, "come": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        first = self.param_groups[0]
        come, length, d = first["come"], 0.0, first["d"]
        members = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p in members:
            state = self.state[p]
            if not state:
                state.update(start=p.clone(), sum=torch.zeros_like(p))
            come += d * float(((state["start"] - p) * p.grad).sum())
            length += float(state["sum"].add_(p.grad, alpha=d).abs().sum())
        for group in self.param_groups:
            group.update(come=come, d=max(d, come / length) if length else d)
        for p in members:
            p.sub_(p.grad.sign(), alpha=first["d"] * first["lr"])
