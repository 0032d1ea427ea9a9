"""Layout and aliasing: where tensors lie, and what they share, end to end.

Every case runs through torch.compile and is compared with eager, bit by bit; `launches`
and the codes of what was not fused are asserted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fuseopt
from fuseopt.backend import fuseopt as backend
from fuseopt.compiler import pipeline
from fuseopt.compiler.report import Report
from fuseopt.compiler.session import session
from fuseopt.ir.alias import may_share, overlaps, self_overlaps
from fuseopt.ir.graph import DTYPE_BYTES, Buffer, Graph
from tests.steps import Twins, same_bits

Step = Callable[..., Any]


def rand(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def against_eager(step: Step, make: Callable[[], Sequence[Tensor]]) -> Report:
    """Two calls of a function of tensors in eager and compiled; the report of it."""
    mine, theirs = make(), make()
    fast = torch.compile(step, backend=backend, options={"fallback": "error"})
    with torch.no_grad():
        for _ in range(2):
            wanted = step(*theirs) or ()
            got = fast(*mine) or ()
    for k, (a, b) in enumerate(zip((*mine, *got), (*theirs, *wanted), strict=True)):
        assert same_bits(a, b), f"tensor {k}: {a} for {b}"
    (report,) = fuseopt.reports()
    return report


def codes(report: Report) -> set[str]:
    return {r.code for r in report.not_fused}


def update(*tensors: Tensor) -> None:
    """A list of parameters, then the list of their gradients."""
    half = len(tensors) // 2
    params, grads = list(tensors[:half]), list(tensors[half:])
    torch._foreach_mul_(params, 0.9)
    torch._foreach_add_(params, grads, alpha=-0.1)


def unscaled(*tensors: Tensor) -> None:
    """Without `alpha`, which eager contracts or not where operands are expanded."""
    half = len(tensors) // 2
    params, grads = list(tensors[:half]), list(tensors[half:])
    torch._foreach_mul_(params, 0.9)
    torch._foreach_sub_(params, torch._foreach_mul(grads, grads))


class Case(NamedTuple):
    """A step, its tensors, the launches it needs and the refusals it reports."""

    step: Step
    make: Callable[[], Sequence[Tensor]]
    launches: int = 1
    codes: frozenset[str] = frozenset()


# ---------------------------------------------------------------- one launch


def dense_in_every_order() -> list[Tensor]:
    """Row major, transposed, channels last, and both ways of three dimensions."""
    image = rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    params = [rand(5, 7), rand(7, 5).t(), image, rand(4, 2, 3).permute(2, 0, 1)]
    return [*params, *(torch.empty_like(p).copy_(rand(*p.shape)) for p in params)]


def grads_in_another_order() -> list[Tensor]:
    params = [rand(5, 7), rand(7, 5).t(), rand(2, 3, 4, 5)]
    image = rand(2, 3, 4, 5, seed=4).contiguous(memory_format=torch.channels_last)
    return [*params, rand(7, 5, seed=4).t(), rand(5, 7, seed=4), image]


def gaps() -> list[Tensor]:
    """Parts of larger tensors: rows, columns, every second element, a diagonal."""
    params = [
        rand(9, 6)[::2],
        rand(6, 9)[:, 2:5],
        rand(20)[1::2],
        rand(6, 6).diagonal(),
    ]
    grads = [rand(5, 6), rand(3, 6).t(), rand(40)[::4], rand(6)]
    return [*params, *grads]


def expanded() -> list[Tensor]:
    params = [rand(4, 5), rand(3, 4, 5), rand(6)]
    grads = [rand(4, 1).expand(4, 5), rand(4, 5).expand(3, 4, 5), rand(1).expand(6)]
    return [*params, *grads]


def small() -> list[Tensor]:
    params = [rand(), rand(1), rand(0), rand(3, 0, 2), rand(1, 1), rand(5)]
    return [*params, *(rand(*p.shape, seed=4) for p in params)]


def unaligned() -> list[Tensor]:
    """No tensor begins at a multiple of 16 bytes, and no two begin alike."""
    shapes = [(33,), (8, 5), (16,)]
    params = [
        rand(64)[k + 1 :][: rand(*s).numel()].view(s) for k, s in enumerate(shapes)
    ]
    grads = [rand(64)[3 - k :][: p.numel()].view(p.shape) for k, p in enumerate(params)]
    return [*params, *grads]


def flat(order: Sequence[int] = (0, 1, 2, 3)) -> list[Tensor]:
    """Parameters are parts of one tensor, and gradients of another."""
    shapes = [(3, 4), (5,), (), (2, 2, 2)]
    whole, grads = rand(40), rand(40, seed=4)
    places = (0, 12, 17, 18)
    return [
        w[places[k] :][: torch.Size(shapes[k]).numel()].view(shapes[k])
        for w in (whole, grads)
        for k in order
    ]


def even_and_odd() -> list[Tensor]:
    whole = rand(21)
    return [whole[::2], whole[1::2], rand(11), rand(10)]


def columns() -> list[Tensor]:
    whole = rand(5, 8)
    params = [whole[:, :3], whole[:, 3], whole[:, 4::2], whole[:, 5::2]]
    return [*params, *(rand(*p.shape, seed=4) for p in params)]


def tiles() -> list[Tensor]:
    """The four quarters of a matrix that is stored by columns."""
    whole = rand(6, 8).t()
    params = [whole[:4, :3], whole[4:, :3], whole[:4, 3:], whole[4:, 3:]]
    return [*params, *(rand(*p.shape, seed=4) for p in params)]


def one_grad_for_all() -> list[Tensor]:
    shared = rand(4, 3)
    return [rand(4, 3), rand(4, 3) + 1, shared, shared]


def permuted_lists(a: Tensor, b: Tensor, c: Tensor, x: Tensor, y: Tensor) -> None:
    torch._foreach_mul_([a, b, c], [0.5, 0.25, 2.0])
    torch._foreach_add_([c, a], [x, y], alpha=0.5)
    torch._foreach_sqrt_([b])
    torch._foreach_maximum_([b, c, a], [y, x, x])


def two_readers(p: Tensor, q: Tensor, g: Tensor, h: Tensor) -> None:
    """What one call makes is read by two others."""
    made = torch._foreach_mul([g, h], 3.0)
    torch._foreach_add_([p, q], made)
    torch._foreach_mul_([q, p], torch._foreach_abs([made[1], made[0]]))


def read_after_write(p: Tensor, q: Tensor, m: Tensor, n: Tensor) -> None:
    torch._foreach_lerp_([m, n], [p, q], 0.1)
    torch._foreach_sub_([p, q], [m, n])
    torch._foreach_mul_([n, m], [q, p])


def twice(x: Tensor, y: Tensor, g: Tensor) -> None:
    """The list API is sequential: x gets both."""
    torch._foreach_add_([x, y, x], 1.0)
    torch._foreach_mul_([x, x], [2.0, 3.0])
    torch._foreach_add_([x, x, y], [g, g, g])


ONE_LAUNCH = {
    "dense in every order": Case(update, dense_in_every_order),
    "grads in another order": Case(update, grads_in_another_order),
    "gaps": Case(update, gaps),
    "expanded grads": Case(unscaled, expanded),
    "0-d, empty, one element": Case(update, small),
    "unaligned": Case(update, unaligned),
    "flat": Case(update, flat),
    "flat, permuted": Case(update, lambda: flat((2, 0, 3, 1))),
    "even and odd elements": Case(update, even_and_odd),
    "columns": Case(update, columns),
    "tiles of a transposed matrix": Case(update, tiles),
    "one gradient for all": Case(update, one_grad_for_all),
    "permuted and unequal lists": Case(
        permuted_lists, lambda: [rand(4).abs() + k for k in range(5)]
    ),
    "an output that feeds two lists": Case(
        two_readers, lambda: [rand(4), rand(4) + 1, rand(4, seed=4), rand(4, seed=5)]
    ),
    "read after a write in another list": Case(
        read_after_write, lambda: [rand(3) + k for k in range(4)]
    ),
    "the same tensor twice": Case(twice, lambda: [rand(5), rand(5) + 1, rand(5) + 2]),
}


@pytest.mark.family(4)
@pytest.mark.parametrize("name", ONE_LAUNCH)
def test_one_launch(name: str) -> None:
    case = ONE_LAUNCH[name]
    report = against_eager(case.step, case.make)
    assert (report.launches, report.externs) == (1, [])
    assert codes(report) == set()


def test_channels_last_and_transposed_share_a_variant() -> None:
    """A layout is data in the table, not text."""
    report = against_eager(update, dense_in_every_order)
    (kernel,) = report.kernels
    assert (kernel.variants, kernel.lanes) == (1, 4)


# ---------------------------------------------------------------- order is kept


def sequence(*parts: Tensor) -> None:
    for k, x in enumerate(parts):
        x.mul_(k + 2.0)
        x.add_(1.0)


def shifted() -> list[Tensor]:
    whole = rand(8)
    return [whole[:4], whole[4:], whole[2:6]]


def matrix_and_transpose() -> list[Tensor]:
    whole = rand(4, 4)
    return [whole, whole.t(), rand(3)]


def whole_and_part() -> list[Tensor]:
    whole = rand(6)
    return [whole, whole[1], whole[2:]]


def read_of_a_neighbour(p: Tensor, q: Tensor) -> None:
    """Each element reads what another one wrote."""
    p.mul_(2.0)
    q.add_(p.flip(0))
    q.add_(p[:1])
    p.add_(1.0)


def broadcast(p: Tensor, q: Tensor) -> None:
    p.mul_(2.0)
    q.mul_(p)


def shared_number(t: Tensor, p: Tensor, q: Tensor) -> None:
    t.add_(1.0)
    p.mul_(t)
    q.mul_(t)
    t.mul_(0.5)


def sums(p: Tensor, q: Tensor) -> None:
    p.mul_(2.0)
    q.add_(p.cumsum(0))
    p.add_(q)


IN_ORDER = {
    "shifted parts": Case(sequence, shifted, 2, frozenset({"overlap"})),
    "a matrix and its transpose": Case(
        sequence, matrix_and_transpose, 2, frozenset({"overlap"})
    ),
    "a tensor and parts of it": Case(
        sequence, whole_and_part, 2, frozenset({"overlap"})
    ),
    "another shape reads it": Case(
        broadcast, lambda: [rand(4), rand(3, 4)], 2, frozenset({"index_space"})
    ),
    "a number for many that changes": Case(
        shared_number,
        lambda: [rand(), rand(4), rand(3)],
        2,  # what changes the number first begins the launch that reads it
        frozenset({"shared_scalar"}),
    ),
    "an extern reads it": Case(
        sums, lambda: [rand(5), rand(5)], 2, frozenset({"extern"})
    ),
}


@pytest.mark.parametrize("name", IN_ORDER)
def test_order_is_kept_and_the_report_says_why(name: str) -> None:
    case = IN_ORDER[name]
    report = against_eager(case.step, case.make)
    assert (report.launches, codes(report)) == (case.launches, case.codes)


def test_a_neighbour_is_read() -> None:
    report = against_eager(read_of_a_neighbour, lambda: [rand(5), rand(5) + 1])
    assert {"extern", "overlap"} <= codes(report)


@pytest.mark.parametrize(
    "step",
    [
        lambda p: p[1:].add_(p[:-1]),
        lambda p: torch._foreach_add_([p[1:]], [p[:-1]]),
        lambda p: p[:3].expand(2, 3).add_(1.0),
    ],
    ids=["a part from a part", "in a list", "an expanded tensor"],
)
def test_what_eager_refuses_is_refused(step: Step) -> None:
    def run(p: Tensor) -> None:
        step(p)

    p = rand(9)
    with torch.no_grad(), pytest.raises(RuntimeError, match="single memory location"):
        torch.compile(run, backend=backend, options={"fallback": "error"})(p)
    assert same_bits(p, rand(9))


def test_memory_read_and_written_in_eagers_own_order() -> None:
    """Eager does not see this overlap; what it gives depends on its loop."""

    def step(p: Tensor) -> None:
        p[::2].add_(p[:20])
        torch._foreach_mul_([p[1::2]], [p[:20]])

    report = against_eager(step, lambda: [rand(40)])
    assert report.launches == 0
    assert {reason for _, reason in report.externs} == {
        "it writes memory that it reads at another index, or one place twice"
    }


# ---------------------------------------------------------------- views, temps


def views_of_an_extern(p: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    product = a @ b
    p.add_(product.t())
    product[0].mul_(2.0)
    p.t()[1:].sub_(product[1:])
    return product.t(), product[0]


def parts_of_a_temp(p: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    made = torch.empty_like(p)
    made.copy_(p)
    made.t()[1:3].add_(1.0)
    upper, lower = made.split(2)
    p[:2].mul_(upper)
    p[2:].mul_(lower)
    return made.t(), p.t()


def a_temp_that_an_extern_changes(
    p: Tensor, a: Tensor, b: Tensor
) -> tuple[Tensor, ...]:
    made = p * 2.0
    made.cumsum_(0)
    p.add_(made)
    made.mul_(3.0)
    return (made,)


def a_bit_cast(p: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    p.mul_(2.0)
    bits = p.view(torch.int32)
    bits.bitwise_xor_(1)
    p.copy_(torch.where(bits > 0, p, -p))
    return (bits,)


@pytest.mark.parametrize(
    "step",
    [views_of_an_extern, parts_of_a_temp, a_temp_that_an_extern_changes, a_bit_cast],
)
def test_views(step: Step) -> None:
    against_eager(step, lambda: [rand(4, 4), rand(4, 6), rand(6, 4)])


# ---------------------------------------------------------------- optimizers

OPTIMIZERS = [
    ("AdamW", {"amsgrad": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("AdamW", {"foreach": False}),
]


def lay_out(how: str, params: Sequence[Any]) -> None:
    """Give parameters of shapes (4, 6), (6,), (2, 3, 4, 5) another layout."""
    with torch.no_grad():
        if how == "transposed":
            for p in params:
                p.data = p.data.movedim(0, -1).contiguous().movedim(-1, 0)
        elif how == "channels last":
            params[2].data = params[2].data.contiguous(
                memory_format=torch.channels_last
            )
        elif how == "gaps":
            for p in params:
                wide = torch.zeros(*p.shape[:-1], 2 * p.shape[-1])
                wide[..., 1::2] = p.data
                p.data = wide[..., 1::2]
        elif how == "flat":
            whole = torch.cat([p.data.reshape(-1) for p in params])
            for p, part in zip(params, whole.split([24, 6, 120]), strict=True):
                p.data = part.view(p.shape)
        elif how == "unaligned":
            for p in params:
                room = torch.zeros(p.numel() + 1)
                room[1:] = p.data.reshape(-1)
                p.data = room[1:].view(p.shape)
        elif how == "interleaved":
            whole = torch.zeros(24, 3)
            for k, p in enumerate(params):
                rows = whole[: p.numel(), k] if p.numel() <= 24 else None
                if rows is not None:
                    rows.copy_(p.data.reshape(-1))
                    p.data = rows.view(p.shape)


@pytest.mark.family(8)
@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
@pytest.mark.parametrize(
    "how", ["transposed", "channels last", "gaps", "flat", "unaligned", "interleaved"]
)
def test_optimizers(how: str, name: str, options: dict[str, Any]) -> None:
    """One launch, whatever the layouts; grads too lie in one flat tensor at last."""
    t = Twins(name, [(4, 6), (6,), (2, 3, 4, 5)], **options)
    for params in (t.eager_params, t.params):
        lay_out(how, params)
    for _ in range(2):
        assert t.step() == []
    for params in (t.eager_params, t.params):
        whole = torch.linspace(-1, 1, 150)
        for p, part in zip(params, whole.split([24, 6, 120]), strict=True):
            p.grad = part.view(p.shape)
    assert t.step(grads=False) == []
    assert {r.launches for r in fuseopt.reports()} == {1}


def test_tied_parameters() -> None:
    """One parameter under two names is updated once; two of one memory, twice."""
    t = Twins("SGD", [(4, 3), (4, 3), (5,)], lr=0.1, momentum=0.9)
    for params in (t.eager_params, t.params):
        params[1].data = params[0].data
    for _ in range(3):
        assert t.step() == []
    for params in (t.eager_params, t.params):
        assert params[0].data_ptr() == params[1].data_ptr()
        params[1].data = params[1].data.clone()
    assert t.step() == [], "untied"


class Each(torch.optim.Optimizer):
    """Subtracts each gradient, seen transposed, from its parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad.t())
                p.t().mul_(0.5)


