"""More optimizers of matrix products, each beside its eager self, bit for bit.

The family of Muon (second moments, masks, rescales, heads, experts, convolutions),
products in other forms of torch, numbers of matrices and shapes, autocast, gradients
of other layouts, groups, and default options.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fuseopt
from fuseopt.ir.products import CHAINED
from fuseopt.runtime import batches
from tests.numerics.test_products import LED, WHOLE, Pair, Shapes, muon
from tests.papers.matrices import LoopMuon
from tests.papers.muons import EINSUM, FAMILY, Dion
from tests.steps import differences

SLOW = pytest.mark.slow
CONVOLUTIONS = [(16, 3, 3, 3)] * 3 + [(24, 8, 1, 1)] * 3
EXPERTS = [(3, 16, 24)] * 3 + [(2, 24, 16)] * 2
#: Shapes that some optimizers need.
SHAPES = {"convolutions": CONVOLUTIONS, "experts": EXPERTS}


@pytest.mark.parametrize(
    ("name", "dtype", "shapes"),
    [
        pytest.param(name, dtype, shapes, marks=() if quick else SLOW,
                     id=f"{name}-{str(dtype)[6:]}-{way}")
        for name in FAMILY
        for dtype in (torch.float32, torch.bfloat16, torch.float64)
        for way in ("led", "whole")
        for shapes in (SHAPES.get(name, WHOLE) * (3 if way == "led" else 1),)
        for quick in (dtype == torch.float32 and way == "whole",)
    ],
)  # fmt: skip
def test_the_family(name: str, dtype: torch.dtype, shapes: Shapes) -> None:
    pair = Pair(FAMILY[name], shapes, dtype)
    pair.run()
    assert pair.report.batches


@pytest.mark.parametrize("name", EINSUM)
def test_other_forms_of_products(name: str) -> None:
    """Each is a product of matrices for ATen, and one call for all rows."""
    pair = Pair(EINSUM[name], [(16, 24)] * 4)
    pair.run(4)
    assert {b.rows for b in pair.report.batches} == {4}
    assert pair.report.externs == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_matrix_of_low_rank(dtype: torch.dtype) -> None:
    """Dion decomposes one matrix a lane at each step, all of a shape in one call."""
    pair = Pair(Dion, [(16, 24)] * 4 + [(24, 16)] * 2, dtype)
    pair.run(8)
    assert {b.rows for b in pair.report.batches} >= {4, 2}
    assert pair.report.externs == []


COUNTS = [(1, 1), (2, 1), (3, 3), (5, 5), (9, 2), (16, 4), (17, 3), (33, 4), (64, 5)]


@pytest.mark.parametrize(
    ("matrices", "shapes"),
    [pytest.param(*c, marks=() if c in COUNTS[:2] else SLOW) for c in COUNTS],
)
def test_any_number_of_matrices_and_shapes(matrices: int, shapes: int) -> None:
    drawn = random.Random(100 * matrices + shapes)
    kinds = [(drawn.randrange(2, 40), drawn.randrange(2, 40)) for _ in range(shapes)]
    rows = [kinds[i % shapes] for i in range(matrices)]
    drawn.shuffle(rows)
    pair = Pair(LoopMuon, rows)
    pair.run()
    one, two, three = (pair.calls() for _ in range(3))
    single = sum(x.calls for x in pair.report.alone)
    assert one == two == three
    assert one <= 15 * shapes + single
    assert sum(b.calls for b in pair.report.batches) <= 15 * shapes


@pytest.mark.family(4)
@pytest.mark.parametrize("make", [muon, LoopMuon])
def test_autocast_around_the_step(make: Any) -> None:
    """Products below autocast are batched as others; each state is its own program."""
    pair = Pair(make, [(32, 48)] * 4, torch.float32)
    for on in (True, True, False, True, False, True):
        pair.gradients()
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            pair.step()
            assert torch.is_autocast_enabled("cpu") is on
        pair.check()
        assert pair.report.alone == []
        assert {b.rows for b in pair.report.batches} == {4}
    with torch.autocast("cpu", torch.bfloat16):
        in_chains = {b.way for b in pair.report.batches} == {CHAINED}
        assert pair.calls() == (0 if in_chains else 15)
    pair.check()


@pytest.mark.slow
def test_single_calls_below_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that is refused at a call makes its single calls below autocast too."""
    pair = Pair(LoopMuon, [(32, 48)] * 4)
    with torch.autocast("cpu", torch.bfloat16):
        pair.run(2)
        prepared = batches.PreparedBatch
        monkeypatch.setattr(prepared, "may", lambda *_: False)
        monkeypatch.setattr(
            batches, "circumstances", lambda: batches.Circumstances(7, False, (), ())
        )
        pair.run(2)
        assert pair.calls() == 4 * 15
    pair.check()


