"""Products of matrices on the simulated accelerator: batches, branches, one graph."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fuseopt.compiler.session import session
from fuseopt.runtime import run_tables
from fuseopt.runtime.probes import Probes
from fuseopt.runtime.sites import Site
from tests.papers.matrices import A, B, C, LoopMuon, Matrices
from tests.simulated.twins import SimTwins

pytest.importorskip("triton")

WIDE, TALL, SQUARE = (16, 32), (32, 16), (24, 24)
MIXED = [WIDE] * 4 + [TALL] * 3 + [SQUARE] * 2
OTHER = "one batched call has other bits here"
#: Names of ATen's products, and what a step's products may call besides.
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


class Polynomial(LoopMuon):
    """Muon without its norm, which a device adds in another order than the CPU."""

    def update(self, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
        if not state:
            state["momentum_buffer"] = torch.zeros_like(g)
        buffer = state["momentum_buffer"]
        buffer.mul_(0.5).add_(g)
        tall = g.size(0) > g.size(1)
        x = (buffer * 0.0625).to(self.dtype)
        x = x.mT if tall else x
        for _ in range(5):
            gram = x @ x.mT
            x = torch.addmm(
                x, torch.addmm(gram, gram, gram, beta=B, alpha=C), x, beta=A
            )
        p.sub_(x.mT if tall else x, alpha=group["lr"])


def products(found: Any) -> int:
    return sum(n for name, n in found.ops.items() if name.split(".")[0] in PRODUCTS)


def twins_of(
    shapes: Any, dtype: torch.dtype = torch.float32, **options: Any
) -> SimTwins:
    return SimTwins(partial(Polynomial, dtype=dtype), shapes, check=True, **options)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_graph_of_a_call_for_each_product_of_a_shape(
    sim: ModuleType, dtype: torch.dtype
) -> None:
    # bfloat16 of 16 x 16 has other bits in a batch, on a CPU
    scale = 2 if dtype == torch.bfloat16 else 1
    twins = twins_of([(scale * n, scale * k) for n, k in MIXED], dtype)
    twins.step()
    twins.step()
    with sim.counting() as first:
        twins.step()
    assert (first.captures, first.replays) == (1, 1)
    assert products(first) == 45
    twins.set_grads()
    sim.synchronize()
    with sim.counting() as later:
        twins.optimizer.step()
    twins.step_eager()
    # what is replayed are 45 products and two kernels
    assert (later.launches, later.captures, later.replays) == (0, 0, 1)
    assert (later.ops, later.d2h, later.allocations) == ({}, 0, 0)
    assert twins.differences() == []
    report = twins.report
    assert report.cudagraph == "captured"
    assert (report.externs, report.alone) == ([], [])
    assert sum(b.calls for b in report.batches) == 45
    assert {b.copied for b in report.batches} == {0}


@pytest.mark.slow
def test_what_has_other_bits_in_a_batch_is_a_branch_of_one_graph(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Probes, "_answer", lambda *_: "")
    series: list[int] = []
    beside = Site.beside

    def counted(site: Site, calls: Any, memory: Any) -> None:
        series.append(len(calls))
        beside(site, calls, memory)

    monkeypatch.setattr(Site, "beside", counted)
    twins = twins_of(MIXED)
    twins.step()
    twins.step()
    assert series == []
    with sim.counting() as first:
        twins.step()
    assert (first.captures, first.replays) == (1, 1)
    assert products(first) == 9 * 15
    # a branch for each matrix
    assert series == [9]
    for _ in range(3):
        twins.step(stay=True)
        with sim.counting() as later:
            twins.step()
        assert (later.launches, later.captures, later.replays) == (0, 0, 1)
        assert later.ops == {}
        assert twins.differences() == []
    assert {x.reason for x in twins.report.alone} == {OTHER}
    assert "9 branches" in str(twins.report)


@pytest.mark.slow
def test_batches_and_single_calls_in_one_graph(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is batched is one branch, each other matrix another one."""
    way = Probes.way

    def not_wide(self: Any, trial: Any, folder: Any) -> Any:
        narrow = 32 not in trial.layouts[-1][0]
        return way(self, trial, folder) if narrow else ""

    monkeypatch.setattr(Probes, "way", not_wide)
    twins = twins_of(MIXED)
    for _ in range(5):
        twins.step()
        assert twins.differences() == []
    assert twins.report.cudagraph == "captured"
    assert twins.report.batches
    assert twins.report.alone


def test_settings_of_products_are_those_of_each_call(sim: ModuleType) -> None:
    """A graph holds the products that settings chose when it was captured."""
    twins = twins_of([WIDE] * 2)
    for _ in range(4):
        twins.step()
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    try:
        matmul.allow_bf16_reduced_precision_reduction = not before
        with sim.counting() as other:
            twins.step()
        assert (other.captures, other.replays) == (0, 0)
        with sim.counting() as other:
            twins.step()
        assert (other.captures, other.replays) == (1, 1)
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before
    with sim.counting() as again:
        twins.step()
    assert (again.captures, again.replays) == (0, 1)
    assert twins.differences() == []


