"""ATen calls in the middle of an update: at their place, in order, the rest fused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

import fuseopt
from fuseopt import compat
from fuseopt.backend import fuseopt as backend
from fuseopt.runtime.memory import Memory
from fuseopt.runtime.plan import Plan
from tests.frames import entered
from tests.steps import same_bits

Update = Callable[[Tensor, Tensor, Tensor], Any]


@pytest.fixture(autouse=True)
def returned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the scheduler says that calls return is what capture saw them return."""
    made = Plan.__init__

    def checked(self: Plan, captured: Any, schedule: Any, *args: Any) -> None:
        buffers = captured.graph.buffers
        # a call that another one replaces is in no schedule
        calls = [captured.calls[e.payload] for e in schedule.externs]
        fresh = {buffers[b].storage for call in calls for b in call.fresh}
        stacked = {s for stack in schedule.stacks for s in stack.storages}
        assert schedule.memory.returned == fresh - stacked
        made(self, captured, schedule, *args)

    monkeypatch.setattr(Plan, "__init__", checked)


def state(shape: tuple[int, ...] = (6, 6), n: int = 3) -> list[list[Tensor]]:
    """`n` triples of a parameter, its gradient and a momentum."""
    generator = torch.Generator().manual_seed(3)
    return [
        [torch.randn(shape, generator=generator) for _ in range(3)] for _ in range(n)
    ]


def check(
    update: Update,
    make: Callable[[], list[list[Tensor]]] = state,
    calls: int = 3,
    **options: Any,
) -> fuseopt.Report:
    """Run `update` of every triple compiled and in eager: the same bits, one graph.

    Returns the only report.
    """

    def step(triples: list[list[Tensor]]) -> list[Any]:
        return [update(*t) for t in triples]

    mine, reference = make(), make()
    compiled = torch.compile(step, backend=backend, options=options, fullgraph=True)
    with torch.no_grad():
        for call in range(calls):
            got, want = compiled(mine), step(reference)
            pairs = [*zip(chain(*mine), chain(*reference), strict=True)]
            pairs += [(g, w) for g, w in zip(got, want, strict=True) if w is not None]
            for k, (a, b) in enumerate(pairs):
                assert same_bits(a, b), f"tensor {k} after call {call}"
    (report,) = fuseopt.reports()
    return report


def polar(x: Tensor) -> Tensor:
    for _ in range(2):
        a = x @ x.mT
        x = 3.4 * x + (-4.7 * a + 2.0 * (a @ a)) @ x
    return x


def spectrum(g: Tensor) -> Tensor:
    return torch.fft.irfft2(torch.fft.rfft2(g * 0.5) * 2.0, s=g.shape)


