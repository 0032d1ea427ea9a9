"""Optimizers that are products of matrices: eager's bits, one call for many matrices.

Each runs beside its eager self over 20 steps. Led: a few lanes are traced, and stand
for the others. Whole: there are so few that all are traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fuseopt
from fuseopt.compiler import pipeline
from fuseopt.compiler.report import Report
from fuseopt.runtime import batches
from fuseopt.runtime.probes import Probes
from tests.papers.matrices import DECOMPOSING, EVERY, LoopMuon
from tests.steps import differences

DTYPES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float64: "float64",
}
LED = [(32, 48)] * 6 + [(48, 32)] * 6 + [(40, 40)] * 6
WHOLE = [(32, 48)] * 2 + [(48, 32)] * 2 + [(40, 40)] * 2
STEPS = 20
OTHER = "one batched call has other bits here"
SLOW = pytest.mark.slow
#: Names of products in a profile.
CALLS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
Shapes = Sequence[tuple[int, ...]]


def muon(params: Any, dtype: Any = None) -> torch.optim.Optimizer:
    return torch.optim.Muon(params)


class Pair:
    """An optimizer, compiled, and its eager self."""

    def __init__(
        self,
        make: Callable[..., torch.optim.Optimizer],
        shapes: Shapes,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        self.shapes, self.dtype = shapes, dtype
        self.params, self.plain = self._made(make)
        self.others, self.compiled = self._made(make)
        self.seen = len(fuseopt.reports())
        fuseopt.compile(self.compiled, eager_if_faster=False, check=True, **options)
        self.turn = 0

    def _made(self, make: Any) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
        generator = torch.Generator().manual_seed(1)
        params = [
            nn.Parameter((0.1 * torch.randn(s, generator=generator)).to(self.dtype))
            for s in self.shapes
        ]
        return params, make(params, dtype=self.dtype)

    def gradients(self) -> None:
        generator = torch.Generator().manual_seed(self.turn)
        self.turn += 1
        for p, q in zip(self.params, self.others, strict=True):
            p.grad = torch.randn(p.shape, generator=generator).to(self.dtype)
            q.grad = p.grad.clone()

    def step(self) -> None:
        self.plain.step()
        self.compiled.step()

    def check(self) -> None:
        found = differences(self.params, self.plain, self.others, self.compiled)
        assert found == []

    def run(self, steps: int = STEPS) -> None:
        for _ in range(steps):
            self.gradients()
            self.step()
        self.check()

    @property
    def report(self) -> Report:
        """That of the last program; the step is no fallback."""
        new = fuseopt.reports()[self.seen :]
        assert new
        assert all(not r.fallback for r in new)
        return new[-1]

    def calls(self) -> int:
        """The products of one compiled step, counted by the profiler."""
        self.gradients()
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            self.compiled.step()
        self.plain.step()
        names = [event.name for event in seen.events() if event.cpu_parent is None
                 or event.cpu_parent.name not in CALLS]  # fmt: skip
        return sum(name in CALLS for name in names)


CASES = [
    pytest.param(name, dtype, shapes, marks=() if quick else SLOW, id=f"{name}-{d}-{w}")
    for name in ("torch", *EVERY)
    for dtype, d in DTYPES.items()
    for shapes, w in ((LED, "led"), (WHOLE, "whole"))
    for quick in (dtype == torch.float32 and (w == "whole") == (name != "loop"),)
]


@pytest.mark.family(6)
@pytest.mark.parametrize(("name", "dtype", "shapes"), CASES)
def test_eager_bits_over_many_steps(
    name: str, dtype: torch.dtype, shapes: Shapes
) -> None:
    pair = Pair({"torch": muon, **EVERY}[name], shapes, dtype)
    pair.run()
    assert pair.report.batches


@pytest.mark.parametrize(
    ("name", "dtype", "shapes"),
    [
        pytest.param(*case, marks=() if quick else SLOW, id=f"{case[0]}-{d}-{w}")
        for name in DECOMPOSING
        for dtype, d in DTYPES.items()
        for shapes, w in ((LED, "led"), (WHOLE, "whole"))
        for case in ((name, dtype, shapes),)
        for quick in (dtype == torch.float32 and w == "whole",)
        if dtype != torch.bfloat16
    ],
)
def test_matrices_that_are_decomposed_now_and_then(
    name: str, dtype: torch.dtype, shapes: Shapes
) -> None:
    """Both ways of a counter are compiled once, and nothing is given to Inductor."""
    pair = Pair(DECOMPOSING[name], shapes, dtype)
    programs: list[int] = []
    for _ in range(STEPS):
        pair.run(1)
        programs.append(len(fuseopt.reports()))
    assert programs[5:] == [programs[5]] * (STEPS - 5)
    assert all(not r.fallback for r in fuseopt.reports()[pair.seen :])
    assert all(p.where == "fuseopt" for r in fuseopt.reports() for p in r.parts)
    assert any(r.batches for r in fuseopt.reports()[pair.seen :])


@pytest.mark.slow
def test_fifteen_calls_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """48 matrices in three shapes: torch's Muon makes 720 calls of ATen for them."""
    monkeypatch.setattr(pipeline, "_chains", lambda *_: None)
    shapes = [(32, 64)] * 16 + [(64, 32)] * 16 + [(40, 40)] * 16
    pair = Pair(muon, shapes)
    pair.run(3)
    assert pair.calls() == 45
    pair.check()
    report = pair.report
    assert report.traced.startswith("3 of 48 lanes")
    assert [name for name in report.order if not name.startswith("kernel")] == [
        name for name in report.order if " x 16" in name
    ]
    assert report.externs == []
    assert report.alone == []
    assert sum(b.calls for b in report.batches) == 45
    assert {b.rows for b in report.batches} == {16}
    # every operand lies in a stack: what kernels and products make is not copied
    assert {b.copied for b in report.batches} == {0}
    assert "batch mm bf16 [32, 64] @ [64, 32]: 16 in one call, " in str(report)