def test_a_view_follows_the_strides_of_its_base() -> None:
    """Gradients are not guarded: the view made of one must be made anew."""
    p, q = torch.nn.Parameter(rand(4, 4)), torch.nn.Parameter(rand(4, 4))
    eager, step = Each([p]).step, torch.compile(Each([q]).step, backend=backend)
    for k in range(6):
        grad = [rand(4, 4), rand(4, 4).t(), rand(8, 8)[::2, 1::2]][k % 3]
        p.grad, q.grad = grad, grad
        eager()
        step()
        assert same_bits(q.detach(), p.detach()), f"step {k}"
    assert len(fuseopt.reports()) == 3, "one plan for each layout"


def test_parts_of_one_tensor_that_move() -> None:
    """Order was settled for memory that lay side by side; now it overlaps, and back."""
    t = Twins("SGD", [(8,), (8,)], lr=0.1, momentum=0.9)
    launches = []
    for start, step in ((8, 1), (20, 1), (3, 1), (1, 2), (0, 1), (8, 1)):
        for params in (t.eager_params, t.params):
            whole = rand(64)
            params[0].data = whole[: 8 * step : step]
            params[1].data = whole[start:][: 8 * step : step]
        assert t.step() == [], f"second part at {start}, every {step}."
        launches.append(fuseopt.reports()[-1].launches)
    assert launches == [1, 1, 2, 1, 1, 1]


