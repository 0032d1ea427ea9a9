"""Shared gradients of several parameters, while Dynamo traces their optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class SeparateGradients:
    """Context in which parameters with a shared gradient have separate gradient
    tensors.

    These have the same memory. Afterwards the parameters share the gradient again.
    While it traces an optimizer, Dynamo makes one input of one object, without a guard
    that it stays one. Checked with torch 2.11 and 2.13. If Dynamo has such a guard,
    this changes only the number of inputs.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        self._changed: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def __enter__(self) -> None:
        seen: dict[int, torch.Tensor] = {}  # by identity, and the parameter that has it
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    grad = p.grad
                    if grad is None or seen.setdefault(id(grad), p) is p:
                        continue
                    if type(grad) is torch.Tensor and grad.layout == torch.strided:
                        self._give(p, grad)

    def _give(self, p: torch.Tensor, grad: torch.Tensor) -> None:
        if grad.requires_grad or grad.is_conj() or grad.is_neg():
            return
        alias = torch.empty(0, dtype=grad.dtype, device=grad.device)
        place = grad.storage_offset(), grad.shape, grad.stride()
        alias.set_(grad.untyped_storage(), *place)
        p.grad = alias
        self._changed.append((p, grad, alias))

    def __exit__(self, *_: object) -> None:
        for p, grad, alias in self._changed:
            if p.grad is alias:
                p.grad = grad
        self._changed.clear()
