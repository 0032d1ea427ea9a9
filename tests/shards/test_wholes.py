"""Steps that need more than the part of a DTensor that is here: what DTensor does to
parts, collectives included, is compiled.

Each is one that gives other bits if it is done to parts as if they were whole.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import fuseopt
from tests.papers import LAMB, LARS, MARS, NovoGrad
from tests.shards import assert_same
from tests.shards.steps import WAYS, compared, give, parameters, step_of
from tests.shards.test_refusals import (
    Flat,
    Initial,
    Later,
    Length,
    Mean,
    Most,
    Narrow,
    Norm,
    Numel,
    OfWhole,
    OwnSum,
    Rows,
    Shape,
    Softmax,
    Step,
    Sums,
    Transposed,
)
from tests.versions import VERSION


class Twice(Step):
    """A norm of what another norm has scaled: two collectives, one after the other."""

    def one(self, p: Any, state: Any, lr: float) -> None:
        d = p.grad / (1 + p.grad.norm())
        p.sub_(d * (lr / (1 + d.norm())))


#: And in how many launches; `Twice`: one after each collective of each parameter.
KINDS = {
    **dict.fromkeys((Numel, Shape, Length, Rows, Sums, Softmax, Initial, OwnSum), 1),
    **dict.fromkeys((Narrow, Transposed, Flat, Norm, Most, Later), 2),
    Mean: 3,
    **dict.fromkeys((LAMB, LARS, MARS, NovoGrad), 2),
    OfWhole: 1,
    Twice: 5,
}


def count(mesh: DeviceMesh, kind: Any, n: int, way: str) -> int:
    told = compared(lambda ps: kind(ps, lr=0.1), mesh, n, way)
    assert not told
    reports = fuseopt.reports()
    assert not any(r.fallback for r in reports), [str(r) for r in reports]
    return reports[-1].launches


@pytest.mark.family(20)
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_a_step_of_whole_tensors(mesh: DeviceMesh, kind: Any) -> None:
    n = 1 if kind in (Flat, Most) else 5  # eager fails at uneven and empty parts
    assert count(mesh, kind, n, WAYS[0]) == KINDS[kind]


@pytest.mark.parametrize("kind", [Norm, Numel, Later, OfWhole])
@pytest.mark.slow
def test_compiled_by_torch(mesh: DeviceMesh, kind: Any) -> None:
    assert count(mesh, kind, 5, WAYS[1]) == KINDS[kind]


@pytest.mark.parametrize("kind", [Norm, LAMB])
@pytest.mark.slow
def test_of_many_parameters(mesh: DeviceMesh, kind: Any) -> None:
    assert count(mesh, kind, 20, WAYS[0]) == KINDS[kind]


def test_products_of_matrices(mesh: DeviceMesh) -> None:
    """Muon of a part would be another step."""
    ends = []
    for way in ("", WAYS[0]):
        params = parameters(mesh, 1)
        optimizer = torch.optim.Muon(params, lr=0.1)
        step = step_of(optimizer, way)
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            give(params, generator)
            step()
        ends.append(optimizer)
    assert_same(ends[1], ends[0])
    assert not fuseopt.reports()[-1].fallback
    assert any("all_gather" in x or "all_reduce" in x for x in externs())


def externs() -> list[str]:
    return [name for name, _ in fuseopt.reports()[-1].externs]


def test_collectives_are_eagers_one_by_one(mesh: DeviceMesh) -> None:
    """One of N numbers would add up over four processes in other orders."""
    count(mesh, LAMB, 3, WAYS[0])
    made = [x for x in externs() if "all_reduce" in x]
    # its two norms are read twice each, and so they are asked for twice
    # torch 2.14 adds up a sum of parts once more
    assert len(made) == 3 * (5 if VERSION >= (2, 14) else 4)