#: A name -> what an update computes from a square gradient, and how many launches a
#: step may have: one before and one after the calls at most.
CALLS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "matmul": (lambda g: (g * 2) @ (g + 1), 2),
    "matmuls in a chain": (polar, 6),
    "bmm": (lambda g: torch.bmm((g * 2)[None], g[None])[0], 2),
    "addmm": (lambda g: torch.addmm(g * 2, g, g, beta=0.5, alpha=2.0), 2),
    "einsum": (lambda g: torch.einsum("ij,kj->ik", g * 2, g), 2),
    "svd": (lambda g: (lambda u, s, v: (u * s) @ v)(*torch.linalg.svd(g * 2)), 3),
    "qr": (lambda g: torch.linalg.qr(g * 2)[0] * 3, 2),
    "inv": (lambda g: torch.linalg.inv(g + 3 * torch.eye(6)), 2),
    "eigh": (lambda g: torch.linalg.eigh(g + g.mT)[1] * 2, 2),
    "cholesky": (lambda g: torch.linalg.cholesky(g @ g.mT + torch.eye(6)), 2),
    "fft": (lambda g: torch.fft.fft(g * 2).abs(), 2),
    "ifft and its real part": (lambda g: torch.fft.ifft(g * 2).real * 2, 2),
    "conjugate": (lambda g: (torch.fft.fft(g).conj() * 2).imag * 3, 2),
    "view_as_real": (lambda g: torch.view_as_real(torch.fft.fft(g))[..., 1] * 3, 2),
    "rfft2 and back": (spectrum, 2),
    "complex product": (lambda g: (torch.complex(g, g * 2) * 1j).imag, 2),
    "sort": (lambda g: torch.sort(g * 2, dim=0).values * 3, 2),
    "argsort": (lambda g: g.flatten()[torch.argsort(g.flatten() * 2)].view(6, 6), 2),
    "cumsum": (lambda g: torch.cumsum(g * 2, 1) * 3, 2),
    "a slice of cumsum": (lambda g: torch.cumsum(g * 2, 1)[:, :1] * 3 + g, 3),
    "gather": (lambda g: g.gather(0, (g > 0).long()) * 3, 2),
    "scatter": (lambda g: (g * 2).scatter(0, (g > 0).long(), 5.0), 2),
    "index_select": (lambda g: (g * 2).index_select(0, torch.arange(5, -1, -1)), 2),
    "topk": (lambda g: torch.topk(g * 2, 6, dim=1)[0] * 3, 2),
    "masked_fill": (lambda g: (g * 2).masked_fill(g > 0, 1.5) * 3, 2),
    "tril": (lambda g: torch.tril(g * 2) * 3, 2),
    "roll": (lambda g: torch.roll(g * 2, 1, 0) * 3, 2),
    "cat": (lambda g: torch.cat([g * 2, g])[3:9] * 3, 2),
    "split": (lambda g: torch.split(g, 3)[1].repeat(2, 1) * 3, 2),
    "chunk of a temporary": (lambda g: (g * 2).chunk(2)[0].repeat(2, 1) + 1, 2),
    "unbind": (lambda g: torch.unbind(torch.cumsum(g, 0))[2] * 3 + g, 2),
    "stack of rows": (lambda g: torch.stack([g[1] * 2, g[0]] * 3) * 3, 2),
    "kron": (lambda g: torch.kron(g[:3, :3] * 2, g[:2, :2]), 3),
    "flip": (lambda g: (g * 2).flip(0) * 3, 2),
    "outer": (lambda g: torch.outer(g[0] * 2, g[1]) * 3, 2),
    "uint16": (lambda g: (g * 100).to(torch.int32).to(torch.uint16).float() * 2, 2),
    "float8": (lambda g: (g * 2).to(torch.float8_e4m3fn).float() * 3, 2),
    "a factory": (lambda g: g * torch.arange(6.0) + torch.zeros(6, device="cpu"), 2),
    "a list of numbers": (lambda g: g * torch.tensor([1.0, 2.0, 3.0] * 2), 2),
    "known arithmetic": (lambda g: g * (torch.tensor([0.5]) + 1).exp(), 2),
    "a known number": (lambda g: g * torch.tensor([0.5, 0.25]).sum(), 2),
    "numbers of 64 bits": (lambda g: (g.long() + torch.tensor([2**60 + 1])) % 7 * g, 4),
    "bit view": (lambda g: ((g * 2).view(torch.int32) >> 16 << 16).view(g.dtype), 3),
}


@pytest.mark.family(20)
@pytest.mark.parametrize("name", CALLS)
def test_calls_between_fused_arithmetic(name: str) -> None:
    """Each runs where it stands; the arithmetic before and after it is fused."""
    direction, launches = CALLS[name]

    def update(p: Tensor, g: Tensor, m: Tensor) -> None:
        m.mul_(0.9).add_(direction(g), alpha=0.1)
        p.sub_(m * 0.1).mul_(0.99)

    report = check(update)
    assert not report.fallback
    assert report.launches <= launches


def test_a_move_to_the_own_device_is_no_copy() -> None:
    def update(p: Tensor, g: Tensor, m: Tensor) -> None:
        p.to("cpu").mul_(0.5)
        m.to(device="cpu").add_(g)
        g.cpu().mul_(2.0)
        p.to(torch.device("cpu"), copy=True).mul_(3.0)
        m.to(torch.float64).mul_(3.0)

    assert check(update).launches == 1