@pytest.mark.slow
@pytest.mark.parametrize("make", [pytest.param(muon, marks=SLOW), LoopMuon])
@pytest.mark.parametrize("shapes", [pytest.param(LED, marks=SLOW), WHOLE])
def test_default_options(make: Any, shapes: Shapes) -> None:
    """What a user writes: whichever way wins the race, the bits are eager's."""
    sides: list[tuple[list[nn.Parameter], Any]] = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(1)
        params = [nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
        sides.append((params, make(params)))
    (one, plain), (two, compiled) = sides
    fuseopt.compile(compiled)
    for turn in range(20):
        generator = torch.Generator().manual_seed(turn)
        for p, q in zip(one, two, strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        plain.step()
        compiled.step()
        assert differences(one, plain, two, compiled) == []


@pytest.mark.slow
def test_gradients_of_other_layouts() -> None:
    """A transposed gradient, and one that is a part of a larger matrix."""
    pair = Pair(LoopMuon, WHOLE)
    ways: list[Callable[[torch.Tensor], torch.Tensor]] = [
        torch.clone,
        lambda g: g.mT.contiguous().mT,
        lambda g: torch.cat([g, g], dim=1)[:, : g.size(1)],
        lambda g: torch.cat([torch.zeros(1), g.flatten()])[1:].view(g.shape),
    ]
    for way in (*ways, *ways[::-1]):
        pair.gradients()
        for params in (pair.params, pair.others):
            for p in params[::2]:
                assert p.grad is not None
                p.grad = way(p.grad)
        pair.step()
        pair.check()


def test_groups_of_other_numbers_share_their_calls() -> None:
    """Rates and momenta are numbers of lanes: products of all groups are one batch."""

    def make(params: Any, dtype: Any = None) -> LoopMuon:
        half = [{"params": params[:2]}, {"params": params[2:], "lr": 0.5}]
        made = LoopMuon(half, dtype)
        made.param_groups[1]["momentum"] = 0.5
        return made

    pair = Pair(make, [(24, 32)] * 4)
    pair.run(4)
    assert {b.rows for b in pair.report.batches} == {4}
    for turn in range(3):
        for optimizer in (pair.plain, pair.compiled):
            optimizer.param_groups[0].update(lr=0.1 / (turn + 1), momentum=0.1 * turn)
        pair.run(1)


@pytest.mark.parametrize("number", [0.0, float("nan"), float("inf")])
def test_every_matrix_without_numbers(number: float) -> None:
    """All matrices of a batch at once, as in a first step of zeros."""
    pair = Pair(LoopMuon, [(24, 16)] * 3)
    for turn in range(4):
        pair.gradients()
        if turn % 2 == 0:
            for p, q in zip(pair.params, pair.others, strict=True):
                p.grad = torch.full_like(p, number)
                q.grad = p.grad.clone()
        pair.step()
        pair.check()


@pytest.mark.slow
def test_vectors_and_empty_matrices_beside_batches() -> None:
    """They stay alone, each with its reason, and the others are batched."""
    odd = [(1, 16)] * 2 + [(16, 1)] * 2 + [(0, 16)] * 2
    pair = Pair(LoopMuon, odd + [(16, 24)] * 3)
    pair.run(3)
    assert {b.rows for b in pair.report.batches} == {3}
    assert sum(b.calls for b in pair.report.batches) == 15
    assert {x.reason for x in pair.report.alone} == {
        "an empty product",
        "a product of vectors, for which BLAS has other code",
    }


@pytest.mark.parametrize("rows", [2, 3, 4])
def test_the_bound_of_memory(rows: int) -> None:
    """No operand of a batch has more than `batch_bytes`; bits and rows stay."""
    size = rows * 24 * 32 * 4
    pair = Pair(LoopMuon, [(24, 32)] * 6, batch_bytes=size)
    pair.run(3)
    found = pair.report.batches
    assert {b.rows for b in found} == {rows if 6 % rows == 0 else 3}
    assert pair.calls() <= sum(b.calls for b in found) + len(pair.report.externs)
