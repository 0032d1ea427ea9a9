"""A probe says whether the rows of a batched product have the bits of single calls.

What it is asked of here are calls that are made to differ, each in one way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fuseopt.ir.products import DENSE, PADDED, Result, Trial
from fuseopt.runtime import probes
from fuseopt.runtime.matrix_rows import rows_of
from fuseopt.runtime.probes import Probes, circumstances


def trial(
    m: int = 8,
    k: int = 12,
    n: int = 8,
    rows: int = 3,
    dtype: str = "f32",
    scales: tuple[str, ...] = (),
) -> Trial:
    """A product of m x k and k x n matrices in dense stacks; `scales`: an addmm."""
    shapes = [(m, n), (m, k), (k, n)] if scales else [(m, k), (k, n)]
    return Trial(
        *("addmm" if scales else "mm", dtype, "cpu", rows),
        tuple(((a, b), (b, 1), 0) for a, b in shapes),
        tuple(((rows, a, b), (a * b, b, 1), 0) for a, b in shapes),
        (Result((m, n), (n, 1), dtype),),
        scales,
    )


Call = Callable[..., None]


@pytest.fixture
def by_rows(monkeypatch: pytest.MonkeyPatch) -> Callable[[Call], None]:
    """Put a function of (row, operands, result, scales) in place of batched calls."""

    def put(call: Call) -> None:
        def every(
            op: str, operands: Sequence[Tensor], out: Tensor, scales: Sequence[float]
        ) -> None:
            rows = zip(*(rows_of(x, 3, 2) for x in (*operands, out)), strict=True)
            for i, (*row, result) in enumerate(rows):
                call(i, row, result, scales)

        monkeypatch.setattr(probes, "batched", every)

    return put


def single(operands: Sequence[Tensor], scales: Sequence[float]) -> Tensor:
    operands = [x.clone() for x in operands]
    if not scales:
        return torch.mm(*operands)
    return torch.addmm(*operands, beta=scales[0], alpha=scales[1])


def test_the_single_call_itself_is_allowed(
    by_rows: Callable[[Call], None], tmp_path: Path
) -> None:
    by_rows(lambda i, row, out, scales: out.copy_(single(row, scales)))
    for dtype in ("f32", "bf16", "f64"):
        for scales in ((), ("any", "1")):
            asked = trial(dtype=dtype, scales=scales)
            assert Probes().way(asked, str(tmp_path)) == DENSE


def halves(row: Sequence[Tensor]) -> Tensor:
    """A product whose sums are added up in another order."""
    left, right = (x.double() if x.dtype == torch.float64 else x.float() for x in row)
    k = left.shape[1] // 2
    return left[:, :k] @ right[:k] + left[:, k:] @ right[k:]


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64"])
@pytest.mark.parametrize("k", [6, 12, 33, 128])
def test_another_order_of_one_element_is_seen(
    by_rows: Callable[[Call], None], tmp_path: Path, dtype: str, k: int
) -> None:
    """In the last row, in the last element alone."""

    def call(i: int, row: Sequence[Tensor], out: Tensor, scales: object) -> None:
        out.copy_(single(row, ()))
        if i == 2:
            out[-1, -1] = halves(row)[-1, -1].to(out.dtype)

    by_rows(call)
    assert Probes().way(trial(k=k, dtype=dtype), str(tmp_path)) == ""


SPOILED: dict[str, Callable[[Tensor, list[Tensor]], Tensor]] = {
    "denormals are lost": lambda x, _: torch.where(
        x.abs() < torch.finfo(x.dtype).tiny, x * 0, x
    ),
    "NaN is lost": lambda x, _: x.nan_to_num(0.0, float("inf"), float("-inf")),
    "infinities are the largest numbers": lambda x, _: torch.where(
        x.isinf(), x.sign() * torch.finfo(x.dtype).max, x
    ),
}


@pytest.mark.parametrize("how", SPOILED)
def test_what_differs_for_unusual_numbers_alone_is_seen(
    by_rows: Callable[[Call], None], tmp_path: Path, how: str
) -> None:
    def call(i: int, row: list[Tensor], out: Tensor, scales: object) -> None:
        good = single(row, ())
        out.copy_(SPOILED[how](good, row) if i == 1 else good)

    by_rows(call)
    assert Probes().way(trial(), str(tmp_path)) == ""


def test_a_row_that_sees_another_one_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """NaN times zero, of any one number of the row behind."""

    def leaking(op: str, operands: Sequence[Tensor], out: Tensor, _: object) -> None:
        left, right = operands
        torch.bmm(left, right, out=out)
        out[0] += left[1, 0, 0] * 0.0

    monkeypatch.setattr(probes, "batched", leaking)
    assert Probes().way(trial(), str(tmp_path)) == ""


def test_gaps_are_tried_where_a_dense_result_differs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def call(op: str, operands: Sequence[Tensor], out: Tensor, _: object) -> None:
        for i in range(3):
            out[i] = single([x[i] for x in operands], ())
        if out.is_contiguous():
            out[1, 0, 0] += 1.0

    monkeypatch.setattr(probes, "batched", call)
    assert Probes().way(trial(), str(tmp_path)) == PADDED


def test_scales_that_blas_treats_apart_are_other_trials(tmp_path: Path) -> None:
    for scales in (("0", "1"), ("any", "any"), ("1", "-1")):
        asked = trial(scales=scales)
        found = [scales for _, scales in probes._rounds(asked)]
        assert all(len(x) == 2 for x in found)
        for kind, numbers in zip(scales, zip(*found, strict=True), strict=True):
            if kind != "any":
                assert {*numbers} == {float(kind)}
            else:
                assert len({*numbers}) > 2
                assert not {*numbers} & {0.0, 1.0, -1.0}


def test_an_answer_is_kept_and_found_by_another_process(tmp_path: Path) -> None:
    one, other = Probes(), Probes()
    said = one.way(trial(), str(tmp_path))
    assert one.way(trial(), str(tmp_path)) == said
    assert one.tried == 1
    assert other.way(trial(), str(tmp_path)) == said
    assert other.tried == 0
    assert other.way(trial(rows=4), str(tmp_path)) in (DENSE, PADDED, "")
    assert other.tried == 1


def test_what_the_answer_depends_on_is_in_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = circumstances()
    names = {
        probes._name(trial(), now),
        probes._name(trial(rows=4), now),
        probes._name(trial(), now._replace(threads=now.threads + 1)),
        probes._name(trial(), now._replace(flushes=True)),
        probes._name(trial(dtype="f64"), now),
    }
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    names.add(probes._name(trial(), now))
    monkeypatch.setattr(torch, "__version__", "0")
    names.add(probes._name(trial(), now))
    assert len(names) == 7


def test_a_damaged_answer_is_tried_again(tmp_path: Path) -> None:
    said = Probes().way(trial(), str(tmp_path))
    (kept,) = tmp_path.rglob(f"*{probes.ENDING}")
    for text in ("", "dense", "fine " + kept.stem, f"padded {'0' * 32}"):
        kept.write_text(text)
        again = Probes()
        assert again.way(trial(), str(tmp_path)) == said
        assert again.tried == 1


def test_an_answer_that_others_may_write_is_not_believed(tmp_path: Path) -> None:
    said = Probes().way(trial(), str(tmp_path))
    (kept,) = tmp_path.rglob(f"*{probes.ENDING}")
    kept.write_text(f" {kept.stem}")
    kept.chmod(0o666)
    again = Probes()
    assert again.way(trial(), str(tmp_path)) == said
    assert again.tried == 1


def test_without_a_cache_there_are_answers(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    one = Probes()
    one.way(trial(), str(blocked / "folder"))
    assert one.tried == 1


def test_denormals_that_are_flushed_are_other_circumstances() -> None:
    before = circumstances()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        assert circumstances().flushes
        assert not before.flushes
    finally:
        torch.set_flush_denormal(False)
    assert circumstances() == before