def test_a_tensor_of_the_closure_is_read_at_each_call() -> None:
    """It is no constant: what it holds may change between calls."""
    weight = torch.tensor([2.0, 3.0])

    def update(p: Tensor, g: Tensor, m: Tensor) -> None:
        p.sub_(g * weight)

    def step(p: Tensor, g: Tensor) -> None:
        update(p, g, g)

    compiled = torch.compile(step, backend=backend)
    p, q, g = torch.ones(2), torch.ones(2), torch.ones(2)
    for _ in range(3):
        compiled(p, g)
        step(q, g)
        weight.mul_(2.0)
        assert same_bits(p, q)


def in_place_on_a_view(p: Tensor, g: Tensor, m: Tensor) -> None:
    p.mul_(0.5)
    p[1:3].cumsum_(0)
    p.T[0].sub_(g[0] * 2)
    m.reshape(-1).index_add_(0, torch.tensor([3, 1]), g[0, :2])
    m.add_(p)


def in_place_calls(p: Tensor, g: Tensor, m: Tensor) -> None:
    m.index_put_((torch.tensor([0, 2]),), g[0] * 2, accumulate=True)
    m.scatter_(1, (g > 0).long(), 3.0).mul_(2.0)
    m.masked_fill_(g > 1, 0.25).add_(g)
    m.index_copy_(0, torch.tensor([5]), g[1:2] + m[0:1])
    p[:, 2] = m[:, 0] * 2
    p[g > 0] = 0.5
    p.tril_().sub_(m, alpha=0.1)


def given_memory(p: Tensor, g: Tensor, m: Tensor) -> None:
    """`out=` writes a state tensor, a temporary and a part of a parameter."""
    torch.cumsum(g * 2, 0, out=m)
    made = torch.empty_like(g)
    torch.matmul(m, g + 1, out=made)
    torch.cumsum(made[0], 0, out=p[0])
    p.sub_(made * 0.1)


def lists(p: Tensor, g: Tensor, m: Tensor) -> None:
    """Calls that return views in a list: of a parameter, of a call's result."""
    for part in torch.split(p, 2):
        part.mul_(2.0).add_(torch.cumsum(part, 0))
    first, second = torch.cumsum(g * 2, 0).chunk(2)
    first.mul_(3.0)
    m[:3].sub_(first)
    m[3:].sub_(second * first)
    for row in p.unbind():
        row.sub_(row.sum())


def in_turn(p: Tensor, g: Tensor, m: Tensor) -> None:
    """Each call reads what arithmetic before it wrote, and is read after it."""
    for _ in range(3):
        m.mul_(0.9).add_(torch.cumsum(p, 0), alpha=0.1)
        p.sub_(torch.cumsum(m, 1) * 0.1)
        g.add_(p.flip(0))


def old_values(p: Tensor, g: Tensor, m: Tensor) -> None:
    """A result is used after what it was made of has changed."""
    before = torch.cumsum(p, 0)
    view = p[1]
    kept = view.clone()
    p.mul_(2.0)
    after = torch.cumsum(p, 0)
    m.copy_(after - before).add_(view).sub_(kept)


def results(p: Tensor, g: Tensor, m: Tensor) -> tuple[Tensor, ...]:
    """What is returned is a call's result, a view, a temporary and a parameter."""
    made = torch.cumsum(g, 0)
    p.sub_(made)
    return made, made[1:3], p[2], made * 2, p


def two_results(p: Tensor, g: Tensor, m: Tensor) -> None:
    values, order = torch.sort(g * 2, dim=1)
    m.copy_(values * 2).add_(order)
    p.sub_(torch.linalg.qr(g.T)[1]).add_(torch.frexp(g * 3)[0])


UPDATES: list[Update] = [
    in_place_on_a_view,
    in_place_calls,
    given_memory,
    lists,
    in_turn,
    old_values,
    results,
    two_results,
]


@pytest.mark.family(4)
@pytest.mark.parametrize("update", UPDATES, ids=lambda u: u.__name__)
def test_calls_that_share_and_change_memory(update: Update) -> None:
    def flat(*triple: Tensor) -> Tensor | None:
        got = update(*triple)
        return None if got is None else torch.cat([t.flatten() for t in got])

    assert not check(flat).fallback


