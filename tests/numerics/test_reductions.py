"""Reductions are stages of kernels: their bits, their launches, their text.

The bits are eager's where what is reduced is dense: sums are taken in the order of
eager's vector loops and threads.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fuseopt
from fuseopt.backend import fuseopt as backend
from tests import ROOT
from tests.steps import DTYPES, name_of, same_bits
from tests.versions import OLD

Step = Callable[..., tuple[Tensor, ...]]


def both(step: Step, *tensors: Tensor, **options: Any) -> tuple[Any, Any, Any]:
    """Results and changed tensors of eager, of the compiled step, and its report."""
    torch._dynamo.reset()

    def copies() -> list[Tensor]:
        made = []
        for t in tensors:
            like = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
            made.append(like.copy_(t))
        return made

    mine, eagers = copies(), copies()
    want = [*step(*eagers), *eagers]
    compiled = torch.compile(step, backend=backend, options=options or None)
    got = [*compiled(*mine), *mine]
    return got, want, fuseopt.reports()[-1]


def check(step: Step, *tensors: Tensor, launches: int = 1) -> None:
    got, want, report = both(step, *tensors)
    assert not report.fallback, str(report)
    assert (report.launches, report.externs) == (launches, []), str(report)
    wrong = [
        i for i, (g, w) in enumerate(zip(got, want, strict=True)) if not same_bits(g, w)
    ]
    assert wrong == []


def whole(x: Tensor, count: Tensor) -> tuple[Tensor, ...]:
    count.add_(1)
    return (
        x.sum(),
        x.mean(),
        x.norm(),
        x.norm(1),
        x.norm(0),
        x.norm(float("inf")),
        x.norm(-float("inf")),
        x.amax(),
        x.min(),
        (x > 1).any(),
        (x < 9).all(),
        (x * x + 1).sum(),
    )


SHAPES = [(1,), (5,), (7, 9), (100,), (33, 77), (3, 4, 5, 6), (301, 403)]


@pytest.mark.family(5)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_whole_tensors_give_eagers_bits(dtype: torch.dtype, threads: int) -> None:
    before = torch.get_num_threads()
    generator = torch.Generator().manual_seed(threads)
    tensors = [torch.randn(s, generator=generator).to(dtype) for s in SHAPES]

    def step(count: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(r for x in xs for r in whole(x, count))

    try:
        torch.set_num_threads(threads)
        check(step, torch.zeros(()), *tensors)
    finally:
        torch.set_num_threads(before)


def lines(dims: Any) -> Step:
    def step(count: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
        count.add_(1)
        return tuple(
            r
            for x in xs
            for r in (
                x.sum(dims),
                x.mean(dims, keepdim=True),
                x.norm(2, dims, keepdim=True),
                x.norm(1, dims),
                x.abs().amax(dims),
                x.amin(dims),
                (x * x).mean(dims),
            )
        )

    return step


@pytest.mark.family(5)
@pytest.mark.parametrize("dims", [-1, -2, 0], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_rows_and_columns_give_eagers_bits(dtype: torch.dtype, dims: int) -> None:
    shapes = [(5, 3), (33, 77), (130, 7), (7, 130), (300, 401), (3, 40, 50), (9, 1)]
    if OLD and dims == -1:
        shapes.pop()  # torch 2.11 gives the norm of a fake tensor a wrong shape there
    generator = torch.Generator().manual_seed(1)
    xs = [torch.randn(s, generator=generator).to(dtype) for s in shapes]
    check(lines(dims), torch.zeros(()), *xs, *[x.transpose(-1, -2) for x in xs[:4]])


def test_several_dimensions_at_once() -> None:
    x = torch.randn(20, 30, 3, 3, generator=torch.Generator().manual_seed(2))
    for dims in ((1, 2, 3), (0, 1), (0, 2), (2, 3)):
        check(lines(dims), torch.zeros(()), x)


def test_a_smaller_operand_beside_what_is_folded() -> None:
    """What it parts is one run of neighbours in the tensor that eager reduces."""
    generator = torch.Generator().manual_seed(9)
    for dims in ((1, 2), (0, 1), (1,), (0, 1, 2)):

        def step(p: Tensor, m: Tensor, dims: Any = dims) -> tuple[Tensor, ...]:
            p.mul_(m)
            return (p.sum(dims), p.mean(dims, keepdim=True), p.norm(2, dims))

        for shape in ((2, 3, 4), (5, 30, 40)):
            p = torch.randn(shape, generator=generator)
            for small in ((shape[0], 1, shape[2]), (1, shape[1], 1), (shape[2],)):
                check(step, p, torch.randn(small, generator=generator))


def test_layouts_that_are_not_dense() -> None:
    """Steps between elements, a transposed operand beside a plain one."""
    base = torch.randn(33, 78, generator=torch.Generator().manual_seed(3))

    def step(base: Tensor) -> tuple[Tensor, ...]:
        base.mul_(2)
        flipped = base.t()
        made = flipped * torch.ones(78, 33)
        views = (base[::2], base[:, ::2], base[1:, 1:], flipped, made)
        return tuple(r for v in views for r in (v.sum(), v.norm(), v.sum(0), v.mean(1)))

    got, want, report = both(step, base)
    assert not report.fallback
    assert not report.externs
    for g, w in zip(got, want, strict=True):
        assert same_bits(g, w)


def test_no_elements_and_one() -> None:
    def step(p: Tensor, none: Tensor, one: Tensor) -> tuple[Tensor, ...]:
        p.add_(1)
        nothing = (none.sum(), none.norm(), none.mean(), none.any(), none.all())
        number = (one.sum(), one.norm(), one.norm(1), one.mean(), one.max())
        return (*nothing, *number, none.sum(0))

    for value in (-3.0, -0.0, float("nan")):
        check(step, torch.zeros(2), torch.zeros(0, 3), torch.tensor(value))


@pytest.mark.family(8)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("threads", [1, 2])
def test_tails_are_those_of_each_call(dtype: torch.dtype, threads: int) -> None:
    """Calls over all elements beside calls over rows, or over what is transposed."""

    def rows(p: Tensor, m: Tensor, row: Tensor) -> tuple[Tensor, ...]:
        p.div_(m).rsqrt_().add_(row, alpha=0.3)
        return (p.norm(), p.sigmoid().sum(), p.sum(1))

    def transposed(p: Tensor, q: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        p.mul_(g).sub_(q, alpha=0.7)
        return (p.norm(), p.sum(0))

    before = torch.get_num_threads()
    generator = torch.Generator().manual_seed(8)

    def some(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator).to(dtype) + 0.1

    try:
        torch.set_num_threads(threads)
        for step, tensors in (
            (rows, (some(40, 50), some(1, 50), some(50))),
            (rows, (some(3, 4, 5), some(3, 1, 5), some(5))),
            (transposed, (some(40, 50), some(40, 50), some(50, 40).t())),
            (transposed, (some(400, 90), some(400, 90), some(90, 400).t())),
        ):
            got, want, report = both(step, *tensors)
            assert not report.externs
            for x, y in zip(got, want, strict=True):
                assert same_bits(x, y)
    finally:
        torch.set_num_threads(before)


@pytest.mark.family(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_that_share_a_lane_fold_it_in_order(
    dtype: torch.dtype, threads: int
) -> None:
    """Eager takes a 2-norm in one thread: ours compute elements side by side, and add
    them in their order. Beside it a sum in parts, and layouts that differ.
    """

    def step(*lanes: Tensor) -> tuple[Tensor, ...]:
        made = []
        for x, y in zip(lanes[::2], lanes[1::2], strict=True):
            x.mul_(0.9).add_(y)
            update = x / (y.abs().sqrt() + 1e-3)
            made += [update.norm(), x.norm(), update.sum()]
        return tuple(made)

    generator = torch.Generator().manual_seed(threads)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    lanes = [random(700001), random(700001), random(100), random(100)]
    lanes += [random(900, 500).t(), random(500, 900)]
    lanes += [random(170, 190, 3, 3), random(190, 170, 3, 3).transpose(0, 1)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        check(step, *lanes)
    finally:
        torch.set_num_threads(before)


@pytest.mark.family(10)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("kernel", [(3, 3), (1, 1), (5, 5), (2, 7), (3, 1)])
def test_gathered_blocks_of_small_kernels(
    dtype: torch.dtype, kernel: tuple[int, int]
) -> None:
    """Of rows, columns and means a block has few numbers, at times fewer than a vector;
    the last block of a lane has fewer still.
    """

    def step(x: Tensor, rows: Tensor, columns: Tensor, mean: Tensor) -> Any:
        rows.lerp_(x.mean(-1, keepdim=True), 0.5)
        columns.lerp_(x.mean(-2, keepdim=True), 0.5)
        made = x * rows + columns / mean
        return made, made.sum(), made.norm()

    generator = torch.Generator().manual_seed(1)
    for n, m in ((1, 1), (3, 5), (64, 9), (31, 67), (128, 128)):
        shape = (n, m, *kernel)
        tensors = [
            (torch.rand(own, generator=generator) + 0.5).to(dtype)
            for own in (shape, (*shape[:3], 1), (n, m, 1, kernel[1]), (n, m, 1, 1))
        ]
        got, want, report = both(step, *tensors)
        assert not report.fallback, str(report)
        assert all(same_bits(g, w) for g, w in zip(got, want, strict=True)), (n, m)


@pytest.mark.family(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_every_level_of_a_sum(dtype: torch.dtype) -> None:
    """Levels of a cascade are zeros until they are reached; sums of -0 are eager's."""

    def step(x: Tensor) -> tuple[Tensor, ...]:
        x.neg_()
        return x.sum(), x.sum(-1), x.sum(0)

    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 140001), (9000, 40), (600, 3), (140, 130), (1, 500)]
    xs = [torch.randn(s, generator=generator).to(dtype) for s in shapes]
    for x in (*xs, torch.zeros(2, 9000, dtype=dtype)):
        got, want, report = both(step, x)
        assert (report.fallback, report.externs) == ("", []), str(report)
        assert all(same_bits(g, w) for g, w in zip(got, want, strict=True)), x.shape


