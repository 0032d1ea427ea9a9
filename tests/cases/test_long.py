"""Long trainings, and many short ones: what they leave, and what they compile."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
import torch

from fuseopt.compiler.session import session
from tests.beside import WAYS
from tests.cases.trainer import SIZES, quiet
from tests.frozen import bits

BOTH = ("compile", "backend")


def parameters(lanes: int) -> list[Any]:
    drawn = torch.Generator().manual_seed(0)
    shapes = ((5,), (3, 4)) * lanes
    tensors = [torch.randn(shape, generator=drawn) for shape in shapes[:lanes]]
    return [*map(torch.nn.Parameter, tensors)]


def ours() -> int:
    """How many objects of classes of fuseopt there are."""
    gc.collect()
    modules = (getattr(type(x), "__module__", "") for x in gc.get_objects())
    return sum(str(name).startswith("fuseopt.") for name in modules)


@pytest.mark.family(8)
@pytest.mark.parametrize("lanes", SIZES)
@pytest.mark.parametrize("way", BOTH)
def test_optimizers_that_are_gone_leave_nothing(way: str, lanes: int) -> None:
    counts, gone = [], []
    with quiet():
        for _ in range(3):
            for _ in range(5):
                opt = torch.optim.SGD(ps := parameters(lanes), lr=0.1, momentum=0.9)
                step = WAYS[way](opt)
                for _ in range(2):
                    for p in ps:
                        p.grad = torch.ones_like(p)
                    step()
                gone += [weakref.ref(opt), weakref.ref(ps[0])]
                del opt, ps, step, p
            torch._dynamo.reset()
            session.reset()
            counts.append(ours())
    assert [x() for x in gone] == [None] * len(gone)
    assert counts[1] == counts[2]


@pytest.mark.family(8)
@pytest.mark.parametrize("lanes", SIZES)
@pytest.mark.parametrize("way", BOTH)
def test_a_long_training_of_changing_sets(way: str, lanes: int) -> None:
    """Of gradients, whose strides change too, with rates drawn anew."""
    runs = []
    with quiet():
        for how in (lambda opt: opt.step, WAYS[way]):
            torch._dynamo.reset()
            session.reset()
            drawn = random.Random(1)
            opt = torch.optim.AdamW(ps := parameters(lanes), lr=0.01)
            step = how(opt)
            for turn in range(300):
                for p in ps:
                    there = drawn.random() < 0.7 or turn < 3
                    p.grad = torch.full_like(p, drawn.random()) if there else None
                    if there and turn % 50 == 0 and p.ndim == 2:
                        p.grad = p.grad.t().contiguous().t()  # type: ignore[union-attr]
                if turn % 7 == 0:
                    opt.param_groups[0]["lr"] = drawn.random()
                step()
            states = [x for p in ps for x in opt.state[p].values()]
            runs.append([bits(x) for x in (*ps, *states)])
    assert runs[0] == runs[1]
    # most sets of gradients are new ones: not each is compiled
    assert len(session.reports) <= 40