def test_missing_gradients_leave_their_rows_out() -> None:
    pair = Pair(LoopMuon, LED)
    pair.run(2)
    for missing in ((0,), (3, 7), tuple(range(6)), (0,)):
        pair.gradients()
        for i in missing:
            pair.params[i].grad = pair.others[i].grad = None
        pair.step()
        pair.check()
    pair.run(2)


@pytest.mark.parametrize(
    "name", ["loop", *(pytest.param(x, marks=SLOW) for x in ("torch", "normuon"))]
)
def test_numbers_that_are_none(name: str) -> None:
    """Zeros, infinities, NaN and the largest numbers, in some matrices alone."""
    pair = Pair({"torch": muon, **EVERY}[name], WHOLE)
    pair.run(1)
    for number in (0.0, -0.0, 1e-42, 3e38, float("inf"), float("nan")):
        pair.gradients()
        for params in (pair.params, pair.others):
            params[0].grad.fill_(number)  # type: ignore[union-attr]
            params[3].grad[0, 1] = number  # type: ignore[index]
        pair.step()
        pair.check()


def test_matrices_of_one_row_or_column_and_empty_ones() -> None:
    shapes = [(1, 9)] * 2 + [(9, 1)] * 2 + [(1, 1)] * 2 + [(0, 4)] * 2
    pair = Pair(LoopMuon, shapes)
    pair.run(4)
    assert any(x.reason == "an empty product" for x in pair.report.alone)


@pytest.mark.slow
def test_a_matrix_that_is_given_another_shape() -> None:
    pair = Pair(LoopMuon, WHOLE)
    pair.run(2)
    for params, optimizer in (
        (pair.params, pair.plain),
        (pair.others, pair.compiled),
    ):
        p = params[0]
        p.grad = None
        p.data = p.detach()[:20].clone()
        state = optimizer.state[p]
        state["momentum_buffer"] = state["momentum_buffer"][:20].clone()
    pair.shapes = [p.shape for p in pair.params]
    pair.run(3)


@pytest.mark.slow
def test_large_groups_are_several_calls() -> None:
    size = 3 * 32 * 48 * 4
    pair = Pair(LoopMuon, WHOLE + [(32, 48)] * 3, batch_bytes=size)
    pair.run(3)
    assert {b.rows for b in pair.report.batches} == {2, 3}


def test_where_bits_would_differ_there_are_single_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Probes, "_answer", lambda *_: "")
    pair = Pair(muon, WHOLE)
    pair.run(3)
    assert pair.report.batches == []
    assert ("mm bf16 [32, 48] @ [48, 32]", 20, OTHER) in pair.report.alone
    assert {x.reason for x in pair.report.alone} == {OTHER}
    assert sum(x.calls for x in pair.report.alone) == pair.calls() == 6 * 15


@pytest.mark.slow
def test_other_circumstances_are_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found for one number of threads does not hold for another."""
    pair = Pair(LoopMuon, WHOLE)
    pair.run(2)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        pair.run(2)
    finally:
        torch.set_num_threads(before)
    now = batches.circumstances()._replace(threads=77)
    monkeypatch.setattr(batches, "circumstances", lambda: now)
    monkeypatch.setattr(Probes, "_answer", lambda *_: "")
    pair.run(2)
    assert pair.calls() == 6 * 15
    pair.check()


class Scaled(LoopMuon):
    """One product whose scales are those of the group."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        x = g * 0.5
        p.add_(torch.addmm(x, x, x.mT, beta=group["momentum"], alpha=group["lr"]))


@pytest.mark.slow
def test_scales_that_become_zero_or_one() -> None:
    pair = Pair(Scaled, [(16, 16)] * 4)
    pair.run(2)
    assert sum(b.calls for b in pair.report.batches) == 1
    for scale in (0.0, 1.0, -1.0, 0.25):
        for optimizer in (pair.plain, pair.compiled):
            optimizer.param_groups[0].update(momentum=scale, lr=1 - scale)
        pair.run(2)


def test_fast_batches_what_has_other_bits() -> None:
    pair = Pair(muon, [(9, 8)] * 4, numerics="fast")
    for _ in range(3):
        pair.gradients()
        pair.step()
    assert sum(b.calls for b in pair.report.batches) == 15
    for p, q in zip(pair.params, pair.others, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-2, atol=1e-3)


def test_an_error_in_a_batch_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_chains", lambda *_: None)
    pair = Pair(LoopMuon, WHOLE, torch.bfloat16)
    pair.run(2)
    done: list[str] = []

    def breaks(op: str, *args: Any) -> None:
        done.append(op)
        if len(done) == 7:
            raise MemoryError("no room")
        torch_call(op, *args)

    torch_call = batches.batched
    monkeypatch.setattr(batches, "batched", breaks)
    pair.gradients()
    with pytest.raises(MemoryError, match="no room"):
        pair.compiled.step()
    pair.check()
    monkeypatch.undo()
    pair.step()
    pair.check()