def test_a_probe_waits_until_a_capture_has_ended(
    sim: ModuleType, tmp_path: Path
) -> None:
    twins = twins_of([WIDE] * 2)
    twins.step()
    (batch, *_) = twins.report.batches
    assert batch.rows == 2
    graph = sim.Graph()
    own = sim.Stream()
    trials = [t for t, *_ in session.probes._known if t.device == "sim:0"]
    assert trials
    fresh, folder = Probes(), str(tmp_path)
    with sim.stream(own):
        graph.capture_begin()
        try:
            torch.ones(1, device="sim").add_(1)  # a graph that holds something
            assert fresh.way(trials[0], folder) is None
        finally:
            graph.capture_end()
    assert fresh.way(trials[0], folder) == "dense"
    elsewhere = trials[0]._replace(device="sim:7")
    assert fresh.way(elsewhere, folder) is None
    sim.fail_allocation(3)
    assert Probes().way(trials[0], str(tmp_path / "other")) is None


@pytest.mark.parametrize(
    ("shapes", "calls"), [([(16, 24)] * 4 + [(24, 16)] * 3, 30), ([(16, 48)] * 3, 19)]
)
def test_fast_numerics_batch_without_a_probe(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch, shapes: Any, calls: int
) -> None:
    """Wide matrices are iterated on their Gram matrices, in the same graph."""
    monkeypatch.setattr(Probes, "_answer", lambda *_: "")
    twins = twins_of(shapes, numerics="fast")
    twins.step()
    twins.step()
    with sim.counting() as found:
        twins.step()
    assert products(found) == calls
    assert twins.report.cudagraph == "captured"
    for p, q in zip(twins.params, twins.eager_params, strict=True):
        torch.testing.assert_close(p.cpu(), q, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_missing_gradients_and_other_ones(sim: ModuleType) -> None:
    twins = twins_of([WIDE] * 4)
    for missing in ((), (), (1,), (0, 3), (), (1,)):
        twins.set_grads()
        for i in missing:
            twins.params[i].grad = twins.eager_params[i].grad = None
        twins.step_eager()
        twins.optimizer.step()
        assert twins.differences() == []


def test_memory_that_runs_out_changes_nothing(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_tables, "KEPT_REMOTE", 0)
    twins = twins_of([WIDE] * 4, cudagraphs=False)
    for _ in range(2):
        twins.step()
    twins.set_grads()
    before = [p.detach().cpu() for p in twins.params]
    sim.fail_allocation(1)
    with pytest.raises(torch.OutOfMemoryError):
        twins.optimizer.step()
    for p, q in zip(twins.params, before, strict=True):
        assert torch.equal(p.cpu(), q)
    twins.step_eager()
    twins.optimizer.step()
    assert twins.differences() == []


@pytest.mark.slow
def test_matrices_on_two_devices(sim: ModuleType) -> None:
    twins = twins_of([WIDE] * 4)
    for i, p in enumerate(twins.params):
        p.data = p.detach().to(f"sim:{i // 2}")
    for _ in range(4):
        generator = torch.Generator().manual_seed(1)
        for p, q in zip(twins.params, twins.eager_params, strict=True):
            q.grad = torch.randn(q.shape, generator=generator)
            p.grad = q.grad.to(p.device)
        twins.step_eager()
        twins.optimizer.step()
        assert twins.differences() == []
    assert sorted(b.rows for b in twins.report.batches) == [2] * len(
        twins.report.batches
    )
    assert twins.report.alone == []


def test_memory_of_a_branch_is_not_used_again_beside_it(sim: ModuleType) -> None:
    """A matrix that the first stream made is read on the second one and given back;
    then the first stream makes another one.
    """
    site = Site(torch.device("sim", 0))
    alive: dict[str, Tensor] = {}
    memory: Any = SimpleNamespace(alive=lambda: [*alive.values()])
    out = torch.zeros(64, device="sim")
    graph = sim.Graph()
    places: list[int] = []

    def make(name: str, number: float) -> None:
        alive[name] = torch.empty(64, device="sim").fill_(number)

    def read() -> None:
        x = alive.pop("x")
        places.append(x.data_ptr())
        out.copy_(x)

    with sim.stream(site.stream):
        graph.capture_begin()
        site.beside([partial(make, "x", 3.0), dict], memory)
        site.beside([dict, read, dict, dict, partial(make, "y", 7.0)], memory)
        graph.capture_end()
    graph.replay()
    assert set(out.tolist()) == {3.0}
    assert places != [alive["y"].data_ptr()]


class Squares(Matrices):
    """Multiplies gradients, which lie apart."""

    def update(self, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
        p.sub_(g @ g.mT @ p, alpha=1e-3)


@pytest.mark.parametrize("first", [0, 1, 16])
def test_unaligned_matrices_of_the_caller_are_single_calls(
    sim: ModuleType, first: int
) -> None:
    """A library may choose another kernel where a matrix begins elsewhere."""
    twins = SimTwins(Squares, [(8, 8)] * 4, check=True)
    for _ in range(5):
        twins.set_grads()
        for p in (*twins.params, *twins.eager_params):
            assert p.grad is not None
            place = torch.empty(p.numel() + first, device=p.device)[first:]
            p.grad = place.view(p.shape).copy_(p.grad)
        twins.step_eager()
        with sim.counting() as found:
            twins.optimizer.step()
        assert twins.differences() == []
    # the second product reads the results of the first, and parameters
    assert products(found) == (4 + 1 if first == 1 else 2)