# ---------------------------------------------------------------- proofs


def strided(shape: Sequence[int], stride: Sequence[int], offset: int = 0) -> Buffer:
    return Buffer(
        "b", "f32", tuple(shape), tuple(stride), offset, 0, "static", 0, "cpu"
    )


APART = {
    "even and odd": (strided((8,), (2,)), strided((8,), (2,), 1)),
    "columns": (strided((8, 3), (7, 1)), strided((8, 4), (7, 1), 3)),
    "rows of a transposed matrix": (strided((9,), (5,), 1), strided((9,), (5,), 3)),
    "tiles": (strided((4, 3), (1, 9)), strided((4, 3), (1, 9), 4)),
    "checkers": (strided((4, 4), (16, 2)), strided((4, 4), (16, 2), 9)),
    "an empty one": (strided((0, 3), (3, 1)), strided((9,), (1,))),
    "of another dtype": (
        strided((4,), (4,), 2),
        strided((4,), (2,))._replace(dtype="f64"),
    ),
}
TOGETHER = {
    "itself": (strided((3,), (1,)), strided((3,), (1,))),
    "shifted by one": (strided((8,), (2,)), strided((8,), (2,), 2)),
    "a row and a column": (strided((5,), (1,), 10), strided((5,), (5,), 2)),
    "expanded": (strided((4, 3), (0, 1)), strided((1,), (1,), 2)),
    "strides without a common divisor": (strided((9,), (2,)), strided((9,), (3,), 1)),
    "half an element": (
        strided((2,), (1,), 3)._replace(dtype="bf16"),
        strided((2,), (1,), 1),
    ),
}


