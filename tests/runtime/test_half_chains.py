"""Chains of small products of bfloat16: the sums of ATen's own loops."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from fuseopt.ir.products import CHAINED, Trial
from fuseopt.runtime.chains import (
    IN_PAIRS,
    MOST_HALF,
    Chains,
    batched_in_chain,
    may_chain,
    orders,
)
from fuseopt.runtime.matrix_rows import same_bits
from fuseopt.runtime.probes import Probes
from tests.numerics.test_products import Pair, muon
from tests.papers.matrices import LoopMuon, Matrices
from tests.runtime.trials import trial_of

HALF = torch.bfloat16
SMALL = [(16, 16)] * 4 + [(16, 24)] * 2 + [(40, 48)] * 2
MANY = [(16, 16)] * 9 + [(8, 12)] * 7


def trial(size: tuple[int, int, int], turned: str, op: str = "mm") -> Trial:
    """Two products; `turned`: which matrices are transposed."""
    return trial_of("bf16", op, size, turned)


@pytest.fixture
def halves(library: Chains) -> None:
    """The loops of this torch have the sums of chains."""
    for op, turned in (("mm", ""), ("mm", "r"), ("addmm", "")):
        if not Probes().order(trial((16, 16, 16), turned, op), None, library):
            pytest.skip("products of bfloat16 have another order here")


def in_turn(left: Any, right: Any, count: int, tree: bool) -> Any:
    """The sums of a chain, for numbers whose products are exact in float32."""
    k = left.shape[-1]
    whole = k // (16 if tree else count) * (16 if tree else count)

    def sum_of(terms: Any) -> Any:
        total = torch.zeros(left.shape[0], right.shape[1])
        for i in terms:
            total = total + left[:, i, None].float() * right[None, i].float()
        return total

    sums = [sum_of(range(c, whole, count)) for c in range(count)]
    rest = [left[:, i, None].float() * right[None, i].float() for i in range(whole, k)]
    while tree and len(sums) > 1:
        half = len(sums) // 2
        sums = [a + b for a, b in zip(sums[:half], sums[half:], strict=True)]
    for x in rest:
        sums[0] = sums[0] + x
    total = sums[0]
    for x in sums[1:]:
        total = total + x
    return total.to(HALF)


@pytest.mark.parametrize("size", [(16, 16, 16), (5, 7, 11), (8, 20, 24), (3, 33, 37)])
@pytest.mark.parametrize(
    ("turned", "count", "tree"),
    [("", 4, False), ("l", 1, False), ("r", 8, True), ("lr", 4, False)],
)
def test_sums_in_turn(
    library: Chains, size: Any, turned: str, count: int, tree: bool
) -> None:
    torch.manual_seed(0)
    m, n, k = size
    left = torch.randn(2, m, k).mul(torch.randint(0, 9, (2, m, k)).exp2()).to(HALF)
    right = torch.randn(2, k, n).mul(torch.randint(0, 9, (2, k, n)).exp2()).to(HALF)
    left = left.mT.contiguous().mT if "l" in turned else left
    right = right.mT.contiguous().mT if "r" in turned else right
    out = torch.empty(2, m, n, dtype=HALF)
    batched_in_chain(library, [left, right], out, ())
    for x, y, made in zip(left, right, out, strict=True):
        assert same_bits(made, in_turn(x, y, count, tree))


def test_larger_products_of_halves_have_another_order(library: Chains) -> None:
    plain, pairs = (library._replace(pairs=x) for x in (False, True))
    small, larger = trial((16, 16, 16), ""), trial((16, 16, 17), "")
    assert may_chain(small, plain)
    assert orders(small) == ["16"]
    assert not may_chain(larger, plain)
    assert may_chain(larger, pairs)
    assert orders(larger) == [IN_PAIRS]
    assert MOST_HALF == 16**3


#: m, n, k: whole vectors and tiles, parts of them, an odd term, many terms.
LARGER = [(32, 64, 32), (33, 65, 77), (17, 100, 30), (20, 40, 512), (9, 33, 71)]


@pytest.fixture
def in_pairs(library: Chains) -> Chains:
    if not library.pairs:
        pytest.skip("this processor multiplies no pairs of bfloat16, or has AMX")
    return library


@pytest.mark.parametrize("size", LARGER)
def test_pairs_in_all_layouts(in_pairs: Chains, size: Any) -> None:
    """Sums of whole numbers are exact in float32, in any order."""
    torch.manual_seed(0)
    m, n, k = size
    for turns in itertools.product((False, True), repeat=4):
        shapes = (m, n), (m, k), (k, n)
        add, left, right = (
            lay(torch.randint(-9, 9, (3, *s)).to(HALF), turn)
            for s, turn in zip(shapes, turns, strict=False)
        )
        out = lay(torch.full((3, m, n), float("nan"), dtype=HALF), turns[3])
        batched_in_chain(in_pairs, [left, right], out, (), "mm", IN_PAIRS)
        exact = left.double() @ right.double()
        assert same_bits(out, exact.to(HALF))
        operands = [add, left, right]
        batched_in_chain(in_pairs, operands, out, (0.5, -0.25), "addmm", IN_PAIRS)
        assert same_bits(out, (0.5 * add.double() - 0.25 * exact).to(HALF))
        add.fill_(float("nan"))
        batched_in_chain(in_pairs, operands, out, (0.0, 1.0), "addmm", IN_PAIRS)
        assert same_bits(out, exact.to(HALF))


@pytest.mark.parametrize("turned", [False, True])
def test_symmetric_products_of_pairs(in_pairs: Chains, turned: bool) -> None:
    """Half of X X^T is copied; it has the bits of the other half."""
    for m, k in ((32, 48), (40, 33), (100, 64)):
        x = lay(torch.randn(2, m, k).to(HALF), turned)
        out, other = torch.empty(2, 2, m, m, dtype=HALF).unbind()
        batched_in_chain(in_pairs, [x, x.mT], out, (), "mm", IN_PAIRS)
        batched_in_chain(in_pairs, [x, x.clone().mT], other, (), "mm", IN_PAIRS)
        assert same_bits(out, other)


@pytest.mark.parametrize("make", [muon, LoopMuon])
def test_larger_halves_in_a_chain(in_pairs: Chains, make: Any) -> None:
    """Bits of eager, where a probe finds oneDNN's sums; other batches elsewhere."""
    pair = Pair(make, [(32, 64)] * 3 + [(64, 32)] * 3 + [(40, 33)], HALF)
    pair.run(4)
    larger = [b for b in pair.report.batches if "[32, 64]" in b.matrices]
    given = trial((32, 64, 64), "r")
    found = Probes().order(given, None, in_pairs)
    assert {b.way for b in larger} == ({CHAINED} if found else {"dense"})


