"""Small products that no batch has: one call of C, with eager's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fuseopt import compat
from fuseopt.runtime import series
from fuseopt.runtime.memory import Memory
from fuseopt.runtime.probes import Probes
from fuseopt.runtime.series import Series
from tests.numerics.test_products import Pair
from tests.papers.matrices import LoopMuon, Soap

SHAPES = [(12, 16)] * 3 + [(16, 12)] * 2
#: Products of one lane in a step of Muon, and of SOAP.
MUON, SOAP = 15, 10


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No batch has the bits of single calls."""
    monkeypatch.setattr(Probes, "_answer", lambda *_: "")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count the calls of externs from Python, and the products that C calls."""
    found = {"python": 0, "c": 0, "series": 0}
    run, prepared = Series.run, Memory.run

    def counted(self: Series, memory: Memory) -> int:
        n = run(self, memory)
        found["series"] += 1
        found["c"] += n
        return n

    def by_python(self: Memory, extern: Any) -> None:
        found["python"] += 1
        prepared(self, extern)

    monkeypatch.setattr(Series, "run", counted)
    monkeypatch.setattr(Memory, "run", by_python)
    return found


def counts(pair: Pair, made: dict[str, int]) -> dict[str, int]:
    """The counts of one compiled step."""
    pair.gradients()
    pair.plain.step()
    made.update(dict.fromkeys(made, 0))
    pair.compiled.step()
    pair.check()
    return dict(made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_all_products_in_a_row_are_one_call(
    dtype: torch.dtype, made: dict[str, int]
) -> None:
    def polynomial(params: Any, dtype: Any = None) -> Any:
        return Polynomial(params, dtype)

    pair = Pair(polynomial, SHAPES, dtype)
    pair.run(4)
    found = counts(pair, made)
    assert found == {"python": 0, "c": 5 * MUON, "series": 1}
    pair.run(3)


class Polynomial(LoopMuon):
    """Muon whose products follow each other, with no kernel between them."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        x = (g * 0.0625).to(self.dtype)
        for _ in range(5):
            gram = x @ x.mT
            update = torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315)
            x = torch.addmm(x, update, x, beta=3.4445)
        p.sub_(x, alpha=group["lr"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_operands_of_the_caller_are_those_of_each_call(
    dtype: torch.dtype, made: dict[str, int]
) -> None:
    """Gradients and states that move, change layouts, and are missing."""
    pair = Pair(Soap, SHAPES, dtype)
    pair.run(3)
    found = counts(pair, made)
    assert found["python"] < found["c"]
    sides = ((pair.params, pair.plain), (pair.others, pair.compiled))
    ways: tuple[Callable[[Any], Any], ...] = (
        torch.clone,
        lambda t: t.mT.contiguous().mT,
        torch.Tensor.contiguous,
    )
    for turn, way in enumerate((*ways, *ways)):
        pair.gradients()
        for params, optimizer in sides:
            for p in params[::2]:
                for name in ("left", "qright"):
                    optimizer.state[p][name] = way(optimizer.state[p][name])
            params[turn % 5].grad = None
        pair.step()
        pair.check()


def test_an_error_in_c_is_met_again_in_python(
    made: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What C did not do, Python does, from the product that failed on."""
    pair = Pair(Polynomial, SHAPES)
    pair.run(3)
    run = Series.run

    def stops(self: Series, memory: Memory) -> int:
        assert self._run is not None
        self._run.struct.n = 7
        return run(self, memory)

    monkeypatch.setattr(Series, "run", stops)
    found = counts(pair, made)
    assert found == {"python": 5 * MUON - 7, "c": 7, "series": 1}
    monkeypatch.setattr(Series, "run", lambda *_: 0)
    assert counts(pair, made)["python"] == 5 * MUON
    pair.run(2)


def test_without_functions_in_c(
    made: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(series, "product_functions", lambda: None)
    pair = Pair(Polynomial, SHAPES)
    pair.run(3)
    assert counts(pair, made) == {"python": 5 * MUON, "c": 0, "series": 1}


def test_a_large_result_is_memory_of_aten(made: dict[str, int]) -> None:
    pair = Pair(Polynomial, [(136, 136)] * 2)
    pair.run(2)
    assert counts(pair, made) == {"python": 2 * MUON, "c": 0, "series": 0}


def test_functions_compute_products() -> None:
    found = compat.product_functions()
    assert found is not None
    assert set(found) == {"mm", "addmm", "bmm", "baddbmm"}
    assert all(found.values())
