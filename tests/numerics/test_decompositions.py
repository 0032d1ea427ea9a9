"""Decompositions of many matrices: one call of ATen, eager's bits, eager's errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fuseopt
from fuseopt.compiler import pipeline
from fuseopt.runtime import batches, matrix_trials
from fuseopt.runtime.probes import Probes
from tests.numerics.test_products import Pair, Shapes
from tests.papers.decompositions import OPS, Decomposing, gram
from tests.papers.matrices import DECOMPOSING

SLOW = pytest.mark.slow
WHOLE = [(12, 20)] * 3 + [(20, 12)] * 2 + [(16, 16)] * 2
LED = [(12, 20)] * 7 + [(20, 12)] * 6 + [(16, 16)] * 6
CHECK = "_linalg_check_errors"


def of(how: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    return lambda params, dtype=None: Decomposing(params, how)


@pytest.mark.family(8)
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shapes", [WHOLE, LED], ids=["whole", "led"])
def test_eager_bits_over_many_steps(
    name: str, dtype: torch.dtype, shapes: Shapes
) -> None:
    make, op = OPS[name]
    pair = Pair(make, shapes, dtype)
    pair.run()
    rows = [b.rows for b in pair.report.batches if b.op == op]
    assert sum(rows) >= len(shapes)
    assert not any(x.what.startswith(op) for x in pair.report.alone)
    assert not any(op in name for name, _ in pair.report.externs)


def test_a_step_makes_one_call_for_a_shape() -> None:
    pair = Pair(OPS["solve"][0], [(12, 20)] * 5)
    pair.run(3)
    found = [(b.op, b.rows, b.calls) for b in pair.report.batches]
    assert ("_linalg_solve_ex", 5, 1) in found
    assert (CHECK, 5, 1) in found
    text = (
        "batch _linalg_solve_ex f32 [12, 12], [12, 20]: 5 in one call, 1 calls a step"
    )
    assert text in str(pair.report)


# ---------------------------------------------------------------- what is refused


def raised(step: Callable[[], object]) -> tuple[type, str]:
    with pytest.raises(RuntimeError) as found:
        step()
    return found.type, str(found.value)


def solve(g: Tensor) -> Tensor:
    return torch.linalg.solve(g @ g.mT, g)


def eigh(g: Tensor) -> Tensor:
    return torch.linalg.eigh(g @ g.mT)[1] @ g


def cholesky(g: Tensor) -> Tensor:
    return torch.linalg.cholesky(g @ g.mT) @ g


@pytest.mark.parametrize(
    ("how", "number", "where"),
    [(solve, 0.0, 1), (eigh, float("nan"), 2), (cholesky, 0.0, 0), (solve, 0.0, 3)],
)
def test_a_matrix_that_is_refused_raises_what_eager_raises(
    how: Callable[[Tensor], Tensor], number: float, where: int
) -> None:
    """The message is that of a single matrix, and the step has changed nothing."""
    pair = Pair(of(how), [(12, 20)] * 4)
    pair.run(2)
    assert pair.report.batches
    before = [p.detach().clone() for p in pair.others]
    kept = [s["m"].clone() for s in pair.compiled.state.values()]
    pair.gradients()
    for params, optimizer in (
        (pair.params, pair.plain),
        (pair.others, pair.compiled),
    ):
        optimizer.state[params[where]]["m"].zero_()
        params[where].grad.fill_(number)  # type: ignore[union-attr]
    kept[where].zero_()
    assert raised(pair.plain.step) == raised(pair.compiled.step)
    assert all(map(torch.equal, before, pair.others))
    after = [s["m"] for s in pair.compiled.state.values()]
    assert all(map(torch.equal, kept, after))


def test_after_an_error_steps_go_on() -> None:
    pair = Pair(of(solve), [(12, 20)] * 4)
    pair.run(2)
    for p in pair.others:
        p.grad.zero_()  # type: ignore[union-attr]
    kept = [s["m"].clone() for s in pair.compiled.state.values()]
    for s in pair.compiled.state.values():
        s["m"].zero_()
    raised(pair.compiled.step)
    for s, m in zip(pair.compiled.state.values(), kept, strict=True):
        s["m"].copy_(m)
    pair.run(3)


@pytest.mark.parametrize("name", ["qr", "svd", "solve_ex", "triangular"])
def test_odd_shapes(name: str) -> None:
    """Vectors, one number, and empty matrices beside others."""
    shapes = [(1, 9)] * 2 + [(9, 1)] * 2 + [(1, 1)] * 2 + [(0, 4)] * 2 + [(6, 4)] * 2
    pair = Pair(OPS[name][0], shapes)
    pair.run(4)
    assert any(b.op == OPS[name][1] for b in pair.report.batches)


def test_large_matrices_are_single_calls() -> None:
    pair = Pair(OPS["qr"][0], [(66, 66)] * 2)
    pair.run(2)
    assert {x.reason for x in pair.report.alone if "qr" in x.what} == {
        "it takes longer than a call"
    }


def test_a_decomposition_of_batches_is_a_single_call() -> None:
    pair = Pair(of(lambda g: torch.linalg.qr(g)[0]), [(3, 8, 8)] * 2)
    pair.run(2)
    assert {x.reason for x in pair.report.alone} == {"it is a batch already"}


def test_a_decomposition_that_the_step_keeps() -> None:
    """New state is not memory of a stack."""

    class Keeping(Decomposing):
        def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
            if state:
                p.sub_(state["q"], alpha=0.1)
            state["q"] = torch.linalg.qr(g)[0]

    pair = Pair(lambda params, dtype=None: Keeping(params, gram), [(8, 8)] * 3)
    pair.run(6)


# ---------------------------------------------------------------- other calls


def test_missing_gradients_and_numbers_that_are_none() -> None:
    pair = Pair(OPS["qr"][0], LED)
    pair.run(2)
    for turn, missing in enumerate(((0,), (3, 8), tuple(range(7)), ())):
        pair.gradients()
        for params in (pair.params, pair.others):
            for i in missing:
                params[i].grad = None
            params[9].grad.fill_((0.0, float("inf"), 1e-42, 3e38)[turn])  # type: ignore[union-attr]
        pair.step()
        pair.check()


@pytest.mark.parametrize("name", ["turning", "kron"])
def test_states_of_other_places_and_layouts(name: str) -> None:
    """C copies operands from their addresses: of these tensors, not of the last ones.

    A transposed state of the same shape must not be read as if it were contiguous.
    """
    pair = Pair(DECOMPOSING[name], [(12, 16)] * 4)
    pair.run(4)
    sides = ((pair.params, pair.plain), (pair.others, pair.compiled))
    ways: Sequence[Callable[[Tensor], Tensor]] = (
        torch.clone,
        lambda t: t.mT.contiguous().mT,
        lambda t: torch.cat([t, t], dim=1)[:, : t.size(1)],
        lambda t: torch.cat([torch.zeros(3), t.flatten()])[3:].view(t.shape),
        torch.Tensor.contiguous,
    )
    for way in ways:
        for params, optimizer in sides:
            for p in params[::2]:
                state = optimizer.state[p]
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.dim() == 2:
                        state[key] = way(value)
        for turn in range(2):
            pair.gradients()
            for params, _ in sides:
                for p in params[1::2]:
                    assert p.grad is not None
                    p.grad = way(p.grad) if turn else p.grad
            pair.step()
            pair.check()
    for _, optimizer in sides:
        optimizer.load_state_dict(optimizer.state_dict())
    pair.run(3)


def test_lanes_that_share_a_state() -> None:
    """Rows of a batch that are one tensor, and rows that overlap."""

    class Sharing(Decomposing):
        def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
            p.sub_(self.basis @ g, alpha=0.1)
            p.sub_(self.wide[: p.size(0)] @ g, alpha=0.1)

        basis = torch.linalg.qr(torch.ones(12, 12).tril())[0]
        wide = torch.arange(240.0).view(20, 12) / 1000

    shapes = [(12, 20)] * 3
    pair = Pair(lambda params, dtype=None: Sharing(params, gram), shapes)
    pair.run(4)


def test_without_a_helper_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands are copied by ATen, with the same bits, where no chain reads them."""
    monkeypatch.setattr(pipeline, "_chains", lambda *_: None)
    calls: list[int] = []
    together = batches._together
    monkeypatch.setattr(batches, "gathers", lambda *_: False)
    monkeypatch.setattr(
        batches, "_together", lambda *args: calls.append(1) or together(*args)
    )
    pair = Pair(DECOMPOSING["turning"], [(12, 16)] * 3)
    pair.run(4)
    assert calls


