"""Rates of type numpy.float64, as schedules written with numpy leave them in groups.

A use of one that is a float's to the bit stays in the kernel. Any other use runs in
eager, and a warning names it. The types of what a step leaves are eager's.
"""

from __future__ import annotations

import decimal
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import Optimizer

from fuseopt.compiler.session import session
from tests.beside import WAYS
from tests.frozen import bits

WAYS_IN = ("backend", "compile")
COUNTS = (4, 18)
MISSING = object()


class Rated(Optimizer):
    """Its step uses the rate as `use` says."""

    use: Callable[..., None]

    def __init__(self, params: Any, lr: Any) -> None:
        self.last = 0.5
        self.zero = 0.0
        super().__init__(params, {"lr": lr, "betas": (lr, 0.5), "other": 0.25})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.use(p, p.grad, group["lr"], group)


# ---------------------------------------------------------------- alike


def as_alpha(self: Any, p: Any, g: Any, lr: Any, group: Any) -> None:
    p.add_(g, alpha=-lr)


def left_of_a_product(self: Any, p: Any, g: Any, lr: Any, group: Any) -> None:
    p.sub_(lr * g)


def right_of_a_product(self: Any, p: Any, g: Any, lr: Any, group: Any) -> None:
    p.sub_(g * lr)


def left_of_others(self: Any, p: Any, g: Any, lr: Any, group: Any) -> None:
    p.add_((lr - g) * 0.1).add_((lr + g) * 0.1).add_(lr / (g.abs() + 1))


def decay(self: Any, p: Any, g: Any, lr: Any, group: Any) -> None:
    p.mul_(1 - lr * 0.1)
    p.add_(g, alpha=-lr / 0.7)


def in_math(self: Any, p: Any, g: Any, lr: Any, group: Any) -> None:
    p.add_(g, alpha=-math.sqrt(lr) * math.exp(-lr) * math.cos(lr))


def in_branches(self: Any, p: Any, g: Any, lr: Any, group: Any) -> None:
    if lr > 0.02 and lr != 1:
        p.add_(g, alpha=-2 * lr)
    elif lr:
        p.add_(g, alpha=-lr)


def as_a_float(self: Any, p: Any, g: Any, lr: Any, group: Any) -> None:
    if isinstance(lr, (float, torch.Tensor)) and lr is not MISSING:
        p.add_(g, alpha=-float(lr) * abs(lr) / max(lr, 0.02))


def as_operands(self: Any, p: Any, g: Any, lr: Any, group: Any) -> None:
    p.addcdiv_(g, g.abs() + 1, value=-lr)
    p.addcmul_(g, g, value=-lr)
    p.lerp_(g, lr)
    p.add_(torch.full_like(p, lr)).clamp_(-lr * 300, lr * 300)


def in_lists(self: Any, p: Any, g: Any, lr: Any, group: Any) -> None:
    torch._foreach_add_([p], [g], alpha=-lr)
    torch._foreach_mul_([p], [1 - lr])
    torch._foreach_add_([p], lr)


def as_a_weight(self: Any, p: Any, g: Any, lr: Any, group: Any) -> None:
    p.copy_(torch.where(g > lr, p * lr, p - lr))


def of_a_tuple(self: Any, p: Any, g: Any, lr: Any, group: Any) -> None:
    first, second = group["betas"]
    p.mul_(1 - first * second).add_(g, alpha=-first)


def by_a_counter(self: Any, p: Any, g: Any, lr: Any, group: Any) -> None:
    state = self.state[p]
    state["n"] = state.get("n", 0) + 1
    p.add_(g, alpha=-lr / (1 + 0.1 * state["n"]))


def by_a_tensor(self: Any, p: Any, g: Any, lr: Any, group: Any) -> None:
    state = self.state[p]
    if not state:
        state["n"] = torch.zeros(())
    state["n"] += 1
    p.add_(g, alpha=-lr / (1 - 0.9 ** state["n"].item()))


def over_zero(self: Any, p: Any, g: Any, lr: Any, group: Any) -> None:
    """A divisor that is read from a tensor: numpy gives an infinity."""
    state = self.state[p]
    if not state:
        state["n"] = torch.zeros(())
    p.add_(g, alpha=-lr / state["n"].item())
    state["n"] += 1


def in_a_sum(self: Any, p: Any, g: Any, lr: Any, group: Any) -> None:
    p.add_(g, alpha=-sum([lr, 0.1, lr]))


def kept_elsewhere(self: Any, p: Any, g: Any, lr: Any, group: Any) -> None:
    p.add_(g, alpha=-self.last * lr)
    self.last = lr