def test_integers_and_bools() -> None:
    def step(p: Tensor, i: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        p.add_(1)
        return (i.sum(), i.amax(), i.min(), b.sum(), b.any(), b.all(), i.sum(0))

    i = torch.arange(-50, 40).reshape(9, 10)
    check(step, torch.zeros(2), i, i > 0)
    check(step, torch.zeros(2), i.to(torch.int8), i < 1000)


def test_nan_and_infinity_spread() -> None:
    x = torch.randn(9, 40, generator=torch.Generator().manual_seed(4))
    for value in (float("nan"), float("inf")):
        x[3, 7] = value
        check(lines(-1), torch.zeros(()), x)
        check(lines(0), torch.zeros(()), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_a_nan_wherever_it_lies(dtype: torch.dtype) -> None:
    """The largest is looked for among many at a time, where none of them is a NaN."""
    tensors = []
    for k, value in enumerate((float("nan"), float("inf"), -float("inf"))):
        for place in (0, 7, 63, 64, 128, 299):
            x = torch.randn(300, generator=torch.Generator().manual_seed(k)).to(dtype)
            x[place] = value
            x[place - 5] = value
            tensors.append(x)

    def step(count: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
        count.add_(1)
        infinity = float("inf")
        each = [(x.amax(), x.amin(), x.norm(infinity), x.norm(-infinity)) for x in xs]
        return tuple(r for results in each for r in results)

    check(step, torch.zeros(()), *tensors)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_lanes_about_as_long_as_a_block(dtype: torch.dtype) -> None:
    """One that is no longer than a block of 128 elements is folded at once."""
    generator = torch.Generator().manual_seed(5)
    sizes = (2, 8, 31, 64, 127, 128, 129, 256, 257)
    tensors = [torch.randn(n, generator=generator).to(dtype) for n in sizes]

    def step(count: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
        count.add_(1)
        each = [(x.sum(), x.norm(), x.amax(), (x * 3).norm(1)) for x in xs]
        return tuple(r for results in each for r in results)

    check(step, torch.zeros(()), *tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name_of)
def test_sums_in_another_order_are_close(dtype: torch.dtype) -> None:
    """What docs/numerics.md names, within its bound."""

    def step(p: Tensor, q: Tensor) -> tuple[Tensor, ...]:
        p.mul_(0.5)
        wide = q[:1].expand(300, 301)
        steps = q[::2, ::2]
        return (
            torch.dot(p[0], q[0]),
            wide.sum(),
            wide.norm(),
            wide.sum(0)[0],
            steps.norm(),
            steps.sum(0)[0],
        )

    x = torch.rand(2, 600, 301, generator=torch.Generator().manual_seed(5)).to(dtype)
    got, want, report = both(step, x[0], x[1])
    assert not report.externs
    bound = 1024 * (2**-24 if dtype == torch.float32 else 2**-53)
    for g, w in zip(got, want, strict=True):
        assert ((g - w).abs() <= bound * w.abs()).all()


# ---------------------------------------------------------------- launches


def trust_ratio(grads: Any, params: Any, state: Any) -> None:
    """Layer-wise scaling of an update by norms, as a loop over parameters."""
    for p, g, (m, v) in zip(params, grads, state, strict=True):
        m.mul_(0.9).add_(g, alpha=0.1)
        v.mul_(0.99).addcmul_(g, g, value=0.01)
        update = m / (v.sqrt() + 1e-6) + 0.01 * p
        own, new = p.norm(), update.norm()
        ratio = torch.where((own > 0) & (new > 0), own / new, 1.0)
        p.add_(update * ratio, alpha=-0.1)


def clip(grads: Any, params: Any, state: Any) -> None:
    norms = torch._foreach_norm(grads)
    total = torch.linalg.vector_norm(torch.stack(norms))
    torch._foreach_mul_(grads, torch.clamp(1.0 / (total + 1e-6), max=1.0))


def factored(grads: Any, params: Any, state: Any) -> None:
    """Second moments as an outer product of rows and columns."""
    for p, g, (row, column) in zip(params, grads, state, strict=True):
        row.lerp_(g.norm(dim=-1, keepdim=True).square_().div_(g.size(-1)), 0.3)
        column.lerp_(g.norm(dim=-2, keepdim=True).square_().div_(g.size(-2)), 0.3)
        second = row @ column
        second.div_(row.mean(dim=-2, keepdim=True).clamp_(min=1e-9))
        update = second.clamp_(min=1e-18).rsqrt_().mul_(g)
        size = update.norm(2) / update.numel() ** 0.5
        p.add_(update / torch.clamp(size, min=1.0), alpha=-0.1)


def clip_and_step(grads: Any, params: Any, state: Any) -> None:
    clip(grads, params, state)
    momenta = [m for m, _ in state]
    torch._foreach_mul_(momenta, 0.9)
    torch._foreach_add_(momenta, grads)
    torch._foreach_add_(params, momenta, alpha=-0.1)


def clip_to_largest(grads: Any, params: Any, state: Any) -> None:
    """The largest element of all, and whether all are finite, as with scaled losses."""
    largest = torch.stack([g.abs().max() for g in grads]).max()
    finite = torch.stack([g.isfinite().all() for g in grads]).all()
    scale = torch.where(finite, 1.0 / largest, 0.0)
    torch._foreach_mul_(grads, scale)
    torch._foreach_sub_(params, grads)


def clip_to_mean(grads: Any, params: Any, state: Any) -> None:
    """A list's sum, added up in Python."""
    squares = [(g * g).sum() for g in grads]
    root = (sum(squares) / len(squares)).sqrt()
    torch._foreach_div_(grads, root)


STEPS = {
    "clip and step": (clip_and_step, 2),
    "clip to the largest": (clip_to_largest, 2),
    "clip to the mean": (clip_to_mean, 2),
    "trust ratio": (trust_ratio, 2),
    "clip": (clip, 2),
    "factored": (factored, 4),
}


@pytest.mark.family(6)
@pytest.mark.parametrize("lanes", [3, 40])
@pytest.mark.parametrize("name", STEPS)
def test_launches_do_not_depend_on_the_number_of_lanes(name: str, lanes: int) -> None:
    step, launches = STEPS[name]
    generator = torch.Generator().manual_seed(6)

    def make() -> Any:
        generator.manual_seed(6)
        shapes = [(4 + i % 3, 5 + i % 4) for i in range(lanes)]
        grads = [torch.randn(s, generator=generator) for s in shapes]
        params = [torch.randn(s, generator=generator) for s in shapes]
        state = [(torch.zeros_like(p), torch.zeros_like(p)) for p in params]
        if step is factored:
            state = [(torch.zeros(a, 1), torch.zeros(1, b)) for a, b in shapes]
        return grads, params, state

    mine, eagers = make(), make()
    compiled = torch.compile(lambda *a: step(*a), backend=backend)
    with torch.no_grad():
        for _ in range(3):
            step(*eagers)
            compiled(*mine)
    for report in fuseopt.reports():
        assert not report.fallback, str(report)
        assert (report.launches, report.externs) == (launches, []), str(report)
    for g, w in zip(
        torch.utils._pytree.tree_leaves(mine),
        torch.utils._pytree.tree_leaves(eagers),
        strict=True,
    ):
        assert same_bits(g, w)


def test_the_text_does_not_depend_on_lanes_or_shapes() -> None:
    texts = []
    for shapes in ([(5, 4), (3, 3)], [(2, 3)] * 20, [(40, 2), (2, 50), (9, 9)]):

        def step(*xs: Tensor) -> None:
            for x in xs:
                x.div_(x.norm(dim=-1, keepdim=True) + x.abs().sum())

        *_, report = both(lambda *xs: step(*xs) or (), *[torch.rand(s) for s in shapes])
        # norms of rows, and a sum; the number that needs both; the quotient
        assert report.launches == 3
        texts.append([k.source for k in report.kernels])
    assert texts[0] == texts[1] == texts[2]


def test_a_sum_of_many_norms_does_not_join_their_lanes() -> None:
    """A loop that adds up norms is done at the end of the launch that takes them."""
    xs = [torch.rand(6, 6) for _ in range(12)]

    def step(*xs: Tensor) -> tuple[Tensor, ...]:
        total = xs[0].norm() ** 2
        for x in xs[1:]:
            total = total + x.norm() ** 2
        for x in xs:
            x.div_(total.sqrt())
        return (total,)

    check(step, *xs, launches=2)


def test_rows_and_columns_of_one_update_wait_for_it() -> None:
    """Two reductions of other dimensions cannot follow one another's elements."""

    def step(p: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        u = g * g + 1
        p.sub_(u)
        return (u.sum(0), u.sum(1), u)

    got, want, report = both(step, torch.rand(7, 9), torch.rand(7, 9))
    assert report.launches == 2
    assert "reduction" in {r.code for r in report.not_fused}
    for g, w in zip(got, want, strict=True):
        assert same_bits(g, w)


# ---------------------------------------------------------------- Triton

SCRIPT = """
import torch, fuseopt
from tests.numerics.test_reductions import both, lines, whole
torch.manual_seed(0)
for dtype, shape in ((torch.float32, (37, 41)), (torch.float64, (3, 4)),
                     (torch.bfloat16, (2, 3, 4))):
    for x in [torch.randn(shape).to(dtype)]:
        cases = [(lambda c, x: whole(x, c), x)]
        if dtype == torch.float32:
            cases += [(lines(-1), x), (lines(-2), x), (lines(-1), x.t())]
        for step, y in cases:
            got, want, report = both(step, torch.zeros(()), y, target="triton")
            assert (report.fallback, report.externs) == ("", []), str(report)
            assert report.kernels[0].target == "triton"
            for g, w in zip(got, want):
                if g.is_floating_point():
                    torch.testing.assert_close(g, w, rtol=1e-2 if dtype.itemsize == 2
                                               else 2e-6, atol=1e-5)
                else:
                    assert torch.equal(g, w)
print("all close")
"""


@pytest.mark.slow
def test_triton_folds_in_the_interpreter() -> None:
    """Every kind of reduction, of whole tensors, rows and columns."""
    root = ROOT
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=env,
        cwd=root,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all close" in done.stdout


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_triton_folds_compile_offline(target: str, tmp_path: Path) -> None:
    from fuseopt.capture import capture
    from fuseopt.codegen.triton.kernel import TritonTarget
    from fuseopt.ir.graph import Kernel
    from fuseopt.runtime.triton.build import compile_offline
    from fuseopt.scheduler import schedule

    sources = []

    def planner(gm: Any, inputs: Any) -> Any:
        captured = capture(gm, inputs, vector_library=False)
        steps = schedule(captured.graph).steps
        kernels = [s for s in steps if isinstance(s, Kernel)]
        sources.extend(TritonTarget().render(k) for k in kernels)
        return gm.forward

    def step(x: Tensor, y: Tensor) -> None:
        x.div_(x.norm() + x.abs().amax() + y.amin(-1, keepdim=True) + y.sum(0))

    torch.compile(step, backend=planner)(torch.rand(4, 4), torch.rand(4, 4))
    assert len(sources) == 3
    for source in sources:
        made = compile_offline(source, target, str(tmp_path))
        assert made["cubin" if target.startswith("sm") else "hsaco"]


@pytest.mark.parametrize("shape", [(0, 3), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("norms", [2, 1], ids=["two norms", "one norm"])
def test_a_column_of_no_elements_is_normalised(
    shape: tuple[int, ...], norms: int
) -> None:
    """The check of the schedule accepts what an empty tensor is written with."""

    def step(x: Tensor, y: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        unit = x / x.norm(2.0, 0, keepdim=True).clamp_min(1e-12).expand_as(x)
        if norms == 2:
            unit = unit * (y / y.norm(2.0, 0, keepdim=True).clamp_min(1e-12))
        s.lerp_(unit, 0.25)
        y.add_(s.add(1.0).mul(x))
        return ()

    got, want, report = both(step, *(torch.zeros(shape) for _ in range(3)))
    assert not report.fallback, str(report)
    assert all(map(same_bits, got, want))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_a_column_times_a_row_is_pointwise(dtype: torch.dtype) -> None:
    """The sign of its zeros is that of eager's BLAS."""

    def step(*tensors: Tensor) -> tuple[Tensor, ...]:
        for out, x, y in zip(tensors[::3], tensors[1::3], tensors[2::3], strict=True):
            out.copy_(x @ y)
        return ()

    generator = torch.Generator().manual_seed(7)
    tensors = []
    for m, n in ((1, 1), (1, 4), (4, 1), (3, 4), (70, 90)):
        for batch in ((), (2,)):
            x = torch.randn(*batch, m, 1, generator=generator).to(dtype)
            x[..., 0, :] = 0
            y = torch.randn(*batch, 1, n, generator=generator).to(dtype)
            tensors += [torch.ones(*batch, m, n, dtype=dtype), x, y]
    check(step, *tensors)