@pytest.mark.parametrize("name", APART)
def test_apart(name: str) -> None:
    a, b = APART[name]
    assert not may_share(a, b)
    assert not may_share(b, a)
    assert overlaps([a, b]) == {}


@pytest.mark.parametrize("name", TOGETHER)
def test_together(name: str) -> None:
    a, b = TOGETHER[name]
    assert may_share(a, b)
    assert may_share(b, a)
    assert overlaps([a, b]) == {0: [1], 1: [0]}


def test_disjointness_is_never_claimed_wrongly() -> None:
    """Against the bytes that random buffers touch; small ones are decided exactly."""
    r = random.Random(0)

    def some() -> Buffer:
        dims = r.randint(0, 3)
        shape = [r.choice([0, 1, 2, 3, 4, 5]) for _ in range(dims)]
        stride = [r.choice([0, 1, 1, 2, 3, 4, 5, 6, 8, 10, 15]) for _ in range(dims)]
        b = strided(shape, stride, r.randint(0, 20))
        return b._replace(dtype=r.choice(["f32", "f64", "bf16"]))

    def places(b: Buffer) -> list[int]:
        found = [b.offset]
        for n, s in zip(b.shape, b.stride, strict=True):
            found = [x + i * s for x in found for i in range(n)]
        return found

    def touched(b: Buffer) -> set[int]:
        size = DTYPE_BYTES[b.dtype]
        return {x * size + k for x in places(b) for k in range(size)}

    for _ in range(2000):
        a, b = some(), some()
        assert may_share(a, b) == bool(touched(a) & touched(b)), (a, b)
        assert self_overlaps(a) or len(set(places(a))) == len(places(a)), a


def test_a_search_that_takes_too_long_says_yes() -> None:
    shape, stride = (50,) * 4, (1009, 1013, 1019, 1021)
    a = strided(shape, stride)
    b = strided(shape, tuple(s + 2 for s in stride), 100_003)
    assert may_share(a, b)
    assert not self_overlaps(strided((3, 3), (1, 3)))
    assert self_overlaps(strided((3, 3), (1, 2)))


def test_a_step_captured_again_is_the_same_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Storages were known by addresses: memory was planned in their order."""
    graphs = []
    inner = pipeline.schedule

    def seen(graph: Graph, *args: Any) -> Any:
        graphs.append(graph)
        return inner(graph, *args)

    monkeypatch.setattr(pipeline, "schedule", seen)
    held = []
    for _ in range(4):
        held.append([rand(999) for _ in range(len(held) + 1)])  # memory lies elsewhere
        against_eager(unscaled, lambda: [rand(5 + k) for k in range(4)] * 2)
        torch._dynamo.reset()
        session.reset()
    for graph in graphs:
        storages = [buffer.storage for buffer in graph.buffers]
        assert list(dict.fromkeys(storages)) == list(range(len(set(storages))))
    assert {graph.buffers for graph in graphs} == {graphs[0].buffers}
