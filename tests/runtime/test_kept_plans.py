"""A graph that tensors of several shapes are given in turn has a plan for each."""

from __future__ import annotations

import torch

import fuseopt

#: More than one, fewer than are kept.
SHAPES = [(n, 3) for n in range(2, 18)]


def test_shapes_that_come_in_turn_are_planned_once() -> None:
    """timm's AdamP is such a step: its pieces were planned anew at each call."""

    @torch.no_grad()
    def update(p: torch.Tensor, g: torch.Tensor) -> None:
        p.add_(g, alpha=-0.5)

    step = torch.compile(update, backend="fuseopt", dynamic=True)
    params = [torch.zeros(shape) for shape in SHAPES]
    grads = [torch.ones(shape) for shape in SHAPES]
    planned = []
    for _ in range(3):
        for p, g in zip(params, grads, strict=True):
            step(p, g)
        planned.append(len(fuseopt.reports()))
    assert planned[0] >= len(SHAPES)
    assert planned == planned[:1] * 3
    assert all(torch.equal(p, torch.full_like(p, -1.5)) for p in params)