def transposed() -> list[list[Tensor]]:
    return [[t.T for t in triple] for triple in state((6, 6))]


@pytest.mark.family(4)
@pytest.mark.parametrize(
    "update",
    # Dynamo itself refuses out= that is not contiguous
    [u for u in UPDATES if u is not given_memory],
    ids=lambda u: u.__name__,
)
def test_the_same_on_transposed_tensors(update: Update) -> None:
    def nothing(*triple: Tensor) -> None:
        update(*triple)

    assert not check(nothing, transposed).fallback


@pytest.mark.family(4)
@pytest.mark.parametrize("update", UPDATES, ids=lambda u: u.__name__)
def test_strides_that_change_between_calls(update: Update) -> None:
    """Views and results of calls follow: Dynamo guards no gradient's strides."""

    def step(p: Any, m: Tensor) -> None:
        update(p.data, p.grad, m)

    compiled = torch.compile(step, backend=backend)
    pairs = [(torch.nn.Parameter(s[0]), s[2]) for s in (state(n=1) + state(n=1))]
    for call in range(5):
        grad = torch.randn(6, 6, generator=torch.Generator().manual_seed(call))
        for (p, m), function in zip(pairs, (compiled, step), strict=True):
            p.grad = grad.clone().T if call % 2 else grad.clone()
            function(p, m)
        (p, m), (q, n) = pairs
        assert same_bits(p.data, q.data), call
        assert same_bits(m, n), call
        assert same_bits(pairs[0][0].grad, pairs[1][0].grad), call


