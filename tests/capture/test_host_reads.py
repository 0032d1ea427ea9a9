"""Steps that read their own tensors as numbers: one graph, no wait, Python's bits."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fuseopt
from tests.numerics.test_regressions import against_eager
from tests.steps import differences, make_params, name_of, same_bits, set_grads
from tests.versions import no_shape_of_powers, untraceable_adafactor

T = torch.tensor
#: What Python does with numbers: x and y are read from tensors, n from a counter.
ARITHMETIC: dict[str, Callable[[Any, Any, Any], Any]] = {
    "sum": lambda x, y, n: x + y + 1 + n,
    "difference": lambda x, y, n: (1 - x) - (y - 0.5) - n,
    "product": lambda x, y, n: -x * y * 3 * n,
    "quotient": lambda x, y, n: x / y / 3 / n + 1 / x,
    "of counters": lambda x, y, n: (n * n - 1) / (n + 1) + n / 3,
    "power": lambda x, y, n: x**-0.8 + y**0.5 + x**2 + 0.9**n + n**2 + abs(x) ** y,
    "max of both": lambda x, y, n: max(x, y) + 2 * max(1.0, x) + max(n, x),
    "min of both": lambda x, y, n: min(x, y) + 2 * min(x, 0.1) + min(n, 1),
    "root": lambda x, y, n: math.sqrt(x) + math.sqrt(n),
    "absolute": lambda x, y, n: abs(-x) - abs(y),
    "kinds": lambda x, y, n: int(10 * x) + float(n) / 7,
}
#: Where a number enters a call.
CALLS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "alpha": lambda p, q, x: p.add_(q, alpha=x),
    "negative alpha": lambda p, q, x: p.sub_(q, alpha=x),
    "alpha of lists": lambda p, q, x: torch._foreach_add_([p], [q], alpha=x),
    "value": lambda p, q, x: p.addcmul_(q, q, value=-x).addcdiv_(q, q + 1, value=x),
    "factor": lambda p, q, x: p.mul_(x).add_(q * x),
    "divisor": lambda p, q, x: p.div_(x).add_(x / q),
    "term": lambda p, q, x: p.add_(x).sub_(q - x).add_(x - q),
    "weight": lambda p, q, x: p.lerp_(q, x),
    "bounds": lambda p, q, x: p.clamp_(min=-x, max=x),
    "list of numbers": lambda p, q, x: torch._foreach_mul_([p, q], [x, 2 * x]),
    "no rule for an exponent": lambda p, q, x: p.copy_(q.abs() ** (x * 0 + 2)),
    "base": lambda p, q, x: p.copy_(x**q),
    "fill": lambda p, q, x: p.fill_(x),
    "a tensor": lambda p, q, x: p.mul_(torch.tensor(x)),
    "where": lambda p, q, x: p.copy_(torch.where(q > x, p, q)),
    "no rule for a product": lambda p, q, x: p.addr_(q[:, 0], q[0], alpha=x),
}

TWICE = ("list of numbers", "no rule for an exponent", "no rule for a product")


def tensors(dtype: torch.dtype = torch.float32) -> Callable[[], list[torch.Tensor]]:
    def make() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(5)
        p, q = (torch.randn(33, 3, generator=generator).to(dtype) for _ in range(2))
        return [
            p,
            q,
            T(3.0),
            T([[0.37]]).to(dtype),
            T(4),
            torch.zeros((), dtype=T(0.0).double().dtype),
        ]

    return make


def compare(step: Callable[..., Any], dtype: torch.dtype = torch.float32) -> Any:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        against_eager(step, tensors(dtype))
    (report,) = fuseopt.reports()
    assert not report.fallback
    return report


@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_has_the_bits_of_python(name: str) -> None:
    function = ARITHMETIC[name]

    def step(p: Any, q: Any, t: Any, one: Any, count: Any, out: Any) -> None:
        t.mul_(0.77)
        count.add_(1)
        out.fill_(function(t.item(), one.item(), count.item()))

    assert compare(step).externs == []


@pytest.mark.family(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=no_shape_of_powers) if x == "base" else x for x in CALLS],
)
def test_calls_take_a_number_as_eager_rounds_it(name: str, dtype: torch.dtype) -> None:
    call = CALLS[name]

    def step(p: Any, q: Any, t: Any, one: Any, count: Any, out: Any) -> None:
        t.mul_(0.77)
        call(p, q, t.item() / 9)

    report = compare(step, dtype)
    assert len(report.externs) == name.startswith("no rule")
    # what runs between kernels parts them, and so does a number that two lanes share
    # and a third one changes
    assert report.launches <= 2 if name in TWICE else report.launches == 1


def test_max_and_min_of_nan_keep_to_pythons_order() -> None:
    """As Dynamo writes it: it takes max(x, 1.0) and max(1.0, x) for the same."""

    def first(p: Any, q: Any, t: Any, one: Any, count: Any, out: Any) -> None:
        t.mul_(math.nan)
        p.fill_(max(1.0, t.item())).add_(min(2.0, t.item()))

    def second(p: Any, q: Any, t: Any, one: Any, count: Any, out: Any) -> None:
        t.mul_(math.nan)
        p.fill_(max(t.item(), 1.0))
        q.fill_(min(t.item(), 1.0))

    for step in (first, second):
        torch._dynamo.reset()
        compare(step)


def test_a_number_is_what_it_was_when_it_was_read() -> None:
    def step(p: Any, q: Any, t: Any, one: Any, count: Any, out: Any) -> None:
        before = t.item()
        t.add_(1)
        between = t.item()
        t.add_(1)
        p.mul_(before).add_(q, alpha=between).sub_(t)

    compare(step)


def test_a_number_is_returned() -> None:
    @torch.compile(backend="fuseopt", options={"fallback": "error"})
    def step(p: torch.Tensor, count: torch.Tensor) -> tuple[float, int]:
        p.mul_(2)
        count.add_(1)
        return p.sum().item() / 2, count.item()  # type: ignore[return-value]

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for n in (1, 2, 3):
            got = step(torch.full((3,), float(n)), T(n))
            assert got == (3.0 * n, n + 1)
            assert [type(x) for x in got] == [float, int]


def test_what_no_rule_covers_runs_in_eager_and_says_so() -> None:
    @torch.compile(backend="fuseopt")
    def step(p: torch.Tensor) -> None:
        p.mul_(2)
        p.add_(p.sum().item() % 3)

    p = torch.ones(4)
    warns = pytest.warns(RuntimeWarning, match="a step runs in eager")
    with torch._dynamo.config.patch(capture_scalar_outputs=True), warns:
        step(p)
    assert torch.equal(p, torch.full((4,), 4.0))
    (report,) = fuseopt.reports()
    assert "mod" in report.fallback
    assert "test_host_reads.py" in report.fallback


# ---------------------------------------------------------------- optimizers


def by_torch(opt: torch.optim.Optimizer) -> Callable[[], Any]:
    return torch.compile(opt.step, backend="fuseopt")


def by_fuseopt(opt: torch.optim.Optimizer) -> Callable[[], Any]:
    return fuseopt.compile(opt).step


@pytest.mark.family(8)
@pytest.mark.parametrize("way", [by_torch, by_fuseopt])
@pytest.mark.parametrize(
    "foreach", [pytest.param(True, marks=untraceable_adafactor), False]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name_of)
def test_adafactor_is_one_graph(way: Any, foreach: bool, dtype: torch.dtype) -> None:
    shapes = [(1,), (3,), (17, 5), (40,), (3, 4, 5), (61, 53)]
    theirs, mine = make_params(shapes, dtype), make_params(shapes, dtype)
    plain = torch.optim.Adafactor(theirs, foreach=foreach)
    opt = torch.optim.Adafactor(mine, foreach=foreach)
    step = way(opt)
    for seed in range(4):
        set_grads(theirs, mine, seed)
        plain.step()
        step()
        assert differences(theirs, plain, mine, opt) == []
    (report,) = fuseopt.reports()
    assert not report.fallback
    assert report.launches <= 6
    assert not any("item" in name or "scalar" in name for name, _ in report.externs)
    assert torch._dynamo.config.capture_scalar_outputs is False


@pytest.mark.slow
def test_adafactor_is_verified_and_explained() -> None:
    params = make_params([(4, 3), (5,)])
    opt = torch.optim.Adafactor(params)
    set_grads(params, params, 1)
    report = fuseopt.explain(opt.step)
    assert 0 < report.launches <= 6
    assert report.fallback == ""
    step = fuseopt.compile(opt, verify=True).step
    for seed in range(3):
        set_grads(params, params, seed)
        step()
    assert [r.fallback for r in fuseopt.reports()] == [""]


def test_a_scheduled_adafactor_compiles_once() -> None:
    theirs, mine = make_params([(4, 3), (5,)]), make_params([(4, 3), (5,)])
    plain = torch.optim.Adafactor(theirs, weight_decay=0.1)
    opt = fuseopt.compile(torch.optim.Adafactor(mine, weight_decay=0.1))
    both = [torch.optim.lr_scheduler.ExponentialLR(o, 0.7) for o in (plain, opt)]
    for seed in range(6):
        set_grads(theirs, mine, seed)
        plain.step()
        opt.step()
        for schedule in both:
            schedule.step()
        assert differences(theirs, plain, mine, opt) == []
    assert [r.fallback for r in fuseopt.reports()] == [""]


class Branches(torch.optim.Optimizer):
    """Asks a tensor for its value in the middle of its step, or in a loop, and takes
    note of the answer, which no predicate can do.
    """

    def __init__(self, params: Any, loop: bool = False) -> None:
        super().__init__(params, {})
        self.loop = loop
        self.large = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        first, second = self.param_groups[0]["params"]
        first.add_(first.grad, alpha=-0.1)
        if not self.loop and first.grad.sum() > 0:
            first.mul_(0.5)
            self.large += 1
        second.add_(second.grad, alpha=-0.1)
        for p in self.param_groups[0]["params"] if self.loop else ():
            if p.grad.norm() > 1:
                p.mul_(0.5)
                self.large += p.dim()


@pytest.mark.family(4)
@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("way", [by_torch, by_fuseopt])
def test_a_branch_on_a_value_is_told_once_and_the_pieces_compiled(
    way: Any, loop: bool
) -> None:
    theirs, mine = make_params([(4, 3), (5,)]), make_params([(4, 3), (5,)])
    plain, opt = Branches(theirs, loop), Branches(mine, loop)
    step = way(opt)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(6):
            set_grads(theirs, mine, seed)
            plain.step()
            step()
            assert differences(theirs, plain, mine, opt) == []
    texts = [str(w.message) for w in caught]
    (text,) = [t for t in texts if t.startswith("fuseopt:")]
    line = "if p.grad.norm() > 1" if loop else "if not self.loop and first.grad.sum()"
    assert f"Branches.step at {__file__}:" in text
    assert line in text
    assert ("fuseopt.compile(optimizer)" in text) is (way is by_torch)
    if way is by_fuseopt and not loop:
        assert [r.launches for r in fuseopt.reports()] == [1, 1, 1]


def test_meant_ends_of_a_graph_are_not_told() -> None:
    params = make_params([(3,)])
    opt = fuseopt.compile(torch.optim.SGD(params, lr=0.1))
    set_grads(params, params, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        opt.step(lambda: 1.0)
        torch.compile(torch.optim.SGD(params).step, backend="fuseopt")()


class Branching(torch.optim.Optimizer):
    """A step that Dynamo must cut: it branches on a tensor's value."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.curved: list[bool] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        p = group["params"][0]
        scaled = torch.exp(p.grad) @ p.grad.T
        update = p.grad
        if scaled.sum() > 0:
            update = torch.tanh(scaled @ p.grad)
            self.curved.append(True)
        p.add_(update, alpha=-group["lr"])


def test_the_pieces_of_a_step_keep_eagers_bits() -> None:
    """A piece that writes nothing yet is a piece of the update all the same."""
    generator = torch.Generator().manual_seed(1)
    value = torch.randn(17, 9, generator=generator)
    p, q = (torch.nn.Parameter(value.clone()) for _ in range(2))
    eager, optimizer = Branching([q]), fuseopt.compile(Branching([p]))

    def steps() -> None:
        for _ in range(3):
            p.grad = torch.randn(17, 9, generator=generator)
            q.grad = p.grad.clone()
            eager.step()
            optimizer.step()
            assert same_bits(p.detach(), q.detach())

    with pytest.warns(RuntimeWarning, match="Data-dependent branching"):
        steps()
    reports = fuseopt.reports()
    assert len(reports) >= 2
    assert not any(r.fallback for r in reports), "\n".join(map(str, reports))
