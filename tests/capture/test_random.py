"""Random numbers in a step: eager's numbers, and eager's generator after it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fuseopt
from tests.steps import same_bits

#: What a step does to one parameter and its gradient.
Body = Callable[[Tensor, Tensor], object]


def several(p: Tensor, g: Tensor) -> None:
    p.add_(torch.rand_like(p))
    g.copy_(torch.randn_like(g))
    p.mul_(g).add_(torch.rand_like(p))


def in_place(p: Tensor, g: Tensor) -> None:
    g.normal_()
    p.add_(g)
    g.uniform_()
    p.sub_(g)


def shuffled(p: Tensor, g: Tensor) -> None:
    p.copy_(p.flatten()[torch.randperm(p.numel())].view(p.shape))


#: (step of a parameter, launches)
BODIES: dict[str, tuple[Body, int]] = {
    "rand_like": (lambda p, g: p.add_(torch.rand_like(p), alpha=0.1), 1),
    "randn_like": (lambda p, g: p.add_(torch.randn_like(p) * 0.1), 1),
    "rand": (lambda p, g: p.add_(torch.rand(p.shape, dtype=p.dtype)), 1),
    "normal_": (lambda p, g: p.sub_(torch.empty_like(p).normal_(0, 0.3)), 1),
    "uniform_": (lambda p, g: p.mul_(torch.empty_like(p).uniform_(0.5, 1.5)), 1),
    "bernoulli_": (lambda p, g: p.mul_(torch.empty_like(p).bernoulli_(0.5)), 1),
    "bernoulli": (lambda p, g: p.mul_(torch.bernoulli(g.abs().clamp(0, 1))), 2),
    "exponential_": (lambda p, g: p.add_(torch.empty_like(p).exponential_()), 1),
    "randint": (lambda p, g: p.add_(torch.randint(0, 7, p.shape)), 1),
    "randint_like": (lambda p, g: p.add_(torch.randint_like(p, 0, 7)), 1),
    "dropout": (lambda p, g: p.add_(torch.nn.functional.dropout(g, 0.3)), 1),
    "randperm": (shuffled, 1),
    "several": (several, 5),
    "in place": (in_place, 5),
}


@pytest.mark.family(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BODIES)
def test_numbers_and_generator_are_eagers(name: str, dtype: torch.dtype) -> None:
    body, launches = BODIES[name]
    g = torch.Generator().manual_seed(0)
    shapes = ((5, 7), (33,), (), (129,))
    params = [torch.randn(s, generator=g).to(dtype) for s in shapes]
    grads = [torch.randn(s, generator=g).to(dtype) for s in shapes]
    others = [t.clone() for t in (*params, *grads)]

    def step(params: list[Tensor], grads: list[Tensor]) -> None:
        for p, g in zip(params, grads, strict=True):
            body(p, g)

    compiled = torch.compile(step, backend="fuseopt", options={"fallback": "error"})
    states = []
    for run, tensors in ((step, others), (compiled, [*params, *grads])):
        torch.manual_seed(3)
        for _ in range(3):
            run(tensors[: len(shapes)], tensors[len(shapes) :])
        states.append(torch.get_rng_state())
    (report,) = fuseopt.reports()
    assert report.launches == launches
    assert torch.equal(*states)
    for got, want in zip([*params, *grads], others, strict=True):
        assert same_bits(got, want)
