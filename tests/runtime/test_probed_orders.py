"""Orders of sums that a probe has found: the bits of eager for numbers of all kinds.

A probe compares a few kinds of numbers. Here are others: zeros of both signs in rows,
in columns and everywhere, sums that underflow or overflow, and what is not finite.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from fuseopt.capture.aten.dtypes import NAMED_DTYPES
from fuseopt.ir.products import SCALED
from fuseopt.runtime.chains import Chains, batched_in_chain, may_chain
from fuseopt.runtime.matrix_calls import product_call
from fuseopt.runtime.matrix_rows import same_bits
from fuseopt.runtime.probes import Probes
from tests.runtime.trials import trial_of

Numbers = Callable[[torch.Tensor, float, float], torch.Tensor]


def _some(t: torch.Tensor, share: float, number: float) -> torch.Tensor:
    return torch.where(torch.rand(t.shape) < share, number, t)


#: Normal numbers, the smallest normal one and the largest one of a dtype -> numbers.
KINDS: dict[str, Numbers] = {
    "normal": lambda t, tiny, most: t,
    "positive": lambda t, tiny, most: t.abs(),
    "zero": lambda t, tiny, most: t * 0.0,
    "minus zero": lambda t, tiny, most: t.abs() * -0.0,
    "zero rows": lambda t, tiny, most: t * (torch.rand(*t.shape[:-1], 1) < 0.5),
    "zero columns": lambda t, tiny, most: t * (torch.rand(t.shape[-1]) < 0.5),
    "sparse": lambda t, tiny, most: _some(t, 0.9, 0.0),
    "whole": lambda t, tiny, most: t.round(),
    "spread": lambda t, tiny, most: t * torch.randint(-20, 21, t.shape).double().exp2(),
    "denormal": lambda t, tiny, most: t * tiny / 8,
    "negative denormal": lambda t, tiny, most: -t.abs() * tiny / 8,
    "partly denormal": lambda t, tiny, most: torch.where(t > 0, t, t * tiny / 4),
    "root of tiny": lambda t, tiny, most: t * tiny**0.5,
    "root of most": lambda t, tiny, most: t * most**0.5,
    "most": lambda t, tiny, most: (t * most / 4).clamp(-most, most),
    "infinite": lambda t, tiny, most: _some(t, 0.02, float("inf")),
    "nan": lambda t, tiny, most: _some(t, 0.02, float("nan")),
}
SIZES = [(8, 12, 3), (16, 16, 17), (32, 24, 40), (24, 40, 264)]
SCALES = [("any", "any"), ("1", "-1"), ("0", "-1"), ("0", "any"), ("1", "1")]
NUMBERS = {"any": 0.75, "0": 0.0, "1": 1.0, "-1": -1.0}


def numbers(shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> torch.Tensor:
    of = torch.finfo(dtype)
    made = KINDS[kind](torch.randn(shape, dtype=torch.float64), of.tiny, of.max)
    return made.to(dtype)


def lay(t: torch.Tensor, turned: bool) -> torch.Tensor:
    return t.mT.contiguous().mT if turned else t


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize(
    ("op", "dtype"),
    [(op, t) for op in ("mm", "addmm", SCALED) for t in ("f32", "f64", "bf16")],
)
def test_numbers_of_all_kinds(
    library: Chains, op: str, dtype: str, flush: bool
) -> None:
    torch.manual_seed(0)
    probes, of = Probes(), NAMED_DTYPES[dtype]
    every = itertools.product(SIZES, ("", "l", "r", "lr"), SCALES)
    tried = {trial_of(dtype, op, *x): x for x in every}
    kinds = itertools.cycle(itertools.product(KINDS, ("normal", "denormal", "zero")))
    compared = 0
    torch.set_flush_denormal(flush)
    try:
        for trial, (size, turned, _) in tried.items():
            order = may_chain(trial, library) and probes.order(trial, None, library)
            for _ in range(10 if order else 0):
                m, n, k = size
                one, other = next(kinds)
                left = lay(numbers((2, m, k), of, one), "l" in turned)
                right = lay(numbers((2, k, n), of, other), "r" in turned)
                add = numbers((2, m, n), of, next(kinds)[0])
                operands = [left, right] if op == "mm" else [add, left, right]
                scales = [NUMBERS[s] for s in trial.scales]
                out = torch.empty(2, m, n, dtype=of)
                batched_in_chain(library, operands, out, scales, op, str(order))
                keywords = dict(zip(("beta", "alpha"), scales, strict=False))
                for made, *row in zip(out, *operands, strict=True):
                    single = product_call(op)(*row, **keywords)
                    assert same_bits(made, single), (trial, order, one, other)
                    compared += 1
    finally:
        torch.set_flush_denormal(False)
    if not compared:
        pytest.skip("a chain has no order of such products")