ALIKE = [
    *(as_alpha, left_of_a_product, right_of_a_product, left_of_others, decay, in_math),
    *(in_branches, as_a_float, as_operands, in_lists, as_a_weight, of_a_tuple),
    *(by_a_counter, by_a_tensor, over_zero, in_a_sum, kept_elsewhere),
]

# ---------------------------------------------------------------- not alike


def stored_product(self: Any, p: Any, g: Any, lr: Any, group: Any) -> None:
    p.add_(g, alpha=-lr)
    group["lr"] = lr * 0.999


def stored_elsewhere(self: Any, p: Any, g: Any, lr: Any, group: Any) -> None:
    self.last = self.last + lr
    p.add_(g, alpha=-self.last)


def stored_in_a_state(self: Any, p: Any, g: Any, lr: Any, group: Any) -> None:
    state = self.state[p]
    p.add_(g, alpha=-state.get("sum", 0.5))
    state["sum"] = state.get("sum", 0.0) + lr


def stored_truth(self: Any, p: Any, g: Any, lr: Any, group: Any) -> None:
    p.add_(g, alpha=-lr)
    self.last = lr > 0.01


def powers(self: Any, p: Any, g: Any, lr: Any, group: Any) -> None:
    p.add_(g, alpha=-(lr**2) - (0.5**lr))


def negative_power(self: Any, p: Any, g: Any, lr: Any, group: Any) -> None:
    p.add_(g, alpha=-abs((-lr) ** 0.5))