def test_a_call_that_raises_leaves_nothing_written() -> None:
    """Eager has doubled `m` by then; here it is put back. The next call is whole."""

    def step(p: Tensor, g: Tensor, m: Tensor) -> None:
        m.mul_(2.0)
        factor = torch.linalg.cholesky(m)
        p.sub_(factor @ g)

    compiled = torch.compile(step, backend=backend)
    runs = []
    for function in (compiled, step):
        p, g, m = torch.ones(3, 3), torch.ones(3, 3), torch.eye(3)
        with torch.no_grad():
            function(p, g, m)
            m[0, 0] = -1.0
            before = m.diag().tolist()
            with pytest.raises(torch.linalg.LinAlgError, match="positive-definite"):
                function(p, g, m)
            if function is compiled:
                assert m.diag().tolist() == before
            m.copy_(torch.eye(3))
            function(p, g, m)
        runs.append([p, g, m])
    assert all(same_bits(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_a_shape_that_depends_on_data_ends_the_graph() -> None:
    """Dynamo cuts there; the update on either side is compiled."""

    def step(p: Tensor, g: Tensor) -> None:
        p.mul_(0.5)
        p.sub_(g[g > 0].sum())
        p.add_(g)

    compiled = torch.compile(step, backend=backend, options={"fallback": "eager"})
    runs = []
    for function in (compiled, step):
        p = torch.ones(4, 4)
        with torch.no_grad():
            for seed in range(3):
                generator = torch.Generator().manual_seed(seed)
                function(p, torch.randn(4, 4, generator=generator))
        runs.append(p)
    assert same_bits(*runs)
    assert [r.launches for r in fuseopt.reports() if not r.fallback]


def test_a_shape_that_depends_on_data_inside_a_graph_is_named() -> None:
    """With Dynamo told to go on, the graph runs in eager and the report says why."""

    def step(p: Tensor, g: Tensor) -> None:
        p.sub_(g[g > 0].sum())

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(step, backend=backend, fullgraph=True)
        p, q, g = torch.ones(4), torch.ones(4), torch.linspace(-1, 2, 4)
        with torch.no_grad():
            with pytest.warns(RuntimeWarning, match="a step runs in eager"):
                compiled(p, g)
            step(q, g)
    assert same_bits(p, q)
    (report,) = fuseopt.reports()
    assert "cannot be recorded" in report.fallback
    assert "g[g > 0]" in report.fallback


# ---------------------------------------------------------------- what a call costs


def orthogonal(x: Tensor) -> Tensor:
    """Two steps of Newton and Schulz, in bfloat16."""
    x = x.bfloat16()
    for _ in range(2):
        gram = x @ x.T
        update = torch.addmm(gram, gram, gram, beta=-4.7, alpha=2.0)
        x = torch.addmm(x, update, x, beta=3.4)
    return x


@pytest.mark.parametrize("shape", [(16, 24), (24, 16), (8, 8)])
def test_products_of_several_lanes(shape: tuple[int, int]) -> None:
    def update(p: Tensor, g: Tensor, m: Tensor) -> None:
        p.sub_(orthogonal(g * 0.1) * 0.5)

    report = check(update, lambda: state(shape, 4))
    batched = sum(b.calls * b.rows for b in report.batches)
    assert len(report.externs) + batched == 6 * 4
    assert sum(x.calls for x in report.alone) == len(report.externs)


def products(length: int) -> Callable[..., None]:
    """Calls that each need the one before, among them one that is seen in two ways."""

    def update(p: Tensor, g: Tensor) -> None:
        x = torch.mm(g * 2, g)
        for _ in range(length):
            x = torch.mm(x, x.T)
        p.sub_(x)

    return update


def compiled(
    update: Callable[..., None], size: int = 6, dtype: torch.dtype = torch.float32
) -> Callable[[], object]:
    """A call of the compiled update that has been done before."""
    step = torch.compile(update, backend=backend, options={"fallback": "error"})
    p = torch.ones(size, size, dtype=dtype)
    g = torch.full((size, size), 0.1, dtype=dtype)

    def call() -> None:
        with torch.no_grad():
            step(p, g)

    call()
    call()
    return call


@pytest.mark.parametrize("in_c", [True, False], ids=["C", "Python"])
def test_a_call_enters_one_function_of_python(in_c: bool) -> None:
    """15 were entered for each product of a step, and 11 of one in a batch. Products in
    a row, which C calls, enter none.
    """
    counts = []
    off = nullcontext() if in_c else compat.switches.without("products-in-c")
    with off:
        for length in (3, 13):
            # no chain has products of float16
            call = compiled(products(length), dtype=torch.float16)
            counts.append(len(entered(call)))
            torch._dynamo.reset()
    assert counts[1] - counts[0] == (0 if in_c else 10)


def test_an_overload_is_called_as_the_function_of_c() -> None:
    mm, x = torch.ops.aten.mm.default, torch.randn(3, 3)
    bound = compat.bound_op(mm)
    assert not isinstance(bound, torch._ops.OpOverload)
    assert same_bits(bound(x, x), mm(x, x))
    for other in (torch.ops.aten.mm, torch.cond, torch.mm):
        assert compat.bound_op(other) is other


def test_what_a_call_returned_is_given_back_after_its_last_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or a step of many products needs memory for all of them."""
    alive: list[int] = []
    run = Memory.run

    def seen(self: Memory, extern: Any) -> None:
        run(self, extern)
        own = {t.untyped_storage().data_ptr() for t in self._made.values()}
        alive.append(len(own))

    monkeypatch.setattr(Memory, "run", seen)
    with compat.switches.without("products-in-c"):
        call = compiled(products(20), dtype=torch.float16)
        alive.clear()
        call()
    assert len(alive) == 21
    assert max(alive) <= 3  # the gradient, what came before, what is made


def test_a_result_of_other_strides_than_foretold_is_brought_to_them() -> None:
    """Kernels were planned for the strides of the shape rule."""
    name = "fuseopt_test::transposed"
    library = torch.library.Library("fuseopt_test", "DEF")
    library.define("transposed(Tensor x) -> Tensor")
    real = lambda x: (x * 2).t().contiguous().t()  # noqa: E731
    torch.library.impl(name, "cpu", real, lib=library)
    torch.library.register_fake(name, torch.empty_like, lib=library)

    def update(p: Tensor, g: Tensor, m: Tensor) -> None:
        p.sub_(torch.ops.fuseopt_test.transposed(g) * m)

    check(update, lambda: state((3, 5)))