def lay(t: torch.Tensor, turned: bool) -> torch.Tensor:
    """Return the same matrices, with rows or columns adjacent."""
    return t.mT.contiguous().mT if turned else t


def test_numbers_that_are_none_or_too_large(library: Chains) -> None:
    left = torch.tensor([[1.0, float("inf")], [float("nan"), 3e38]], dtype=HALF)
    right = torch.tensor([[3e38, -1.0], [3e38, 0.0]], dtype=HALF)
    add = torch.full((1, 2, 2), float("nan"), dtype=HALF)
    out = torch.empty(1, 2, 2, dtype=HALF)
    batched_in_chain(library, [left[None], right[None]], out, ())
    assert same_bits(out[0], (left.double() @ right.double()).to(HALF))
    batched_in_chain(library, [add, left[None], right[None]], out, (0.0, 1.0), "addmm")
    assert same_bits(out[0], (left.double() @ right.double()).to(HALF))


class Turning(Matrices):
    """Products of small matrices of bfloat16 in all layouts, with moving scales."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        x = g / (g.norm() + 1e-7)
        gram = x @ x.mT
        other = (x.mT @ x)[: gram.size(0), : gram.size(0)].contiguous()
        y = torch.addmm(gram, gram, gram, beta=group["lr"], alpha=-0.5)
        z = torch.addmm(other, y, gram, beta=1.0, alpha=group["lr"])
        p.sub_(z @ x, alpha=group["lr"])


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize("shapes", [SMALL, MANY, [(16, 16)]])
@pytest.mark.parametrize("make", [muon, Turning])
def test_small_halves_in_a_chain(make: Any, shapes: Any) -> None:
    pair = Pair(make, shapes, HALF)
    pair.run(4)
    square = [b for b in pair.report.batches if b.matrices == "[16, 16] @ [16, 16]"]
    assert square
    assert {b.way for b in square} == {CHAINED}
    for lr in (0.5, -1.0, 0.0):
        for optimizer in (pair.plain, pair.compiled):
            optimizer.param_groups[0]["lr"] = abs(lr) if make is muon else lr
        pair.run(2)


@pytest.mark.usefixtures("halves")
def test_the_bits_of_each_order_are_probed(library: Chains) -> None:
    """A library with another order is refused."""
    given = trial((16, 16, 16), "r")
    assert Probes().order(given, None, library) == "16"
    # as if the right matrix were not transposed
    other = given._replace(
        layouts=(given.layouts[0], ((16, 16), (1, 16), 0)),
        stacked=(given.stacked[0], ((2, 16, 16), (256, 16, 1), 0)),
    )
    assert Probes().order(other, None, library) == ""
