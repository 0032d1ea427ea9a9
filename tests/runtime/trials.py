"""Trials of products for tests of chains."""

from __future__ import annotations

from fuseopt.ir.products import Layout, Result, Trial


def trial_of(
    dtype: str,
    op: str,
    size: tuple[int, int, int],
    turned: str,
    scales: tuple[str, ...] = ("any", "any"),
) -> Trial:
    """Return a trial of two products, m x k and k x n; `turned`: which matrices are
    transposed, "l" and "r". `scales` are those of an op that adds.
    """
    m, n, k = size
    rows: list[Layout] = [] if op == "mm" else [((m, n), (n, 1), 0)]
    rows.append(((m, k), (1, m) if "l" in turned else (k, 1), 0))
    rows.append(((k, n), (1, k) if "r" in turned else (n, 1), 0))
    stacked = tuple(((2, *s), (s[0] * s[1], *d), 0) for s, d, _ in rows)
    result = (Result((m, n), (n, 1), dtype),)
    given = () if op == "mm" else scales
    return Trial(op, dtype, "cpu", 2, tuple(rows), stacked, result, given)