def whole_quotient(self: Any, p: Any, g: Any, lr: Any, group: Any) -> None:
    p.add_(g, alpha=-(lr // 0.003) - lr % 0.003)


def both_quotients(self: Any, p: Any, g: Any, lr: Any, group: Any) -> None:
    p.add_(g, alpha=-divmod(lr, 0.003)[1])


def rounded(self: Any, p: Any, g: Any, lr: Any, group: Any) -> None:
    p.add_(g, alpha=-round(lr, 3))


def as_data(self: Any, p: Any, g: Any, lr: Any, group: Any) -> None:
    p.sub_(torch.tensor(lr) * g.sum())


def as_new_data(self: Any, p: Any, g: Any, lr: Any, group: Any) -> None:
    p.sub_(g.new_tensor([lr, 1.0])[0] * g)


def by_method(self: Any, p: Any, g: Any, lr: Any, group: Any) -> None:
    p.add_(g, alpha=-lr.item() if hasattr(lr, "item") else 0.25)


def by_attribute(self: Any, p: Any, g: Any, lr: Any, group: Any) -> None:
    p.add_(g, alpha=-0.5 if getattr(lr, "dtype", None) is None else -0.25)


def by_type(self: Any, p: Any, g: Any, lr: Any, group: Any) -> None:
    p.add_(g, alpha=-0.5 if type(lr) is float else -0.25)


def by_class(self: Any, p: Any, g: Any, lr: Any, group: Any) -> None:
    p.add_(g, alpha=-0.5 if isinstance(lr, np.floating) else -0.25)


def as_text(self: Any, p: Any, g: Any, lr: Any, group: Any) -> None:
    p.add_(g, alpha=-0.01 * len(f"{lr!r}"))


def as_formatted(self: Any, p: Any, g: Any, lr: Any, group: Any) -> None:
    p.add_(g, alpha=-0.01 * len("%r" % (lr,)) - 0.01 * len(f"{lr}"))  # noqa: UP031


def as_representation(self: Any, p: Any, g: Any, lr: Any, group: Any) -> None:
    p.add_(g, alpha=-0.01 * len(repr(lr)))


def truth_in_arithmetic(self: Any, p: Any, g: Any, lr: Any, group: Any) -> None:
    p.add_(g, alpha=-0.1 * ((lr > 0) + (lr < 1)))


def truth_by_identity(self: Any, p: Any, g: Any, lr: Any, group: Any) -> None:
    p.add_(g, alpha=-0.5 if (lr > 0) is True else -0.25)


def truth_inverted(self: Any, p: Any, g: Any, lr: Any, group: Any) -> None:
    p.add_(g, alpha=-0.5 if ~(lr > 0) else -0.25)


def equal_to_nothing(self: Any, p: Any, g: Any, lr: Any, group: Any) -> None:
    p.add_(g, alpha=-0.1 * ((lr == None) + (None != lr) + (lr != "")))  # noqa: E711, SIM300


def over_nothing(self: Any, p: Any, g: Any, lr: Any, group: Any) -> None:
    p.add_(g, alpha=-(lr / self.zero))


def in_numpy(self: Any, p: Any, g: Any, lr: Any, group: Any) -> None:
    p.add_(g, alpha=-float(np.sqrt(lr)))


def as_a_key(self: Any, p: Any, g: Any, lr: Any, group: Any) -> None:
    p.add_(g, alpha=-0.5 if lr in {0.5: 1} else -0.25)


def as_a_decimal(self: Any, p: Any, g: Any, lr: Any, group: Any) -> None:
    p.add_(g, alpha=-float(decimal.Decimal(lr)))


def by_identity(self: Any, p: Any, g: Any, lr: Any, group: Any) -> None:
    p.add_(g, alpha=-0.5 if lr is group["betas"][0] else -0.25)


UNLIKE = [
    *(stored_product, stored_elsewhere, stored_in_a_state, stored_truth, powers),
    *(negative_power, whole_quotient, both_quotients, rounded, as_data, as_new_data),
    *(by_method, by_attribute, by_type, by_class, as_text, as_formatted),
    *(as_representation, truth_in_arithmetic, truth_by_identity, truth_inverted),
    *(equal_to_nothing, over_nothing, in_numpy, as_a_key, as_a_decimal, by_identity),
]


def rates() -> Iterator[Any]:
    """As a schedule leaves them; each an object of its own."""
    for t in range(7):
        yield np.float64(0.01) * 0.5 * (1 + np.cos(np.pi * t / 30))


def mixed() -> Iterator[Any]:
    """A warm-up of floats, then numpy's, an integer, floats again, and in turn."""
    yield from (0.001, 0.002, 0.0025, np.float64(0.003), np.float64(0.0035), 1)
    yield from (0.0045, np.float64(0.03), 0.04, np.float64(0.05), 2, np.float64(0.0))


def train(
    way: str, n: int, kind: type[Optimizer], schedule: Callable[[], Iterator[Any]]
) -> tuple[list[Any], list[Any]]:
    """All that is held after each step, with types; and the reports."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    ps = [torch.nn.Parameter(torch.randn(5, 3)) for _ in range(n)]
    first, *rest = schedule()
    opt: Any = kind(ps, lr=first)
    step = opt.step if way == "eager" else WAYS[way](opt)
    known, seen = len(session.reports), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for lr in (first, *rest):
            opt.param_groups[0]["lr"] = lr
            opt.param_groups[0]["betas"] = (lr, 0.5)
            for p in ps:
                p.grad = torch.randn(5, 3)
            step()
            held = [*opt.param_groups[0].items(), ("last", opt.last)]
            held += [x for p in ps for x in opt.state[p].items()]
            tensors = [*ps, *(v for _, v in held if isinstance(v, torch.Tensor))]
            numbers = [
                (k, type(v), repr(v))
                for k, v in held
                if k != "params" and not isinstance(v, torch.Tensor)
            ]
            seen.append(([bits(t) for t in tensors], numbers))
    return seen, session.reports[known:]


def compare(want: list[Any], got: list[Any]) -> None:
    for t, (one, other) in enumerate(zip(want, got, strict=True)):
        assert one[1] == other[1], f"step {t}"
        assert one[0] == other[0], f"step {t}"


def made(use: Callable[..., None]) -> type[Optimizer]:
    return type(use.__name__, (Rated,), {"use": use})


@pytest.mark.family(72)
@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("way", WAYS_IN)
@pytest.mark.parametrize("use", ALIKE, ids=lambda use: use.__name__)
def test_a_use_that_is_a_floats_stays_in_the_kernel(
    use: Callable[..., None], way: str, n: int
) -> None:
    kind = made(use)
    want, _ = train("eager", n, kind, rates)
    got, reports = train(way, n, kind, rates)
    compare(want, got)
    assert [r.fallback for r in reports] == [""] * len(reports)
    assert 1 <= len(reports) <= 3


@pytest.mark.family(18)
@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("way", WAYS_IN)
@pytest.mark.parametrize("use", UNLIKE, ids=lambda use: use.__name__)
def test_any_other_use_runs_in_eager_and_is_named(
    use: Callable[..., None], way: str, n: int
) -> None:
    kind = made(use)
    want, _ = train("eager", n, kind, rates)
    got, reports = train(way, n, kind, rates)
    compare(want, got)
    assert any("numpy.float64" in r.fallback for r in reports)


@pytest.mark.family(180)
@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("way", WAYS_IN)
@pytest.mark.parametrize("use", [*ALIKE, *UNLIKE], ids=lambda use: use.__name__)
def test_a_rate_may_change_its_type(use: Callable[..., None], way: str, n: int) -> None:
    kind = made(use)

    try:
        want, _ = train("eager", n, kind, mixed)
    except Exception as error:
        pytest.skip(f"eager raises {type(error).__name__} for one of the types")
    got, _ = train(way, n, kind, mixed)
    compare(want, got)