def test_fast_needs_no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Probes, "_answer", lambda *_: "")
    pair = Pair(OPS["eigh"][0], [(12, 20)] * 3, numerics="fast")
    for _ in range(3):
        pair.gradients()
        pair.step()
    assert any(b.op == "_linalg_eigh" for b in pair.report.batches)
    for p, q in zip(pair.params, pair.others, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


def test_other_bits_are_single_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Probes, "_answer", lambda *_: "")
    pair = Pair(OPS["cholesky"][0], [(12, 20)] * 3)
    pair.run(3)
    assert pair.report.batches == []
    assert sum(name.startswith("aten.linalg") for name, _ in pair.report.externs) == 3


@pytest.mark.parametrize("wrong", ["last", "strides", "refuses"])
def test_a_probe_sees_one_row_that_differs(
    wrong: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pair = Pair(OPS["qr"][0], [(12, 20)] * 3)
    pair.run(2)
    session = fuseopt.compiler.session.session
    trials = [t for t, *_ in session.probes._known if t.op == "linalg_qr"]
    trial = next(t for t in trials if t.rows == 3)
    assert Probes().way(trial, str(tmp_path / "one")) == "dense"
    each = matrix_trials.each_matrix

    def broken(op: Any, operands: Any, outs: Any, options: Any) -> None:
        each(op, operands, outs, options)
        if wrong == "refuses":
            raise RuntimeError("no")
        if wrong == "last":
            x = outs[0][-1, -1]
            x[-1] = torch.nextafter(x[-1], torch.tensor(9.0))

    monkeypatch.setattr(matrix_trials, "each_matrix", broken)
    if wrong == "strides":
        results = trial.results[0]._replace(stride=(12, 1)), *trial.results[1:]
        trial = trial._replace(results=results)
    assert Probes().way(trial, str(tmp_path / "two")) == ""


# ---------------------------------------------------------------- around them


def test_autocast_around_the_step() -> None:
    """Autocast casts what LAPACK gets; each call keeps eager's bits."""
    pair = Pair(OPS["qr"][0], [(12, 20)] * 3)
    for on in (True, False, True, False):
        pair.gradients()
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            pair.step()
        pair.check()
        known = {"autocast is on", "one batched call has other bits here"}
        assert {x.reason for x in pair.report.alone} <= known
        (qr,) = (b for b in pair.report.batches if b.op == "linalg_qr")
        assert (qr.rows, qr.dtype) == (3, "f32")


def test_a_graph_of_nothing_but_a_batch() -> None:
    """Its operands are the caller's, and the graph returns its results."""

    class Products(Decomposing):
        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["q"] = torch.linalg.qr(p.grad)[0]

    pair = Pair(lambda params, dtype=None: Products(params, gram), [(8, 12)] * 4)
    pair.run(3)
    kept = [s["q"] for s in pair.compiled.state.values()]
    before = [q.clone() for q in kept]
    pair.run(2)
    # a later call writes no result of an earlier one
    assert all(map(torch.equal, kept, before))


def test_no_batch_if_no_bytes_are_allowed() -> None:
    pair = Pair(OPS["qr"][0], [(12, 20)] * 3, batch_bytes=0)
    pair.run(2)
    assert pair.report.batches == []
    assert "two of its matrices have more than batch_bytes" in {
        x.reason for x in pair.report.alone
    }


@pytest.mark.parametrize("name", ["qr", "turning"])
def test_inference_mode_now_and_then(name: str) -> None:
    """Views of the arena that one mode made serve the other one."""
    make = OPS[name][0] if name in OPS else DECOMPOSING[name]
    pair = Pair(make, [(12, 20)] * 3)
    for inference in (False, True, False, True, False):
        pair.gradients()
        with torch.inference_mode(inference):
            pair.step()
        pair.check()
