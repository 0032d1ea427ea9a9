"""What steps seldom see: NaN and inf, whole numbers and masks as state, gradients of
another dtype, and more elements than 31 bits can count.
"""

from __future__ import annotations

import re
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import symbolic_trace

import fuseopt
from fuseopt.backend import fuseopt as backend
from fuseopt.capture import capture
from fuseopt.codegen import CppTarget
from fuseopt.codegen.triton.kernel import TritonTarget
from fuseopt.ir.graph import Kernel
from fuseopt.ir.verifier import check_graph, check_schedule
from fuseopt.runtime.cpp.table import TensorLayout, VariantTable
from fuseopt.runtime.triton.build import TritonBuilder
from fuseopt.runtime.triton.table import triton_factory
from fuseopt.scheduler import schedule
from tests.steps import Twins, eager_step, same_bits, set_grads

# ---------------------------------------------------------------- values, types


@pytest.mark.family(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("AdamW", {"amsgrad": True}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}),
        ("RMSprop", {"centered": True}),
        ("Adamax", {}),
    ],
)
def test_nan_and_inf_in_gradients(
    name: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """They flow as in eager, and stay where they are."""
    t = Twins(name, [(40,), (5,), ()], dtype, **options)
    assert t.step() == []
    for bad in (float("nan"), float("inf"), -float("inf")):
        t.seed += 1
        set_grads(t.eager_params, t.params, t.seed)
        for params in (t.eager_params, t.params):
            params[0].grad[3] = params[1].grad[0] = bad
        assert t.step(grads=False) == []
    assert t.step() == []
    assert not t.params[0].isfinite().all()
    assert t.params[0][4:].isfinite().all()
    assert {r.launches for r in fuseopt.reports()} == {1}


class Masked(torch.optim.Optimizer):
    """Moves parameters where a mask is set; counts how often in whole numbers."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mask"] = torch.zeros_like(p, dtype=torch.bool)
                    state["count"] = torch.zeros_like(p, dtype=torch.int32)
                    state["total"] = torch.zeros((), dtype=torch.int64)
                state["mask"].copy_(p.grad > 0)
                state["count"].add_(state["mask"])
                state["total"].add_(1).mul_(2)
                p.sub_(torch.where(state["mask"], p.grad, 0.0) * group["lr"])
                p.div_(1 + state["count"])
                state["mask"].logical_not_()


@pytest.mark.parametrize("rate", [1e37, 1e39, 1e308, float("inf")])
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_rates_beyond_float32(name: str, rate: float) -> None:
    """As docs/numerics.md has it: eager raises, or has the bits of a compiled step."""
    twins = Twins(name, [(5,), (3, 4)], lr=0.1)
    assert not twins.step()
    for optimizer in twins.both():
        optimizer.param_groups[0]["lr"] = rate
    set_grads(twins.eager_params, twins.params, 2)
    twins.step_function()
    # AdamW divides a rate by less than one, which makes the largest ones infinite
    if 1e39 <= rate < (1e308 if name == "AdamW" else float("inf")):
        with pytest.raises(RuntimeError, match="without overflow"):
            eager_step(twins.eager)
        assert not twins.params[0].detach().isfinite().any()
    else:
        eager_step(twins.eager)
        assert not twins.differences()


def test_whole_numbers_and_masks_as_state() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 3), (5,), ()]
    params = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    eager, mine = Masked(params), Masked(others)
    step = torch.compile(mine.step, backend=backend, options={"fallback": "error"})
    for seed in range(4):
        set_grads(params, others, seed)
        eager.step()
        step()
        for p, q in zip(params, others, strict=True):
            assert same_bits(q.detach(), p.detach())
            for key, value in eager.state[p].items():
                assert same_bits(mine.state[q][key], value), key
    assert fuseopt.reports()[-1].launches == 1


MIXED = [
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float64),
]


def give(t: Twins, dtype: torch.dtype, seed: int) -> None:
    """The same gradients of `dtype` for both runs."""
    generator = torch.Generator().manual_seed(seed)
    for p, q in zip(t.eager_params, t.params, strict=True):
        grad = torch.randn(p.shape, generator=generator).to(dtype)
        for x in (p, q):
            x.grad = None
            x.grad_dtype = dtype  # type: ignore[attr-defined]
            x.grad = grad.clone()


@pytest.mark.family(4)
@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop"])
@pytest.mark.parametrize(("own", "other"), MIXED)
def test_gradients_that_change_their_dtype(
    name: str, own: torch.dtype, other: torch.dtype
) -> None:
    t = Twins(name, [(40,), (5, 3)], own, lr=0.1)
    assert t.step() == []
    give(t, other, 1)
    try:
        eager_step(t.eager)
    except RuntimeError as error:  # it refuses a lerp of two dtypes, half way
        with (
            pytest.warns(RuntimeWarning, match="which Dynamo cannot trace"),
            pytest.raises(RuntimeError, match=str(error).split()[0]),
        ):
            t.step_function()
        return
    t.step_function()
    assert t.differences() == []
    give(t, own, 2)
    eager_step(t.eager)
    t.step_function()
    assert t.differences() == []


def test_gradients_of_another_dtype_from_the_start() -> None:
    """Dynamo does not trace these: they run in eager, which a warning says."""
    t = Twins("SGD", [(40,), (5, 3)], lr=0.1, momentum=0.9)
    give(t, torch.bfloat16, 1)
    with pytest.warns(RuntimeWarning, match="which Dynamo cannot trace"):
        t.step_function()
    eager_step(t.eager)
    assert t.differences() == []


# ---------------------------------------------------------------- more than 2**31

FAR = 2**31 + 8


def far_tensors() -> list[Tensor]:
    """Two rows 2 GiB apart, and one behind them; nobody touches what lies between."""
    whole = torch.empty(FAR + 16, dtype=torch.int8)
    whole[:4] = torch.arange(4)
    whole[FAR:] = torch.arange(16)
    return [whole.as_strided((2, 3), (FAR, 1)), whole[FAR + 4 :]]


def test_offsets_beyond_31_bits() -> None:
    def step(rows: Tensor, last: Tensor, g: Tensor, h: Tensor) -> None:
        torch._foreach_mul_([rows, last], 2)
        torch._foreach_add_([rows, last], [g, h])

    extra = [torch.ones(2, 3, dtype=torch.int8), torch.ones(12, dtype=torch.int8)]
    mine, theirs = far_tensors(), far_tensors()
    torch.compile(step, backend=backend, options={"fallback": "error"})(*mine, *extra)
    step(*theirs, *extra)
    assert all(same_bits(a, b) for a, b in zip(mine, theirs, strict=True))
    assert [r.launches for r in fuseopt.reports()] == [1]


def huge(*shapes: tuple[int, ...]) -> tuple[Any, list[Kernel], list[Tensor]]:
    """A captured and scheduled step over meta tensors: params, then grads."""

    def step(a: Tensor, b: Tensor, g: Tensor, h: Tensor) -> None:
        torch._foreach_mul_([a, b], 0.9)
        torch._foreach_add_([a, b], [g, h])

    tensors = [torch.empty(s, device="meta") for s in (*shapes, *shapes)]
    tensors[2] = tensors[2].t().contiguous().t()  # of other strides
    captured = capture(symbolic_trace(step), tensors, vector_library=True)
    plan = schedule(captured.graph)
    check_graph(captured.graph)
    check_schedule(captured.graph, plan)
    return captured, [k for k in plan.steps if isinstance(k, Kernel)], tensors


HUGE = {
    "one tensor": ((2**16 + 1, 2**16), (5,)),
    "all together": ((2**15, 2**15), (2**30 + 3,)),
    "more than 2**40": ((2**21, 2**20), (5,)),
}


@pytest.mark.parametrize("name", HUGE)
def test_tables_of_huge_tensors(name: str) -> None:
    """Sizes, strides and places of elements, for C++."""
    captured, (kernel,), tensors = huge(*HUGE[name])
    buffers = captured.graph.buffers
    layouts = {b: TensorLayout(x.shape, x.stride) for b, x in enumerate(buffers)}
    (variant,) = kernel.variants
    table = VariantTable(variant, {b: b for b in layouts}, layouts)
    sizes = [t.numel() for t in tensors[:2]]
    assert list(table.start) == [0, sizes[0], sum(sizes)]
    assert table.start.itemsize == table.geometry.itemsize == 8
    rows, columns = tensors[0].shape
    assert list(table.geometry[:3]) == [2, rows, columns]
    strides = {
        tuple(table.geometry[i : i + 2]) for i in range(3, len(table.geometry), 2)
    }
    assert strides == {(columns, 1), (1, rows)}
    report = fuseopt.compiler.report.kernel_report(captured.graph, kernel, "cpp", "")
    assert report.elements == sum(sizes)


@pytest.mark.parametrize("name", ["one tensor", "all together"])
def test_chunks_of_huge_tensors(name: str, tmp_path: Path) -> None:
    """The chunk table that a GPU reads covers each element once."""
    captured, (kernel,), tensors = huge(*HUGE[name])
    buffers = captured.graph.buffers
    layouts = {b: TensorLayout(x.shape, x.stride) for b, x in enumerate(buffers)}
    source = TritonTarget().render(kernel)
    make = triton_factory(source, str(tmp_path), "cpu", TritonBuilder(), True)
    table: Any = make(
        kernel, array("Q", [0] * len(buffers)), {b: b for b in layouts}, layouts
    )
    # behind the head of the table
    chunks, block = table.constants[0][1:].long(), table.module.sizes["BLOCK"]
    places = chunks[:, 1].unique()
    assert len(places) == 2
    for place, t in zip(places, tensors[:2], strict=True):
        ordinals = chunks[chunks[:, 1] == place, 2]
        # a program runs through `span` chunks
        expected = -(-t.numel() // (block * table.span))
        assert torch.equal(ordinals, torch.arange(expected))
        assert int(table.lanes[place + 1]) == t.numel()
    assert len(chunks) < 2**31


def test_offsets_of_generated_source_have_64_bits() -> None:
    """No address is computed from fewer bits, in C++ or in Triton."""
    _, (kernel,), _ = huge(*HUGE["one tensor"])
    cpp = CppTarget().render(kernel).text
    counted = r"\b(?:unsigned|int|int32_t|uint32_t|long|size_t) +(\w+) *(?:=|;)"
    step = cpp[cpp.index("static void row0") if "static void row0" in cpp else 0 :]
    # x: the register of a thread's float mode
    assert set(re.findall(counted, step)) <= {"v", "i", "even", "tail", "x"}
    for name in ("start", "geometry", "strided"):
        assert f"const int64_t* {name};" in cpp
    assert re.search(r"span0\(const Table& t, int64_t lane, int64_t begin", cpp)
    triton = TritonTarget().render(kernel).text
    assert "start = ordinal.to(tl.int64) * (span * BLOCK)" in triton
    assert "(1 + tl.program_id(0).to(tl.int64)) * 4" in triton
    narrow = re.findall(r"(\w+) = .*\.to\(tl\.int32\)", triton)
    # elements of one chunk, and dimensions of one tensor
    assert set(narrow) == {"count", "dims"}
